"""Output of --dry-run."""

import pytest

from mimo import registry
from mimo.config.cli import parse
from mimo.config.validate import run_world_size, validate
from mimo.grid.dry_run import dry_run_report

FAKE = ["--model-provider", "tests.unit.config.fake_provider:model",
        "--dataset-provider", "tests.unit.config.fake_provider:dataset", "--dry-run"]


def report(flags: str) -> str:
    config = parse([*FAKE, *flags.split()])
    layout = validate(config, run_world_size(config, {}))
    return dry_run_report(config, layout, registry.model_provider(config.model.model_provider))


def row(text: str, start: str) -> list[str]:
    """Cells of the first line that begins with `start`."""
    return next(line for line in text.splitlines() if line.startswith(start)).split()


def test_the_figures_of_a_small_world():
    text = report("--encoder-dp 2 --llm-tp 2 --llm-pp 2 --micro-batch-size 3 --global-batch-size 6")
    assert text.startswith("layout disjoint, 6 ranks, 1 lane\n")
    assert row(text, "grid") == ["grid", "ranks", "tp", "cp", "dp", "pp", "ep", "expt_tp", "expt_dp"]
    assert row(text, "vision") == ["vision", "0-1", "1", "1", "2", "1", "1", "1", "2"]
    assert row(text, "language") == ["language", "2-5", "2", "1", "1", "2", "1", "1", "2"]
    assert "  vision dp 0 -> lane 0, samples 0\n  vision dp 1 -> lane 0, samples 1-2\n" in text
    assert "  rank  1  vision tp 0 dp 1 pp 0\n" in text
    assert "  rank  5  language tp 1 dp 0 pp 1\n" in text
    # embedding 16x8 over tp 2, then 2 of 4 layers of an 8x8 matrix over tp 2 and a norm of 8
    parameters = row(text[text.index("\nparameters"):], "language")
    assert parameters == ["language", str(16 * 8 * 2 + 4 * (64 + 8)), str(64 + 2 * (32 + 8))]
    assert "batch: 2 microbatches per iteration (--global-batch-size 6 = 2 * --micro-batch-size 3 * 1 lane)" in text
    # one image of 8x8 pixels in patches of 2x2 = 16 tokens, 3 samples, hidden size 8, 2 bytes
    assert "bridge: 768 B per lane and microbatch, 768 B over all lanes, forward and again backward\n" in text
    assert "(one 8x8 image per sample = 16 tokens, hidden size 8, bf16)" in text
    assert "for an image of 8x8 from the data set to its encoder, in float32\n" in text


def test_fan_out_serves_whole_lanes_and_fp32_moves_twice_the_bytes():
    text = report("--encoder-dp 2 --llm-dp 4 --no-bf16")
    assert "  vision dp 0 -> lanes 0-1\n  vision dp 1 -> lanes 2-3\n" in text
    assert "bridge: 512 B per lane and microbatch, 2,048 B (2.0 KiB) over all lanes," in text


def test_context_parallel_ranks_and_what_they_get():
    text = report("--llm-cp 2 --seq-length 64")
    assert row(text, "language") == ["language", "1-2", "1", "2", "1", "1", "1", "1", "2"]
    assert "each of 2 ranks computes 32 of the 64 tokens of a whole row, chunks r and 3 - r of 4 on rank r\n" in text
    assert "  the 2 context-parallel ranks of a lane each get the rows of their own tokens, 128 B on average" in text


def test_the_logits_of_some_tokens_at_a_time():
    # A vocabulary of 16 rows, over two ranks.
    assert ("logits: of 10 tokens at a time (--logits-chunk-size), about 480 B on a rank instead of 3,072 B (3.0 KiB)"
            in report("--llm-tp 2 --logits-chunk-size 10 --seq-length 64"))
    assert "; the backward pass needs up to " in report("--logits-chunk-size 10 --seq-length 64")
    assert "of 64 tokens at a time" in report("--logits-chunk-size 100 --seq-length 64")


def test_a_homogeneous_layout_has_no_bridge():
    text = report("--layout homogeneous --llm-pp 2")
    assert "layout homogeneous, 2 ranks, 1 lane\n" in text and "bridge" not in text
    assert "  rank  1  language tp 0 dp 0 pp 1" in text


def test_encoder_windows_and_uneven_stages_are_shown():
    text = report("--layout colocated --encoder-dp 2 --llm-pp 2 --encoder-window 3")
    assert "images of every 3 microbatches, of all lanes, are dealt by cost to the 2 replicas of vision\n" in text
    text = report("--layout colocated --encoder-dp 2 --llm-pp 2 --encoder-window 0 --no-encoder-balance")
    assert "images of a whole iteration, of all lanes, are dealt in order to the 2 replicas of vision\n" in text


def test_colocated_ranks_show_both_places_and_frozen_parts_are_marked():
    text = report("--layout colocated --encoder-dp 2 --llm-tp 2 --micro-batch-size 2 --freeze vision")
    assert "  rank  1  vision tp 0 dp 1 pp 0; language tp 1 dp 0 pp 0\n" in text
    assert "vision (frozen)" in text and "language (frozen)" not in text


def test_the_memory_of_prefetched_features():
    flags = "--dry-run --model-provider llava --freeze vision --encoder-dp 2 --llm-dp 4 --global-batch-size 8"

    def planned(more: str) -> str:
        config = parse([*flags.split(), *more.split()])
        layout = validate(config, run_world_size(config, {}))
        return dry_run_report(config, layout, registry.model_provider("llava"))

    # 3 microbatches of 2 lanes with an image of 576 tokens each, 1024 columns, bf16
    text = planned("--encoder-prefetch-depth 3")
    assert f"up to 3 microbatches of features on each rank of vision, {3 * 2 * 576 * 1024 * 2:,} B" in text
    assert "prefetch" not in planned("")


def test_the_plan_counts_the_microbatches_that_an_encoder_running_ahead_keeps():
    flags = "--encoder-dp 2 --llm-pp 2 --llm-dp 2 --encoder-run-ahead 3 --global-batch-size"
    assert "encoder run-ahead: activations of up to 6 microbatches on" in report(f"{flags} 16")
    text = report(f"{flags} 10")
    assert "up to 5 microbatches on each rank of an encoder's first stage (3 without)" in text
    assert "run-ahead" not in report("--encoder-dp 2 --llm-dp 2")


def test_without_encoder_there_is_no_bridge():
    text = report("--llm-only --llm-dp 2 --dataset-provider mock --mock-images-max 0")
    assert "bridge" not in text and "vision" not in text
    assert "lanes: language dp rank l reads lane l of 2" in text


@pytest.mark.parametrize("flags", [
    "--world-size 264 --encoder-dp 8 --llm-tp 8 --llm-dp 32 --global-batch-size 32",
    "--world-size 16640 --encoder-dp 256 --llm-tp 8 --llm-dp 512 --llm-pp 4 --global-batch-size 512",
    "--world-size 1024 --layout colocated --encoder-dp 1024 --llm-tp 8 --llm-dp 128 --micro-batch-size 8 "
    "--global-batch-size 1024",
])
def test_a_big_world_stays_on_a_page(flags):
    text = report(flags)
    assert len(text.splitlines()) < 60
    assert max(map(len, text.splitlines())) < 120
    assert "more ..." in text


def test_the_ranges_of_a_big_world_end_at_its_last_rank():
    text = report("--world-size 264 --encoder-dp 8 --llm-tp 8 --llm-dp 32 --global-batch-size 32")
    assert "  vision dp 7 -> lanes 28-31\n" in text
    assert "  language dp 0  ranks 8-15\n" in text
    assert "  language dp 31  ranks 256-263\n" in text
