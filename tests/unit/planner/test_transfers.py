"""Bytes and links of the transfers of a simulated iteration."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import pytest

from mimo.planner.costs import LATENCY_S
from mimo.planner.gpus import GPUS
from mimo.planner.transfers import transfers
from mimo.planner.workload import SampleSize
from tests.support.planning import config_of, step_of

H200 = GPUS["H200"]
HIDDEN = 4096  # of the preset
BATCH = [SampleSize(300, (64, 16)), SampleSize(4000)]


def moved(flags: str, gpus: int, samples: list[SampleSize]) -> Callable[[Hashable, float], float]:
    """Return a function from a key and the GB/s of its link to the bytes of a transfer."""
    config = config_of(f"--microbatch-order read {flags}", "10b-uneven")
    step = step_of(config, gpus)
    assert config.model_family.hidden_size == HIDDEN
    seconds = transfers(step, step.batches(samples)[0])
    return lambda key, gb_s: (seconds(key) - LATENCY_S) * gb_s * 1e9


def test_stages_send_rows_of_their_microbatch() -> None:
    bytes_of = moved("--layout homogeneous --llm-pp 2", 2, BATCH * 12)
    # Rows have a multiple of 256 tokens: 380 are 512.
    sent = [bytes_of(((0, 0), "forward", microbatch), H200.link_gb_s) for microbatch in range(2)]
    assert sent == pytest.approx([512 * HIDDEN * 2, 4096 * HIDDEN * 2])
    assert moved("--layout homogeneous --llm-pp 2 --no-bf16", 2, BATCH * 12)(
        ((0, 0), "backward", 0), H200.link_gb_s) == pytest.approx(2 * sent[0])


def test_the_bridge_carries_tokens_of_images() -> None:
    bytes_of = moved("--encoder-dp 1 --llm-dp 1", 2, BATCH * 12)
    sent = [bytes_of((("bridge", 0, 0), "forward", microbatch), H200.link_gb_s) for microbatch in range(2)]
    assert sent == pytest.approx([80 * HIDDEN * 2, 0], abs=1)
    # One rank sends each half to one of two, which gather them, so that its link and theirs carry three halves.
    halves = moved("--encoder-dp 1 --llm-tp 2 --sequence-parallel", 3, BATCH * 12)
    assert halves((("bridge", 0, 0), "forward", 0), H200.link_gb_s) == pytest.approx(1.5 * sent[0])


def test_windows_carry_the_images_of_their_microbatches() -> None:
    bytes_of = moved("--layout colocated --encoder-dp 2 --llm-pp 2 --encoder-window 2", 2, BATCH * 12)
    assert bytes_of(("features", 0), H200.link_gb_s) == pytest.approx(80 * HIDDEN * 2)


def test_stages_of_one_node_do_not_take_the_network() -> None:
    # Eight ranks of stages 0 and 1 are on the first of two nodes.
    bytes_of = moved("--layout homogeneous --llm-dp 4 --llm-pp 4 --global-batch-size 64", 16, BATCH * 32)
    found = [bytes_of(((0, stage), "forward", 0), gb_s)
             for stage, gb_s in enumerate((H200.link_gb_s, H200.network_gb_s, H200.link_gb_s))]
    assert found == pytest.approx([found[0]] * 3)


def test_lanes_of_one_replica_share_its_features_and_stages_of_an_encoder_its_patches() -> None:
    shared = moved("--layout colocated --encoder-dp 1 --encoder-tp 2 --llm-dp 2", 2, BATCH * 12)
    assert shared((range(2), "forward", 0), H200.link_gb_s) == pytest.approx(80 * HIDDEN * 2)
    stages = moved("--encoder-dp 1 --encoder-pp 2 --llm-dp 1", 3, BATCH * 12)
    config = config_of("", "10b-uneven")
    patches = 80 * config.model_family.vision_pixel_shuffle**2
    sent = stages(((("encoder", 0), 0), "forward", 0), H200.link_gb_s)
    assert sent == pytest.approx(patches * config.model_family.vision_hidden_size * 2)
