"""Rollouts for TRL: a `rollout_func` that samples from the trainer's own model on a bounded KV cache.

    trainer = GRPOTrainer(..., rollout_func=SparseRollouts(KV(budget=512)))

`SparseRollouts` samples and records log-probs. TRL corrects for another sampler only in vLLM mode, so a plain `GRPOTrainer`
trains on these rollouts uncorrected. `SparseGRPOTrainer` in `trl.py` adds the correction.
"""

import copy
import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..config import KV, Sampling
from ..errors import UserError, notice
from ..kernels.counter_rng import derive
from ..kv import statistics
from ..rollout.calibrate import is_due
from ..rollout.engine import Engine
from ..rollout.rollout import Rollout
from ..world import ALONE, World, agreed

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
MOST_SLOTS = 64
"""Maximum number of sequences that are sampled concurrently if `slots` is not set."""
TRAINING_CALLS = "training_calls"
"""Name of the number of training calls in the file of statistics. It decides when statistics are gathered again."""


class SparseRollouts:
    """A TRL `rollout_func`: one completion for each prompt, sampled by an `Engine` on the trainer's model.

    The engine is built at the first call. `slots` sequences run concurrently; the default is the generation batch of this
    process, at most 64. `merge_lora` is explained at `SamplerWeights`. Reward functions receive the column `finish` (`stop` or
    `length`).

    Statistics of the model, if the policy or `kv.dtype` needs them, are gathered from the first prompts, and again from the
    rollouts of training calls 1, 2, 4, 8, 16 and every 32nd. All ranks gather them together. `SparseGRPOTrainer` stores them in
    its checkpoints with `save` and continues with `load`.
    """

    def __init__(self, kv: KV | None = None, *, slots: int | None = None, merge_lora: bool = True):
        self.kv = KV() if kv is None else kv
        self.kv.capacity  # noqa: B018 - refuse auto here, not at the first call
        self.slots, self.merge_lora = slots, merge_lora
        self.weights: SamplerWeights | None = None
        self.engine: Engine | None = None
        self.world = ALONE
        self.rollouts: list[Rollout] = []
        """Rollouts of the last call, in the order of its prompts."""
        self._place, self._calls = (-1, -1), 0
        self._training_calls = 0

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        engine = self.prepare(trainer)
        ids, images, _ = trainer._tokenize_prompts(prompts)
        if images is not None:
            raise UserError("A prompt has images, which the engine cannot sample from: use text prompts.")
        unique, samples = grouped(ids)
        sampling = Sampling(
            max_tokens=trainer.max_completion_length, temperature=trainer.temperature, stop=tuple(trainer.eos_token_ids)
        )
        if not self.rollouts and self.world.is_main and (warning := self.kv.remark(unique, sampling.max_tokens)):
            notice(warning)
        longest = max(map(len, unique)) + sampling.max_tokens
        assert self.weights is not None
        self.weights.sync()
        with unchanged_attention(engine.model):
            if engine.needed_statistics and not engine.statistics:

                def check() -> None:
                    for prompt in unique:
                        engine.check_prompt(prompt, sampling)

                agreed(self.world, check)  # else the other ranks would wait for this one
                self._calibrate(engine, unique, longest)
            self.rollouts = engine.generate(unique, samples, sampling, seeds=self._seeds(trainer, len(ids)), record=False)
            if trainer.model.training:
                self._training_calls += 1
                if is_due(self._training_calls):
                    self._calibrate(engine, [rollout.prompt + rollout.response for rollout in self.rollouts], longest)
        return {
            "prompt_ids": [list(rollout.prompt) for rollout in self.rollouts],
            "completion_ids": [rollout.response for rollout in self.rollouts],
            "logprobs": [rollout.logprobs.tolist() for rollout in self.rollouts],
            "finish": [rollout.finish for rollout in self.rollouts],
        }

    def prepare(self, trainer: Any) -> Engine:
        """Return the engine. The first call checks the trainer's settings and model, and builds it."""
        if self.engine is None:
            refuse_settings(trainer.args)
            refuse_trainer(trainer)
            model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
            self.weights = SamplerWeights(model, HALF.get(trainer.accelerator.mixed_precision), merge_lora=self.merge_lora)
            batch = trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation
            # A compiled engine stores the weights of projections contiguously, and DeepSpeed has its own layout.
            compile = False if trainer.is_deepspeed_enabled else None
            with unchanged_attention(self.weights.sampler):
                self.engine = Engine(
                    self.weights.sampler, self.kv, slots=self.slots or min(MOST_SLOTS, batch), compile=compile
                )
            self.world = world_of(trainer)
        return self.engine

    def save(self, folder: str | Path) -> None:
        """Write the statistics into a checkpoint, if there are any."""
        if self.engine is not None and self.engine.statistics:
            stored = self.engine.statistics | {TRAINING_CALLS: torch.tensor(self._training_calls)}
            statistics.save(stored, Path(folder))

    def load(self, folder: str | Path) -> None:
        """Continue with the statistics of a checkpoint, as rank 0 reads them. Call it on all ranks, after `prepare`."""
        assert self.engine is not None
        stored = self.world.gather(statistics.load(Path(folder)) if self.world.is_main else {})[0]
        if self.engine.needed_statistics and not stored:
            notice(f"{folder} has no statistics of queries or keys: they are gathered again, and results may differ slightly.")
        self._training_calls = int(stored.pop(TRAINING_CALLS, 0))
        self.engine.load_statistics(stored)

    def _calibrate(self, engine: Engine, texts: list[list[int]], longest: int) -> None:
        """Gather statistics from the texts of all ranks, if the engine needs any. All ranks get the same."""
        if engine.needed_statistics:
            ranks = self.world.gather((texts, longest))
            engine.calibrate([text for part, _ in ranks for text in part], max(each for _, each in ranks), self.world)

    def _seeds(self, trainer: Any, rollouts: int) -> list[int]:
        """Return a seed for each rollout. It derives from the training seed, the step, the rank and the row, so a resumed run
        samples the same tokens."""
        place = (int(trainer.model.training), trainer.state.global_step)
        self._calls = self._calls + 1 if place == self._place else 0
        self._place = place
        base = derive(trainer.args.seed, *place, self._calls, trainer.accelerator.process_index)
        return [derive(base, row) for row in range(rollouts)]


def world_of(trainer: Any) -> World:
    """Return the ranks of the trainer. They exchange statistics on the CPU."""
    ranks = trainer.accelerator
    if ranks.num_processes == 1:
        return ALONE
    timeout = trainer.args.ddp_timeout_delta
    return World(ranks.process_index, ranks.num_processes, dist.new_group(backend="gloo", timeout=timeout), timeout=timeout)


def grouped(ids: Sequence[Sequence[int]]) -> tuple[list[list[int]], int]:
    """Return (prompts, samples of each), which repeat to `ids`. Equal neighbours are one prompt, prefilled once."""
    runs = [(list(prompt), len(list(rows))) for prompt, rows in itertools.groupby(ids, key=list)]
    samples = math.gcd(*(count for _, count in runs))
    return [prompt for prompt, count in runs for _ in range(count // samples)], samples


@contextmanager
def unchanged_attention(model: PreTrainedModel) -> Iterator[None]:
    """Restore the attention implementation with which the user trains. The engine sets its own."""
    before = model.config._attn_implementation
    try:
        yield
    finally:
        if model.config._attn_implementation != before:
            model.set_attn_implementation(before)


class SamplerWeights:
    """The weights that sample, next to the trainer's.

    - The trainer's model itself, if it runs in its own dtype. Nothing is copied.
    - A half-precision copy, if the trainer keeps float32 weights and autocasts (`bf16=True`, TRL's default).
    - With LoRA, a model with merged weights W + s·BA, which shares all other weights. `merge_lora=False` samples with the
      trainer's own adapters instead: slower, without a copy, and for any adapter that PEFT can run unmerged.
    """

    def __init__(self, model: nn.Module, half: torch.dtype | None, *, merge_lora: bool = True):
        base = model.get_base_model() if isinstance(model, PeftModel) else model
        if not isinstance(base, PreTrainedModel):
            raise UserError(
                f"The model is a {type(model).__name__}, which the engine cannot run: pass a transformers model, or a PeftModel "
                "around one, without another wrapper."
            )
        if isinstance(model, PeftModel) and model.active_peft_config.is_prompt_learning:
            raise UserError(
                f"PEFT's {model.active_peft_config.peft_type.value} adds virtual tokens to the prompt, which the engine cannot "
                "run: use LoRA, or train without PEFT."
            )
        self.learner = self.sampler = base
        self.merged: list[tuple[Any, Tensor]] = []
        """Adapted layers of the learner, and the sampler's weight of each."""
        self.adapter = model.active_adapter if isinstance(model, PeftModel) else ""
        self.casts = half is not None and base.dtype == torch.float32
        merges = isinstance(model, PeftModel) and merge_lora
        if merges:
            self._refuse_unmergeable()
        if merges or (self.casts and not isinstance(model, PeftModel)):
            self.sampler = self._copy(half if self.casts else None)
        if merges:
            for name, layer in self._adapted():
                target = self.sampler.get_submodule(name)
                if not self.casts:
                    target.weight = nn.Parameter(target.weight.detach().clone(), requires_grad=False)
                self.merged.append((layer, target.weight))

    @torch.no_grad()
    def sync(self) -> None:
        """Write the learner's weights into the sampler's, in place. Do nothing if they are the same."""
        if self.sampler is self.learner:
            return
        if not self.adapter:
            for mine, theirs in zip(self.sampler.parameters(), self.learner.parameters(), strict=True):
                mine.copy_(theirs)
        for layer, weight in self.merged:
            weight.copy_(layer.get_base_layer().weight.float() + layer.get_delta_weight(self.adapter).float())

    def _adapted(self) -> Iterator[tuple[str, Any]]:
        for name, module in self.learner.named_modules():
            if isinstance(module, BaseTunerLayer):
                yield name, module

    def _refuse_unmergeable(self) -> None:
        for name, weight in self.learner.named_parameters():
            if weight.requires_grad and ".lora_" not in name:
                raise UserError(
                    f"The weight {name} is trained in addition to the LoRA adapters, and a merged sampler would not see it: remove "
                    "modules_to_save and bias from the LoraConfig, or set merge_lora=False."
                )
        for name, layer in self._adapted():
            weight = getattr(layer.get_base_layer(), "weight", None)
            plain = isinstance(layer, LoraLayer) and not layer.use_dora.get(self.adapter, False)
            plain = plain and not layer.lora_bias.get(self.adapter, False)
            if not plain or not isinstance(weight, Tensor) or not weight.is_floating_point():
                raise UserError(
                    f"The adapter of {name} cannot be merged into the sampler's weights, because it is not plain LoRA on "
                    "unquantized weights: set merge_lora=False."
                )

    def _copy(self, dtype: torch.dtype | None) -> PreTrainedModel:
        """Return the model without adapters and wrappers. It shares the weights, or has its own in this dtype."""

        def place(tensor: Tensor) -> Tensor:
            if dtype is None or not isinstance(tensor, nn.Parameter):
                return tensor
            return nn.Parameter(tensor.detach().to(dtype), requires_grad=False)

        tensors = (*self.learner.parameters(), *self.learner.buffers())
        plain = copy.deepcopy(self.learner, {id(tensor): place(tensor) for tensor in tensors})
        for wrapper in ("forward", "_original_forward"):  # those of TRL and accelerate call the original model
            vars(plain).pop(wrapper, None)
        for name, layer in list(plain.named_modules()):
            if isinstance(layer, BaseTunerLayer):
                parent, _, child = name.rpartition(".")
                setattr(plain.get_submodule(parent), child, layer.get_base_layer())
        return plain.eval()


def refuse_settings(args: Any) -> None:
    """Raise UserError for settings of TRL under which the recorded log-probs would not be those of the sampler."""
    required = {
        "use_vllm": (False, "the engine samples instead of vLLM"),
        "use_transformers_continuous_batching": (False, "the engine samples instead of transformers"),
        "top_p": (1.0, "log-probs of a truncated distribution are not recorded"),
        "top_k": (0, "log-probs of a truncated distribution are not recorded"),
        "min_p": (None, "log-probs of a truncated distribution are not recorded"),
        "repetition_penalty": (1.0, "the learner has no such penalty"),
        "generation_kwargs": (None, "they belong to transformers' generate, which does not run"),
        "cache_implementation": (None, "the engine has its own cache"),
    }
    for name, (wanted, why) in required.items():
        value = getattr(args, name, wanted)
        if value != wanted and value not in ({}, None):
            raise UserError(f"{name} = {value!r} does not work with sparse rollouts ({why}): set {name}={wanted!r}.")
    if args.max_completion_length is None:
        raise UserError("max_completion_length = None sets no limit, and the engine needs one: set max_completion_length=512.")
    if args.temperature <= 0:
        raise UserError(
            f"temperature = {args.temperature} gives no log-probs to train on: set a temperature above 0, such as 1.0."
        )


def refuse_images() -> NoReturn:
    raise UserError(
        "processing_class is a processor for images or audio, and the engine samples only text: use a text model and its "
        "tokenizer."
    )


def refuse_trainer(trainer: Any) -> None:
    """Raise UserError for models and launchers whose weights the engine cannot read."""
    if trainer._is_vlm:
        refuse_images()
    plugin = trainer.accelerator.state.deepspeed_plugin if trainer.is_deepspeed_enabled else None
    if trainer.is_fsdp_enabled or (plugin is not None and plugin.zero_stage == 3):
        raise UserError(
            "The weights are sharded over ranks (FSDP or DeepSpeed ZeRO-3), so the engine cannot sample from them in TRL: use "
            "DDP or ZeRO-2, or sparse-rl train, which shards the learner with FSDP2."
        )
