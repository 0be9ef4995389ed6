"""The session around the iterations of both training loops: watchdog, stops, checkpoints, records and run folder."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from mimo.checkpoint.differences import flat_config
from mimo.checkpoint.load import find_source
from mimo.checkpoint.paths import saved_iterations
from mimo.checkpoint.reader import read_common
from mimo.checkpoint.save import Saver
from mimo.checkpoint.state import Progress, RunState, is_imported
from mimo.comm import broadcast_result, gather
from mimo.config.cli import to_toml, without_training_stage
from mimo.config.trainer import CheckpointConfig, RunConfig
from mimo.config.validate import train_iterations
from mimo.grid.groups import Grids
from mimo.observability.dated_folder import LATEST, is_chosen, make_run_folder, point_latest_to, refuse_latest
from mimo.observability.metrics import RunLogger, format_steps
from mimo.observability.remote_trackers import CLOSE_LIMIT_S
from mimo.protocols import ModelProvider
from mimo.training.setup import Resumable, start
from mimo.watchdog.signals import StopSignal
from mimo.watchdog.watchdog import open_watchdog

logger = logging.getLogger(__name__)


def with_run_folder[C: RunConfig](config: C, grids: Grids) -> C:
    """Return the configuration with the folder of the run, which rank 0 chooses and makes. Collective over the world.

    Raises:
        ValueError: the folder cannot be made, or the checkpoint that names it cannot be read.
    """
    return replace(config, observe=replace(config.observe, run_dir=broadcast_result(grids, lambda: _choose(config))))


def without_chosen_folder[C: RunConfig](config: C) -> C:
    """Return the configuration without a folder that was chosen for this run, so that another run gets a new one."""
    if not is_chosen(config.observe.run_dir):
        return config
    return replace(config, observe=replace(config.observe, run_dir=""))


def _choose(config: RunConfig) -> str:
    if config.observe.run_dir:
        refuse_latest(config.observe.run_dir)
        return config.observe.run_dir
    try:
        earlier = _folder_of_checkpoint(config.checkpoint)
    except OSError as problem:
        raise ValueError(f"--load {config.checkpoint.load}: cannot be read: {problem}") from problem
    try:
        return _make_folder(config, earlier)
    except OSError as problem:
        raise ValueError(f"--run-dir is left out, and its folder cannot be made: {problem}; name another with "
                         "--run-dir") from problem


def _make_folder(config: RunConfig, folder: Path | None) -> str:
    """Make a run's folder, unless it is there: `folder`, or a new one if that is None. Point runs/latest to it."""
    if folder is None:
        folder = make_run_folder(config.model.model_provider, config.data.dataset_provider)
    elif not folder.is_dir():
        logger.warning("%s, the run's folder according to its checkpoint, is not there; a new one is made, without "
                       "the earlier records", folder)
        folder.mkdir(parents=True)
    logger.info("run folder: %s", folder)
    problem = point_latest_to(folder)
    if problem is not None:
        logger.warning(problem)
    return str(folder)


def _folder_of_checkpoint(flags: CheckpointConfig) -> Path | None:
    """Return the earlier folder of a run that resumes from its own checkpoint, or None for a new run.

    A run that starts from another one's checkpoint, with a --save of its own or with --finetune, is a new run.
    """
    source = None if flags.load is None else find_source(flags, Path(flags.load), repair=False)
    if source is None:
        return None
    goes_on = source.is_own if flags.save is not None else not flags.finetune
    common = read_common(source.folder) if goes_on else {}
    run_dir = None if is_imported(common) else flat_config(common.get("config", "")).get("run_dir")
    if not run_dir:
        return None
    folder = Path(run_dir)
    # Earlier versions called every folder runs/latest. By now that is a link to another run's folder, or will be one.
    return None if folder.is_symlink() or (folder == LATEST and not folder.is_dir()) else folder


def how_to_continue(checkpoint: CheckpointConfig) -> str:
    """Say what continues a run that was stopped early."""
    if checkpoint.save is None:
        return "nothing was saved, because the run has no --save"
    again = "to continue, repeat the command"
    if checkpoint.starts_elsewhere:
        return again  # from its own checkpoint in --save, with everything in it
    # With these flags the run would begin at an earlier iteration, or without a part of its state that is saved.
    omitted = [] if checkpoint.ckpt_step is None else [f"--ckpt-step {checkpoint.ckpt_step}"]
    omitted += [f"--no-load-{part}" for part, loads, saves in (
        ("optim", checkpoint.load_optim, checkpoint.save_optim), ("scheduler", checkpoint.load_scheduler, True),
        ("rng", checkpoint.load_rng, checkpoint.save_rng), ("data", checkpoint.load_data, True)) if saves and not loads]
    changes = [] if checkpoint.load_is_save else [f"with --load {checkpoint.save}"]
    changes += [f"without {' '.join(omitted)}"] if omitted else []
    return " ".join([again, *filter(None, [" and ".join(changes)])])


def note_on_earlier(checkpoint: CheckpointConfig) -> list[str]:
    """Return a line if a run starts anew beside earlier checkpoints, as after a stop if --load is forgotten."""
    if checkpoint.save is None or checkpoint.load is not None:
        return []
    return [f"--save {checkpoint.save} has checkpoints of an earlier run, the last one of iteration {iteration}. This "
            f"run starts anew and saves beside them; --load {checkpoint.save} would continue the earlier one"
            for iteration in saved_iterations(Path(checkpoint.save))[-1:]]


def total_iterations(config: RunConfig, progress: Progress) -> int:
    """Return the number of iterations of a whole run.

    With --train-samples, the present batch size says how many are left, because earlier ones may have had another.
    """
    train = config.train
    if train.train_samples is None:
        return train_iterations(config)
    left = max(train.train_samples - progress.passed_samples, 0)
    return progress.iteration + -(-left // train.global_batch_size)


class Session:
    """One run on this rank, from its first wait to its last record.

    A training loop runs inside the session's context, which handles stop signals and closes everything at the end. If
    an error ends the run, the session marks the records as failed and waits for no other rank.

    Attributes:
        watchdog: ends the run if it hangs; opened here.
        total_iterations: number of iterations of the whole run, those before a resume included.
        is_logging_rank: whether this rank writes the records.
        progress: iterations, samples and skipped iterations so far.
        saver: writes checkpoints; None without --save, and before `resume`.
        checkpoint_s: seconds that checkpoints took since `take_checkpoint_s`.
    """

    def __init__(self, config: RunConfig, grids: Grids) -> None:
        self._config, self._grids = config, grids
        self.total_iterations = total_iterations(config, Progress())
        # The rank whose loss is complete first, as in Megatron: last stage, first lane.
        self.is_logging_rank = grids.rank == grids.layout.language.rank_at(pp=-1)
        self.watchdog = open_watchdog(config.train.watchdog_timeout_s, grids, config.observe.run_dir,
                                      config.checkpoint.checkpoint_timeout_s)
        self.progress = Progress()
        self.saver: Saver | None = None
        self.checkpoint_s = 0.0
        self._state: RunState | None = None
        self._logger: RunLogger | None = None
        self._stop: StopSignal | None = None
        self._began = 0.0

    def __enter__(self) -> Session:
        self._began = time.monotonic()
        self._stop = StopSignal(self.watchdog)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        failed = error is not None
        if self._logger is not None:
            # Remote trackers may be slow to take the last figures.
            with self.watchdog.limit(2 * CLOSE_LIMIT_S):
                self._logger.close(failed=failed)
        if self.saver is not None:
            self.saver.close()
        assert self._stop is not None, "set on entry"
        self._stop.close()
        # Last, because everything above may hang.
        self.watchdog.close(failed=failed)

    def resume(self, state: RunState, provider: ModelProvider, data: Resumable) -> list[str]:
        """Load what the run starts from: its own checkpoint, another one, pretrained weights or nothing. Collective.

        Returns:
            Lines for the log that say what was loaded.

        Raises:
            ValueError: what is asked for cannot be loaded; see `mimo.training.setup.start`.
        """
        self._state = state
        if self._config.checkpoint.save is not None:
            self.saver = Saver(state, self.watchdog)
        notes = note_on_earlier(self._config.checkpoint)
        self.progress, lines = start(state, provider, data, self.watchdog)
        self.total_iterations = total_iterations(self._config, self.progress)
        lines = [*notes, *lines]
        if self.saver is not None and state.source is not None and state.source.is_own:
            # The checkpoint exists already: a finished run that is started again has nothing to write.
            self.saver.last_iteration = self.progress.iteration or None
        if self.progress.iteration:
            left = (f"continuing with iteration {self.progress.iteration + 1} of {self.total_iterations}"
                    if not self.is_done else f"all {self.total_iterations} iterations were made before; a larger "
                    "--train-iters or --train-samples continues")
            lines = [*lines, left]
        return lines

    def open_records(self, format_records: Callable[[Sequence[Any], int], str] = format_steps) -> RunLogger:
        """Open the log, the metrics and the trackers. After `resume`, which says at which iteration they go on."""
        with self.watchdog.waiting("start of the run's records", is_work=True):
            logger = RunLogger(self._config.observe, active=self.is_logging_rank,
                               total_iterations=self.total_iterations,
                               config_toml=to_toml(without_training_stage(without_chosen_folder(self._config))),
                               resume_iteration=self.progress.iteration, format_records=format_records,
                               how_to_continue=how_to_continue(self._config.checkpoint))
        self.watchdog.on_stall.append(logger.mark_failed)
        self._logger = logger
        return logger

    @property
    def is_done(self) -> bool:
        return self.progress.iteration >= self.total_iterations

    def is_due(self, interval: int | None) -> bool:
        """Return whether something that happens every `interval` iterations is due now; None and 0 mean never."""
        return interval is not None and interval > 0 and self.progress.iteration % interval == 0

    @property
    def is_evaluation_due(self) -> bool:
        """Whether an evaluation of `--eval-interval` is due now and was not made, neither here nor before a resume.

        It is made after the iteration is saved, which it must not endanger, and `note_evaluation` adds it to the
        checkpoint. A run that is told to stop leaves it out, and the resumed run makes it. The evaluation at the end of
        a run does not count.
        """
        progress = self.progress
        return (progress.evaluated_iteration < progress.iteration and not self.is_done
                and self.is_due(self._config.train.eval_interval))

    def stop_reason(self) -> str | None:
        """Return why this rank wants to stop early, or None. Other ranks may have reasons of their own."""
        assert self._stop is not None, "inside the context"
        if self._stop.name is not None:
            return self._stop.name
        limit_mins = self._config.checkpoint.exit_duration_in_mins
        over_time = limit_mins is not None and time.monotonic() - self._began > 60 * limit_mins
        return "--exit-duration-in-mins" if over_time else None

    def agree_to_stop(self, *, by_signal: bool = False) -> str | None:
        """Return why a rank wants to stop early, or None; with `by_signal`, only if it got a signal.

        Ranks also agree on the progress of a checkpoint that is written in the background. Collective over the world.
        """
        assert self._stop is not None, "inside the context"
        reason = self._stop.name if by_signal else self.stop_reason()
        with self.watchdog.waiting("agreement on whether to stop"):
            agreed, _ = self._grids.nodes.reduce(
                torch.tensor([reason is not None, self.is_writing], dtype=torch.float64),
                torch.empty(0, dtype=torch.float64))
        any_stops, any_writing = agreed.tolist()
        self.continue_saving(bool(any_writing))
        if not any_stops:
            return None
        with self.watchdog.waiting("reasons to stop of all ranks"):
            return next(each for each in gather(self._grids, reason) if each is not None)

    def note_evaluation(self) -> None:
        """Note that this iteration was evaluated, also in its checkpoint if it has been saved."""
        self.progress.evaluated_iteration = self.progress.iteration
        if self.saver is not None:
            self.saver.mark_evaluated(self.progress.iteration)

    def save(self, streams: Callable[[], dict[str, Any]], *, stopped: bool = False) -> None:
        """Save the run as it stands, unless this iteration is saved already or there is no --save. Collective.

        `streams` gives the position in the data (`RunState.streams`). `stopped` says that the run was told to stop. If
        that was before its first iteration, there is nothing to save.
        """
        if self.saver is None or self.saver.last_iteration == self.progress.iteration:
            return
        if stopped and not self.progress.iteration:
            return
        assert self._state is not None, "set with the saver"
        began = time.perf_counter()
        self._state.streams = streams()
        if self.is_done and not stopped:
            # The last evaluation comes after the last checkpoint, which it must not endanger. A run that is started
            # again makes it in any case, and a longer run need not.
            self.progress.evaluated_iteration = self.progress.iteration
        self.saver.save(self.progress)
        self.checkpoint_s += time.perf_counter() - began

    @property
    def is_writing(self) -> bool:
        """Whether this rank still writes an earlier checkpoint in the background."""
        return self.saver is not None and self.saver.is_writing

    def continue_saving(self, any_writing: bool) -> None:
        """Finish a background checkpoint once no rank is writing any more. Collective where one is pending."""
        if self.saver is not None and self.saver.is_pending:
            began = time.perf_counter()
            self.saver.poll(any_writing)
            self.checkpoint_s += time.perf_counter() - began

    def finish_saving(self) -> None:
        """Wait until the last checkpoint is complete. Collective."""
        if self.saver is not None:
            self.saver.finish()

    def take_checkpoint_s(self) -> float:
        """Return for how many seconds training stood still for checkpoints since the last call."""
        taken, self.checkpoint_s = self.checkpoint_s, 0.0
        return taken
