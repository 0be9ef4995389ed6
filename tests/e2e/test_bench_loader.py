"""The benchmark of lane loaders runs, and its last line has every figure."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.support.launch import ROOT

pytestmark = pytest.mark.slow

# More shards than Energon keeps open by itself (16 a worker), each read a few samples at a time.
SMALL = ("--samples", "160", "--shards", "50", "--image-size", "32", "--num-workers", "1", "--repeats", "1",
         "--warmup-steps", "1")
COUNTS = {"shard_opens", "distinct_shards", "opens_per_shard", "bytes_read", "index_opens", "index_bytes_read",
          "samples_used", "samples_decoded", "images_decoded", "decoded_per_used", "resident_bytes", "processes",
          "samples_per_s", "first_batch_s"}
# Flags, ranks that need each lane, rows of all lanes in a step, workers of all lanes.
CASES = {
    "two-lanes": (("--lanes", "2", "--llm-tp", "1", "--micro-batch-size", "5", "--steps", "10"), 2, 10, 2),
    "packed": (("--lanes", "1", "--llm-tp", "2", "--packing-buffer-size", "16", "--steps", "12"), 3, 1, 1),
}


@pytest.mark.parametrize("case", ["two-lanes", pytest.param("packed")])
def test_the_benchmark_prints_every_figure(case: str) -> None:
    given, readers, rows, workers = CASES[case]
    command = [sys.executable, str(ROOT / "scripts" / "bench" / "loader.py"), "--device", "cpu", *SMALL, *given]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=280,
                          env=os.environ | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    routed, per_lane, ratios = figures["routed"], figures["per-lane"], figures["routed_over_per_lane"]
    assert figures["device"] == "cpu" and figures["world_size"] == 3 and figures["equal_batches"]
    assert all(arm[name] > 0 for arm in (routed, per_lane) for name in COUNTS)
    assert routed["samples_used"] == per_lane["samples_used"]
    if case == "two-lanes":
        assert routed["samples_used"] == rows * 11
    else:
        assert routed["samples_used"] > 2 * rows * 13, "packs of several samples"

    # The targets: one reader decodes a sample, and opens a shard, once; a shard may be divided between two workers.
    assert routed["decoded_per_used"] == 1 and figures["meets_decoded"]
    assert routed["distinct_shards"] > 16 * workers
    assert routed["distinct_shards"] <= routed["shard_opens"] < routed["distinct_shards"] + workers
    assert figures["meets_opens"]
    # Without routing every rank that needs a lane decodes all of it. What it reads ahead is a matter of time.
    assert per_lane["decoded_per_used"] == readers
    assert ratios["decoded_per_used"] == pytest.approx(1 / readers)
    assert ratios["shard_opens"] < 0.75 and ratios["bytes_read"] < 0.75
    # Torch's workers: in the one reader, and in every rank.
    assert routed["processes"] == 3 + workers
    assert per_lane["processes"] == 3 + readers * workers

    assert ratios["samples_per_s"] == pytest.approx(routed["samples_per_s"] / per_lane["samples_per_s"])
    assert figures["meets_samples_per_s"] == (ratios["samples_per_s"] >= 1)
    assert {"device_name", "cpus", "steps", "lanes", "num_workers", "packing_buffer_size"} <= figures.keys()
    assert [len(figures["all"][arm]) for arm in ("routed", "per-lane")] == [1, 1]
