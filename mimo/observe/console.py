"""What a person sees: one line a step, and a progress bar where the console is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from tqdm import tqdm

if TYPE_CHECKING:
    from mimo.observe.metrics import StepRecord


def short_count(value: float) -> str:
    """A count in at most five characters or so: `950`, `12.3k`, `4.5M`."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.0f}"


def format_steps(records: Sequence[StepRecord], total_iterations: int) -> str:
    """The console line of the iterations since the last one.

    Loss, times and rates are means over them (the loss over those that took a step); the rest is the last one's.
    """
    last = records[-1]
    losses = [record.lm_loss for record in records if record.success] or [last.lm_loss]
    parts = [
        f"iteration {last.iteration:5d}/{total_iterations:4d}",
        f"samples {last.consumed_samples}",
        f"lm loss {fmean(losses):.4E}",
        f"lr {last.learning_rate:.1E}",
        "step skipped" if last.grad_norm is None else f"grad norm {last.grad_norm:.2f}",
        f"{fmean(record.iteration_time_s for record in records):.3f} s",
        f"{short_count(fmean(record.tokens_per_s_per_gpu for record in records))} tokens/s/gpu",
        f"data {1e3 * fmean(record.data_wait_s for record in records):.0f} ms",
        f"bridge {1e3 * fmean(record.bridge_wait_s for record in records):.0f} ms",
    ]
    if last.mfu is not None:
        tflops = fmean(record.tflops or 0.0 for record in records)
        parts.insert(-2, f"{tflops:.1f} TFLOP/s/gpu, MFU {fmean(record.mfu or 0.0 for record in records):.1%}")
    if last.loss_scale != 1.0:
        parts.append(f"loss scale {last.loss_scale:g}")
    if last.skipped_iterations:
        parts.append(f"skipped {last.skipped_iterations}")
    return " | ".join(parts)


def format_eval(iteration: int, metrics: Mapping[str, float]) -> str:
    """The console line of an evaluation."""
    figures = [f"{name} {value:.6g}" for name, value in metrics.items()]
    return " | ".join([f"evaluation at iteration {iteration}", *figures])


class Console:
    """Lines on standard output that a progress bar does not garble."""

    def __init__(self, total_iterations: int, resume_iteration: int, *, progress: bool) -> None:
        """Show a bar over `total_iterations` if `progress` and standard output is a terminal."""
        self._bar: tqdm | None = None
        if progress and sys.stdout.isatty():
            self._bar = tqdm(total=total_iterations, initial=resume_iteration, unit="it", file=sys.stdout,
                             dynamic_ncols=True)

    def line(self, text: str) -> None:
        """Print `text` (above the bar, if there is one)."""
        if self._bar is None:
            print(text, flush=True)
        else:
            tqdm.write(text, file=sys.stdout)

    def advance(self, iteration: int, figure: str) -> None:
        """Move the bar to `iteration`, with a figure beside it."""
        if self._bar is not None:
            self._bar.set_postfix_str(figure, refresh=False)
            self._bar.update(iteration - self._bar.n)

    def close(self) -> None:
        """End the bar; later lines are printed plainly."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
