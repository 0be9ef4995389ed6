"""Records of iterations, and the logger that writes them to the console, metrics.jsonl and trackers."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from tqdm import tqdm

from mimo.config.trainer import ObserveConfig
from mimo.observability.remote_trackers import open_remote
from mimo.observability.trackers import (
    FileTracker,
    Generation,
    GenerationKind,
    GenerationsTracker,
    JsonlTracker,
    TensorBoardTracker,
    Tracker,
    Value,
)


def short_count(value: float) -> str:
    """Format a count in about five characters: `950`, `12.3k`, `4.5M`."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.0f}"


def format_steps(records: Sequence[StepRecord], total_iterations: int) -> str:
    """Format the console line of the iterations since the last line.

    Loss, times and rates are means over these iterations (the loss over those with an update), and allocation retries
    are their sum. Everything else is of the last iteration.
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
    if retries := sum(max(record.allocation_retries.values(), default=0) for record in records):
        parts.append(f"memory full {retries}x")
    if last.skipped_iterations:
        parts.append(f"skipped {last.skipped_iterations}")
    return " | ".join(parts)


class Console:
    """Prints lines to standard output, above a progress bar if there is one."""

    def __init__(self, total_iterations: int, resume_iteration: int, *, progress: bool) -> None:
        """Show a bar over `total_iterations` if `progress` and standard output is a terminal."""
        self._bar: tqdm | None = None
        if progress and sys.stdout.isatty():
            self._bar = tqdm(total=total_iterations, initial=resume_iteration, unit="it", file=sys.stdout,
                             dynamic_ncols=True)

    def line(self, text: str) -> None:
        """Print `text`, above the bar if there is one."""
        if self._bar is None:
            print(text, flush=True)
        else:
            tqdm.write(text, file=sys.stdout)

    def advance(self, iteration: int, figure: str) -> None:
        """Move the bar to `iteration` and show a figure beside it."""
        if self._bar is not None:
            self._bar.set_postfix_str(figure, refresh=False)
            self._bar.update(iteration - self._bar.n)

    def close(self) -> None:
        """End the bar; later lines are printed plainly."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


@dataclass(frozen=True, kw_only=True)
class Record(ABC):
    """Figures of one iteration, as `RunLogger` takes them. Those here are of every kind of training.

    Attributes:
        iteration: number of the iteration, 1 for the first.
        consumed_samples: samples, or completions of reinforcement learning, trained on so far, this iteration included
            if it took a step.
        grad_norm: norm before clipping, over all modules; None if the step was skipped.
        learning_rate: learning rate of the language model, or of the first trainable module if that is frozen.
        batch_size: samples or completions of the global batch.
        success: whether the optimizer took the step.
        skipped_iterations: skipped steps so far.
        num_zeros: zeros in the gradient; None if not counted.
        timeline: result of `mimo.observability.timeline.Timeline.figures`.
        peak_memory_bytes: highest memory of any rank of each module.
        moe_losses: MoE auxiliary losses under Megatron's names (`seq_load_balancing_loss`), averaged over MoE layers,
            microbatches and data-parallel ranks; with per-layer logging also `moe/<name>_layer_<i>`.
    """

    iteration: int
    consumed_samples: int
    grad_norm: float | None
    learning_rate: float
    batch_size: int
    success: bool = True
    skipped_iterations: int = 0
    num_zeros: int | None = None
    timeline: Mapping[str, float] = field(default_factory=dict)
    peak_memory_bytes: Mapping[str, int] = field(default_factory=dict)
    moe_losses: Mapping[str, float] = field(default_factory=dict)

    @property
    @abstractmethod
    def headline(self) -> str:
        """The most important figure, shown beside a progress bar."""

    @abstractmethod
    def to_dict(self) -> dict[str, Value]:
        """Return all figures by name."""


@dataclass(frozen=True, kw_only=True)
class StepRecord(Record):
    """Figures of one iteration of supervised training. Dictionaries are by module name, except `mtp_losses`.

    Attributes:
        lm_loss: mean loss per target token over the global batch, nats.
        iteration_time_s: wall time, seconds.
        loss_scale: 1.0 without loss scaling.
        module_learning_rates: learning rate of each trainable module.
        tokens_per_s_per_gpu: language tokens of the global batch per second, over the world size.
        image_tokens, text_tokens: tokens of the global batch of each kind, padding excluded.
        packing_utilisation: share of the rows' tokens that is not padding.
        bad_samples: samples that the data set has skipped so far.
        encoder_imbalance: tokens in the encoder's layers on the fullest lane divided by the mean of all lanes, over
            the microbatches; 1.0 is even. With encoder windows the cost of the busiest replica of each window divided
            by the mean. None without images.
        encoder_imbalance_unbalanced: the same without balanced packing, or with images dealt in order; None if nothing
            is balanced.
        data_wait_s, bridge_wait_s: longest wait of any rank, seconds.
        encoder_prefetch_s: device time of prefetched encoder passes on the rank with most of them, seconds; None
            without encoder prefetch.
        checkpoint_s: seconds for which training stood still for checkpoints since the iteration before.
        forward_backward_s: device time of the forward and backward passes, bridge waits and gradient reduction
            included, on the slowest rank of each module, seconds.
        optimizer_s: device time of the optimizer step, likewise.
        tflops: model TFLOP/s per GPU over the whole iteration (`mimo.observability.flops` says what counts), or None if
            the model does not say what it computes.
        mfu: `tflops` divided by a GPU's peak; None if the peak is not known.
        flops: model FLOPs of the iteration over all ranks.
        hardware_flops: computed FLOPs over all ranks, with padding and recomputation.
        allocation_retries: how often device memory was full since the iteration before, on the rank with the most; only
            modules with any. See `mimo.platform.base.Platform.drain_allocation_retries`.
        mtp_losses: losses of multi-token prediction under Megatron's names (`mtp_1 loss`), each a mean over the target
            tokens of its depth, nats.
    """

    lm_loss: float
    iteration_time_s: float
    loss_scale: float = 1.0
    module_learning_rates: dict[str, float] = field(default_factory=dict)
    tokens_per_s_per_gpu: float = 0.0
    image_tokens: int = 0
    text_tokens: int = 0
    packing_utilisation: float = 0.0
    bad_samples: int = 0
    encoder_imbalance: float | None = None
    encoder_imbalance_unbalanced: float | None = None
    data_wait_s: float = 0.0
    bridge_wait_s: float = 0.0
    encoder_prefetch_s: float | None = None
    checkpoint_s: float = 0.0
    forward_backward_s: dict[str, float] = field(default_factory=dict)
    optimizer_s: dict[str, float] = field(default_factory=dict)
    tflops: float | None = None
    mfu: float | None = None
    flops: dict[str, float] = field(default_factory=dict)
    hardware_flops: dict[str, float] = field(default_factory=dict)
    allocation_retries: dict[str, int] = field(default_factory=dict)
    mtp_losses: dict[str, float] = field(default_factory=dict)

    @property
    def headline(self) -> str:
        return f"lm loss {self.lm_loss:.3f}"

    def to_dict(self) -> dict[str, Value]:
        """Return all figures under Megatron's names. Figures of a module are named `<key>/<module>`."""
        figures: dict[str, Value] = {
            "iteration": self.iteration,
            "consumed_samples": self.consumed_samples,
            "lm loss": self.lm_loss,
            "grad-norm": self.grad_norm,
            "learning-rate": self.learning_rate,
            **{f"learning-rate/{module}": rate for module, rate in self.module_learning_rates.items()},
            "loss-scale": self.loss_scale,
            "num-zeros": self.num_zeros,
            "batch-size": self.batch_size,
            "iteration-time": self.iteration_time_s,
            "tokens-per-s-per-gpu": self.tokens_per_s_per_gpu,
            "image-tokens": self.image_tokens,
            "text-tokens": self.text_tokens,
            "packing-utilisation": self.packing_utilisation,
            "bad-samples": self.bad_samples,
            **{key: value for key, value in (("tflops", self.tflops), ("mfu", self.mfu),
                                             ("encoder-prefetch-s", self.encoder_prefetch_s),
                                             ("encoder-imbalance", self.encoder_imbalance),
                                             ("encoder-imbalance-unbalanced", self.encoder_imbalance_unbalanced))
               if value is not None},
            **{f"flops/{module}": flops for module, flops in self.flops.items()},
            **{f"hardware-flops/{module}": flops for module, flops in self.hardware_flops.items()},
            "data-wait-s": self.data_wait_s,
            "bridge-wait-s": self.bridge_wait_s,
            **({"checkpoint-s": self.checkpoint_s} if self.checkpoint_s else {}),
            **{f"forward-backward-s/{module}": seconds for module, seconds in self.forward_backward_s.items()},
            **{f"optimizer-s/{module}": seconds for module, seconds in self.optimizer_s.items()},
            **{f"timeline/{name}": value for name, value in self.timeline.items()},
            **{f"peak-memory-bytes/{module}": size for module, size in self.peak_memory_bytes.items()},
            **{f"allocation-retries/{module}": count for module, count in self.allocation_retries.items()},
            "skipped-iterations": self.skipped_iterations,
            "success": self.success,
        }
        losses = {**self.moe_losses, **self.mtp_losses}
        clash = figures.keys() & losses.keys()
        assert not clash, f"losses named like other figures: {sorted(clash)}"
        return {**figures, **losses}


class RunLogger:
    """Writes a run's figures on the logging rank. On every other rank its methods do nothing.

    After it was opened, a disk or server that fails does not end the run. The failure is reported once, and later
    figures are tried again.
    """

    def __init__(self, observe: ObserveConfig, *, active: bool, total_iterations: int, config_toml: str,
                 resume_iteration: int = 0, format_records: Callable[[Sequence[Any], int], str] = format_steps,
                 how_to_continue: str = "") -> None:
        """Open the run folder.

        Args:
            observe: what to write and where.
            active: whether this is the logging rank.
            total_iterations: length of the run.
            config_toml: the run's flags as TOML, written to run_config.toml.
            resume_iteration: iteration of the checkpoint from which the run continues. 0 starts a new metrics.jsonl;
                otherwise lines up to that iteration are kept.
            format_records: formats the console line of the iterations since the last line, given them and the length
                of the run.
            how_to_continue: line for the end of a run that stops early.

        Raises:
            ValueError: a flag is out of range, or a folder it names cannot be written.
        """
        if observe.log_interval < 1:
            raise ValueError(f"--log-interval {observe.log_interval}: must be at least 1")
        self._log_interval = observe.log_interval
        self._total_iterations = total_iterations
        self._resume_iteration = resume_iteration
        self._trackers: list[Tracker] = []
        self._format_records, self._how_to_continue = format_records, how_to_continue
        self._pending: list[Record] = []
        self._last: Record | None = None
        self._console: Console | None = None
        self._start = time.monotonic()
        self._places: dict[str, Path] = {}
        if active:
            self._open(observe, config_toml)
            self._console = Console(total_iterations, resume_iteration, progress=observe.progress)

    def _open(self, observe: ObserveConfig, config_toml: str) -> None:
        run_dir = Path(observe.run_dir)
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            # Readers would take files of an earlier run's later iterations for this run's.
            for old in run_dir.glob("timeline/step-*.json"):
                number = old.name.removeprefix("step-").partition(".")[0]  # of step-N.json and step-N.trace.json
                if number.isdigit() and int(number) > self._resume_iteration:
                    old.unlink(missing_ok=True)
            if self._resume_iteration == 0:
                (run_dir / "startup.json").unlink(missing_ok=True)
            (run_dir / "run_config.toml").write_text(config_toml, encoding="utf-8")
            self._keep(run_dir / "metrics.jsonl", JsonlTracker(run_dir / "metrics.jsonl", self._resume_iteration))
            answers = run_dir / "generations.jsonl"
            if observe.generations_mib:
                self._keep(answers, GenerationsTracker(answers, self._resume_iteration, observe.generations_mib << 20,
                                                       self.message))
            elif not self._resume_iteration:
                answers.unlink(missing_ok=True)
        except OSError as error:
            raise ValueError(f"--run-dir {observe.run_dir}: cannot be written: {error}") from error
        self._places["metrics"] = run_dir / "metrics.jsonl"
        if observe.tensorboard_dir is not None:
            try:
                self._keep(Path(observe.tensorboard_dir), TensorBoardTracker(
                    Path(observe.tensorboard_dir), by_samples=observe.tensorboard_by_samples))
            except OSError as error:
                self.close()
                raise ValueError(f"--tensorboard-dir {observe.tensorboard_dir}: cannot be written: {error}") from error
            self._places["tensorboard"] = Path(observe.tensorboard_dir)
        try:
            self._trackers += open_remote(observe, config_toml, self.message)
        except ValueError:
            self.close()
            raise

    def _keep(self, path: Path, tracker: Tracker) -> None:
        self._trackers.append(FileTracker(path, tracker, self.message))

    def log_step(self, record: Record) -> None:
        """Write one iteration to the trackers, and to the console if it is due there."""
        if self._console is None:
            return
        self._last = record
        figures = record.to_dict()
        for tracker in self._trackers:
            tracker.log(record.iteration, record.consumed_samples, figures)
        self._pending.append(record)
        self._console.advance(record.iteration, record.headline)
        if record.iteration % self._log_interval == 0 or record.iteration >= self._total_iterations:
            self._flush_pending()

    def log_eval(self, iteration: int, metrics: Mapping[str, float], *, consumed_samples: int | None = None) -> None:
        """Write an evaluation; each figure is tracked as `"<name> validation"`, Megatron's key.

        `consumed_samples` defaults to the number of the last `log_step`.
        """
        if self._console is None:
            return
        if consumed_samples is None:
            consumed_samples = 0 if self._last is None else self._last.consumed_samples
        figures = {f"{name} validation": value for name, value in metrics.items()}
        for tracker in self._trackers:
            tracker.log(iteration, consumed_samples, figures)
        self._console.line(" | ".join([f"evaluation at iteration {iteration}",
                                       *(f"{name} {value:.6g}" for name, value in metrics.items())]))

    def log_generations(self, iteration: int, generations: Sequence[Generation], kind: GenerationKind = "held-out", *,
                        prints: bool = True) -> None:
        """Write answers of the model to generations.jsonl, and those to held-out prompts to TensorBoard."""
        for line in (line for each in generations if prints for line in each.said):
            self.message(f"  {line}")
        for tracker in self._trackers:
            tracker.show(iteration, generations, kind)

    def message(self, text: str) -> None:
        """Print `text` on the logging rank."""
        if self._console is not None:
            self._console.line(text)

    def summary(self, figures: Mapping[str, float | str], *, stopped: str | None = None) -> None:
        """Print the final lines: what was trained, where the files are, and the results.

        Args:
            figures: the run's results by name; floats are shown with four digits after the point.
            stopped: why the run ended early, for example `SIGTERM`; None if it reached its end.
        """
        if self._console is None:
            return
        self._flush_pending()
        self._console.close()
        iteration = self._resume_iteration if self._last is None else self._last.iteration
        ending = f"stopped by {stopped} after" if stopped is not None else "finished"
        parts = [f"{ending} iteration {iteration}/{self._total_iterations}"]
        if self._last is not None:
            parts += [f"samples {self._last.consumed_samples}", f"skipped iterations {self._last.skipped_iterations}"]
        self._console.line(" | ".join([*parts, f"{time.monotonic() - self._start:.1f} s"]))
        for name, place in self._places.items():
            self._console.line(f"{name}: {place}")
        if stopped is not None and self._how_to_continue:
            self._console.line(self._how_to_continue)
        for name, value in figures.items():
            self._console.line(f"{name}: {value:.4f}" if isinstance(value, float) else f"{name}: {value}")

    def close(self, *, failed: bool = False) -> None:
        """Flush and close every destination. A second call does nothing.

        If the run has failed, this does not wait for servers, which could delay the report of the error.
        """
        if self._console is not None:
            self._flush_pending()
            self._console.close()
        if failed:
            self.mark_failed()
        for tracker in self._trackers:
            tracker.close()
        self._trackers = []

    def mark_failed(self) -> None:
        """Tell servers that the run ends with an error, and send them nothing more. May be called on any thread."""
        for tracker in self._trackers:
            tracker.mark_failed()

    def _flush_pending(self) -> None:
        """Print the line of the iterations that were not printed yet."""
        if self._console is not None and self._pending:
            self._console.line(self._format_records(self._pending, self._total_iterations))
            self._pending = []
