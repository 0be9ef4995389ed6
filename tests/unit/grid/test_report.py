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


AHEAD = "--encoder-dp 2 --llm-pp 2 --llm-dp 2 --encoder-run-ahead 3 --global-batch-size"
WINDOW = "--layout colocated --encoder-dp 2 --llm-pp 2 --encoder-window"


@pytest.mark.parametrize(("flags", "shown", "absent"), [
    # Fan-out serves whole lanes, and fp32 moves twice the bytes.
    ("--encoder-dp 2 --llm-dp 4 --no-bf16", [
        "  vision dp 0 -> lanes 0-1\n  vision dp 1 -> lanes 2-3\n",
        "bridge: 512 B per lane and microbatch, 2,048 B (2.0 KiB) over all lanes,"], ["run-ahead"]),
    # Logits of a vocabulary of 16 rows, over two ranks.
    ("--llm-tp 2 --logits-chunk-size 10 --seq-length 64", [
        "logits: of 10 tokens at a time (--logits-chunk-size), about 320 B on a rank instead of 2,048 B (2.0 KiB)"],
     []),
    ("--llm-tp 2 --logits-chunk-size 10 --seq-length 64 --no-bf16", [
        "logits: of 10 tokens at a time (--logits-chunk-size), about 640 B on a rank"], []),
    ("--logits-chunk-size 10 --seq-length 64", ["; the backward pass needs up to "], []),
    ("--logits-chunk-size 100 --seq-length 64", ["of 64 tokens at a time"], []),
    ("--layout homogeneous --llm-pp 2", [
        "layout homogeneous, 2 ranks, 1 lane\n", "  rank  1  language tp 0 dp 0 pp 1"], ["bridge"]),
    (f"{WINDOW} 3", [
        "images of every 3 microbatches, of all lanes, are dealt by cost to the 2 replicas of vision\n"], []),
    (f"{WINDOW} 0 --no-encoder-balance", [
        "images of a whole iteration, of all lanes, are dealt in order to the 2 replicas of vision\n"], []),
    # Colocated ranks show both places, and frozen parts are marked.
    ("--layout colocated --encoder-dp 2 --llm-tp 2 --micro-batch-size 2 --freeze vision", [
        "  rank  1  vision tp 0 dp 1 pp 0; language tp 1 dp 0 pp 0\n", "vision (frozen)"], ["language (frozen)"]),
    # An encoder that runs ahead keeps more microbatches.
    (f"{AHEAD} 16", ["encoder run-ahead: activations of up to 6 microbatches on"], []),
    (f"{AHEAD} 10", ["up to 5 microbatches on each rank of an encoder's first stage (3 without)"], []),
    ("--llm-only --llm-dp 2 --dataset-provider mock --mock-images-max 0", [
        "lanes: language dp rank l reads lane l of 2"], ["bridge", "vision"]),
    # The ranges of a big world end at its last rank.
    ("--world-size 264 --encoder-dp 8 --llm-tp 8 --llm-dp 32 --global-batch-size 32", [
        "  vision dp 7 -> lanes 28-31\n", "  language dp 0  ranks 8-15\n", "  language dp 31  ranks 256-263\n"], []),
])
def test_the_plan_shows_what_a_layout_does(flags, shown, absent):
    text = report(flags)
    assert [each for each in shown if each not in text] == [each for each in absent if each in text] == []


def test_context_parallel_ranks_and_what_they_get():
    text = report("--llm-cp 2 --seq-length 64")
    assert row(text, "language") == ["language", "1-2", "1", "2", "1", "1", "1", "1", "2"]
    assert "each of 2 ranks computes 32 of the 64 tokens of a whole row, chunks r and 3 - r of 4 on rank r\n" in text
    assert "  the 2 context-parallel ranks of a lane each get the rows of their own tokens, 128 B on average" in text


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
