"""`--refit-verify` of `train_rl.py`: an engine with other weights than the trainer's ends the run by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.test_train_rl import FLAGS
from tests.support.launch import records, torchrun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_one_changed_weight_is_found_at_its_refit(tmp_path: Path) -> None:
    """Of the second refit; checksums know nothing of it, and the first passes, whatever the temperature."""
    done = torchrun(2, *FLAGS, "--refit-verify", "--temperature", "0.7", "--run-dir", str(tmp_path),
                    script="tests/support/train_rl_changed.py", CHANGED="1")
    assert done.returncode != 0 and [step["iteration"] for step in records(tmp_path)] == [1]
    found = re.findall(r"RefitError: --refit-verify: engine and trainer do not have the same weights: token \d+ of "
                       r"prompt (\S+) has log-prob (\S+) in the engine and (\S+) in the trainer; they differ by \S+ "
                       r"nats, which is more than 0\.001", done.stdout)
    assert found, done.stdout[-3000:]
    (prompt, engine, trainer), *_ = found
    assert prompt.startswith("arithmetic/train/") and abs(float(engine) - float(trainer)) > 1e-3
