from __future__ import annotations

import json
import os
import pty
import termios
from dataclasses import replace
from pathlib import Path

import pytest

from mimo.checkpoint import paths
from mimo.config.trainer import CheckpointConfig, ObserveConfig
from mimo.observability.metrics import RunLogger, StepRecord, format_steps, short_count
from mimo.training.session import how_to_continue, note_on_earlier

RECORD = StepRecord(
    iteration=12, consumed_samples=384, lm_loss=1.2345, grad_norm=1.23, learning_rate=3e-4, batch_size=32,
    iteration_time_s=0.152, tokens_per_s_per_gpu=12_340.0, image_tokens=640, text_tokens=1200, data_wait_s=0.001,
    bridge_wait_s=0.003, module_learning_rates={"vision": 1e-4, "language": 3e-4},
    forward_backward_s={"vision": 0.09, "language": 0.1}, optimizer_s={"vision": 0.01, "language": 0.02},
    peak_memory_bytes={"vision": 100, "language": 200}, moe_losses={"seq_load_balancing_loss": 1.01}, tflops=250.0,
    flops={"vision": 1e12, "language": 3e12}, hardware_flops={"vision": 1e12, "language": 5e12})


def observe(tmp_path, **flags):
    return ObserveConfig(run_dir=str(tmp_path / "run"), **flags)


def logged(tmp_path):
    return [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]


def test_record_is_flat_under_megatron_keys():
    assert RECORD.to_dict() == {
        "iteration": 12, "consumed_samples": 384, "lm loss": 1.2345, "grad-norm": 1.23, "learning-rate": 3e-4,
        "learning-rate/vision": 1e-4, "learning-rate/language": 3e-4, "loss-scale": 1.0, "num-zeros": None,
        "batch-size": 32, "iteration-time": 0.152, "tokens-per-s-per-gpu": 12_340.0, "image-tokens": 640,
        "text-tokens": 1200, "packing-utilisation": 0.0, "bad-samples": 0, "tflops": 250.0, "flops/vision": 1e12,
        "flops/language": 3e12, "hardware-flops/vision": 1e12, "hardware-flops/language": 5e12,
        "data-wait-s": 0.001, "bridge-wait-s": 0.003, "forward-backward-s/vision": 0.09,
        "forward-backward-s/language": 0.1, "optimizer-s/vision": 0.01, "optimizer-s/language": 0.02,
        "peak-memory-bytes/vision": 100, "peak-memory-bytes/language": 200, "skipped-iterations": 0, "success": True,
        "seq_load_balancing_loss": 1.01}


def test_figures_that_a_run_has_not_are_left_out():
    assert RECORD.to_dict().keys() ^ replace(RECORD, tflops=None, mfu=0.25).to_dict().keys() == {"tflops", "mfu"}
    assert replace(RECORD, checkpoint_s=0.5).to_dict().items() - RECORD.to_dict().items() == {("checkpoint-s", 0.5)}


def test_console_line():
    assert format_steps([RECORD], 200) == (
        "iteration    12/ 200 | samples 384 | lm loss 1.2345E+00 | lr 3.0E-04 | grad norm 1.23 | 0.152 s"
        " | 12.3k tokens/s/gpu | data 1 ms | bridge 3 ms")


def test_full_memory_is_said():
    full = replace(RECORD, allocation_retries={"language": 3})
    assert full.to_dict().items() - RECORD.to_dict().items() == {("allocation-retries/language", 3)}
    assert format_steps([full, RECORD, full], 200).endswith(" | memory full 6x")


def test_console_line_with_a_known_peak():
    fast, slow = (replace(RECORD, tflops=tflops, mfu=tflops / 1000) for tflops in (300.0, 201.0))
    assert "tokens/s/gpu | 250.5 TFLOP/s/gpu, MFU 25.1% | data 1 ms" in format_steps([fast, slow], 200)


def test_console_line_of_several_iterations_averages_those_that_took_a_step():
    skipped = replace(RECORD, iteration=13, lm_loss=float("nan"), grad_norm=None, success=False, skipped_iterations=1,
                      iteration_time_s=0.252, loss_scale=4096.0)
    line = format_steps([RECORD, skipped], 200)
    assert "iteration    13/ 200" in line
    assert "lm loss 1.2345E+00" in line
    assert "step skipped" in line
    assert "0.202 s" in line
    assert line.endswith("loss scale 4096 | skipped 1")


@pytest.mark.parametrize(("value", "text"), [(950.4, "950"), (12_340, "12.3k"), (4.56e6, "4.6M"), (0, "0")])
def test_short_count(value, text):
    assert short_count(value) == text


def test_logging_rank_writes_every_iteration_and_prints_by_interval(tmp_path, capsys):
    logger = RunLogger(observe(tmp_path, log_interval=2), active=True, total_iterations=5, config_toml="[train]\n")
    for step in range(1, 6):
        logger.log_step(replace(RECORD, iteration=step, consumed_samples=8 * step))
    logger.log_eval(5, {"lm loss": 0.5, "exact match": 0.9})
    logger.message("saved")
    logger.summary({"exact match": 0.9})
    logger.close()
    logger.close()

    out = capsys.readouterr().out.splitlines()
    assert [line.split("|")[0].split("/")[0].split()[-1] for line in out[:3]] == ["2", "4", "5"]
    assert out[3:5] == ["evaluation at iteration 5 | lm loss 0.5 | exact match 0.9", "saved"]
    assert out[5].startswith("finished iteration 5/5 | samples 40 | skipped iterations 0 | ")
    assert out[6:] == [f"metrics: {tmp_path}/run/metrics.jsonl", "exact match: 0.9000"]
    assert (tmp_path / "run" / "run_config.toml").read_text() == "[train]\n"
    lines = logged(tmp_path)
    assert [line["iteration"] for line in lines] == [1, 2, 3, 4, 5, 5]
    last = {"consumed_samples": 40, "lm loss validation": 0.5, "exact match validation": 0.9}
    assert lines[-1].items() >= last.items()


def test_early_stop_prints_the_pending_line_and_its_cause(tmp_path, capsys):
    logger = RunLogger(observe(tmp_path, log_interval=10), active=True, total_iterations=20, config_toml="",
                       how_to_continue="to continue, repeat the command")
    logger.log_step(replace(RECORD, iteration=3))
    logger.summary({}, stopped="SIGTERM")
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("iteration     3/  20")
    assert out[1].startswith("stopped by SIGTERM after iteration 3/20 | samples 384")
    assert out[-1] == "to continue, repeat the command"
    logger.summary({})
    assert "to continue" not in capsys.readouterr().out


def test_how_a_run_that_was_stopped_is_continued():
    assert how_to_continue(CheckpointConfig()) == "nothing was saved, because the run has no --save"
    repeat = "to continue, repeat the command"
    assert how_to_continue(CheckpointConfig(save="a")) == f"{repeat} with --load a"
    # A run that began elsewhere continues from its own checkpoints.
    assert how_to_continue(CheckpointConfig(save="a", load="b", finetune=True)) == repeat
    assert how_to_continue(CheckpointConfig(save="a", load="b", ckpt_step=3, load_optim=False)) == repeat
    assert how_to_continue(CheckpointConfig(save="a", load="a", ckpt_step=3)) == f"{repeat} without --ckpt-step 3"
    # Otherwise it would begin again with that checkpoint, or with another optimizer.
    assert how_to_continue(CheckpointConfig(save="a", load="a/iter_0000003", load_optim=False)) == (
        f"{repeat} with --load a and without --no-load-optim")
    assert how_to_continue(CheckpointConfig(save="a", load="a", load_optim=False, save_optim=False)) == repeat


def test_a_run_that_forgets_load_is_told_of_its_earlier_checkpoints(tmp_path):
    save = tmp_path / "saved"
    assert note_on_earlier(CheckpointConfig(save=str(save))) == []
    for iteration in (7, 20):
        folder = paths.iteration_dir(save, iteration)
        folder.mkdir(parents=True)
        (folder / paths.METADATA).write_text("{}")
    (note,) = note_on_earlier(CheckpointConfig(save=str(save)))
    assert note.startswith(f"--save {save} has checkpoints of an earlier run, the last one of iteration 20. ")
    assert f"--load {save} would continue" in note
    assert note_on_earlier(CheckpointConfig(save=str(save), load=str(save))) == []
    assert note_on_earlier(CheckpointConfig()) == []


def test_other_ranks_write_nothing(tmp_path, capsys):
    logger = RunLogger(observe(tmp_path, tensorboard_dir=str(tmp_path / "tb")), active=False, total_iterations=5,
                       config_toml="")
    logger.log_step(RECORD)
    logger.log_eval(5, {"lm loss": 0.5})
    logger.message("saved")
    logger.summary({"exact match": 0.9})
    logger.close()
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""


def test_resume_appends_and_counts_samples_for_an_early_evaluation(tmp_path):
    for resume in (0, 2):
        logger = RunLogger(observe(tmp_path), active=True, total_iterations=4, config_toml="", resume_iteration=resume)
        if resume:
            logger.log_eval(2, {"lm loss": 0.7}, consumed_samples=16)
        for step in range(resume + 1, 4):
            logger.log_step(replace(RECORD, iteration=step))
        logger.close()
    assert [(line["iteration"], "lm loss" in line) for line in logged(tmp_path)] == [
        (1, True), (2, True), (2, False), (3, True)]
    assert logged(tmp_path)[2]["consumed_samples"] == 16


def test_tensorboard_carries_steps_and_evaluations(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = RunLogger(observe(tmp_path, tensorboard_dir=str(tmp_path / "tb"), tensorboard_by_samples=True),
                       active=True, total_iterations=20, config_toml="")
    logger.log_step(RECORD)
    logger.log_eval(12, {"lm loss": 0.5})
    logger.close()
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    asked = {"train/lm loss", "optim/grad-norm", "optim/learning-rate", "optim/loss-scale", "optim/batch-size",
             "perf/iteration-time", "moe/seq_load_balancing_loss", "val/lm loss"}
    assert asked | {f"{name} vs samples" for name in asked} <= set(events.Tags()["scalars"])
    assert [event.step for event in events.Scalars("val/lm loss vs samples")] == [384]
    assert "optim/skipped-iterations vs samples" not in events.Tags()["scalars"]


@pytest.mark.parametrize("active", [True, False])
def test_log_interval_out_of_range_is_refused_on_every_rank(tmp_path, active):
    with pytest.raises(ValueError, match="--log-interval 0"):
        RunLogger(observe(tmp_path, log_interval=0), active=active, total_iterations=1, config_toml="")


@pytest.mark.parametrize("flag", ["run_dir", "tensorboard_dir"])
def test_a_folder_that_cannot_be_written_names_its_flag(tmp_path, flag):
    (tmp_path / "file").write_text("in the way")
    flags = {"run_dir": str(tmp_path / "run"), flag: str(tmp_path / "file")}
    with pytest.raises(ValueError, match=f"--{flag.replace('_', '-')} .*file: cannot be written"):
        RunLogger(ObserveConfig(**flags), active=True, total_iterations=1, config_toml="")


BAR_RUN = """
import sys
from mimo.config.trainer import ObserveConfig
from mimo.observability.metrics import RunLogger, StepRecord
logger = RunLogger(ObserveConfig(run_dir=sys.argv[1], progress=sys.argv[2] == "on"), active=True, total_iterations=2,
                   config_toml="")
for step in (1, 2):
    logger.log_step(StepRecord(iteration=step, consumed_samples=8 * step, lm_loss=1.0, grad_norm=1.0,
                               learning_rate=1e-3, batch_size=8, iteration_time_s=0.1))
logger.summary({"exact match": 0.5})
logger.close()
"""


@pytest.mark.parametrize("progress", ["on", "off"])
def test_progress_bar_on_a_terminal_only_and_lines_stay_whole(start, tmp_path, progress):
    terminal, far_end = pty.openpty()
    termios.tcsetwinsize(far_end, (24, 100))
    process = start(BAR_RUN, tmp_path, progress, stdout=far_end)
    os.close(far_end)
    shown = b""
    while True:
        try:
            part = os.read(terminal, 4096)
        except OSError:  # how a terminal ends once nobody holds its far end
            break
        shown += part
    os.close(terminal)
    assert process.wait() == 0, process.communicate()[1]
    text = shown.decode()
    assert ("/2 [" in text) == (progress == "on")
    assert text.count("| data 0 ms | bridge 0 ms\r\n") == 2
    assert "]iteration" not in text  # the bar was cleared first
    assert text.endswith("exact match: 0.5000\r\n")


def test_no_bar_without_a_terminal(start, tmp_path):
    out, error = start(BAR_RUN, tmp_path, "on").communicate()
    assert "[" not in out
    assert error == ""
    assert len(out.splitlines()) == 5


def test_a_fresh_run_leaves_nothing_of_an_earlier_one_for_readers(tmp_path: Path) -> None:
    for name in ("timeline/step-10.json", "timeline/step-20.json", "timeline/step-20.trace.json", "startup.json",
                 "timeline/notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    flags = ObserveConfig(run_dir=str(tmp_path))
    RunLogger(flags, active=True, total_iterations=2, config_toml="", resume_iteration=10).close()
    assert (tmp_path / "timeline" / "step-10.json").exists() and (tmp_path / "startup.json").exists()
    assert not list(tmp_path.glob("timeline/step-20.*")), "the resumed run has not come to it"
    RunLogger(flags, active=True, total_iterations=2, config_toml="").close()
    assert [path.name for path in (tmp_path / "timeline").iterdir()] == ["notes.txt"]
    assert not (tmp_path / "startup.json").exists()


def test_a_disk_that_fails_is_said_once_and_ends_no_run(tmp_path, capsys):
    class Failing:
        steps: list[int] = []

        def log(self, step, samples, record):
            self.steps.append(step)
            raise OSError(122, "Disk quota exceeded")

        def close(self):
            raise OSError(122, "Disk quota exceeded")

    logger = RunLogger(observe(tmp_path, tensorboard_dir=str(tmp_path / "tb")), active=True, total_iterations=3,
                       config_toml="")
    jsonl, _, tensorboard = logger._trackers
    jsonl._tracker._file = open("/dev/full", "ab", buffering=0)
    tensorboard._tracker.close()
    tensorboard._tracker = Failing()
    for step in (1, 2, 3):
        logger.log_step(replace(RECORD, iteration=step))
    logger.log_eval(3, {"lm loss": 0.5})
    logger.close()
    out = capsys.readouterr().out
    assert out.count("the run goes on") == 2
    assert f"{tmp_path}/run/metrics.jsonl: cannot be written: [Errno 28] No space left on device; the run" in out
    assert f"{tmp_path}/tb: cannot be written: [Errno 122] Disk quota exceeded; the run goes on" in out
    assert Failing.steps == [1, 2, 3, 3], "later figures are tried"
    assert [line["iteration"] for line in logged(tmp_path)] == [2, 3, 3]
