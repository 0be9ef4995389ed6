"""The tutorial, from its first command to its last, as one shell session."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.test_readme import blocks
from tests.support.launch import ROOT

pytestmark = pytest.mark.slow


@pytest.mark.timeout(1800)
def test_every_command_of_the_tutorial_runs(tmp_path: Path) -> None:
    install, *steps = blocks(ROOT / "docs" / "tutorial.md", "bash")
    assert "setup.sh" in install
    for name in ("scripts", "train_hetero.py", "train_rl.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT),
        "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(["bash", "-euxm", "-c", "\n".join(steps)], cwd=tmp_path, env=environment, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=1700, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-5000:]
    before, after = re.findall(r"answered by vLLM on cpu\n(?:.*\n)*?([a-z0-9 ]+)\n\+", done.stdout)
    (served,) = re.findall(r'^\{"id":.*\}', done.stdout, re.M)
    assert json.loads(served)["choices"][0]["message"]["content"].strip() == after
    assert re.fullmatch(r"\d( \d)?", after), (before, after)
    assert (tmp_path / "runs/tutorial/sft-run/report.html").exists() and (tmp_path / "runs/tutorial/data.html").exists()
