"""Hybrid models: sampler, replay, learner and transformers agree where some layers have a recurrent state instead of keys."""

import copy
import json
import sys
from inspect import isfunction
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    FalconH1Config,
    GraniteMoeHybridConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    NemotronHConfig,
    OlmoHybridConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)
from transformers.integrations import use_kernel_func_from_hub_with_fallback
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

from small_models import SIZE, covering, random_weights
from small_runs import metrics, train
from sparse_rl import KV, NEVER, Engine, Sampling, UserError, load_tokenizer, replay
from sparse_rl.errors import notice
from sparse_rl.kv.policies import POLICIES
from sparse_rl.models import recurrent
from sparse_rl.models.recurrent import bind, mixers, with_reference
from sparse_rl.models.reduced import reduced
from sparse_rl.models.support import next_logits
from sparse_rl.rollout.decode import DecodeView
from sparse_rl.sizes import DENSE_SLOT_TOKENS, PAGE_TOKENS
from test_windows import CODE_NAMES, CODES, farthest, own_logprobs, own_parallel, plain

ANY_DEPTH = {name: value for name, value in SIZE.items() if name != "num_hidden_layers"}
THREE = {**SIZE, "num_hidden_layers": 3}
LINEAR = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_expand": 1,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
FAMILIES = {
    "qwen3.5": Qwen3_5TextConfig(
        **ANY_DEPTH,
        **DELTA,
        head_dim=16,
        num_hidden_layers=4,
        layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    ),
    "qwen3.5-moe": Qwen3_5MoeTextConfig(
        **THREE, **LINEAR, **DELTA, **EXPERTS, head_dim=16, shared_expert_intermediate_size=16
    ),
    "qwen3-next": Qwen3NextConfig(**THREE, **LINEAR, **DELTA, **EXPERTS, head_dim=16, shared_expert_intermediate_size=16),
    "lfm2": Lfm2Config(**THREE, layer_types=["conv", "full_attention", "conv"]),
    "lfm2-moe": Lfm2MoeConfig(**THREE, **EXPERTS, layer_types=["conv", "full_attention", "conv"], num_dense_layers=1),
    "falcon-h1": FalconH1Config(**ANY_DEPTH, **MAMBA, num_hidden_layers=2, head_dim=16, mamba_d_ssm=32),
    "nemotron-h": NemotronHConfig(
        **ANY_DEPTH,
        head_dim=16,
        layers_block_type=["linear_attention", "mlp", "full_attention", "moe", "linear_attention"],
        mamba_num_heads=4,
        mamba_head_dim=8,
        ssm_state_size=8,
        n_groups=1,
        chunk_size=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        moe_shared_expert_intermediate_size=16,
        n_group=1,
        topk_group=1,
    ),
    "granite-4": GraniteMoeHybridConfig(
        **THREE,
        **MAMBA,
        layer_types=["mamba", "attention", "mamba"],
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=16,
    ),
    "bamba": BambaConfig(**THREE, **MAMBA, attn_layer_indices=[1]),
    "olmo-hybrid": OlmoHybridConfig(**THREE, **LINEAR, **{**DELTA, "linear_num_key_heads": 4}),
}
KINDS = ["qwen3.5", "lfm2", "falcon-h1", "nemotron-h"]
"""A family of each kind of recurrent layer, and one with layers that do not mix tokens."""
BOUNDED = KV(policy="rkv", budget=24, interval=4, window=4, sinks=2, protect_prompt=False)
CACHES = [BOUNDED, BOUNDED.model_copy(update={"protect_prompt": True}), KV(policy="full")]
CACHE_NAMES = ["rkv", "protected", "full"]
SHORT, LONG = [7, 8, 9], list(range(3, 60))
TOKENS = 50
"""Response tokens: at least five compactions. After the long prompt they span two chunks of the parallel form."""
ROUNDING = 2e-5


def family(name, dtype=torch.float32, **changes):
    return random_weights(FAMILIES[name], dtype, **changes)


@pytest.fixture(scope="module")
def models():
    return {name: family(name) for name in FAMILIES}


def assert_rounds_alike(model, rollouts, found):
    """Log-probs are those of the rollouts up to rounding, or twice what transformers' cached and parallel passes differ by."""
    gap = farthest(found, [rollout.logprobs for rollout in rollouts])
    if gap >= ROUNDING:
        assert gap < 2 * max(farthest(*zip(own_logprobs(plain(model), each))) for each in (rollouts[0], rollouts[-1]))


def attention_layers(engine):
    return engine.limits.shape.layers_with_keys


@pytest.mark.parametrize("name", KINDS)
def test_with_a_protected_prompt_replay_reproduces_the_sampler_over_many_compactions(models, name):
    """`test_families.py` does so without protection."""
    model = models[name]
    engine = Engine(model, BOUNDED.model_copy(update={"protect_prompt": True}), slots=4)
    rollouts = engine.generate([SHORT, LONG], samples=2, sampling=Sampling(max_tokens=TOKENS, stop=()))
    sampled = [rollout.logprobs for rollout in rollouts]
    for tokens_per_pass in (1, 4096):  # unpacked and packed
        assert_rounds_alike(model, rollouts, replay(model, rollouts, "sparse", tokens_per_pass=tokens_per_pass))
    assert farthest(replay(model, rollouts, "dense"), sampled) > 0.01  # else the replay above proves nothing
    evicted_at = rollouts[0].evicted_at
    assert len(evicted_at) == model.config.num_hidden_layers
    for layer in range(len(evicted_at)):
        times = evicted_at[layer][evicted_at[layer] != NEVER].unique()
        assert len(times) >= 5 if layer in attention_layers(engine) else len(times) == 0


@pytest.mark.parametrize("name", FAMILIES)
def test_the_default_policy_needs_only_rotary_positions(models, name):
    model, kv = models[name], KV(budget=24, interval=4)
    assert kv.policy == "triattention"
    if name in ("nemotron-h", "granite-4"):
        with pytest.raises(UserError, match="has no rotary positions, .*: set kv.policy = streaming or rkv."):
            Engine(model, kv, slots=1)
        return
    rollouts = Engine(model, kv, slots=2).generate([LONG], samples=2, sampling=Sampling(max_tokens=TOKENS // 2, stop=()))
    assert_rounds_alike(model, rollouts, replay(model, rollouts, "sparse"))


@pytest.mark.parametrize(("name", "kv"), covering(KINDS, CACHES))
def test_rollouts_do_not_depend_on_slots_or_pieces(models, name, kv):
    """Slots that later prompts use again, samples that wait for a slot, and prompts in pieces, the last of a single token."""
    model, sampling = models[name], Sampling(max_tokens=16, stop=())
    prompts = [SHORT, LONG, LONG[::-1] * 2]
    expected = Engine(model, kv, slots=6).generate(prompts, 2, sampling)
    engine = Engine(model, kv, slots=3)
    for prefill_tokens in (8192, 28):  # the second call finds the states of the first
        engine.prefill_tokens = prefill_tokens
        found = engine.generate(prompts, 2, sampling)
        assert [each.response for each in found] == [each.response for each in expected]
        assert farthest([each.logprobs for each in found], [each.logprobs for each in expected]) < 2 * ROUNDING


@pytest.mark.parametrize(("name", "kv"), covering(KINDS, CACHES))
def test_a_group_shares_the_prefill_of_its_prompt(models, name, kv):
    model, sampling, seeds = models[name], Sampling(max_tokens=20, stop=()), [11, 12]
    engine = Engine(model, kv, slots=2)
    together = engine.generate([LONG], 2, sampling, seeds=seeds)
    assert engine.stats.prompt_tokens == len(LONG)
    alone = [Engine(model, kv, slots=1).generate([LONG], 1, sampling, seeds=[seed])[0] for seed in seeds]
    assert [each.response for each in together] == [each.response for each in alone]
    assert farthest([each.logprobs for each in together], [each.logprobs for each in alone]) < ROUNDING


def test_a_paused_sequence_continues_with_its_state(models):
    model, sampling, prompts = models["qwen3.5"], Sampling(max_tokens=215, stop=()), [SHORT, LONG]
    expected = Engine(model, KV(policy="full"), slots=4).generate(prompts, 2, sampling)
    engine = Engine(model, KV(policy="full"), slots=4)
    tokens = 4 * DENSE_SLOT_TOKENS + 7 * PAGE_TOKENS
    needed = tokens * engine.cache.token_bytes + engine.cache.states.nbytes
    engine.reserve_dense(len(LONG), 215, 2, 2, kv_bytes=needed)
    found = engine.generate(prompts, 2, sampling)
    assert engine.stats.preemptions > 0 and engine.stats.peak_kv_bytes <= needed
    assert [each.response for each in found] == [each.response for each in expected]
    assert farthest([each.logprobs for each in found], [each.logprobs for each in expected]) < 10 * ROUNDING


@pytest.mark.parametrize(("dtype", "head"), [("auto", 16 * 4), ("8bit", 16 + 2)])
def test_a_state_has_a_fixed_size_however_long_the_rollout(models, dtype, head):
    engine = Engine(models["qwen3.5"], BOUNDED.model_copy(update={"dtype": dtype}), slots=2)
    keys = 2 * BOUNDED.capacity * 2 * 2 * head  # slots, tokens, keys and values, heads, bytes of a head: one layer
    states = 2 * 3 * (64 * 4 + 4 * 8 * 8) * 4  # slots, layers, the convolution's and the delta rule's state, bytes
    for tokens in (TOKENS // 2, TOKENS):
        (rollout,) = engine.generate([SHORT], sampling=Sampling(max_tokens=tokens, stop=()))
        assert engine.stats.peak_kv_bytes == keys + states
        assert rollout.trace.codes_LHT.shape == (1, 2, len(SHORT) + tokens)  # no codes of recurrent layers


def test_warming_up_a_graph_leaves_the_states_as_they_were(models):
    """The steps that compile a graph's kernels run on live slots. They compute what a real step would."""
    model, tokens, positions = models["qwen3.5"], torch.tensor([5, 6]), torch.tensor([0, 0])
    cache = Engine(model, BOUNDED, slots=3).cache
    for tensor in cache.states.tensors:
        tensor.normal_()
    before, logits = [tensor.clone() for tensor in cache.states.tensors], []
    for updates in (False, False, True):
        view = DecodeView(cache, positions, cache.lengths_S[:2], longest=1, updates_states=updates)
        logits.append(next_logits(model, tokens[:, None], positions[:, None], view, keep=1))
        same = [torch.equal(tensor, old) for tensor, old in zip(cache.states.tensors, before, strict=True)]
        assert not any(same) if updates else all(same)
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])


@pytest.mark.parametrize("name", KINDS)
def test_gradients_are_those_of_transformers(models, name):
    """A dense replay of packed rollouts, padded in recurrent layers, against one plain pass per rollout."""
    model = models[name]
    sampling, lengths = Sampling(max_tokens=40, stop=()), [9, 40, 25, 40]
    rollouts = Engine(model, BOUNDED, slots=4).generate([SHORT, LONG], 2, sampling, limits=lengths)
    reference = plain(model)
    sum(own_parallel(reference, rollout).sum() for rollout in rollouts).backward()
    sum(each.sum() for each in replay(model, rollouts, "dense")).backward()
    for (path, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), path
        if ours.grad is not None:
            scale = float(theirs.grad.abs().max())
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-3 * scale + 1e-6, msg=path)
    model.zero_grad()


@pytest.fixture(scope="module")
def hybrid_world(world, tmp_path_factory):
    """The problems of the small runs, with a Qwen3.5 model."""
    folder = tmp_path_factory.mktemp("hybrid")
    tokenizer = load_tokenizer("tiny")
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model = family("qwen3.5", vocab_size=len(tokenizer), **ids)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    for name in ("problems.jsonl", "rewards.py"):
        (folder / name).write_text((world / name).read_text())
    return folder


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("dense", ["--optimizer.gradient-checkpointing", "true"]),
        ("smd", ["--optimizer.tokens-per-microbatch", "30"]),
        ("sparse_rl", ["--model.lora.rank", "4", "--kv.dtype", "8bit"]),
    ],
    ids=["dense-checkpointing", "smd-microbatches", "sparse_rl-lora-8bit"],
)
def test_a_run_trains_a_hybrid_model(hybrid_world, tmp_path, method, options):
    run = tmp_path / "run"
    train(hybrid_world, run, "--method", method, "--rollout.max-tokens", "16", *options)
    for row in metrics(run)[1:]:
        assert row["sparse/engine_noise"] < (1e-3 if "8bit" in options else 1e-5)  # a code may flip
        assert row["policy/skipped_updates"] == 0 and row["policy/grad_norm"] > 0
        assert (row["kv/evictions"] == 0) == (method == "dense")
    if "--model.lora.rank" not in options:
        before, after = (load_file(folder / "model/model.safetensors") for folder in (hybrid_world, run))
        assert not torch.equal(after["model.layers.0.linear_attn.A_log"], before["model.layers.0.linear_attn.A_log"])
    assert json.loads((run / "model/sparse_rl.json").read_text())["kv"]["policy"] == ("full" if method == "dense" else "rkv")


@pytest.mark.parametrize("policy", [name for name in POLICIES if name not in ("rkv", "full")])
def test_every_policy_evicts_from_attention_alone(models, policy):
    """Also policies with statistics and seeds, which are those of the model's own layers."""
    model = models["qwen3.5"]
    engine = Engine(model, BOUNDED.model_copy(update={"policy": policy}), slots=2)
    rollouts = engine.generate([SHORT, LONG], sampling=Sampling(max_tokens=30, stop=()))
    assert farthest(replay(model, rollouts, "sparse"), [rollout.logprobs for rollout in rollouts]) < 5 * ROUNDING
    evicted_at = rollouts[1].evicted_at
    assert bool((evicted_at[2] != NEVER).any()) and bool((evicted_at[[0, 1, 3]] == NEVER).all())


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3-next", "lfm2", "nemotron-h"])
def test_the_check_of_a_model_runs_one_layer_of_each_kind(name):
    """So that a large hybrid model is checked in little memory."""
    config = copy.deepcopy(FAMILIES[name])
    per_layer = "layers_block_type" if name == "nemotron-h" else "layer_types"
    types = getattr(config, per_layer)
    config.update({per_layer: types * 3, **({} if name == "nemotron-h" else {"num_hidden_layers": 3 * len(types)})})
    small = reduced(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    assert small.config.num_hidden_layers == len(set(types))
    Engine(small, BOUNDED, slots=1)


# Refusals


def test_missing_kernels_are_named_with_the_layer():
    def forward(self, hidden_states, past_key_values=None, **kwargs):
        raise ImportError("No module named 'causal_conv1d'")

    model = family("lfm2")
    for layer in (0, 2):
        model.model.layers[layer].conv.__class__ = type("Lfm2ShortConv", (Lfm2ShortConv,), {"forward": forward})
    sentence = (
        r"Layer 0 \(Lfm2ShortConv\) needs kernels that are not installed \(.*\): install causal-conv1d, or use another model\."
    )
    with pytest.raises(UserError, match=sentence):
        Engine(model, BOUNDED, slots=1)


def test_missing_fast_kernels_are_said_once_on_a_gpu(monkeypatch, capsys):
    mixer = family("lfm2").model.layers[0].conv

    def stand_in(is_cuda):
        return SimpleNamespace(modules=lambda: [mixer], parameters=lambda: iter([SimpleNamespace(is_cuda=is_cuda)]))

    notice.cache_clear()
    for found, lines in ((object(), 0), (None, 1)):
        monkeypatch.setattr(recurrent, "find_spec", lambda name, found=found: found)
        for is_cuda in (False, True, True):
            bind(stand_in(is_cuda))
        said = capsys.readouterr().err.splitlines()
        assert len(said) == lines
    assert said == [
        "sparse-rl: Lfm2ShortConv runs without fast kernels, which is slower and takes more memory than planned: install "
        "causal-conv1d."
    ]


def test_a_cpu_takes_the_references_of_installed_kernels():
    """A function of torch stands for a kernel. Transformers chooses it when it defines the function, whatever the device."""

    @use_kernel_func_from_hub_with_fallback("softsign", "torch.nn.functional")
    def double(input, scale=2):
        return scale * input

    values, chosen = torch.ones(2), with_reference(double)
    assert double(values).tolist() == [0.5, 0.5] and chosen(values).tolist() == [2, 2]
    assert chosen(values, scale=3, unknown=True).tolist() == [3, 3]
    assert chosen(values, cu_seqlens=[0, 2]).tolist() == [0.5, 0.5]  # the reference would mix packed sequences


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_float32_takes_the_references_of_installed_kernels():
    @use_kernel_func_from_hub_with_fallback("softsign", "torch.nn.functional")
    def double(input):
        return 2 * input

    chosen, values = with_reference(double), torch.ones(2, device="cuda")
    assert chosen(values).tolist() == [2, 2] and chosen(values.bfloat16()).tolist() == [0.5, 0.5]


@pytest.mark.parametrize("name", FAMILIES)
def test_all_kernels_of_a_family_have_their_references(models, name):
    Engine(models[name], BOUNDED, slots=1)
    for kind in {type(module) for module in mixers(models[name])}:
        source = sys.modules[kind.__module__]
        kernels = [function for function in vars(source).values() if isfunction(function) and hasattr(function, "__wrapped__")]
        assert kernels and all(hasattr(function, "sparse_rl") for function in kernels)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("kv", [*CACHES, *CODES], ids=[*CACHE_NAMES, *CODE_NAMES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_replay_reproduces_the_sampler(name, kv, dtype):
    """Graphs and, where they are installed, fast kernels. Codes that flip change few log-probs by much."""
    model = family(name, dtype).cuda()
    rollouts = Engine(model, kv, slots=4).generate([SHORT, LONG], 3, Sampling(max_tokens=TOKENS, stop=()))
    reference = plain(model)
    own = torch.cat([left - right for left, right in (own_logprobs(reference, rollout) for rollout in rollouts)]).abs()
    for view in ("sparse", "dense") if kv.policy == "full" and not kv.quantised else ("sparse",):
        pairs = zip(replay(model, rollouts, view), rollouts, strict=True)
        gaps = torch.cat([(ours.detach().cpu() - rollout.logprobs).abs() for ours, rollout in pairs])
        if kv.quantised and dtype == torch.float32:
            assert float(gaps.median()) < 2e-3
        elif dtype == torch.float32:
            assert float(gaps.max()) < max(2e-3, 2 * float(own.max()))
        else:
            assert float(gaps.mean()) < max(0.02, 2 * float(own.mean()))
