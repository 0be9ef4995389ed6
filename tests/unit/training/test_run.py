"""Start and end of a process around its run."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.launch import ROOT

LAUNCH = """
import atexit, os, signal
from mimo.config.cli import parse
from mimo.observability import remote_trackers
from mimo.training import run

def body(*_):
    {body}

atexit.register(print, "atexit")
run._with_groups = body
print("code", run.launch(parse("--model-provider mock --dataset-provider mock --device cpu".split()), None, None))
"""


@pytest.mark.parametrize(("body", "output"), [
    ("os.kill(os.getpid(), signal.SIGUSR2)", "code 0\natexit\n"),
    ("remote_trackers._left.append('Weights & Biases')", ""),
], ids=["a request for a Gantt where there is none", "a tracker that may wait for its server at exit"])
def test_it_ends_with_code_0(body: str, output: str) -> None:
    done = subprocess.run([sys.executable, "-c", LAUNCH.format(body=body)], cwd=ROOT, capture_output=True, text=True,
                          timeout=100, check=False)
    log, _, told = done.stdout.partition("gloo\n")
    assert (done.returncode, told) == (0, output), log + done.stderr
