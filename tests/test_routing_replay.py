"""Routing replay: the learner's routers choose the experts that the sampler's routers chose, with gradients to the routers."""

import copy
import shutil
from dataclasses import replace

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    FlexOlmoConfig,
    GptOssConfig,
    Lfm2MoeConfig,
    MixtralConfig,
    OlmoeConfig,
    PhimoeConfig,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from small_models import SIZE, covering, random_weights
from small_runs import arguments, metrics, refused, train
from sparse_rl import KV, Config, Engine, Sampling, UserError, load_model, load_tokenizer, replay
from sparse_rl.learner.optimizer import checkpointed
from sparse_rl.learner.replay import forward, response_logprobs
from sparse_rl.models.compile import decoder_layers
from sparse_rl.models.routing import RecordedRouting, ReplayedRouting, Routers, install
from sparse_rl.rollout.runner import _GraphRouting
from sparse_rl.sizes import DENSE_SLOT_TOKENS, PAGE_TOKENS
from sparse_rl.train.distributed import refuse_uneven_groups
from sparse_rl.world import World
from test_resume import assert_same_run

EXPERTS, CHOSEN = 8, 2
EIGHT = {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN}
LOCAL = {"num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN}
QWEN3 = {**SIZE, **EIGHT, "head_dim": 8, "moe_intermediate_size": 16}
HYBRID = {
    **QWEN3,
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 16,
}
FAMILIES = {
    "mixtral": MixtralConfig(**SIZE, **LOCAL, sliding_window=None),
    "qwen2-moe": Qwen2MoeConfig(**SIZE, **EIGHT, moe_intermediate_size=16, shared_expert_intermediate_size=16),
    "qwen3-moe": Qwen3MoeConfig(**QWEN3, norm_topk_prob=True),
    "qwen3-moe, first layer dense": Qwen3MoeConfig(**QWEN3, norm_topk_prob=False, mlp_only_layers=[0]),
    "qwen3-next": Qwen3NextConfig(**HYBRID, norm_topk_prob=True),
    "qwen3.5-moe": Qwen3_5MoeTextConfig(**HYBRID),
    "olmoe": OlmoeConfig(**SIZE, **EIGHT),
    "flex-olmo": FlexOlmoConfig(**SIZE, **EIGHT),
    "gpt-oss": GptOssConfig(**SIZE, **LOCAL, head_dim=8, layer_types=["full_attention"] * 2),
}
FULL, BOUNDED = KV(policy="full"), KV(policy="rkv", budget=24, interval=8, window=4, sinks=2, protect_prompt=False)
CACHES = {"full": FULL, "rkv": BOUNDED, "protected": BOUNDED.model_copy(update={"protect_prompt": True})}
SHORT, LONG = [7, 8, 9], list(range(3, 60))
SAMPLING = Sampling(max_tokens=40, stop=())
ROUNDING = 2e-5


@pytest.fixture(scope="module")
def models():
    return {name: random_weights(config) for name, config in FAMILIES.items()}


def sampled(model, kv=FULL, samples=2, **settings):
    engine = Engine(model, kv, **{"slots": 4, **settings})
    return engine.generate([SHORT, LONG], samples, SAMPLING, routing=True)


def without(rollouts):
    return [replace(rollout, routing=None) for rollout in rollouts]


def all_choices(rollout):
    return torch.cat([rollout.routing.prompt_TRK, rollout.routing.response_TRK])


def turned(rollouts):
    """The same rollouts with other experts: no router would choose them itself."""
    parts = [(rollout, rollout.routing.prompt_TRK, rollout.routing.response_TRK) for rollout in rollouts]
    return [
        replace(rollout, routing=replace(rollout.routing, prompt_TRK=(p + 3) % EXPERTS, response_TRK=(r + 3) % EXPERTS))
        for rollout, p, r in parts
    ]


def plain_model(model, config):
    """The model as transformers alone runs it, with the same weights."""
    plain = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=model.dtype, attn_implementation="eager").eval()
    plain.load_state_dict(model.state_dict())
    return plain


def routers_of(model):
    return [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]


def max_gap(model, rollouts, view):
    with torch.no_grad():
        ours = replay(model, rollouts, view)
    return max(float((mine.cpu() - each.logprobs).abs().max()) for mine, each in zip(ours, rollouts, strict=True))


# Recording


@pytest.mark.parametrize("family", FAMILIES)
def test_the_recorded_experts_are_those_of_a_plain_forward_pass(models, family):
    """Of every fed token: prompts as a whole, in pieces, shared by samples that wait, and responses."""
    model, seen = models[family], []
    plain = plain_model(model, FAMILIES[family])
    for router in routers_of(plain):
        router.register_forward_hook(lambda _, args, out: seen.append(out[2]))
    for rollout in [*sampled(model), *sampled(model, slots=3, prefill_tokens=16)]:
        fed = rollout.prompt + rollout.response[:-1]
        seen.clear()
        with torch.no_grad():
            plain(torch.tensor([fed]))
        assert all_choices(rollout).dtype == torch.uint8
        assert torch.equal(all_choices(rollout), torch.stack(seen, dim=1).to(torch.uint8))


def test_a_paused_sequence_keeps_the_choices_of_the_steps_that_sampled_it(models):
    model = models["mixtral"]
    sampling = Sampling(max_tokens=300, stop=())
    plain = Engine(model, FULL, slots=3).generate([SHORT], 3, sampling, routing=True)
    engine = Engine(model, FULL, slots=3)
    engine.reserve_dense(3, 300, 1, 3, kv_bytes=(3 * DENSE_SLOT_TOKENS + 7 * PAGE_TOKENS) * engine.cache.token_bytes)
    paused = engine.generate([SHORT], 3, sampling, routing=True)
    assert engine.stats.preemptions > 0
    for left, right in zip(plain, paused, strict=True):
        assert left.response == right.response and torch.equal(all_choices(left), all_choices(right))


def test_samples_of_a_prompt_share_its_choices(models):
    first, second, *_ = sampled(models["mixtral"])
    assert first.routing.prompt_TRK.data_ptr() == second.routing.prompt_TRK.data_ptr()


def test_the_last_token_has_no_choice_because_it_is_never_fed(models):
    engine = Engine(models["mixtral"], FULL, slots=2)
    (rollout,) = engine.generate([SHORT], 1, Sampling(max_tokens=1, stop=()), routing=True)
    assert rollout.routing.prompt_TRK.shape == (3, 2, CHOSEN) and rollout.routing.response_TRK.shape == (0, 2, CHOSEN)
    assert max_gap(models["mixtral"], [rollout], "dense") < ROUNDING


def test_nothing_is_recorded_unless_asked(models):
    (rollout,) = Engine(models["mixtral"], FULL, slots=1).generate([SHORT], 1, SAMPLING)
    assert rollout.routing is None


def test_a_graph_writes_the_choices_of_each_slot_to_its_step():
    buffers = _GraphRouting(Routers(2, 3, torch.uint8), steps=4, slots=5, device=torch.device("cpu"))
    for step in range(4):
        RecordedRouting(buffers.step_SRK[:3]).choose(1, torch.full((3, 3), step + 1))
        buffers.store(torch.full((3,), step))
    assert buffers.choices_nSRK[:, :3, 1, 0].tolist() == [[1] * 3, [2] * 3, [3] * 3, [4] * 3]
    assert not buffers.choices_nSRK[:, 3:].any() and not buffers.choices_nSRK[:, :, 0].any()


# Replay


@pytest.mark.parametrize(("family", "cache"), covering(FAMILIES, CACHES))
def test_with_the_sampler_s_experts_replay_reproduces_the_sampler(models, family, cache):
    rollouts = sampled(models[family], CACHES[cache])
    assert max_gap(models[family], rollouts, "sparse") < ROUNDING
    with torch.no_grad():
        assert int(forward(models[family], rollouts, "sparse").routing.flips_R.sum()) == 0


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # bfloat16 on a CPU that has none
def test_in_bfloat16_other_experts_are_the_largest_part_of_the_engine_noise():
    """With many experts of similar scores, rounding changes some choices, and each of them changes log-probs a lot."""
    more = {"num_experts": 32, "num_experts_per_tok": 4, "num_hidden_layers": 4}
    model = random_weights(Qwen3MoeConfig(**QWEN3 | more, norm_topk_prob=True), torch.bfloat16)
    rollouts = sampled(model, BOUNDED, samples=4, slots=8)
    with torch.no_grad():
        flips, choices = forward(model, rollouts, "sparse").routing.flips_and_choices.tolist()
    assert 0 < flips < 0.05 * choices
    assert max_gap(model, without(rollouts), "sparse") > 2 * max_gap(model, rollouts, "sparse")


def test_under_eviction_the_dense_view_has_the_sampler_s_experts(models):
    rollouts = sampled(models["qwen3-moe"], BOUNDED)
    with torch.no_grad():
        flips, choices = forward(models["qwen3-moe"], rollouts, "dense").routing.flips_and_choices.tolist()
    assert flips > 0 and choices == 2 * sum(map(len, [SHORT, LONG])) + 4 * 2 * 39  # two routers, shared prompts


@pytest.mark.parametrize("cache", CACHES)
def test_packed_rollouts_have_the_log_probs_of_single_ones(models, cache):
    model = models["qwen3-moe"]
    rollouts = turned(sampled(model, CACHES[cache]))
    for view in ("sparse", "dense"):
        with torch.no_grad():
            packed, single = (replay(model, rollouts, view, tokens_per_pass=count) for count in (4096, 1))
            own = replay(model, without(rollouts), view)
        for left, right, other in zip(packed, single, own, strict=True):
            torch.testing.assert_close(left, right, atol=ROUNDING, rtol=0)
            assert (left - other).abs().max() > 0.01


def fixed(router, chosen_NK, family):
    """A forward of the router with fixed experts, written out."""

    def forward(hidden):
        hidden = hidden.reshape(-1, hidden.shape[-1])
        logits_NE = hidden @ router.weight.T
        if family == "gpt-oss":
            logits_NE = logits_NE + router.bias
            return logits_NE, logits_NE.gather(1, chosen_NK).softmax(dim=-1), chosen_NK
        weights_NK = logits_NE.softmax(dim=-1).gather(1, chosen_NK)
        if getattr(router, "norm_topk_prob", True):
            weights_NK = weights_NK / weights_NK.sum(dim=-1, keepdim=True)
        return logits_NE, weights_NK, chosen_NK

    return forward


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_is_that_of_a_model_whose_experts_are_fixed(models, family):
    """With experts that the routers would not choose, so that the choice must have come from the rollout."""
    model = copy.deepcopy(models[family])
    rollout = turned(sampled(model))[0]
    plain = plain_model(model, FAMILIES[family])
    for index, router in enumerate(routers_of(plain)):
        router.forward = fixed(router, all_choices(rollout)[:, index].long(), family)
    logits_TV = plain(torch.tensor([rollout.prompt + rollout.response[:-1]])).logits[0, len(rollout.prompt) - 1 :]
    logits_TV.log_softmax(dim=-1).gather(1, torch.tensor(rollout.response)[:, None]).sum().backward()
    (logprobs,) = replay(model, [rollout], "dense")
    logprobs.sum().backward()
    wanted = {name: weight.grad for name, weight in plain.named_parameters()}
    for name, weight in model.named_parameters():
        assert (weight.grad is None) == (wanted[name] is None)
        if weight.grad is not None:
            torch.testing.assert_close(weight.grad, wanted[name], atol=1e-3, rtol=1e-3)
    assert all(float(router.weight.grad.abs().max()) > 1e-3 for router in routers_of(model))


@pytest.mark.parametrize("layers", [1, 2])
def test_gradient_checkpointing_computes_the_same_gradient(models, layers):
    """A pass over other rollouts lies between forward and backward: layers that run again need their own choices."""
    rollouts, grads = turned(sampled(models["qwen3-moe"])), []
    for count in (0, layers):
        model = copy.deepcopy(models["qwen3-moe"])
        with checkpointed(model, count):
            output = forward(model, rollouts, "dense")
            forward(model, without(rollouts[:1]), "dense")
            response_logprobs(model, output)[0].sum().backward()
        grads.append([weight.grad for weight in model.parameters()])
        grads[-1].append(output.routing.flips_R)
    for left, right in zip(*grads, strict=True):
        assert torch.equal(left, right)


def test_a_compiled_layer_uses_the_choices(models):
    """The compiler leaves the router out, so that a compiled layer is not compiled for one pass."""
    model = copy.deepcopy(models["qwen3-moe"])
    rollouts = turned(sampled(model))[:2]
    with torch.no_grad():
        wanted = replay(model, rollouts, "dense")
        for layer in decoder_layers(model):
            compiled = torch.compile(type(layer).forward, backend="eager")
            layer.forward = lambda *args, compiled=compiled, layer=layer, **kwargs: compiled(layer, *args, **kwargs)
        found = replay(model, rollouts, "dense")
    for left, right in zip(wanted, found, strict=True):
        torch.testing.assert_close(left, right, atol=ROUNDING, rtol=0)


def test_a_flip_is_another_set_of_experts_in_any_order():
    routing = ReplayedRouting(torch.tensor([[[1, 2]], [[3, 4]], [[5, 6]]], dtype=torch.uint8))
    chosen = routing.choose(0, torch.tensor([[2, 1], [3, 7], [5, 6]]))
    assert chosen.tolist() == [[1, 2], [3, 4], [5, 6]] and routing.flips_and_choices.tolist() == [1, 3]


def test_a_copy_of_a_model_has_its_own_routers(models):
    model = copy.deepcopy(models["mixtral"])
    install(model)
    other = copy.deepcopy(model)
    rollouts = sampled(other)
    with torch.no_grad():
        for router in routers_of(model):
            router.weight.zero_()
    assert max_gap(other, rollouts, "dense") < ROUNDING < max_gap(model, rollouts, "dense")


# Training


@pytest.fixture(scope="module")
def moe_world(world, tmp_path_factory):
    """The world of small runs with a mixture-of-experts model."""
    folder = tmp_path_factory.mktemp("moe") / "world"
    shutil.copytree(world, folder)
    shutil.rmtree(folder / "model")
    tokenizer = load_tokenizer("tiny")
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = Qwen3MoeConfig(
        **QWEN3 | ids | {"vocab_size": len(tokenizer), "max_position_embeddings": 256}, norm_topk_prob=True
    )
    random_weights(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder


RUNS = {
    "sparse_rl": ["--loss.kl-coef", "0.01", "--optimizer.updates-per-step", "2"],
    "lora": ["--model.lora.rank", "2", "--model.lora.targets", "q_proj,v_proj"],
    "smd": ["--method", "smd", "--optimizer.gradient-checkpointing", "true"],
    "dense": ["--method", "dense"],
}


@pytest.mark.parametrize("kind", RUNS)
def test_a_run_with_routing_replay_resumes_to_the_bit(moe_world, tmp_path, kind):
    """Routers differ only where the learner sees other keys than the sampler."""
    flags = [*RUNS[kind], "--model.routing-replay", "true", "--checkpoint.every", "1", "--rollout.max-tokens", "16"]
    train(moe_world, tmp_path / "whole", *flags, "--steps", "2")
    train(moe_world, tmp_path / "parts", *flags, "--steps", "1")
    train(moe_world, tmp_path / "parts", *flags, "--steps", "2", "--resume")
    assert_same_run(tmp_path / "whole", tmp_path / "parts", 2)
    rates = [row["routing/flip_rate"] for row in metrics(tmp_path / "whole") if row["step"]]
    assert all(0 <= rate < 1 for rate in rates) and (max(rates) > 0) == (kind in ("sparse_rl", "lora"))


def test_routing_replay_reduces_the_mismatch_of_a_run(moe_world, tmp_path):
    """The rollouts of the first step are the same in both runs."""
    for value in ("true", "false"):
        train(moe_world, tmp_path / value, "--model.routing-replay", value, "--steps", "1")
    on, off = (metrics(tmp_path / value)[-1] for value in ("true", "false"))
    assert "routing/flip_rate" not in off and on["reward/mean"] == off["reward/mean"]
    assert on["sparse/mismatch_k3"] < off["sparse/mismatch_k3"]


# Refusals


def test_models_without_supported_routers_are_refused_by_name(world, tmp_path, capsys):
    said = refused(capsys, *arguments(world, tmp_path / "run", "--model.routing-replay", "true"))
    assert said == "Qwen2ForCausalLM has no routers, so it does not support model.routing_replay = true: set it to false."
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="Qwen2ForCausalLM has no routers"):
        Engine(load_model(str(world / "model")), FULL, slots=1).generate([SHORT], 1, SAMPLING, routing=True)
    phimoe = random_weights(PhimoeConfig(**SIZE, **LOCAL, sliding_window=64))
    with pytest.raises(UserError, match=r"PhimoeForCausalLM routes tokens by .*Router.* \(it supports Mixtral, Qwen2-MoE, "):
        install(phimoe)
    lfm2 = random_weights(Lfm2MoeConfig(**QWEN3, layer_types=["conv", "full_attention"], num_dense_layers=0))
    modules = "Lfm2MoeExperts, Lfm2MoeSparseMoeBlock, Lfm2MoeTopKRouter"  # and no norm of this family, whose name has Moe
    with pytest.raises(UserError, match=f"Lfm2MoeForCausalLM routes tokens by {modules}, which"):
        install(lfm2)


def test_several_ranks_are_refused():
    config = Config(model={"routing_replay": True})
    with pytest.raises(UserError, match="model.routing_replay = true supports only one rank: set it to false"):
        refuse_uneven_groups(World(size=2), config)


def test_rollouts_without_choices_or_of_another_model_are_refused(models):
    rollouts = sampled(models["mixtral"])
    with pytest.raises(UserError, match="1 of 4 rollouts has no expert choices: generate all of them with routing=True"):
        replay(models["mixtral"], [*without(rollouts[:1]), *rollouts[1:]], "dense")
    with pytest.raises(UserError, match=r"experts per token\] = \[2, 2\], but the model has \[1, 2\]"):
        replay(models["qwen3-moe, first layer dense"], rollouts, "dense")


def test_a_model_whose_routers_are_not_called_is_refused(models):
    """A fused kernel computes routers and experts at once."""
    model = copy.deepcopy(models["mixtral"])
    engine = Engine(model, FULL, slots=1)
    decoder_layers(model)[1].mlp.forward = lambda hidden: hidden
    with pytest.raises(UserError, match="MixtralForCausalLM computes its experts without its routers"):
        engine.generate([SHORT], 1, SAMPLING, routing=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compile", [False, True])
def test_decode_steps_on_a_gpu_record_the_experts(compile):
    model = random_weights(FAMILIES["qwen3-moe"]).cuda()
    engine = Engine(model, BOUNDED, slots=4, compile=compile)
    rollouts = engine.generate([SHORT, LONG], 3, SAMPLING, routing=True)
    assert max_gap(model, rollouts, "sparse") < 1e-3
    with torch.no_grad():
        flips, choices = forward(model, rollouts, "sparse").routing.flips_and_choices.tolist()
    assert flips < 0.01 * choices
