"""The benchmarks on real runs: every figure is on the last line, and figures agree with each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mimo.observability.startup import Phase
from tests.support.launch import bench, start_bench

pytestmark = pytest.mark.slow

# Activations over the bridge

BRIDGE = "--device cpu --size-mb 0.1 --microbatches 2 --blocks 2 --warmup-blocks 1 --hidden-size 64".split()


def test_arms_of_the_bridge_are_compared():
    found = bench("bridge", *BRIDGE, "--case", "1->2", "--case", "1tp2->1tp2")
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


def test_the_bridge_moves_uneven_rows():
    (case,) = bench("bridge", *BRIDGE, "--case", "2->1", "--uneven")["cases"]
    assert set(case["sizes"][0]["arms"]) == {"ours", "raw"} and "not run" in case["upstream"]


# Checkpoints

CHECKPOINT = ("--hidden-size", "64", "--num-layers", "2", "--seq-length", "96", "--repeats", "2", "--steps", "2")
SECONDS = {"sync_stall_s", "async_stall_s", "async_save_s", "async_publish_s", "until_published_s", "copy_s", "step_s",
           "load_s"}
RATIOS = {"copy_bytes_per_s", "async_over_sync", "async_over_copy"}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_figures_of_checkpoints(tmp_path: Path, num_ranks: int) -> None:
    figures = bench("checkpoint", "--device", "cpu", "--nproc", str(num_ranks), "--dir", str(tmp_path), *CHECKPOINT)
    assert figures["device"] == "cpu" and figures["world_size"] == num_ranks
    # Two layers and an embedding of 64: some 300 thousand parameters of 14 bytes, split over the ranks.
    assert 2e6 / num_ranks < figures["bytes_per_rank"] < 8e6 / num_ranks
    assert all(figures[name] > 0 for name in SECONDS | RATIOS)
    assert figures["async_over_sync"] == pytest.approx(figures["async_stall_s"] / figures["sync_stall_s"])
    assert figures["async_over_copy"] == pytest.approx(figures["async_stall_s"] / figures["copy_s"])
    reached = figures["async_over_sync"] < 0.05 or figures["async_over_copy"] <= 1.2
    assert figures["meets_target"] == reached
    assert {"step_during_save_s", "step_slowdown", "device_name", "all"} <= figures.keys()
    assert all(len(figures["all"][name]) == 2 for name in ("sync_stall_s", "async_stall_s", "copy_s", "step_s"))
    assert not list(tmp_path.iterdir()), "the checkpoints are gone"


# Loaders of lanes

# More shards than Energon keeps open by itself (16 a worker), each read a few samples at a time.
LOADER = ("--samples", "160", "--shards", "50", "--image-size", "32", "--num-workers", "1", "--repeats", "1",
         "--warmup-steps", "1")
LOADER_FIGURES = {"shard_opens", "distinct_shards", "opens_per_shard", "bytes_read", "index_opens", "index_bytes_read",
          "samples_used", "samples_decoded", "images_decoded", "decoded_per_used", "resident_bytes", "processes",
          "samples_per_s", "first_batch_s"}
# Flags, ranks that need each lane, rows of all lanes in a step, workers of all lanes.
LANES = {"two-lanes": (("--lanes", "2", "--llm-tp", "1", "--micro-batch-size", "5", "--steps", "10"), 2, 10, 2),
         "packed": (("--lanes", "1", "--llm-tp", "2", "--packing-buffer-size", "16", "--steps", "12"), 3, 1, 1)}


@pytest.mark.parametrize("case", LANES)
def test_figures_of_lane_loaders(case: str) -> None:
    given, readers, rows, workers = LANES[case]
    figures = bench("loader", "--device", "cpu", *LOADER, *given)
    routed, per_lane, ratios = figures["routed"], figures["per-lane"], figures["routed_over_per_lane"]
    assert figures["device"] == "cpu" and figures["world_size"] == 3 and figures["equal_batches"]
    assert all(arm[name] > 0 for arm in (routed, per_lane) for name in LOADER_FIGURES)
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


# Schedules on sleeping modules

ENCODER_MS, LANGUAGE_MS, MICROBATCHES = 45.0, 90.0, 4
SCHEDULE = "--device cpu --blocks 2 --warmup-blocks 1 --steps 1 --synthetic".split()


@pytest.mark.parametrize("stages", [1, 2])
def test_a_schedule_has_the_times_that_were_put_in(stages):
    # A sleep is never shorter than it was told to be, but parts of a step are differences of times: on a busy machine
    # they are told apart only by far.
    found = bench("schedule", *SCHEDULE, f"{ENCODER_MS},{LANGUAGE_MS}", "--global-batch-size", str(MICROBATCHES),
                  "--encoder-dp", "1", "--llm-pp", str(stages))
    language, vision, parts = found["grids"]["language"], found["grids"]["vision"], found["parts_ms"]
    assert (found["ranks"], found["microbatches"], found["critical"]) == (1 + stages, MICROBATCHES, "language")
    assert language["microbatch_ms"] >= LANGUAGE_MS and vision["microbatch_ms"] >= ENCODER_MS
    assert language["ideal_ms"] >= MICROBATCHES * LANGUAGE_MS and vision["ideal_ms"] >= MICROBATCHES * ENCODER_MS
    assert found["step_ms"] > (MICROBATCHES + stages - 1) * LANGUAGE_MS + ENCODER_MS
    # The first forward and the last backward pass of the encoder, and a microbatch for each further stage.
    assert parts["fill and drain"] >= 0.5 * ENCODER_MS
    assert (parts["bubble"] >= 0.5 * LANGUAGE_MS) == (stages > 1) and language["bubble_share"] == (stages - 1) / 5
    assert abs(sum(parts.values()) / found["step_ms"] - 1) <= 0.03
    assert 0 < found["eta"] and 1 < found["prefetch"]["bound"] < 2


def test_lanes_of_different_length_are_stragglers():
    found = bench("schedule", *SCHEDULE, "10,60,0.5", "--global-batch-size", "8", "--encoder-dp", "1", "--llm-dp", "2")
    assert found["grids"]["language"]["straggler_factor"] > 1 and found["parts_ms"]["imbalance"] > 0
    assert found["ranks"] == 3 and found["microbatches"] == 4


def test_run_ahead_off_and_on_in_one_run():
    found = bench("schedule", *SCHEDULE, *"""60,20,0.5,0.5 --global-batch-size 6 --encoder-dp 1 --llm-dp 1
        --encoder-run-ahead 3""".split())
    ahead = found["run_ahead"]
    # Equal work in both arms, and neither is faster than the encoder.
    assert found["critical"] == "vision" and min(ahead["off_ms"], ahead["on_ms"]) > 6 * 60
    # Passes alone are timed in blocks of their own, so on a busy machine eta may be above 1.
    assert 0 < min(ahead["eta_off"], ahead["eta_on"])
    assert found["encoder_run_ahead"] == 3 and found["bound_of_eta"] == 1


def test_prefetch_off_and_on_in_one_run():
    # So long that what a busy machine adds between passes is a small share of a step.
    found = bench("schedule", *SCHEDULE, *"""120,120 --global-batch-size 2 --encoder-dp 1 --llm-dp 1 --freeze vision
        --encoder-prefetch-depth 3""".split())
    prefetch = found["prefetch"]
    assert min(prefetch["off_ms"], prefetch["on_ms"]) > 2 * 120 and prefetch["speedup"] > 0
    assert 1 < prefetch["bound_of_step"] < prefetch["bound"] <= 2
    assert found["grids"]["vision"]["microbatch_ms"] >= 120


# Training

TRAIN = """--steps 3 --warmup-steps 1 --model-provider mock --dataset-provider mock --seq-length 128 --device cpu
--no-bf16 --micro-batch-size 2 --global-batch-size 4 --mock-text-only-fraction 0""".split()
LAYOUTS = ("--run", "disjoint=--encoder-dp 1 --llm-dp 1", "--run", "alone=--layout colocated")


def test_figures_of_training(tmp_path: Path) -> None:
    found = bench("train", *TRAIN, *LAYOUTS, "--out", str(tmp_path))
    assert [(run["name"], run["ranks"]) for run in found["runs"]] == [("disjoint", 2), ("alone", 1)]
    for run in found["runs"]:
        assert min(run["step_ms"], run["tokens_per_s_per_gpu"], run["tflops_per_gpu"]) > 0
        assert set(run["peak_memory_gib"]) == {"vision", "language"} and min(run["peak_memory_gib"].values()) > 0
        times = run["time_ms"]
        assert {"data_wait", "bridge_wait", "rest", "forward_backward/vision", "optimizer/language"} <= times.keys()
        assert 0 < times["forward_backward/language"] and 0 < times["optimizer/language"]
        assert len(run["losses"]) == 3 and run["loss_first"] == run["losses"][0] != run["loss_last"]
    assert (tmp_path / "disjoint" / "metrics.jsonl").exists()


# Starts

STARTUP = """--device cpu --repeats 1 --warmup-runs 0 --steps 3 --warmup-steps 1 --model-provider mock
--dataset-provider mock --seq-length 128 --no-bf16 --micro-batch-size 2 --global-batch-size 4 --encoder-dp 1
--llm-dp 1""".split()


def test_a_start_is_taken_apart():
    (run,) = bench("startup", *STARTUP)["runs"]
    assert set(run["parts_s"]) == {"launcher", *(phase.value for phase in Phase if phase != Phase.EVALUATION)}
    assert sum(run["parts_s"].values()) == pytest.approx(run["whole_s"])
    assert min(run["parts_s"].values()) >= 0 and run["parts_s"]["imports"] > 0
    assert min(run["first_over_steady"], run["baseline_s"], run["imports_over_baseline"]) > 0
    assert run["process_groups"] > run["process_groups_of_a_rank"] > 10


# Layouts

SEARCH = """--device cpu --gpus 2 --preset smallest --candidates 1 --search-steps 1 --warmup-steps 2 --rounds 1
--steps 2 --global-batch-size 4 --no-variants""".split()


@pytest.mark.timeout(600)
def test_every_kind_trains_alike(tmp_path: Path) -> None:
    colocated = "--layout colocated --encoder-dp 2 --llm-tp 2 --sequence-parallel --micro-batch-size 2"
    found = bench("layouts", *SEARCH, "--out", str(tmp_path), "--colocated", colocated)
    rows = {row["kind"]: row for row in found["layouts"]}
    assert set(rows) == {"homogeneous", "colocated", "disjoint"} and len(found["layouts"]) == 3
    for row in rows.values():
        assert min(row["tokens_per_s"], row["tflops"], row["step_ms"], row["peak_gib"], row["over_homogeneous"]) > 0
        assert row["rounds"] == 1 and len(row["losses"]) == 4 and not row["error"]
    assert rows["homogeneous"]["over_homogeneous"] == 1
    assert 0 < rows["disjoint"]["eta_split"] <= 1 and rows["colocated"]["eta_split"] is None
    # Also where tensor parallelism splits what is drawn: the same weights, the same batches.
    assert "--encoder-dp 2 --llm-tp 2" in rows["colocated"]["layout"]
    assert 0 <= found["loss_difference"] <= found["loss_tolerance"] == 1e-4
    assert (tmp_path / "round-1--disjoint----encoder-dp-1---llm-dp-1" / "metrics.jsonl").exists()


@pytest.mark.timeout(600)
def test_a_layout_without_room_is_a_row_and_the_next_one_runs() -> None:
    small = "--encoder-dp 1 --llm-dp 1"
    large = f"{small} --hidden-size 512 --vocab-size 400000 --image-token-id 399999"
    done = start_bench("layouts", *SEARCH, "--kind", "disjoint", "--disjoint", large, "--disjoint", small,
                       "--memory-limit-gib", "0.5")
    found = json.loads(done.stdout.splitlines()[-1])
    full, trained = found["layouts"]
    assert (full["layout"], full["error"], full["tokens_per_s"]) == (large, "out of memory", None)
    assert "out-of-memory-rank1: " in done.stderr and "allocate" in done.stderr
    assert (trained["layout"], trained["error"], trained["rounds"]) == (small, "", 1) and trained["tokens_per_s"] > 0
    assert found["loss_difference"] < 1e-6 and trained["over_homogeneous"] is None


# Long rows

VIDEOS = """--device cpu --text-tokens 24 --pair-tokens 4 --num-layers 2 --hidden-size 64 --ffn-hidden-size 128
--num-attention-heads 4 --num-query-groups 2 --kv-channels 16 --mrope-section 4 2 2 --logits-chunk-size 64
--vision-hidden-size 32 --vision-num-layers 2 --vision-ffn-hidden-size 64 --vision-deepstack-layers 0 1
--vision-num-attention-heads 4 --mock-image-size 64 --mock-min-length 20 --mock-max-length 20""".split()


@pytest.mark.timeout(600)
def test_every_way_to_share_a_row_trains_alike() -> None:
    found = bench("long_rows", *VIDEOS, "--lengths", "64", "128", "128", "--steps", "2", "--frames",
                  "--context-recomputed", "0", "1", "0")
    assert [(row["layout"], row["length"], row["recomputed"]) for row in found["rows"]] == [
        ("context parallel", 64, 0), ("tensor parallel", 64, 0), ("context parallel, frames on each", 64, 0),
        ("context parallel", 128, 1), ("tensor parallel", 128, 0),
        ("context parallel", 128, 0), ("tensor parallel", 128, 0)]
    turns = [row["tokens_per_s"] for row in found["rows"][3:]]
    assert len(set(turns)) == 4, "two turns are one run"
    assert found["context_over_tensor"]["128"] == pytest.approx((turns[0] + turns[2]) / (turns[1] + turns[3]))
    for row in found["rows"]:
        assert min(row["tokens_per_s"], row["step_ms"], row["peak_gib"], row["encoder_ms"]) > 0 and not row["error"]
        alike = next(each for each in found["rows"] if each["length"] == row["length"])
        assert row["losses"] == pytest.approx(alike["losses"], rel=1e-6)
    assert set(found["context_over_tensor"]) == {"64", "128"} and found["frames"] > 0


@pytest.mark.timeout(600)
def test_rows_grow_until_the_memory_is_full() -> None:
    found = bench("long_rows", *VIDEOS, "--part", "longest", "--memory-limit-gib", "1.479")
    alone = [row for row in found["rows"] if row["gpus"] == 1]
    lengths = [row["length"] for row in alone]
    assert len(lengths) > 1 and lengths == sorted(lengths)
    assert alone[0]["planned_gib"] <= 0.9 * 1.479 < alone[-1]["planned_gib"], "rows do not start where the plan is full"
    assert [row["error"] for row in alone] == [""] * (len(alone) - 1) + ["out of memory"]
    assert (found["one_gpu_fits"], found["one_gpu_does_not_fit"]) == tuple(lengths[-2:])
    for layout, name in (("context parallel", "longest"), ("tensor parallel", "longest_tensor")):
        shared = [row for row in found["rows"] if row["layout"] == layout]
        assert shared and {row["gpus"] for row in shared} == {2}
        assert found[name] == max((row["length"] for row in shared if not row["error"]), default=0) / lengths[-1]
