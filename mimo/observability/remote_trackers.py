"""Weights & Biases and MLflow. A run never waits for their servers, and a server that fails does not end it."""

from __future__ import annotations

import importlib
import os
import queue
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mimo.config.trainer import ObserveConfig, is_folder
from mimo.observability.trackers import Tracker, Value, curves
from mimo.watchdog.process_exit import on_daemon_thread, within_limit

# Iterations that a slow server may fall behind before figures are left out.
MAX_BEHIND = 1000
# Seconds that the end of a run waits for queued figures. Twice this is less than a signal's grace period.
CLOSE_LIMIT_S = 8.0
# Seconds that a server may take to start a run; MLflow's own retries take up to 16 minutes.
OPEN_LIMIT_S = 60.0
# Seconds for telling a server that a run has failed.
FAIL_LIMIT_S = 2.0
DEFAULT_EXPERIMENT = "mimo-hetero"


# Trackers whose threads were left behind at the end.
_left: list[str] = []


def are_left() -> bool:
    """Return whether a tracker has not finished: its package may wait for a server when the interpreter exits."""
    return bool(_left)


class WandbTracker(Tracker):
    """Run of Weights & Biases. `consumed_samples` is one of its figures, for use as another axis.

    The server notices by itself if the process ends without `close`.
    """

    def __init__(self, project: str, name: str | None, run_dir: Path, config_toml: str) -> None:
        """Start the run. The package's own settings and environment variables choose the server."""
        wandb = importlib.import_module("wandb")
        self._run: Any = wandb.init(project=project, name=name, dir=str(run_dir), config=tomllib.loads(config_toml),
                                    settings=wandb.Settings(init_timeout=OPEN_LIMIT_S))

    def log(self, step: int, samples: int, record: Mapping[str, Value]) -> None:
        self._run.log({**curves(record), "consumed_samples": samples}, step=step)

    def close(self) -> None:
        self._run.finish()


class MlflowTracker(Tracker):
    """Run of an MLflow experiment, which is created if it does not exist.

    In a folder, names have `.` in place of `/`: a metric is a file there, and the file `learning-rate` cannot be the
    folder of `learning-rate/vision` as well.
    """

    def __init__(self, uri: str, experiment: str, run_dir: Path, config_toml: str) -> None:
        """Start the run, named as its folder, with the flags as an artifact."""
        self._separator = "." if is_folder(uri) else "/"
        if is_folder(uri):
            # Newer releases of MLflow refuse folders in favour of a database, which mlflow-skinny cannot open.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        mlflow = importlib.import_module("mlflow")
        self._metric: Any = importlib.import_module("mlflow.entities").Metric
        self._client: Any = mlflow.MlflowClient(tracking_uri=uri)
        found = self._client.get_experiment_by_name(experiment)
        number = self._client.create_experiment(experiment) if found is None else found.experiment_id
        self._run_id = self._client.create_run(number, run_name=run_dir.name).info.run_id
        self._client.log_text(self._run_id, config_toml, "run_config.toml")

    def log(self, step: int, samples: int, record: Mapping[str, Value]) -> None:
        now_ms = int(1000 * time.time())
        figures = {**curves(record), "consumed_samples": float(samples)}
        self._client.log_batch(self._run_id, metrics=[
            self._metric(name.replace("/", self._separator), value, now_ms, step) for name, value in figures.items()])

    def close(self) -> None:
        self._client.set_terminated(self._run_id)

    def mark_failed(self) -> None:
        """Mark the run as failed. Otherwise the server would show it as running for ever."""
        self._client.set_terminated(self._run_id, status="FAILED")


class BackgroundTracker(Tracker):
    """Runs a tracker on a thread of its own. If it fails, this is reported once and the run continues.

    Later figures are sent all the same, because a server may come back. `say` is called on the tracker's thread.
    """

    def __init__(self, name: str, tracker: Tracker, say: Callable[[str], None]) -> None:
        self._name, self._tracker, self._say = name, tracker, say
        self._said = self._closed = False
        self._queue: queue.Queue[tuple[int, int, dict[str, Value]] | None] = queue.Queue(MAX_BEHIND)
        self._thread = threading.Thread(target=self._send, name=name, daemon=True)
        self._thread.start()

    def log(self, step: int, samples: int, record: Mapping[str, Value]) -> None:
        """Queue the figures of an iteration, unless the tracker is too far behind."""
        try:
            self._queue.put_nowait((step, samples, dict(record)))
        except queue.Full:
            self.fail(f"is {MAX_BEHIND} iterations behind")

    def close(self) -> None:
        """Wait a while for queued figures. A second call does nothing."""
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
        """Tell the server, if it answers soon, that the run ends with an error. Queued figures are dropped."""
        def tell() -> None:
            with self._failures_reported():
                self._tracker.mark_failed()

        if not self._closed:
            self._closed = True
            within_limit(tell, FAIL_LIMIT_S)

    def fail(self, what: str) -> None:
        """Report a failure, unless one was reported before."""
        if not self._said:
            self._said = True
            self._say(f"{self._name} {what}; the run goes on, its figures are in metrics.jsonl")

    def _send(self) -> None:
        while (item := self._queue.get()) is not None:
            with self._failures_reported():
                self._tracker.log(*item)
        with self._failures_reported():
            self._tracker.close()

    @contextmanager
    def _failures_reported(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # A tracker's package may raise anything, and must not end the run.
            self.fail(f"failed: {type(error).__name__}: {error}")


@contextmanager
def _opening(flag: str) -> Iterator[None]:
    """Context of the start of a tracker. It turns any exception into a ValueError that names the flag."""
    try:
        yield
    except (Exception, SystemExit) as error:  # A tracker's package may raise anything.
        raise ValueError(f"{flag}: cannot be started: {type(error).__name__}: {error}") from error


def open_remote(observe: ObserveConfig, config_toml: str, say: Callable[[str], None]) -> list[Tracker]:
    """Open the remote trackers that the flags ask for.

    Raises:
        ValueError: a tracker cannot be started; names the flag.
    """
    opened: dict[str, Tracker] = {}
    run_dir = Path(observe.run_dir)
    if observe.wandb_project is not None:
        with _opening(f"--wandb-project {observe.wandb_project}"):
            opened["Weights & Biases"] = WandbTracker(observe.wandb_project, observe.wandb_name, run_dir, config_toml)
    if observe.mlflow_uri is not None:
        uri, experiment = observe.mlflow_uri, observe.mlflow_experiment or DEFAULT_EXPERIMENT
        with _opening(f"--mlflow-uri {uri}"):
            started = on_daemon_thread(lambda: MlflowTracker(uri, experiment, run_dir, config_toml), "tracker")
            if not wait([started], OPEN_LIMIT_S).done:
                raise TimeoutError(f"no answer within {OPEN_LIMIT_S:.0f} s")
            opened["MLflow"] = started.result()
    return [BackgroundTracker(name, tracker, say) for name, tracker in opened.items()]
