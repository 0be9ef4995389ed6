"""--encoder-prefetch-depth and --encoder-run-ahead: what they need, refused by flag and value before a run starts."""

import pytest

from mimo.config.cli import parse
from mimo.config.validate import steps_ahead, validate

BASE = ["--model-provider", "tests.unit.config.fake_provider:model",
        "--dataset-provider", "tests.unit.config.fake_provider:dataset", "--train-iters", "4"]
# Two microbatches an iteration.
FROZEN = "--freeze vision --global-batch-size 2 --encoder-prefetch-depth"


def checked(flags: str, world_size: int = 2):
    return validate(parse([*BASE, *flags.split()]), world_size)


@pytest.mark.parametrize(("flags", "world_size"), [(f"{FROZEN} 0", 2), (f"{FROZEN} 1", 2), (f"{FROZEN} 8", 2),
                                                   (f"{FROZEN} 3 --encoder-tp 2 --llm-pp 2", 4),
                                                   (f"{FROZEN} 3 --freeze vision,projector", 2),
                                                   (f"{FROZEN} 3 --freeze language,vision", 2),
                                                   ("--layout colocated --encoder-prefetch-depth 0", 1)])
def test_runs_that_can_prefetch_are_accepted(flags, world_size):
    assert checked(flags, world_size).encoders


@pytest.mark.parametrize(("flags", "world_size", "expected"), [
    (f"{FROZEN} -1", 2, "--encoder-prefetch-depth -1 is below 0"),
    ("--encoder-prefetch-depth 2", 2, "--encoder-prefetch-depth 2 with --freeze '': vision trains, .* add vision to"),
    ("--freeze projector --encoder-prefetch-depth 2", 2, "with --freeze 'projector': vision trains"),
    (f"{FROZEN} 1 --layout colocated", 1, "--encoder-prefetch-depth 1 with --layout colocated: .* --layout disjoint"),
    (f"{FROZEN} 1 --llm-only --freeze x", 1, "--freeze x: unknown part"),
    ("--llm-only --encoder-prefetch-depth 1", 1, "--encoder-prefetch-depth 1: a run without encoder"),
    (f"{FROZEN} 1 --encoder-pp 2", 3, "--encoder-prefetch-depth 1 with --encoder-pp 2: .* use --encoder-pp 1"),
    (f"{FROZEN} 9", 2, "--encoder-prefetch-depth 9: an iteration has 2 microbatches .*; at most 8"),
])
def test_runs_that_cannot_prefetch_are_refused_with_flag_and_value(flags, world_size, expected):
    with pytest.raises(ValueError, match=expected):
        checked(flags, world_size)


@pytest.mark.parametrize(("depth", "num_microbatches", "steps"), [(0, 4, 0), (1, 1, 1), (1, 4, 1), (4, 4, 1), (5, 4, 2),
                                                                 (3, 1, 3)])
def test_a_queue_reaches_over_as_many_iterations_as_it_is_long(depth, num_microbatches, steps):
    assert steps_ahead(depth, num_microbatches) == steps


# --encoder-run-ahead: a trained encoder may be ahead inside an iteration

@pytest.mark.parametrize(("flags", "world_size"), [("--encoder-run-ahead 3", 2),
                                                   ("--encoder-run-ahead 100 --encoder-tp 2 --llm-pp 2", 4),
                                                   ("--encoder-run-ahead 1 --encoder-pp 2", 3),
                                                   ("--encoder-run-ahead 1 --freeze vision,projector", 2),
                                                   ("--encoder-run-ahead 0 --layout colocated", 1)])
def test_an_encoder_may_run_ahead(flags, world_size):
    assert checked(flags, world_size).encoders


@pytest.mark.parametrize(("flags", "world_size", "expected"), [
    ("--encoder-run-ahead -1", 2, "--encoder-run-ahead -1 is below 0"),
    ("--encoder-run-ahead 2 --layout colocated", 1, "--encoder-run-ahead 2 with --layout colocated: .* leave it out"),
    ("--encoder-run-ahead 2 --layout homogeneous", 1, "--encoder-run-ahead 2 with --layout homogeneous: .*disjoint"),
    ("--encoder-run-ahead 2 --llm-only", 1, "--encoder-run-ahead 2: a run without encoder"),
    (f"{FROZEN} 1 --encoder-run-ahead 2", 2, "--encoder-run-ahead 2 with --encoder-prefetch-depth 1: a frozen encoder"),
])
def test_an_encoder_that_cannot_run_ahead_is_refused(flags, world_size, expected):
    with pytest.raises(ValueError, match=expected):
        checked(flags, world_size)
