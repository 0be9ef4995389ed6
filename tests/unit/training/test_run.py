"""Start and end of a process around its run, and what the garbage collector examines meanwhile."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import pytest

from mimo.training.setup import kept_objects
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


class Node:
    """Refers to itself, so that only a collection ends it."""

    def __init__(self) -> None:
        self.itself = self


def test_existing_objects_are_ignored_until_the_end() -> None:
    before = Node()
    early = weakref.ref(before)
    with kept_objects():
        late = weakref.ref(Node())
        del before
        gc.collect()
        assert late() is None, "what came later is collected"
        assert early() is not None, "what was there is not looked at"
    gc.collect()
    assert early() is None, "and is collected afterwards"
