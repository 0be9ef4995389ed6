"""The quickstart: a short run leaves everything a user looks for; a whole run reads the held-out scans."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support.digit_shards import data_flags
from tests.support.launch import ROOT, losses, records, torchrun
from tests.support.report_runs import figures, headings

CONFIG = ROOT / "scripts" / "configs" / "quickstart.toml"


def test_a_short_quickstart_leaves_metrics_and_tensorboard(tmp_path: Path) -> None:
    # Two processes in place of the four that the slow tests start.
    flags = "--encoder-dp 1 --llm-tp 1 --train-iters 4 --lr-warmup-iters 0 --eval-interval 2 --log-interval 1".split()
    done = torchrun(2, "--config", str(CONFIG), *flags, "--run-dir", str(tmp_path / "run"), "--tensorboard-dir",
                    str(tmp_path / "tb"))
    assert done.returncode == 0, done.stdout[-3000:]
    assert "CPU emulation is on" in done.stdout
    assert len(re.findall(r"^iteration +\d+/ +4 \|", done.stdout, re.M)) == 4
    assert re.search(r"^exact match: [01]\.\d{4}$", done.stdout, re.M), "the last figure of the run"
    assert len(re.findall(r"^ +digits/valid/\d+: read", done.stdout, re.M)) == 20, "greedily decoded samples"
    steps = [record for record in records(tmp_path / "run") if "lm loss" in record]
    assert [record["iteration"] for record in steps] == [1, 2, 3, 4]
    for record in steps:
        assert {"tokens-per-s-per-gpu", "data-wait-s", "bridge-wait-s", "optimizer-s/vision", "optimizer-s/language",
                "peak-memory-bytes/vision", "peak-memory-bytes/language", "grad-norm",
                "learning-rate"} <= record.keys()
        assert record["image-tokens"] > 0 and record["bridge-wait-s"] > 0
        assert record["forward-backward-s/language"] > 0
    check_report(tmp_path / "run", steps)
    board = EventAccumulator(str(tmp_path / "tb")).Reload()
    for tag in ("train/lm loss", "optim/grad-norm", "optim/learning-rate", "optim/batch-size", "perf/iteration-time"):
        assert [event.step for event in board.Scalars(tag)] == [1, 2, 3, 4], tag
    assert not [tag for tag in board.Tags()["scalars"] if tag.endswith("vs samples")]
    assert "digits/valid/" in board.Tensors("generations/answers/text_summary")[0].tensor_proto.string_val[0].decode()
    shown = [tag for tag in board.Tags()["images"] if tag.startswith("generations/digits/valid/")]
    assert len({tag.split("/")[3] for tag in shown}) == 16, "samples whose images are shown, from the encoder's rank"


def check_report(run: Path, steps: list[dict[str, Any]]) -> None:
    """The run's page answers with the figures of its metrics."""
    done = subprocess.run([sys.executable, "scripts/report.py", str(run)], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    html = (run / "report.html").read_text(encoding="utf-8")
    assert html.count('alt="image 1 of digits/valid/') == 16, "the encoder's rank sends images of so many samples"
    learned, fast, waited = re.findall(r"<div class=\"tile\"><h2>[^<]+</h2><b>([^<]+)</b>", html)
    first, last = (statistics.fmean(record["lm loss"] for record in two) for two in (steps[:2], steps[-2:]))
    assert learned.endswith(f"loss {float(f'{first:.3g}'):.4g} to {float(f'{last:.3g}'):.4g}")
    seconds, _, words = fast.partition(" ")
    steady = steps[1:]
    usual = statistics.median(record["iteration-time"] for record in steady)
    assert float(seconds) * {"s": 1.0, "ms": 1e-3}[words.split()[0]] == pytest.approx(usual, rel=0.01)
    share = {module: sum(record[f"timeline/{module}/bridge-wait-s"] for record in steady)
             / sum(record[f"timeline/{module}/step-s"] for record in steady) for module in ("vision", "language")}
    assert waited.startswith(f"{max(share, key=share.__getitem__)} waited for ")
    assert float(waited.removesuffix(" % of its step").rpartition(" ")[2]) == pytest.approx(100 * max(share.values()),
                                                                                          abs=0.51)
    headings(html)
    [rows] = [figure["layout"]["yaxis"]["ticktext"] for title, figure in figures(html).items()
              if title.startswith("Iteration 4:")]
    assert sum(name.startswith("rank ") for name in rows) == 2, "one row for each rank"


@pytest.mark.slow
def test_seeds_repeat_and_matter(tmp_path: Path) -> None:
    found = []
    for name, seed in (("first", "1"), ("again", "1"), ("other", "2")):
        flags = "--encoder-dp 1 --llm-tp 1 --train-iters 2 --eval-iters 0 --eval-interval 0 --lr-warmup-iters 0".split()
        done = torchrun(2, "--config", str(CONFIG), *flags, "--seed", seed, "--run-dir", str(tmp_path / name))
        assert done.returncode == 0, done.stdout[-3000:]
        found.append(losses(tmp_path / name))
    assert found[0] == found[1]
    assert found[0] != found[2]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_quickstart_reads_held_out_scans(tmp_path: Path) -> None:
    done = torchrun(4, "--config", str(CONFIG), "--run-dir", str(tmp_path), timeout_s=1780)
    assert done.returncode == 0, done.stdout[-3000:]
    match = re.search(r"^exact match: ([01]\.\d+)$", done.stdout, re.M)
    assert match is not None and float(match[1]) >= 0.90, done.stdout[-2000:]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_quickstart_on_shards_reads_held_out_scans(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "scripts/prepare_digits.py", str(tmp_path / "shards"), "--image-size", "8"],
                   cwd=ROOT, check=True, capture_output=True)
    # Two processes in place of four, because the readers of the shards are processes, too.
    done = torchrun(2, "--config", str(CONFIG), "--encoder-dp", "1", "--llm-tp", "1", "--dataset-provider", "energon",
                    *data_flags(tmp_path / "shards"), "--run-dir", str(tmp_path / "run"), timeout_s=1780)
    assert done.returncode == 0, done.stdout[-3000:]
    match = re.search(r"^exact match: ([01]\.\d+)$", done.stdout, re.M)
    assert match is not None and float(match[1]) >= 0.90, done.stdout[-2000:]
