"""Weights & Biases and MLflow: figures that go over a network, without a run ever waiting for it or ending for it."""

from __future__ import annotations

import importlib
import os
import queue
import threading
import time
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from mimo.config.trainer import ObserveConfig, is_folder
from mimo.observability.trackers import Tracker, Value, curves
from mimo.watchdog.process_exit import within_limit

# Iterations that a slow server may fall behind before figures are left out.
MAX_BEHIND = 1000
# Seconds that the end of a run waits for what is still on its way; that of two trackers is less than a signal's grace.
CLOSE_LIMIT_S = 8.0
# Seconds that a server may take to start a run; MLflow's own retries go on for 16 minutes.
OPEN_LIMIT_S = 60.0
# Seconds for the word that a run has failed.
FAIL_LIMIT_S = 2.0
DEFAULT_EXPERIMENT = "mimo-hetero"


# Trackers whose threads were left behind at the end.
_left: list[str] = []


def are_left() -> bool:
    """Whether a tracker has not come to its end; its package may then wait for its server as the interpreter exits."""
    return bool(_left)


class RemoteTracker(Tracker, Protocol):
    """A tracker on a server."""

    def mark_failed(self) -> None:
        """Tell the server that the run ends with an error. On any thread."""
        ...


class WandbTracker:
    """A run of Weights & Biases; `consumed_samples` is among its figures, as another axis."""

    def __init__(self, project: str, name: str | None, run_dir: Path, config_toml: str) -> None:
        """Start the run, as the package's own settings and environment variables say where."""
        wandb = importlib.import_module("wandb")
        self._run: Any = wandb.init(project=project, name=name, dir=str(run_dir), config=tomllib.loads(config_toml))

    def log(self, step: int, samples: int, record: Mapping[str, Value]) -> None:
        """Send the figures of an iteration."""
        self._run.log({**curves(record), "consumed_samples": samples}, step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()

    def mark_failed(self) -> None:
        """The server sees for itself that the process is gone."""


class MlflowTracker:
    """A run of an MLflow experiment, which is created where it is not there.

    A folder has `.` where figures have `/` in their names: a metric is a file there, and `learning-rate` cannot be the
    folder of `learning-rate/vision`, too.
    """

    def __init__(self, uri: str, experiment: str, run_dir: Path, config_toml: str) -> None:
        """Start the run, named as its folder, with the flags as an artifact."""
        self._separator = "." if is_folder(uri) else "/"
        if is_folder(uri):
            # MLflow refuses folders in its newer releases, and points to a database, which mlflow-skinny cannot open.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        mlflow = importlib.import_module("mlflow")
        self._metric: Any = importlib.import_module("mlflow.entities").Metric
        self._client: Any = mlflow.MlflowClient(tracking_uri=uri)
        found = self._client.get_experiment_by_name(experiment)
        number = self._client.create_experiment(experiment) if found is None else found.experiment_id
        self._run_id = self._client.create_run(number, run_name=run_dir.name).info.run_id
        self._client.log_text(self._run_id, config_toml, "run_config.toml")

    def log(self, step: int, samples: int, record: Mapping[str, Value]) -> None:
        """Send the figures of an iteration."""
        now_ms = int(1000 * time.time())
        figures = {**curves(record), "consumed_samples": float(samples)}
        self._client.log_batch(self._run_id, metrics=[
            self._metric(name.replace("/", self._separator), value, now_ms, step) for name, value in figures.items()])

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._run_id)

    def mark_failed(self) -> None:
        """Mark the run as failed; otherwise it would be shown as running for ever."""
        self._client.set_terminated(self._run_id, status="FAILED")


class BackgroundTracker:
    """A tracker on a thread of its own. What fails there is said once, and the run goes on.

    Later figures are tried all the same: a server may come back.

    Args:
        name: of the tracker, in words.
        tracker: what figures go to.
        say: told about the first failure, on that thread.
    """

    def __init__(self, name: str, tracker: RemoteTracker, say: Callable[[str], None]) -> None:
        self._name, self._tracker, self._say = name, tracker, say
        self._said = self._closed = False
        self._queue: queue.Queue[tuple[int, int, dict[str, Value]] | None] = queue.Queue(MAX_BEHIND)
        self._thread = threading.Thread(target=self._send, name=name, daemon=True)
        self._thread.start()

    def log(self, step: int, samples: int, record: Mapping[str, Value]) -> None:
        """Queue the figures of an iteration; they are left out where the tracker is too far behind."""
        try:
            self._queue.put_nowait((step, samples, dict(record)))
        except queue.Full:
            self.fail(f"is {MAX_BEHIND} iterations behind")

    def close(self) -> None:
        """Wait a while for what is on its way. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        until = time.monotonic() + CLOSE_LIMIT_S
        while self._thread.is_alive() and time.monotonic() < until:
            try:
                self._queue.put(None, timeout=1.0)
                break
            except queue.Full:
                continue
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            _left.append(self._name)
            self.fail(f"has not taken everything {CLOSE_LIMIT_S:.0f} s after the end")

    def mark_failed(self) -> None:
        """Try for a moment to tell the server that the run ends with an error; figures on their way are left."""
        def tell() -> None:
            with _Failing(self.fail):
                self._tracker.mark_failed()

        if not self._closed:
            self._closed = True
            within_limit(tell, FAIL_LIMIT_S)

    def fail(self, what: str) -> None:
        """Say what went wrong, unless something was said before."""
        if not self._said:
            self._said = True
            self._say(f"{self._name} {what}; the run goes on, its figures are in metrics.jsonl")

    def _send(self) -> None:
        while (item := self._queue.get()) is not None:
            with _Failing(self.fail):
                self._tracker.log(*item)
        with _Failing(self.fail):
            self._tracker.close()


class _Failing:
    """Context of a call into a tracker's client, which raises what it likes: told, and no more."""

    def __init__(self, fail: Callable[[str], None]) -> None:
        self._fail = fail

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> bool:
        if isinstance(error, Exception):
            self._fail(f"failed: {type(error).__name__}: {error}")
            return True
        return False


class _Opening:
    """Context of the start of a tracker: what its client raises names the flag."""

    def __init__(self, flag: str) -> None:
        self._flag = flag

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if isinstance(error, Exception):
            raise ValueError(f"{self._flag}: cannot be started: {type(error).__name__}: {error}") from error


def _open_in_time(build: Callable[[], RemoteTracker]) -> RemoteTracker:
    """Run `build` on another thread with a timeout and raise its error again, or TimeoutError."""
    opened: list[RemoteTracker] = []
    errors: list[Exception] = []

    def open_it() -> None:
        try:
            opened.append(build())
        except Exception as error:
            errors.append(error)

    within_limit(open_it, OPEN_LIMIT_S)
    if errors:
        raise errors[0]
    if not opened:
        raise TimeoutError(f"no answer within {OPEN_LIMIT_S:.0f} s")
    return opened[0]


def open_remote(observe: ObserveConfig, config_toml: str, say: Callable[[str], None]) -> list[Tracker]:
    """The trackers that the flags ask for.

    Args:
        observe: the flags.
        config_toml: the run's flags.
        say: told if one fails later.

    Raises:
        ValueError: one cannot be started; names the flag.
    """
    opened: dict[str, RemoteTracker] = {}
    run_dir = Path(observe.run_dir)
    if observe.wandb_project is not None:
        with _Opening(f"--wandb-project {observe.wandb_project}"):
            opened["Weights & Biases"] = WandbTracker(observe.wandb_project, observe.wandb_name, run_dir, config_toml)
    if observe.mlflow_uri is not None:
        uri, experiment = observe.mlflow_uri, observe.mlflow_experiment or DEFAULT_EXPERIMENT
        with _Opening(f"--mlflow-uri {uri}"):
            opened["MLflow"] = _open_in_time(lambda: MlflowTracker(uri, experiment, run_dir, config_toml))
    return [BackgroundTracker(name, tracker, say) for name, tracker in opened.items()]
