"""The bridge's benchmark: all arms move every value, and the figures say what that took."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.support.launch import ROOT

pytestmark = pytest.mark.slow
FLAGS = "--device cpu --size-mb 0.1 --microbatches 2 --blocks 2 --warmup-blocks 1 --hidden-size 64".split()


def bench(*flags: str) -> dict:
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "bench" / "bridge.py"), *FLAGS, *flags], check=False,
                          capture_output=True, text=True, timeout=280,
                          env=os.environ | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_arms_are_compared():
    found = bench("--case", "1->2", "--case", "1tp2->1tp2")
    assert [(case["case"], case["ranks"]) for case in found["cases"]] == [("1->2", 3), ("1tp2->1tp2", 4)]
    for case, messages, shapes in zip(found["cases"], (4, 4), (8, 4), strict=True):
        (size,) = case["sizes"]
        ours, raw, upstream = (size["arms"][name] for name in ("ours", "raw", "upstream"))
        assert (ours["messages"], ours["collectives"], ours["host_syncs"]) == (messages, 0, 0)
        assert ours["p2p_bytes"] == raw["p2p_bytes"], "nothing but rows, each once to each rank"
        assert raw["messages"] == 4 and raw["collectives"] == raw["host_syncs"] == 0
        assert upstream["messages"] == shapes and upstream["host_syncs"] > 0
        assert min(size["raw_over_ours"], size["upstream_over_ours"], ours["gb_per_s"]) > 0
    sliced = size["arms"]["sliced"]
    assert (sliced["messages"], sliced["collectives"], sliced["host_syncs"]) == (4, 2, 0)
    assert sliced["p2p_bytes"] == size["bytes"], "nothing but rows, each once between the grids"
    assert "sliced" not in found["cases"][0]["sizes"][0]["arms"] and size["raw_over_sliced"] > 0


def test_uneven_rows():
    (case,) = bench("--case", "2->1", "--uneven")["cases"]
    assert set(case["sizes"][0]["arms"]) == {"ours", "raw"} and "not run" in case["upstream"]
