"""Records of iterations of reinforcement learning, and their line on the console."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from mimo.observability.metrics import Record
from mimo.observability.trackers import Value


@dataclass(frozen=True, kw_only=True)
class PolicyRecord(Record):
    """Figures of one iteration of reinforcement learning.

    Attributes:
        policy_version: version of the weights that drew the completions: the number of iterations before them.
        num_tokens: tokens of all sequences, prompts included.
        num_microbatches: microbatches of each data-parallel rank.
        world_size: number of trainer ranks.
        figures: figures of completions, loss and mismatch, by name.
        refit_bytes: bytes that the engine received.
        seconds: seconds by part: memory (moved between trainer and engine on the same GPUs), refit, rollout (of the
            engine), reward, rollout-wait (of the trainer, for all of these), log-probs, reference (log-probs of the
            reference policy, if there is one), update, and the whole iteration. Also checkpoint, if training stood
            still for one since the iteration before.
        speed: `tflops`, model TFLOP/s per GPU in the seconds of log-probs and updates, and `mfu`, this divided by a
            GPU's peak; without what is not known.
    """

    policy_version: int
    num_tokens: int
    num_microbatches: int
    world_size: int
    figures: Mapping[str, float]
    refit_bytes: int
    seconds: Mapping[str, float]
    speed: Mapping[str, float] = field(default_factory=dict)

    @property
    def headline(self) -> str:
        return f"reward {self.figures['reward']:.3f}"

    def to_dict(self) -> dict[str, Value]:
        """Return all figures. Those that supervised training has, too, have the same names."""
        return {
            "iteration": self.iteration,
            "consumed_samples": self.consumed_samples,
            **{name.replace("_", "-"): value for name, value in self.figures.items()},
            "policy-version": self.policy_version,
            "grad-norm": self.grad_norm,
            "num-zeros": self.num_zeros,
            "learning-rate": self.learning_rate,
            "batch-size": self.batch_size,
            "tokens": self.num_tokens,
            "microbatches": self.num_microbatches,
            "tokens-per-s-per-gpu": self.num_tokens / self.seconds["iteration"] / self.world_size,
            "iteration-time": self.seconds["iteration"],
            **{f"{part}-s": seconds for part, seconds in self.seconds.items() if part != "iteration"},
            "refit-bytes": self.refit_bytes,
            **self.speed,
            **{f"timeline/{name}": value for name, value in self.timeline.items()},
            **self.moe_losses,
            **{f"peak-memory-bytes/{module}": size for module, size in self.peak_memory_bytes.items()},
            "skipped-iterations": self.skipped_iterations,
            "success": self.success,
        }


def format_policy_steps(records: Sequence[PolicyRecord], total_iterations: int) -> str:
    """Format the console line of the iterations since the last line. Rewards and times are means over them."""
    last = records[-1]
    figures = last.figures
    parts = [
        f"iteration {last.iteration:5d}/{total_iterations:4d}",
        f"samples {last.consumed_samples}",
        f"reward {fmean(record.figures['reward'] for record in records):.4f}",
        f"length {figures['completion-length']:.1f}",
        f"entropy {figures['entropy']:.3f}",
        f"loss {figures['loss']:.3E}",
        f"gen-kl {figures['gen_kl']:.1E}",
        f"lr {last.learning_rate:.1E}",
        "step skipped" if last.grad_norm is None else f"grad norm {last.grad_norm:.2f}",
        *(f"{part} {fmean(record.seconds[part] for record in records):.2f} s"
          for part in ("refit", "rollout", "update")),
    ]
    if "mfu" in last.speed:
        parts.append(f"{fmean(record.speed['tflops'] for record in records):.1f} TFLOP/s/gpu, "
                     f"MFU {fmean(record.speed['mfu'] for record in records):.1%}")
    if last.skipped_iterations:
        parts.append(f"skipped {last.skipped_iterations}")
    return " | ".join(parts)
