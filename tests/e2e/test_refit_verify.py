"""`--refit-verify-interval` and `--max-gen-kl` of `train_rl.py` beside a live engine: a faulty refit ends the run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.test_train_rl import FLAGS
from tests.support.launch import records, torchrun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("dtype", ["--no-bf16", "--bf16"])
def test_one_changed_weight_is_found_at_its_refit(tmp_path: Path, dtype: str) -> None:
    """The weight changes in the second refit, where checksums miss it; the first refit passes at any temperature."""
    done = torchrun(2, *FLAGS, dtype, "--refit-verify-interval", "1", "--temperature", "0.7", "--run-dir",
                    str(tmp_path), script="tests/support/train_rl_changed.py", CHANGED="1")
    assert done.returncode != 0 and [step["iteration"] for step in records(tmp_path)] == [1]
    found = re.findall(r"RefitError: --refit-verify-interval: after a refit of scrambled weights, engine and trainer "
                       r"do not compute with the same weights: over \d+ tokens .* token \d+ of prompt (\S+) has "
                       r"log-prob \S+ in the engine and \S+ in the trainer", done.stdout)
    assert found and found[0].startswith("arithmetic/train/"), done.stdout[-3000:]


def test_a_wrong_refit_that_nothing_verifies_ends_the_run_before_its_update(tmp_path: Path) -> None:
    saved = ["--save", str(tmp_path / "saved"), "--save-interval", "1"]
    done = torchrun(2, *FLAGS, *saved, "--refit-verify-interval", "0", "--run-dir", str(tmp_path / "run"),
                    script="tests/support/train_rl_changed.py", CHANGED="1")
    assert done.returncode != 0 and [step["iteration"] for step in records(tmp_path / "run")] == [1]
    assert re.search(r"ValueError: gen-kl \S+ is above --max-gen-kl 0\.0001: on \d+ sampled tokens", done.stdout), (
        done.stdout[-3000:])
    resumed = torchrun(2, *FLAGS, *saved, "--load", str(tmp_path / "saved"), "--run-dir", str(tmp_path / "resumed"),
                       script="train_rl.py")
    assert resumed.returncode == 0, resumed.stdout[-3000:]
    assert [step["iteration"] for step in records(tmp_path / "resumed")] == [2, 3]


@pytest.mark.parametrize(("dtype", "model"), [("bfloat16", "moe"), ("bfloat16", "dense"), ("float32", "moe")])
def test_stale_and_swapped_tensors_are_caught_and_good_refits_pass(dtype: str, model: str) -> None:
    done = subprocess.run([sys.executable, "scripts/bench/refit_verify.py", "--device", "cpu", "--dtype", dtype,
                           "--model", model], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert result["good"]["refits"] == 20 and result["good"]["false_alarms"] == []
    kinds = [name.partition(":")[0] for name in result["faults"]]
    assert kinds.count("stale") == 3 and kinds.count("swapped") >= 8
    assert result["missed"] == []
