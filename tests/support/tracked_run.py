"""A run of three iterations and an evaluation with the trackers' real packages; prints what they have kept of it.

`python tracked_run.py RUN_DIR wandb` or `... RUN_DIR mlflow URI`. The output is JSON: the flags, and by iteration the
figures, as metrics.jsonl spells them.
"""

from __future__ import annotations

import json
import math
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

from mimo.config.trainer import ObserveConfig
from mimo.observability.metrics import RunLogger, StepRecord

Kept = dict[int, dict[str, float | str | None]]
CONFIG = "[train]\nlr = 0.5\n"


def record(iteration: int) -> StepRecord:
    """Return a record with each kind of figure. The second iteration is skipped."""
    failed = iteration == 2
    modules = {"vision": iteration / 3, "language": 1e-7 * iteration}
    return StepRecord(
        iteration=iteration, consumed_samples=8 * iteration, lm_loss=math.nan if failed else 1 / 3,
        grad_norm=None if failed else 2.5, success=not failed, skipped_iterations=int(iteration > 1),
        learning_rate=3e-4, module_learning_rates=modules, batch_size=8, iteration_time_s=0.152, num_zeros=None,
        timeline={"vision/forward-s": 0.25, "vision/forward-max-s": 0.5, "image-tokens-per-lane/min": 640.0},
        forward_backward_s=modules, optimizer_s=modules, peak_memory_bytes={"vision": 10**11, "language": 3},
        tflops=250.0, mfu=None, flops={"vision": 1.5e15}, hardware_flops={"vision": 1.7e15}, encoder_imbalance=1.25,
        moe_losses={"seq_load_balancing_loss": 1.01, "moe/seq_load_balancing_loss_layer_1": math.inf},
        mtp_losses={"mtp_1 loss": -math.inf})


def train(flags: ObserveConfig) -> None:
    """Log a run as the logging rank does."""
    logger = RunLogger(flags, active=True, total_iterations=3, config_toml=CONFIG)
    for iteration in (1, 2, 3):
        logger.log_step(record(iteration))
    logger.log_eval(3, {"lm loss": 0.7, "exact match": math.nan})
    logger.close()


def json_value(value: object) -> object:
    """Write a figure that JSON lacks as metrics.jsonl does."""
    return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}.get(str(value), value)


def kept_by_mlflow(uri: str) -> tuple[str, Kept]:
    """Return the artifact and the metric history of the later of the experiment's two runs."""
    from mlflow import MlflowClient, artifacts

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("mimo-hetero")
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert {name: run.info.status for name, run in runs.items()} == {"earlier": "FINISHED", "run": "FINISHED"}
    run = runs["run"]
    kept: Kept = {}
    for name in run.data.metrics:
        for point in client.get_metric_history(run.info.run_id, name):
            kept.setdefault(point.step, {})[name] = json_value(point.value)
    return artifacts.load_text(f"{run.info.artifact_uri}/run_config.toml"), kept


def log_records(data: bytes) -> Iterator[bytes]:
    """Records of a log in LevelDB's format, as `wandb sync` reads it, behind a header of 7 bytes."""
    block, head, begin = 32768, 7, 7
    body = b""
    while begin + head <= len(data):
        if block - begin % block < head:  # too short a rest for another head: filled up
            begin += block - begin % block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, begin)
        body += data[begin + head:begin + head + length]
        begin += head + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield body
            body = b""


def kept_by_wandb(run_dir: Path) -> tuple[dict[str, object], Kept]:
    """Configuration and history in the files that `wandb sync` would send."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # its process may write on after the run's end
    [path] = run_dir.glob("wandb/offline-run-*/run-*.wandb")
    kept: Kept = {}
    config: dict[str, object] = {}
    for data in log_records(path.read_bytes()):
        entry = Record.FromString(data)
        if entry.HasField("run"):
            assert (entry.run.project, entry.run.display_name) == ("digits", "first")
            config |= {item.key: json.loads(item.value_json) for item in entry.run.config.update}
        if entry.HasField("history"):
            figures = {"/".join(item.nested_key) or item.key: json.loads(item.value_json)
                       for item in entry.history.item}
            own = {name: json_value(value) for name, value in figures.items() if not name.startswith("_")}
            kept.setdefault(entry.history.step.num, {}).update(own)
    return {name: value for name, value in config.items() if not name.startswith("_")}, kept


def main() -> None:
    """Train, then read."""
    run_dir, kind, *rest = sys.argv[1:]
    if kind == "mlflow":
        for folder in (Path(run_dir).with_name("earlier"), run_dir):
            train(ObserveConfig(run_dir=str(folder), mlflow_uri=rest[0]))
        found: object = kept_by_mlflow(rest[0])
    else:
        train(ObserveConfig(run_dir=run_dir, wandb_project="digits", wandb_name="first"))
        found = kept_by_wandb(Path(run_dir))
    print(json.dumps(found, allow_nan=False))


if __name__ == "__main__":
    main()
