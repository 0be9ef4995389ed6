"""Failures of Weights & Biases and MLflow, and a server of the latter: small modules stand in, with the calls that are
used of theirs. test_real_trackers.py has the packages themselves."""

from __future__ import annotations

import importlib
import json
import sys
import threading

import pytest

from mimo.config.trainer import ObserveConfig
from mimo.config.validate import check_observe
from mimo.observability import remote_trackers
from mimo.observability.metrics import RunLogger, StepRecord
from mimo.observability.remote_trackers import BackgroundTracker

# Each writes what it is told to calls.jsonl beside it, one call a line.
SHARED = '''
import json, pathlib
def note(*call):
    with (pathlib.Path(__file__).parent / "calls.jsonl").open("a") as file:
        file.write(json.dumps(call) + "\\n")
'''
WANDB = SHARED + '''
class Run:
    def log(self, figures, step):
        if step == 2:
            raise ConnectionError("no route")
        note("log", step, figures)
    def finish(self):
        note("finish")
class Settings:
    def __init__(self, init_timeout):
        self.init_timeout = init_timeout
def init(project, name, dir, config, settings):
    if project == "refused":
        raise PermissionError("no key")
    note("init", project, name, dir, config, settings.init_timeout)
    return Run()
'''
MLFLOW = SHARED + '''
from types import SimpleNamespace
class MlflowClient:
    def __init__(self, tracking_uri):
        note("client", tracking_uri)
    def get_experiment_by_name(self, name):
        return None
    def create_experiment(self, name):
        note("experiment", name)
        return "1"
    def create_run(self, experiment_id, run_name):
        note("run", experiment_id, run_name)
        return SimpleNamespace(info=SimpleNamespace(run_id="r"))
    def log_text(self, run_id, text, artifact_file):
        note("text", run_id, text, artifact_file)
    def log_batch(self, run_id, metrics):
        note("batch", run_id, {metric.key: [metric.value, metric.step] for metric in metrics})
    def set_terminated(self, run_id, status=None):
        note("terminated", run_id, *([status] if status else []))
'''
ENTITIES = '''
class Metric:
    def __init__(self, key, value, timestamp, step):
        self.key, self.value, self.step = key, value, step
'''
FAKES = {"wandb": {"__init__": WANDB}, "mlflow": {"__init__": MLFLOW, "entities": ENTITIES}}


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Make a stand-in importable by its name; gives a function that reads the calls made to it."""

    def install(name):
        folder = tmp_path / "site" / name
        folder.mkdir(parents=True)
        for part, source in FAKES[name].items():
            (folder / f"{part}.py").write_text(source)
        monkeypatch.syspath_prepend(str(tmp_path / "site"))
        for part in FAKES[name]:
            monkeypatch.delitem(sys.modules, name if part == "__init__" else f"{name}.{part}", raising=False)
        return lambda: [json.loads(line) for line in (folder / "calls.jsonl").read_text().splitlines()]

    yield install
    for name in [name for name in sys.modules if name.partition(".")[0] in FAKES]:
        del sys.modules[name]


def record(iteration):
    return StepRecord(iteration=iteration, consumed_samples=8 * iteration, lm_loss=0.5, grad_norm=None,
                      learning_rate=1e-3, module_learning_rates={"vision": 1e-3}, batch_size=8, iteration_time_s=0.1)


def run(observe, iterations):
    logger = RunLogger(observe, active=True, total_iterations=iterations, config_toml="[train]\nlr = 1.0\n")
    for iteration in range(1, iterations + 1):
        logger.log_step(record(iteration))
    logger.summary({})
    logger.close()


def test_wandb_gets_every_figure_and_a_failure_is_said_once(tmp_path, fake, capsys):
    calls = fake("wandb")
    run_dir = tmp_path / "run"
    run(ObserveConfig(run_dir=str(run_dir), wandb_project="digits", wandb_name="first"), 4)
    first, *logs, last = calls()
    assert first == ["init", "digits", "first", str(run_dir), {"train": {"lr": 1.0}}, 60.0]
    assert [step for _, step, _ in logs] == [1, 3, 4], "what comes after a failure is sent"
    assert logs[0][2]["train/lm loss"] == 0.5 and logs[0][2]["consumed_samples"] == 8
    assert "grad-norm" not in logs[0][2], "there was none"
    assert last == ["finish"]
    out = capsys.readouterr().out
    assert out.count("Weights & Biases failed: ConnectionError: no route; the run goes on") == 1
    assert len((run_dir / "metrics.jsonl").read_text().splitlines()) == 4


def test_a_server_of_mlflow_gets_every_figure(tmp_path, fake):
    calls = fake("mlflow")
    run(ObserveConfig(run_dir=str(tmp_path / "run"), mlflow_uri="http://host:5000"), 2)
    *opened, one, two, last = calls()
    assert opened == [["client", "http://host:5000"], ["experiment", "mimo-hetero"], ["run", "1", "run"],
                      ["text", "r", "[train]\nlr = 1.0\n", "run_config.toml"]]
    assert one[2]["train/lm loss"] == [0.5, 1] and two[2]["consumed_samples"] == [16.0, 2]
    assert {"optim/learning-rate", "optim/learning-rate/vision"} < one[2].keys(), "a server keeps names as they are"
    assert last == ["terminated", "r"]


def test_a_tracker_that_cannot_be_started_is_one_error(tmp_path, fake):
    fake("wandb")
    observe = ObserveConfig(run_dir=str(tmp_path / "run"), wandb_project="refused")
    with pytest.raises(ValueError, match="--wandb-project refused: cannot be started: PermissionError: no key"):
        RunLogger(observe, active=True, total_iterations=1, config_toml="")


@pytest.mark.parametrize(("flags", "message"), [
    ({"wandb_project": "p"}, "--wandb-project p: the package wandb is not installed"),
    ({"mlflow_uri": "u"}, "--mlflow-uri u: the package mlflow is not installed"),
    ({"wandb_name": "n"}, "--wandb-name n needs --wandb-project"),
    ({"mlflow_experiment": "e"}, "--mlflow-experiment e needs --mlflow-uri"),
])
def test_impossible_flags_are_refused_before_a_run(monkeypatch, flags, message):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=message):
        ObserveConfig(**flags).check()
        check_observe(ObserveConfig(**flags), 2, 10, dry_run=False)


def test_a_dry_run_needs_no_package(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_observe(ObserveConfig(wandb_project="p", mlflow_uri="u"), 2, None, dry_run=True)


def test_a_server_that_does_not_answer_is_an_error(tmp_path, fake, monkeypatch):
    fake("mlflow")
    monkeypatch.setattr(remote_trackers, "OPEN_LIMIT_S", 0.1)
    release = threading.Event()
    client = importlib.import_module("mlflow").MlflowClient
    monkeypatch.setattr(client, "get_experiment_by_name", lambda *_: release.wait())
    with pytest.raises(ValueError, match="--mlflow-uri http://host: cannot be started: TimeoutError: no answer within"):
        RunLogger(ObserveConfig(run_dir=str(tmp_path), mlflow_uri="http://host"), active=True, total_iterations=1,
                  config_toml="")
    release.set()


def test_a_run_that_fails_is_not_shown_as_running(tmp_path, fake):
    calls = fake("mlflow")
    logger = RunLogger(ObserveConfig(run_dir=str(tmp_path), mlflow_uri="http://host"), active=True, total_iterations=1,
                       config_toml="")
    logger.close(failed=True)
    logger.close(failed=True)
    assert [call for call in calls() if call[0] == "terminated"] == [["terminated", "r", "FAILED"]]


def test_a_tracker_that_hangs_holds_up_nobody(monkeypatch):
    monkeypatch.setattr(remote_trackers, "MAX_BEHIND", 2)
    monkeypatch.setattr(remote_trackers, "CLOSE_LIMIT_S", 0.2)
    monkeypatch.setattr(remote_trackers, "_left", [])
    release, said = threading.Event(), []

    class Hanging:
        def log(self, step, samples, record):
            release.wait()

        def close(self):
            pass

    tracker = BackgroundTracker("MLflow", Hanging(), said.append)
    for step in range(10):
        tracker.log(step, step, {})
    tracker.close()
    tracker.close()
    assert remote_trackers.are_left()
    release.set()
    assert said == ["MLflow is 2 iterations behind; the run goes on, its figures are in metrics.jsonl"]


def test_a_package_that_would_end_the_process_is_an_error(tmp_path, fake, monkeypatch):
    fake("mlflow")
    client = importlib.import_module("mlflow").MlflowClient
    monkeypatch.setattr(client, "get_experiment_by_name", lambda *_: sys.exit("no login"))
    with pytest.raises(ValueError, match="--mlflow-uri http://host: cannot be started: SystemExit: no login"):
        RunLogger(ObserveConfig(run_dir=str(tmp_path), mlflow_uri="http://host"), active=True, total_iterations=1,
                  config_toml="")
