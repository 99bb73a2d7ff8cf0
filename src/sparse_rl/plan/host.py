"""Compute the host memory of a training run, by part and by phase, for responses of full length.

The plan counts what grows with the run: rollouts, weights, optimizer state. It does not count Python, CUDA's libraries and
reward workers.
"""

# L layers, H kv heads, T tokens of the longest sequence (prompt and response)

from dataclasses import dataclass

from ..config import MAX_DRAWS, SHADOW_METHODS, Config
from ..format import gib
from ..sizes import recorded_rollouts
from .dimensions import Dimensions
from .memory import Phase, Plan
from .parts import STATE_8BIT_BYTES, itemsize, sharded
from .roofline import NODE_GPUS

TOKEN_BYTES = 8 + 32 + 4
"""Bytes of a response token in a `Rollout`: a place in a list, a Python integer and a float32 log-prob."""
TEXT_BYTES = 4
"""Bytes of a token's text (assumed)."""
PACKED_TOKEN_BYTES = 8
"""Bytes of a token that ranks exchange: an int32 id and a float32 log-prob."""


@dataclass(frozen=True)
class HostPlan:
    """The host memory of a run. Phases are of one rank."""

    phases: list[Phase]
    ranks: int = 1
    """Ranks that share a machine."""
    memory_bytes: int | None = None
    """Memory of the machine; None if it is unknown."""

    @property
    def fullest(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def peak_bytes(self) -> int:
        """Peak of all ranks of a machine."""
        return self.ranks * self.fullest.total

    @property
    def line(self) -> str:
        parts = self.fullest.in_words
        ranks = f" for {self.ranks} ranks, {gib(self.fullest.total)} each," if self.ranks > 1 else ""
        return f"Host memory: {gib(self.peak_bytes)} GiB{ranks} in {self.fullest.name}{f' ({parts})' if parts else ''}."

    @property
    def warning(self) -> str | None:
        """Sentence for a machine with too little memory; else None."""
        if self.memory_bytes is None or self.peak_bytes <= self.memory_bytes:
            return None
        needs = f"The run needs {gib(self.peak_bytes)} GiB of host memory, more than the {gib(self.memory_bytes)} GiB"
        return f"{needs} of the machine: {REMEDIES[max(self.fullest.parts, key=self.fullest.parts.__getitem__)]}."

    @property
    def record(self) -> dict:
        return {
            "memory_bytes": self.memory_bytes,
            "peak_bytes": self.peak_bytes,
            "peak_phase": self.fullest.name,
            "ranks_per_machine": self.ranks,
            "phases_of_a_rank": {phase.name: phase.parts | {"all": phase.total} for phase in self.phases},
        }


OTHER_MACHINE = " For another machine, pass its memory with --host-memory."
"""Added to a warning if the plan compares with the memory of this machine."""

FEWER = "lower rollout.max_tokens or rollout.prompts_per_step, or use a larger machine"
REMEDIES = {
    "model weights": "use a smaller model or a larger machine",
    "optimizer state": "set optimizer.state to 8bit or model.lora.rank to 16, or use a larger machine",
    "gradients": "set optimizer.state to 8bit or model.lora.rank to 16, or use a larger machine",
    "base weights": "set model.lora.merge to true, or use a larger machine",
    "checkpoint copy": "set optimizer.state to 8bit or model.lora.rank to 16, or use a larger machine",
    **dict.fromkeys(("rollouts", "texts", "traces", "exchange", "padded log-probs"), FEWER),
}


def host_plan(plan: Plan, memory_bytes: int | None = None) -> HostPlan:
    """Return the host memory of a planned run. `memory_bytes` is the memory of the machine, if known."""
    phases = host_phases(plan.config, plan.dims, plan.prompt_tokens)
    return HostPlan(phases, min(plan.config.ranks.count, NODE_GPUS), memory_bytes)


def host_phases(config: Config, dims: Dimensions, prompt_tokens: int) -> list[Phase]:
    size, lora, ranks = itemsize(config), config.model.lora, config.ranks.count
    trained = dims.adapter_params(lora.targets, lora.rank) if lora.rank else dims.params
    offload = config.optimizer.state == "offload"
    always = {
        "optimizer state": 12 * trained if offload else 0,  # float32 masters and two moments
        "base weights": size * dims.adapted_params(lora.targets) if lora.merges_in_place else 0,
    }
    rollouts = config.rollout.rollouts_per_step * rounds(config)
    tokens = rollouts * config.rollout.max_tokens
    dropped, codes = trace_bytes(config, dims, prompt_tokens)
    held = always | {"rollouts": rollout_bytes(config, prompt_tokens)}
    exchange = 2 * max(PACKED_TOKEN_BYTES * tokens, codes) if ranks > 1 else 0  # received bytes and the arrays read from them
    update = {
        "traces": dropped + codes,
        "padded log-probs": 4 * tokens,
        "gradients": 4 * trained if offload else 0,
    }
    moments = {"fp32": 8.0, "8bit": STATE_8BIT_BYTES, "offload": 0.0}[config.optimizer.state]
    saved = 0 if offload else int((4 + moments) * trained) // (ranks if sharded(config) else 1)
    written = 4 * trained if lora.rank else size * dims.params
    return [
        Phase("load", {"model weights": size * dims.params}),
        Phase("sampling", held | {"texts": TEXT_BYTES * tokens // ranks, "traces": dropped, "exchange": exchange}),
        Phase("update", held | update),
        Phase("checkpoint", always | {"checkpoint copy": saved}),  # torch holds all tensors of a file until it is written
        Phase("final model", always | {"model weights": written}),
    ]


def rounds(config: Config) -> int:
    """Return how many times the rollouts of a step may be sampled. Replaced rollouts stay in memory, too."""
    return MAX_DRAWS if config.refill or config.rollout.refill_rejected else 1


def rollout_bytes(config: Config, prompt_tokens: int) -> int:
    """Return the bytes of a step's rollouts: all of them are on every rank. Samples of a prompt share the list of its tokens."""
    prompts = config.rollout.prompts_per_step * rounds(config)
    return prompts * (config.rollout.samples_per_prompt * config.rollout.max_tokens * TOKEN_BYTES + 8 * prompt_tokens)


def trace_bytes(config: Config, dims: Dimensions, prompt_tokens: int) -> tuple[int, int]:
    """Return (bytes of the dropped positions that a rank records, bytes of the codes made from them) of a step's traces."""
    kv, longest = config.sampler_kv, prompt_tokens + config.rollout.max_tokens
    if not kv.is_sparse:
        return 0, 0
    recorded = (MAX_DRAWS if config.refill else 1) * len(recorded_rollouts(config, config.rollout.rollouts_per_step))
    position = 2 if longest < 2**15 else 4
    last_code = config.rollout.max_tokens // kv.interval + 1
    code = next(count for count, most in ((1, 2**8), (2, 2**15), (4, 2**31)) if last_code < most)
    keys = recorded * dims.full.layers * dims.kv_heads
    own = config.ranks.count if config.method in SHADOW_METHODS else 1  # a rank records the rollouts that it samples
    return keys * max(0, longest - kv.kept_tokens) * position // own, keys * longest * code
