"""`SparseGRPOTrainer`: TRL's GRPOTrainer with rollouts on a bounded KV cache, corrected as Sparse-RL does.

    trainer = SparseGRPOTrainer(model, reward_funcs, args, train_dataset, kv=KV(budget=512))

TRL computes the loss. It corrects for the sampler only in vLLM mode, so this trainer runs the dense pass, corrects xi = pi_old /
pi_sampler, and hands TRL one advantage per token: weight * A, 0 for dropped tokens and rejected sequences. The weights are not
negative, so min(w·xi·A, clip(w)·xi·A) = xi·min(w·A, clip(w)·A): exact for every loss that is linear in A for each sign of A.
"""

# B completions of this process, T tokens of the longest, N completions of all processes

import difflib
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import ProcessorMixin

from ..config import KV, PRESETS, CorrectionSpec
from ..errors import UserError, notice
from ..learner.correction import Corrected, correct
from ..models.attention import eval_mode
from ..train.metrics import kv_metrics
from ..train.probe import ROLLOUTS, TOKENS, measured
from .trl_version import require_trl

EXACT = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo")
"""Loss types whose token terms scale with the advantage. `vespo` weights whole sequences by a function of the ratio."""


OWN_FIELDS = ("kv", "correction", "slots", "merge_lora")
"""Fields of SparseGRPOConfig that TRL's GRPOConfig does not have."""


require_trl("sparse_rl.integrations.trl")

from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from .trl_rollouts import SparseRollouts, refuse_images, refuse_settings, unchanged_attention  # noqa: E402

__all__ = ["SparseGRPOConfig", "SparseGRPOTrainer", "SparseRollouts"]


@dataclass
class SparseGRPOConfig(GRPOConfig):
    """TRL's GRPOConfig with the settings of sparse rollouts. Arguments of the trainer replace `kv` and `correction`."""

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*GRPOConfig._VALID_DICT_FIELDS, "kv"]

    kv: dict[str, Any] | str | None = field(
        default=None, metadata={"help": 'Options of sparse_rl.KV, such as {"policy": "rkv", "budget": 512}.'}
    )
    correction: str = field(
        default="paper",
        metadata={"help": f"Correction preset: {' '.join(name for name in PRESETS if name != 'released')}."},
    )
    slots: int | None = field(
        default=None, metadata={"help": "Sequences sampled concurrently; default: the generation batch, at most 64."}
    )
    merge_lora: bool = field(
        default=True, metadata={"help": "Sample from merged LoRA weights; false uses the trainer's adapters, without a copy."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.kv, KV):  # the arguments are written as JSON
            self.kv = self.kv.model_dump()
        refuse_settings(self)
        refuse_loss(self, spec_of(self.correction))


class SparseGRPOTrainer(GRPOTrainer):
    """TRL's GRPOTrainer with two more arguments, `kv` and `correction`. `args` may be a GRPOConfig."""

    _tag_names: ClassVar[list[str]] = [*GRPOTrainer._tag_names, "sparse-rl"]

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        *more: Any,
        kv: KV | None = None,
        correction: str | CorrectionSpec | None = None,
        **options: Any,
    ):
        own = {name: getattr(args, name, getattr(SparseGRPOConfig, name)) for name in OWN_FIELDS}
        self.correction = spec_of(own["correction"] if correction is None else correction)
        if args is not None:
            refuse_settings(args)
            refuse_loss(args, self.correction)
        if any(isinstance(each, ProcessorMixin) for each in (*more, *options.values())):
            refuse_images()
        for name in ("tools", "environment_factory"):
            if options.get(name):
                raise UserError(f"{name} needs rollouts of several turns, which the engine does not sample: omit {name}.")
        if options.get("rollout_func") is not None:
            raise UserError("SparseGRPOTrainer samples by itself: omit rollout_func, or use it with TRL's GRPOTrainer.")
        kv = KV(**(own["kv"] or {})) if kv is None else kv
        rollouts = SparseRollouts(kv, slots=own["slots"], merge_lora=own["merge_lora"])
        super().__init__(model, reward_funcs, args, *more, **options)
        refuse_loss(self.args, self.correction)
        self._measured = False
        self.rollouts = self.rollout_func = rollouts  # set here: as an argument it would warn
        rollouts.prepare(self)  # a model that cannot run is refused before the first step

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        if self.model.training and not self._measured:
            self._measure_quantisation()
        advantages_BT, corrected = self.token_advantages(output)
        engine = self.rollouts.prepare(self)
        metrics = {**corrected.metrics, **kv_metrics([engine.stats], self.rollouts.rollouts, engine)}
        metrics["perf/rollout_s"], metrics["perf/rollout_tokens_per_s"] = engine.stats.seconds, engine.stats.tokens_per_s
        for name, value in metrics.items():
            self._metrics["train" if self.model.training else "eval"][name].append(value)
        if bool(corrected.rejected.all()):
            notice(
                "The correction rejected every completion of a generation batch, so its policy gradient is 0 (see sparse/xi_min): "
                f"{engine.kv.remedy}, or use another correction."
            )
        return output | {"advantages": advantages_BT}

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save:
            self.rollouts.save(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.rollouts.load(checkpoint)

    def _measure_quantisation(self) -> None:
        """Measure the mismatch of a quantised cache on the first completions of a run. Warn if it is large. Raise UserError if
        quantisation ruins the model."""
        self._measured = True
        engine, rollouts = self.rollouts.prepare(self), self.rollouts.rollouts
        if not engine.kv.quantised or self.state.global_step:
            return
        chosen = [
            replace(each, response=each.response[:TOKENS], logprobs=each.logprobs[:TOKENS])
            for each in rollouts[:: -(-len(rollouts) // ROLLOUTS)]
        ]
        with unchanged_attention(engine.model):
            found = measured(engine, engine.model, chosen, self.rollouts.world)
        warning = found.warning()
        if self.accelerator.is_main_process:
            notice(warning or f"{found.sentence}.")

    def token_advantages(self, output: dict[str, Any]) -> tuple[Tensor, Corrected]:
        """Return (weight * A of this process's completions [B, T], the correction of all processes' completions).

        The correction covers all sampled tokens. TRL hides completions that it masks from its old log-probs, so these are then
        computed again.
        """
        in_loss_BT, old_BT = output["completion_mask"].bool(), output.get("old_per_token_logps")
        lengths_B = torch.tensor([len(rollout.response) for rollout in self.rollouts.rollouts], device=in_loss_BT.device)
        mask_BT = torch.arange(in_loss_BT.shape[1], device=in_loss_BT.device) < lengths_B[:, None]
        if old_BT is None or not torch.equal(in_loss_BT, mask_BT):
            old_BT = self._dense_logprobs(output | {"completion_mask": mask_BT.long()})
        log_ratio_BT = (old_BT - output["sampling_per_token_logps"]).masked_fill(~mask_BT, 0)
        log_ratio_NT, mask_NT = (
            self.accelerator.gather(self.accelerator.pad_across_processes(each, dim=1))
            for each in (log_ratio_BT, mask_BT.long())
        )
        corrected = correct(log_ratio_NT, mask_NT, self.correction)
        row = self.accelerator.process_index * len(mask_BT)
        weights_BT = corrected.weights[row : row + len(mask_BT), : mask_BT.shape[1]]
        return output["advantages"][:, None] * weights_BT.masked_fill(~in_loss_BT, 0), corrected

    @torch.no_grad()
    def _dense_logprobs(self, output: dict[str, Any]) -> Tensor:
        """Return log pi_old, [B, T], with the pass that TRL trains with. TRL omits it if the first update is on-policy."""
        ids, mask = (torch.cat([output[f"prompt_{name}"], output[f"completion_{name}"]], dim=1) for name in ("ids", "mask"))
        training = self.model.training
        rows = self.args.per_device_train_batch_size if training else self.args.per_device_eval_batch_size
        with eval_mode(self.model):  # without dropout, as the sampler
            logprobs_BT, *_ = self._get_per_token_logps_and_entropies(
                self.model, ids, mask, output["completion_ids"].shape[1], batch_size=rows
            )
        return logprobs_BT


def spec_of(correction: str | CorrectionSpec) -> CorrectionSpec:
    """Return the correction with this name. Raise UserError if TRL's losses cannot express it."""
    if isinstance(correction, CorrectionSpec):
        spec, name = correction, "this correction"
    elif correction in PRESETS:
        spec, name = PRESETS[correction], f"correction = {correction!r}"
    else:
        names = [each for each in PRESETS if each != "released"]
        close = difflib.get_close_matches(str(correction), names, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"use one of {', '.join(names)}."
        raise UserError(f"correction = {correction!r} is unknown: {hint}")
    if spec.normalize or spec.divisor == "kept":
        raise UserError(
            f"{name[0].upper()}{name[1:]} averages over kept tokens and divides by the mean weight of an update, which TRL's losses "
            "do not: use correction='paper', or sparse-rl train."
        )
    return spec


def refuse_loss(args: Any, spec: CorrectionSpec) -> None:
    """Raise UserError if an advantage per token is not exactly the correction under this loss."""
    if args.loss_type not in EXACT:
        raise UserError(
            f"loss_type = {args.loss_type!r} does not multiply each token by its advantage, so it cannot be corrected by it: use "
            f"one of {', '.join(EXACT)}."
        )
    if args.importance_sampling_level == "sequence" and (spec.weight == "token" or spec.drop == "token"):
        raise UserError(
            "importance_sampling_level = 'sequence' has one ratio for all tokens of a sequence, and this correction weighs "
            "single tokens: use importance_sampling_level='token', or correction='reject_only'."
        )
