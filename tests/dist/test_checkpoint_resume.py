"""A run that goes on from a checkpoint is the run that was not interrupted: to the bit on the same layout."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mimo.grid.spec import GridSpec, Layout
from tests.support.equality import MOE, TOLERANCE, part_of, run_oracle
from tests.support.global_state import assemble, worst_errors
from tests.support.hf_families import LLAVA_MODELS, VOCAB_SIZE
from tests.support.marks import fast_only
from tests.support.resuming import (
    NUM_STEPS,
    SAVED_AT,
    Run,
    assert_same_bits,
    find_differences,
    refusal,
    resave,
    started,
    train,
    whole_parameters,
)
from tests.support.spawn import WorkerPool
from tests.support.steps import run_loop

DROPOUT = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")
# name -> (ranks, flags, flags of the run that saves)
SAME_LAYOUT = {
    "disjoint-llm-dp2": (3, "--llm-dp 2", ""),
    "colocated-bf16": (2, "--layout colocated --encoder-dp 2 --llm-tp 2 --micro-batch-size 2 --sequence-parallel "
                       "--bf16", "--async-save"),
    "pp2": (3, "--llm-pp 2 --bf16", "--async-save"),
    "tp2": (3, "--llm-tp 2 --no-use-distributed-optimizer", ""),
    "both-pp2": (4, "--encoder-pp 2 --llm-pp 2 --bf16", "--async-save"),
    "both-tp2": (4, "--encoder-tp 2 --llm-tp 2 --no-use-distributed-optimizer", ""),
    "moe-ep2-bf16": (3, f"--llm-dp 2 --llm-ep 2 --bf16 {' '.join(MOE)}", ""),
    "unsharded-optimizer-bf16": (3, "--encoder-dp 2 --micro-batch-size 2 --no-use-distributed-optimizer --bf16", ""),
    "windows-pp2-bf16": (2, "--layout colocated --encoder-dp 2 --llm-pp 2 --bf16", "--async-save"),
    "homogeneous-pp2-uneven": (2, "--layout homogeneous --llm-pp 2 --num-layers 3 --llm-pp-layout 1,2", ""),
    "cp2": (3, "--llm-cp 2", ""),
    "overlapped": (3, "--llm-dp 2 --overlap-grad-reduce --overlap-param-gather --ddp-num-buckets 3", "--async-save"),
}


@pytest.mark.parametrize("layout", fast_only(("tp2", "disjoint-llm-dp2"), SAME_LAYOUT))
def test_same_layout_continues_to_the_bit(pool: WorkerPool, tmp_path: Path, layout: str) -> None:
    world_size, flags, saving = SAME_LAYOUT[layout]
    flags = (*flags.split(), *DROPOUT)
    whole = pool.run(train, (*flags, *saving.split(), "--save", str(tmp_path)), world_size, world_size=world_size)
    rest = pool.run(train, (*flags, "--load", str(tmp_path)), world_size, world_size=world_size)
    assert_same_bits(whole, rest)


# One checkpoint for all layouts: name -> (ranks, flags) of the run that saves, (ranks, flags) of those that load.
ORIGINS = {
    "dense": (3, "--llm-dp 2"),
    "moe": (3, f"--llm-dp 2 --llm-ep 2 {' '.join(MOE)}"),
    "dense-colocated-unsharded": (2, "--layout colocated --encoder-tp 2 --llm-tp 2 --sequence-parallel "
                                  "--no-use-distributed-optimizer"),
    "dense-pipelines": (4, "--encoder-pp 2 --llm-pp 2"),
    "dense-cp2": (2, "--layout colocated --encoder-dp 2 --llm-cp 2"),
    "uneven-stages": (2, "--layout homogeneous --llm-pp 2 --num-layers 4 --llm-pp-layout 1,3"),
    "four-layers": (3, "--llm-pp 2 --num-layers 4"),
}
OTHER_LAYOUTS = {
    "llm-tp2": ("dense", 3, "--llm-tp 2 --sequence-parallel"),
    "both-tp2-unsharded": ("dense", 4, "--encoder-tp 2 --llm-tp 2 --no-use-distributed-optimizer"),
    "both-pp2": ("dense", 4, "--encoder-pp 2 --llm-pp 2"),
    "encoder-dp2-llm-dp1": ("dense", 3, "--encoder-dp 2 --micro-batch-size 2"),
    "colocated": ("dense", 2, "--layout colocated --encoder-dp 2 --llm-tp 2 --micro-batch-size 2 --sequence-parallel"),
    "one-process": ("dense", 1, "--layout colocated"),
    "unsharded": ("dense", 3, "--llm-dp 2 --no-use-distributed-optimizer"),
    "moe-ep1": ("moe", 2, ""),
    "moe-ep4-of-dp4": ("moe", 4, "--layout colocated --encoder-dp 4 --llm-dp 4 --llm-ep 4"),
    "moe-tp2-ep2-expert-tp1": ("moe", 3, "--llm-tp 2 --sequence-parallel --llm-ep 2"),
    "moe-expert-tp2-unsharded": ("moe", 3, "--llm-tp 2 --sequence-parallel --llm-expt-tp 2 "
                                 "--no-use-distributed-optimizer"),
    "moe-pp2": ("moe", 3, "--llm-pp 2"),
    "llm-cp2": ("dense", 3, "--llm-cp 2"),
    "from-cp2-to-one-process": ("dense-cp2", 1, "--layout colocated"),
    "from-colocated-to-disjoint": ("dense-colocated-unsharded", 3, "--llm-dp 2"),
    "from-pipelines-to-tp2": ("dense-pipelines", 3, "--llm-tp 2"),
    "windows-pp2": ("dense", 2, "--layout colocated --encoder-dp 2 --llm-pp 2"),
    "homogeneous-pp2": ("dense", 2, "--layout homogeneous --llm-pp 2"),
    "from-uneven-stages-to-disjoint": ("uneven-stages", 3, "--llm-pp 2 --num-layers 4"),
    "from-even-to-uneven-stages": ("four-layers", 2, "--layout colocated --encoder-dp 2 --llm-pp 2 --num-layers 4 "
                                   "--llm-pp-layout 3,1"),
}


Origins = Callable[[str], tuple[Path, list[Run]]]


@pytest.fixture(scope="module")
def origins(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Origins:
    """Gives a checkpoint of ORIGINS and the uninterrupted run, made when first asked for."""
    @cache
    def find(name: str) -> tuple[Path, list[Run]]:
        world_size, flags = ORIGINS[name]
        folder = tmp_path_factory.mktemp(name)
        return folder, pool.run(train, (*flags.split(), "--save", str(folder)), world_size, world_size=world_size)

    return find


@pytest.mark.parametrize("layout", fast_only(("llm-tp2", "from-colocated-to-disjoint"), OTHER_LAYOUTS))
def test_any_layout_continues(pool: WorkerPool, origins: Origins, layout: str) -> None:
    origin, world_size, flags = OTHER_LAYOUTS[layout]
    folder, whole = origins(origin)
    model = MOE if origin == "moe" else ()
    rest = pool.run(train, (*flags.split(), *model, "--load", str(folder)), world_size, world_size=world_size)
    found = find_differences(whole, rest)
    assert not found, "\n".join(found[:8] + [f"... {len(found)} differences"])


@pytest.mark.slow
def test_modules_may_change_places(pool: WorkerPool, origins: Origins) -> None:
    folder, whole = origins("dense")
    layout = Layout("disjoint", 3, (GridSpec("vision", offset=2),), GridSpec("language", offset=0, dp=2))
    rest = pool.run(train, ("--llm-dp", "2", "--load", str(folder)), 3, NUM_STEPS, (), layout, world_size=3)
    assert not find_differences(whole, rest)


ROUND_TRIPS = {
    "cp2": ("--llm-dp 2", 3, "--llm-cp 2"),
    "cp2-bf16": ("--llm-dp 2 --bf16", 4, "--layout homogeneous --llm-cp 2 --llm-pp 2 --bf16"),
    "dense-bf16": ("--llm-dp 2 --bf16", 4, "--encoder-tp 2 --llm-pp 2 --no-use-distributed-optimizer --bf16"),
    "moe-bf16": (f"--llm-dp 2 --llm-ep 2 --bf16 {' '.join(MOE)}", 4,
                 "--layout colocated --encoder-dp 4 --llm-tp 2 --llm-dp 2 --sequence-parallel --llm-ep 2 "
                 f"--llm-expt-tp 2 --micro-batch-size 2 --bf16 {' '.join(MOE)}"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_another_layout_keeps_every_bit(pool: WorkerPool, tmp_path: Path, name: str) -> None:
    """Loaded and saved again by another layout, a checkpoint is the same for the first one."""
    flags, world_size, between = ROUND_TRIPS[name]
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    whole = pool.run(train, (*flags.split(), "--save", first), 3, world_size=3)
    pool.run(resave, (*between.split(), "--load", first, "--save", second), world_size, world_size=world_size)
    assert_same_bits(whole, pool.run(train, (*flags.split(), "--load", second), 3, world_size=3))


CONSTANT = ("--global-batch-size", "4", "--lr-decay-style", "constant", "--lr-warmup-iters", "0", "--min-lr", "0")
STAGES = ("language,vision", "language", "vision,projector")
SECOND_STAGES = {
    "same-layout": (3, "--llm-dp 2"),
    "colocated-tp2": (2, "--layout colocated --encoder-dp 2 --llm-tp 2 --micro-batch-size 2 --sequence-parallel"),
    "pipelines-unsharded": (4, "--encoder-pp 2 --llm-pp 2 --no-use-distributed-optimizer"),
}


@pytest.mark.slow
@pytest.mark.parametrize("frozen", STAGES)
def test_frozen_stage_then_everything_trains(pool: WorkerPool, tmp_path: Path, frozen: str) -> None:
    """Parts that were frozen start with fresh moments and Adam's first update; the others go on."""
    parts = frozenset(frozen.split(","))
    oracle = pool.run(run_oracle, CONSTANT, 5, parts, SAVED_AT, world_size=1)[0]
    first = pool.run(train, ("--llm-dp", "2", *CONSTANT, "--freeze", frozen, "--save", str(tmp_path)), 3, SAVED_AT,
                     world_size=3)
    assert first[0].losses == pytest.approx(oracle.losses[:SAVED_AT], rel=TOLERANCE)
    for world_size, flags in SECOND_STAGES.values():
        runs = pool.run(train, (*flags.split(), *CONSTANT, "--load", str(tmp_path)), world_size, 5,
                        world_size=world_size)
        for run in runs:
            assert run.losses == pytest.approx(oracle.losses[SAVED_AT:], rel=TOLERANCE)
            assert run.grad_norms == pytest.approx(oracle.grad_norms[SAVED_AT:], rel=TOLERANCE)
            assert all(counts == {3 if part in parts else 5} for part, counts in run.updates.items()), run.updates
            fresh = [line for line in run.lines if "its optimizer starts fresh" in line]
            assert len(fresh) == len(parts) and all(any(f"{part} (" in line for line in fresh) for part in parts)
        assert {part for run in runs for part in run.updates} == {"language", "vision", "projector"}
        errors = worst_errors(assemble(oracle.parameters), [run.parameters for run in runs])
        assert max(errors.values()) < TOLERANCE, errors


@pytest.mark.slow
def test_a_trained_part_may_be_frozen_later(pool: WorkerPool, origins: Origins) -> None:
    folder, _ = origins("dense")
    flags = ("--llm-dp", "2", "--load", str(folder))
    loaded = pool.run(train, flags, 3, SAVED_AT, world_size=3)
    frozen = pool.run(train, (*flags, "--freeze", "vision"), 3, world_size=3)
    before = whole_parameters(loaded)
    for name, value in whole_parameters(frozen).items():
        assert np.array_equal(value, before[name]) == (part_of(name) == "vision"), name
    assert frozen[0].updates == {"projector": {NUM_STEPS}}
    assert frozen[1].updates == {"language": {NUM_STEPS}}


# What is taken from a checkpoint, on one process


@pytest.fixture(scope="module")
def alone(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Run]:
    """Checkpoints of iterations 2 and 4 of a run with dropout, and the run."""
    folder = str(tmp_path_factory.mktemp("alone"))
    return folder, one_process(pool, *DROPOUT, "--save", folder, save_at=(2, 4))


def one_process(pool: WorkerPool, *flags: str, until: int = NUM_STEPS, save_at: tuple[int, ...] = (2,)) -> Run:
    """`train` with both modules on one process."""
    run: Run = pool.run(train, ("--layout", "colocated", *flags), 1, until, save_at, world_size=1)[0]
    return run


def refused(pool: WorkerPool, *flags: str) -> str:
    """Return the errors of starts with flags that are refused, both modules on one process."""
    message = pool.run(refusal, ("--layout", "colocated", *flags), 1, world_size=1)[0]
    assert message, "not refused"
    return message


@pytest.mark.slow
def test_everything_is_taken_unless_flags_say_otherwise(pool: WorkerPool, alone: tuple[str, Run]) -> None:
    folder, whole = alone
    rest = one_process(pool, *DROPOUT, "--load", folder)
    assert len(rest.losses) == 3, "the latest checkpoint"
    assert_same_bits([whole], [rest])
    assert rest.lines == [f"loaded {folder}/iter_0000004"]


@pytest.mark.slow
def test_ckpt_step(pool: WorkerPool, alone: tuple[str, Run]) -> None:
    folder, whole = alone
    rest = one_process(pool, *DROPOUT, "--load", folder, "--ckpt-step", "2")
    assert len(rest.losses) == 5
    assert_same_bits([whole], [rest])
    message = refused(pool, "--load", folder, "--ckpt-step", "3")
    assert "--ckpt-step 3" in message and "iter_0000003" in message and "complete: 2, 4" in message


@pytest.mark.slow
def test_finetune_takes_only_the_weights(pool: WorkerPool, alone: tuple[str, Run]) -> None:
    folder, whole = alone
    at_4 = one_process(pool, "--load", folder, until=4)
    start = one_process(pool, *DROPOUT, "--load", folder, "--finetune", until=0)
    assert np.array_equal(*(flat_parameters(run) for run in (start, at_4)))
    run = one_process(pool, *DROPOUT, "--load", folder, "--finetune", until=1)
    assert (run.iteration, run.consumed_samples) == (1, 4)
    assert run.keys == whole.keys[:1]
    assert run.learning_rates == whole.learning_rates[:1]
    assert set.union(*run.updates.values()) == {1}
    assert run.losses[0] != whole.losses[0]


def flat_parameters(run: Run) -> np.ndarray:
    """Weights of a run on one process."""
    return np.concatenate([value.ravel() for _, value in sorted(whole_parameters([run]).items())])


@pytest.mark.slow
def test_no_load_optim(pool: WorkerPool, alone: tuple[str, Run]) -> None:
    folder, whole = alone
    run = one_process(pool, *DROPOUT, "--load", folder, "--no-load-optim", until=5)
    assert set.union(*run.updates.values()) == {1}
    assert run.losses == whole.losses[4:5], "weights and generators"
    assert run.learning_rates == whole.learning_rates[4:5] and run.keys == whole.keys[4:5]
    again = one_process(pool, *DROPOUT, "--load", folder, until=5)
    assert not np.array_equal(flat_parameters(run), flat_parameters(again)), "the moments matter"


@pytest.mark.slow
def test_no_load_scheduler(pool: WorkerPool, alone: tuple[str, Run]) -> None:
    folder, whole = alone
    run = one_process(pool, *DROPOUT, "--load", folder, "--no-load-scheduler", until=5)
    assert run.learning_rates == whole.learning_rates[:1] != whole.learning_rates[4:5]
    assert run.losses == whole.losses[4:5] and run.updates["language"] == {5}


@pytest.mark.slow
def test_no_load_rng(pool: WorkerPool, alone: tuple[str, Run]) -> None:
    folder, whole = alone
    run = one_process(pool, *DROPOUT, "--load", folder, "--no-load-rng", until=5)
    assert run.losses[0] == pytest.approx(whole.losses[4], rel=0.1) and run.losses[0] != whole.losses[4]
    assert run.keys == whole.keys[4:5] and run.updates["language"] == {5}


@pytest.mark.slow
def test_no_save_optim(pool: WorkerPool, tmp_path: Path) -> None:
    whole = one_process(pool, "--save", str(tmp_path), "--no-save-optim", until=3)
    flags = ("--load", str(tmp_path))
    message = refused(pool, *flags)
    assert "holds no optimizer (--no-save-optim)" in message and "--no-load-optim" in message
    run = one_process(pool, *flags, "--no-load-optim", until=3)
    assert run.losses == whole.losses[2:] and run.updates["language"] == {1}
    assert one_process(pool, *flags, "--finetune", until=0).iteration == 0
    full = one_process(pool, "--save", str(tmp_path / "full"), until=3)
    assert full.saved_bytes > 2.9 * whole.saved_bytes, "two moments of fp32 beside fp32 weights"


@pytest.mark.slow
def test_no_save_rng(pool: WorkerPool, tmp_path: Path) -> None:
    whole = one_process(pool, *DROPOUT, "--save", str(tmp_path), "--no-save-rng", until=3)
    run = one_process(pool, *DROPOUT, "--load", str(tmp_path), until=3)
    assert run.losses != whole.losses[2:] and run.updates == whole.updates
    assert any("random generators of vision, language start from --seed" in line for line in run.lines)


@pytest.mark.slow
def test_generators_of_another_grid_are_reported(pool: WorkerPool, alone: tuple[str, Run]) -> None:
    lines = pool.run(train, ("--load", alone[0]), 2, 4, world_size=2)[0].lines
    assert not any("random generators" in line for line in lines), "sizes are the same, places are not"
    lines = pool.run(train, ("--load", alone[0], "--llm-dp", "2"), 3, 4, world_size=3)[1].lines
    assert any("random generators of language" in line for line in lines)


@pytest.mark.slow
def test_keep_last_and_many_saves(pool: WorkerPool, tmp_path: Path) -> None:
    """Megatron Core reuses its plan of the first saves for the later ones: those must hold what they should too."""
    flags = ("--save", str(tmp_path), "--keep-last", "2", "--async-save")
    whole = one_process(pool, *DROPOUT, *flags, save_at=(1, 2, 3, 4, 5))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "iter_0000004", "iter_0000005", "latest_checkpointed_iteration.txt"]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "5"
    for step, remaining in ((4, 3), (5, 2)):
        rest = one_process(pool, *DROPOUT, "--load", str(tmp_path), "--ckpt-step", str(step))
        assert len(rest.losses) == remaining
        assert_same_bits([whole], [rest])


@pytest.mark.slow
def test_changed_flags_are_reported(pool: WorkerPool, alone: tuple[str, Run]) -> None:
    changed = ("--lr", "1e-3", "--no-use-distributed-optimizer", "--global-batch-size", "2", "--hidden-dropout", "0.2")
    lines = one_process(pool, *DROPOUT, "--load", alone[0], *changed, until=0).lines
    assert lines[0] == f"loaded {alone[0]}/iter_0000004"
    assert [line.strip() for line in lines[1:]] == [
        "--global-batch-size 2 (checkpoint: 4)", "--hidden-dropout 0.2 (checkpoint: 0.1)",
        "--lr 0.001 (checkpoint: 0.002)", "--use-distributed-optimizer False (checkpoint: True)"]


@pytest.mark.parametrize("batch", ["2", "8"])
def test_a_schedule_in_iterations_stays_at_its_iteration_with_another_batch_size(
        pool: WorkerPool, alone: tuple[str, Run], batch: str) -> None:
    folder, whole = alone
    rest = one_process(pool, *DROPOUT, "--load", folder, "--global-batch-size", batch)
    assert rest.learning_rates == whole.learning_rates[4:]


# Flags that change what the model computes and leave every shape as it is -> fields that are named.
OTHER_FUNCTIONS = {
    "rope": ("--rotary-base 5e5 --use-rope-scaling", {"rotary_base", "use_rope_scaling", "rope_scaling_factor"}),
    "norms": ("--norm-epsilon 1e-3 --vision-norm-epsilon 1e-3", {"norm_epsilon", "vision_norm_epsilon"}),
    "heads": ("--num-attention-heads 2 --num-query-groups 1",
              {"num_attention_heads", "num_query_groups", "kv_channels"}),
    "activation": ("--vision-hidden-act gelu", {"vision_hidden_act"}),
    "vocabulary": ("--vocab-size 90 --image-token-id 89", {"vocab_size", "image_token_id"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHER_FUNCTIONS)
def test_a_model_that_computes_something_else_is_refused(pool: WorkerPool, alone: tuple[str, Run], name: str) -> None:
    flags, fields = OTHER_FUNCTIONS[name]
    changed = (*DROPOUT, "--load", alone[0], *flags.split())
    message = refused(pool, *changed)
    assert f"--load {alone[0]}/iter_0000004: its weights belong to a model that computes something else" in message
    assert {line.split()[0] for line in message.splitlines()[1:]} == {
        f"--{field.replace('_', '-')}" for field in fields}
    allowed = tuple(word for field in fields for word in ("--allow-difference", field))
    assert "computes something else" in refused(pool, *changed, *allowed[2:], "--finetune")
    lines = one_process(pool, *changed, *allowed, until=4).lines
    assert len([line for line in lines if "which --allow-difference allows" in line]) == len(fields)


@pytest.mark.slow
def test_a_checkpoint_has_the_sizes_of_its_config_json(pool: WorkerPool, tmp_path: Path) -> None:
    values = {"model_type": "llava", **LLAVA_MODELS["clip-llama"], "image_token_index": VOCAB_SIZE - 1}
    config = tmp_path / "hf" / "config.json"
    config.parent.mkdir()
    config.write_text(json.dumps(values))
    save = str(tmp_path / "save")
    one_process(pool, "--hf-config", str(config.parent), "--save", save, until=2)
    text = {**values["text_config"], "rope_theta": 5e5}
    config.write_text(json.dumps({**values, "text_config": text}))
    assert "--rotary-base 500000.0 (checkpoint: 10000.0)" in refused(
        pool, "--hf-config", str(config.parent), "--load", save)
    moved = config.parent.rename(tmp_path / "moved")
    (moved / "config.json").write_text(json.dumps(values))
    lines = one_process(pool, "--hf-config", str(moved), "--load", save, until=2).lines
    assert lines == [f"loaded {save}/iter_0000002", f"  --hf-config {moved} (checkpoint: {tmp_path / 'hf'})"]


@pytest.mark.slow
def test_other_data_is_refused(pool: WorkerPool, alone: tuple[str, Run]) -> None:
    folder, whole = alone
    changed = (*DROPOUT, "--load", folder, "--mock-max-length", "20", "--mock-images-max", "1")
    message = refused(pool, *changed)
    assert f"--load {folder}/iter_0000004: the data cannot go on where it was" in message
    assert "--no-load-data to start the data anew" in message
    assert [line.strip() for line in message.splitlines()[1:]] == [
        "--mock-images-max 1 (checkpoint: 3)", "--mock-max-length 20 (checkpoint: 30)"]
    anew = one_process(pool, *changed, "--no-load-data", until=5)
    assert anew.keys[0] != whole.keys[4] and anew.iteration == 5
    assert anew.consumed_samples == whole.consumed_samples // 7 * 5
    assert "  the data starts at its beginning: --no-load-data" in anew.lines
    on = one_process(pool, *changed, "--allow-difference", "mock-max-length", "--allow-difference", "mock-images-max",
                     until=5)
    assert on.keys == whole.keys[4:5]
    assert "--seed 7 (checkpoint: 1234)" in refused(pool, *DROPOUT, "--load", folder, "--seed", "7")
    assert one_process(pool, *changed, "--finetune", until=0).iteration == 0


def save_without_data_flags(rank: int, flags: tuple[str, ...], world_size: int) -> None:
    """Save what an older version would have saved."""
    from mimo.checkpoint.save import Saver

    with started(rank, flags, world_size) as (parts, loader, state, progress, _):
        state.data, state.streams = {}, loader.state_dict()
        Saver(state, parts.watchdog).save(progress)


def test_a_checkpoint_that_does_not_know_its_data_is_loaded_and_says_so(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(save_without_data_flags, ("--layout", "colocated", "--save", str(tmp_path)), 1, world_size=1)
    rest = one_process(pool, "--load", str(tmp_path), until=0)
    assert [line for line in rest.lines if "did not store the flags of the data" in line], rest.lines


def save_streams(rank: int, flags: tuple[str, ...], world_size: int) -> list[str | None]:
    """Save with data streams whose state is what a data set should not give; what is said, on this rank."""
    from mimo.checkpoint.save import Saver
    from mimo.watchdog.process_exit import ReportedElsewhereError

    found: list[str | None] = []
    with started(rank, flags, world_size) as (parts, _, state, progress, _):
        for value in (np.random.default_rng(1), np.int64(3), lambda: None, open, {"position": 3}):
            state.streams = {"consumed_samples": 0, "streams": {f"language/{rank}": {"state": value}}}
            try:
                Saver(state, parts.watchdog).save(progress)
                found.append(None)
            except ValueError as error:
                found.append(str(error))
            except ReportedElsewhereError:
                found.append("")
    return found


@pytest.mark.slow
def test_stream_states_that_could_not_be_loaded_are_refused(pool: WorkerPool, tmp_path: Path) -> None:
    flags = ("--layout", "colocated", "--encoder-dp", "2", "--llm-dp", "2", "--save", str(tmp_path))
    first, second = pool.run(save_streams, flags, 2, world_size=2)
    assert first[-1] is None and second == ["", "", "", "", None]
    for message, reason in zip(first[:-1], ("numpy", "numpy", "lambda", "open"), strict=True):
        assert message is not None and "data stream language/0" in message and "not plain data" in message
        assert reason in message.split("cannot hold: ")[1].splitlines()[0], message


@pytest.mark.slow
def test_nothing_to_load(pool: WorkerPool, tmp_path: Path) -> None:
    nowhere, fresh = str(tmp_path / "nowhere"), str(tmp_path / "fresh")
    run = one_process(pool, "--load", fresh, "--save", fresh, until=0)
    assert run.lines == [f"--load {fresh} holds no checkpoint yet: the run starts fresh"]
    assert refused(pool, "--load", nowhere).startswith(f"--load {nowhere} does not exist")
    assert refused(pool, "--load", str(tmp_path)).startswith(f"--load {tmp_path} holds no checkpoint")
    assert refused(pool, "--load", nowhere, "--save", str(tmp_path)).startswith(f"--load {nowhere} does not exist")


# Started again by the command that it began with, --load and --save being two folders

BEGINNINGS = {"finetune": ("--finetune", 0), "finetune-of-an-earlier-one": ("--finetune --ckpt-step 2", 0),
              "going-on": ("", 4), "weights-and-place": ("--no-load-optim --no-load-scheduler --no-load-rng", 4)}


@pytest.mark.slow
@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_started_again_a_run_goes_on_from_its_own_checkpoint(pool, alone, tmp_path, beginning):
    flags, iteration = BEGINNINGS[beginning]
    command = (*DROPOUT, "--load", alone[0], *flags.split())
    saved, end = iteration + 2, iteration + 5
    whole = one_process(pool, *command, "--save", str(tmp_path / "whole"), until=end, save_at=(saved,))
    assert len(whole.losses) == 5 and "is not read" not in "".join(whole.lines)
    own = str(tmp_path / "own")
    one_process(pool, *command, "--save", own, until=saved + 1, save_at=(saved,))
    rest = one_process(pool, *command, "--save", own, until=end, save_at=(end,))
    assert len(rest.losses) == 3
    assert_same_bits([whole], [rest])
    finetune = " --finetune" if "--finetune" in flags else ""
    assert rest.lines == [f"loaded {own}/iter_000000{saved}",
                          f"  --load {alone[0]}{finetune} is not read: --save has the run's own checkpoint"]


@pytest.mark.slow
def test_checkpoints_of_another_run_are_neither_replaced_nor_continued(pool, alone, tmp_path):
    folder, other, own = alone[0], str(tmp_path / "other"), str(tmp_path / "own")
    one_process(pool, "--save", other, until=2)
    for command in (("--load", folder, "--finetune", "--save", other), ("--load", folder, "--save", other)):
        assert refused(pool, *command).startswith(
            f"--load {folder} with --save {other}: iter_0000002 there is of a run that began without --load. To go on")
    one_process(pool, "--load", folder, "--finetune", "--save", own, until=2)
    assert f"a run that began with --load {folder}. To go on from it give --load {own}," in refused(
        pool, "--load", other, "--finetune", "--save", own)
    # Its own command, whether it was last started by that, by --load and --save the same folder, or elsewhere.
    one_process(pool, "--load", own, "--save", own, until=4, save_at=(4,))
    again = one_process(pool, "--load", f"{folder}/../{Path(folder).name}", "--finetune", "--save", own, until=4)
    assert again.lines[0] == f"loaded {own}/iter_0000004"
    # A checkpoint's own folder in --save is one of the run, which goes back.
    back = one_process(pool, "--load", f"{own}/iter_0000002", "--save", own, until=2)
    assert back.lines[0] == f"loaded {own}/iter_0000002"
    (tmp_path / "own" / "latest_checkpointed_iteration.txt").write_text("9")
    assert refused(pool, "--load", folder, "--finetune", "--save", own).startswith(
        f"--save {own}: {own}/latest_checkpointed_iteration.txt names iter_0000009, which is not there; complete: 2, 4")


@pytest.mark.slow
def test_a_run_needs_its_optimizer_to_go_on(pool: WorkerPool, alone: tuple[str, Run], tmp_path: Path) -> None:
    flags = ("--load", alone[0], "--finetune", "--save", str(tmp_path), "--no-save-optim", "--no-load-optim")
    one_process(pool, *flags, until=2)
    message = refused(pool, *flags)
    assert "from its own checkpoint, which holds no optimizer (--no-save-optim): give --load the folder" in message


@pytest.mark.slow
def test_the_loop_of_a_requeued_finetune_comes_to_its_end(pool: WorkerPool, tmp_path: Path) -> None:
    """Make every start save and end after an iteration, as --exit-duration-in-mins does."""
    flags = ("--layout", "colocated", *DROPOUT, "--global-batch-size", "4", "--train-iters", "3")
    stage1, own, run_dir = (str(tmp_path / name) for name in ("stage1", "own", "run"))

    def records_of(folder: str, *more: str) -> list[Any]:
        records: list[Any] = pool.run(run_loop, (*flags, *more), 1, folder, world_size=1)[0]
        return records

    records_of(str(tmp_path / "first"), "--save", stage1)
    command = ("--load", stage1, "--finetune", "--save")
    whole = records_of(str(tmp_path / "second"), *command, str(tmp_path / "whole"))
    for iteration in (1, 2, 3):
        records = records_of(run_dir, *command, own, "--exit-duration-in-mins", "1e-9")
        assert [record.iteration for record in records] == [iteration]
        assert records[0].lm_loss == whole[iteration - 1].lm_loss
    before = (Path(own) / "iter_0000003").stat().st_mtime_ns
    assert records_of(run_dir, *command, own) == [], "nothing is left to do"
    assert (Path(own) / "iter_0000003").stat().st_mtime_ns == before, "nor to be written"
    lines = (Path(run_dir) / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [1, 2, 3]


@pytest.mark.slow
def test_the_loop_goes_on(pool: WorkerPool, tmp_path: Path) -> None:
    """The whole loop: records after a restart are those of the uninterrupted run; the last iteration is saved too."""
    folder = str(tmp_path / "checkpoints")
    flags = ("--llm-dp", "2", *DROPOUT, "--global-batch-size", "4")
    first = (*flags, "--train-iters", "3", "--save", folder, "--save-interval", "2", "--async-save")
    whole = pool.run(run_loop, first, 3, str(tmp_path / "first"), world_size=3)
    assert sorted(path.name for path in Path(folder).glob("iter_*")) == ["iter_0000002", "iter_0000003"]
    rest = pool.run(run_loop, (*flags, "--train-iters", "3", "--load", folder, "--ckpt-step", "2"), 3,
                    str(tmp_path / "second"), world_size=3)
    for before, after in zip(whole, rest, strict=True):
        assert [record.iteration for record in after] == [3]
        for figure in ("lm_loss", "grad_norm", "consumed_samples", "module_learning_rates"):
            assert vars(after[0])[figure] == vars(before[2])[figure], figure
    done = pool.run(run_loop, (*flags, "--train-iters", "3", "--load", folder), 3, str(tmp_path / "third"),
                    world_size=3)
    assert done == [[], [], []], "nothing is left to do"


@pytest.mark.slow
def test_evaluations_are_those_of_the_uninterrupted_run_and_change_nothing(pool: WorkerPool, tmp_path: Path) -> None:
    flags = ("--layout", "colocated", *DROPOUT, "--global-batch-size", "4", "--num-generations", "0")
    evaluates = ("--eval-iters", "1", "--eval-interval", "2")

    def run(name: str, *more: str) -> list[tuple[int, int, float | None, float | None]]:
        pool.run(run_loop, (*flags, *more), 1, str(tmp_path / name), world_size=1)
        return [(line["iteration"], line["consumed_samples"], line.get("lm loss"), line.get("lm loss validation"))
                for line in map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())]

    def saves(name: str, *more: str) -> tuple[str, ...]:
        return ("--save", str(tmp_path / f"{name}-saved"), *more)

    plain = run("plain", "--train-iters", "4")
    whole = run("whole", "--train-iters", "4", *evaluates, *saves("whole", "--save-interval", "2"))
    assert [line[0] for line in whole if line[3] is not None] == [2, 4]
    assert [line for line in whole if line[2] is not None] == plain
    # Every start ends after an iteration, or after the evaluation that the start before has left out. The last one
    # would evaluate at the end, had it not been told to stop.
    again = ("--train-iters", "4", *evaluates, *saves("stopped"), "--load", str(tmp_path / "stopped-saved"))
    for _ in range(5):
        stopped = run("stopped", *again, "--exit-duration-in-mins", "1e-9")
    assert stopped == whole[:-1]
    assert run("stopped", *again) == whole
    # What a run has evaluated before it is killed, or at its end, is not evaluated again.
    shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    load = ("--load", str(tmp_path / "whole-saved"))
    assert run("killed", "--train-iters", "4", *evaluates, *load, "--ckpt-step", "2") == whole
    longer = run("whole", "--train-iters", "5", *evaluates, *load)
    assert longer[:len(whole)] == whole and [line[0] for line in longer[len(whole):]] == [5, 5]
    tuned = run("tuned", "--train-iters", "2", "--eval-iters", "1", "--eval-interval", "1", *load, "--finetune")
    assert [line[0] for line in tuned if line[3] is not None] == [1, 2]


def stopped_loop(rank: int, flags: tuple[str, ...], world_size: int, run_dir: str, step: int) -> None:
    """Run the loop. The last rank gets SIGTERM when it comes to this step of all evaluations, counted from 1."""
    from mimo.training.loop import TrainingLoop

    read, count = TrainingLoop._next_step, 0

    def next_step(loop: Any, loader: Any) -> Any:
        nonlocal count
        count += 1
        if count == step and rank == world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return read(loop, loader)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingLoop, "_next_step", next_step)
        run_loop(rank, flags, world_size, run_dir)


@pytest.mark.slow
def test_a_stop_ends_an_evaluation_whose_iteration_is_saved(pool: WorkerPool, tmp_path: Path) -> None:
    flags = ("--layout", "colocated", "--encoder-dp", "2", "--llm-tp", "2", "--micro-batch-size", "2", *DROPOUT,
             "--global-batch-size", "4", "--num-generations", "0", "--train-iters", "4", "--eval-iters", "3",
             "--eval-interval", "2", "--save-interval", "2", "--async-save")

    def run(name: str, step: int) -> list[tuple[int, float | None, float | None]]:
        folder, saved = tmp_path / name, str(tmp_path / f"{name}-saved")
        pool.run(stopped_loop, (*flags, "--save", saved, "--load", saved), 2, str(folder), step, world_size=2)
        return [(line["iteration"], line.get("lm loss"), line.get("lm loss validation"))
                for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())]

    def is_noted(name: str) -> bool:
        (folder,) = (tmp_path / f"{name}-saved").glob("iter_*")
        return folder.name == "iter_0000002" and (folder / "evaluated").exists()

    whole = run("whole", 0)
    assert [line[0] for line in whole if line[2] is not None] == [2, 4] and len(whole) == 6
    assert (tmp_path / "whole-saved" / "iter_0000002" / "evaluated").exists()
    # In the first evaluation: the checkpoint is there, without it, and the next start makes it.
    assert (run("within", 2), is_noted("within")) == (whole[:2], False)
    assert run("within", 0) == whole
    # In its last step, it is made, noted and not made again.
    assert (run("last-step", 3), is_noted("last-step")) == (whole[:3], True)
    assert run("last-step", 0) == whole
    # In the evaluation at the end of the run.
    assert run("end", 5) == whole[:-1]
    assert run("end", 0) == whole


def test_a_length_in_samples_stays_with_another_batch_size(pool: WorkerPool, tmp_path: Path) -> None:
    flags = ("--layout", "colocated", "--train-iters", "none", "--save", str(tmp_path), "--load", str(tmp_path))
    ends = []
    for samples, batch in ((8, 4), (14, 2), (15, 2), (15, 4)):
        more = ("--train-samples", str(samples), "--global-batch-size", str(batch))
        records = pool.run(run_loop, (*flags, *more), 1, str(tmp_path / "run"), world_size=1)[0]
        ends.append([(record.iteration, record.consumed_samples) for record in records])
    assert ends == [[(1, 4), (2, 8)], [(3, 10), (4, 12), (5, 14)], [(6, 16)], []]
