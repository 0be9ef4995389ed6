"""Bugs that earlier checkpoints of modules on separate grids had, each with the test that catches it.

Numbers are those of the record, as in test_recorded_bugs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.damage import add_tensor, delete, refusals, tensors_of
from tests.support.equality import MOE
from tests.support.resuming import SAVED_AT, bits, exact_state, started, train
from tests.support.spawn import WorkerPool

SavedRun = tuple[tuple[str, ...], str, list[tuple[dict[str, np.ndarray], list[str]]]]
# name -> (ranks, flags)
LAYOUTS = {
    "disjoint-tp2": (4, "--encoder-tp 2 --llm-tp 2"),
    "colocated-encoder-dp4": (4, "--layout colocated --encoder-dp 4 --llm-tp 2 --llm-dp 2 --micro-batch-size 2 "
                              "--sequence-parallel"),
    "unsharded-dp2": (4, "--encoder-dp 2 --llm-dp 2 --no-use-distributed-optimizer"),
    "pipelines": (4, "--encoder-pp 2 --llm-pp 2"),
    "moe-ep2-of-dp2": (3, f"--llm-dp 2 --llm-ep 2 {' '.join(MOE)}"),
    "moe-dp4-ep2": (4, f"--layout colocated --encoder-dp 4 --llm-dp 4 --llm-ep 2 {' '.join(MOE)}"),
}


@dataclass
class Slice:
    """A slice of a global tensor that a rank would save, and whether this rank writes it."""

    module: str
    key: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    writes: bool
    num_bytes: int

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(begin, begin + size) for begin, size in zip(self.offset, self.size, strict=True))


@dataclass
class Described:
    """The tensors that a rank would save.

    Attributes:
        is_global: whether Megatron's global process groups were set.
        unnamed: parameters and persistent buffers that no slice stands for.
        weights, optimizer: slices.
        objects: unique keys of the generator states that it writes.
    """

    is_global: bool
    unnamed: list[str] = field(default_factory=list)
    weights: list[Slice] = field(default_factory=list)
    optimizer: list[Slice] = field(default_factory=list)
    objects: list[str] = field(default_factory=list)


def describe(rank: int, flags: tuple[str, ...], world_size: int) -> Described:
    """Return the state dicts of a trainer that has not trained."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.mapping import is_main_replica

    from mimo.checkpoint.state import model_entries, optimizer_entries, rng_objects

    with started(rank, flags, world_size) as (parts, _, state, _, _):
        saved = state.saved()

        def slices(entries: dict[str, Any], module_at: int) -> list[Slice]:
            return [Slice(entry.key.split(".")[module_at], entry.key, tuple(entry.global_shape),
                          tuple(entry.global_offset), (*(1,) * (len(entry.global_shape) - entry.data.dim()),
                                                       *entry.data.shape),
                          is_main_replica(entry.replica_id), entry.data.numel() * entry.data.element_size())
                    for entry in entries.values()]

        held = {tensor.tensor.data_ptr() for tensor in saved}
        model = parts.built.model
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        persistent = model.state_dict()
        return Described(
            parallel_state.model_parallel_is_initialized(),
            [name for name, tensor in tensors.items() if name in persistent and tensor.data_ptr() not in held],
            slices(model_entries(state, saved), 0), slices(optimizer_entries(state.held(saved)), 1),
            [one.unique_key for one in rng_objects(parts.platform, parts.grids).values()
             if is_main_replica(one.replica_id)])


@pytest.fixture(scope="module")
def describe_layout(pool: WorkerPool) -> Callable[[str], list[Described]]:
    """Describe all ranks of a layout, each layout once."""
    @cache
    def get(layout: str) -> list[Described]:
        world_size, flags = LAYOUTS[layout]
        ranks: list[Described] = pool.run(describe, tuple(flags.split()), world_size, world_size=world_size)
        return ranks

    return get


@pytest.fixture(params=LAYOUTS)
def described(describe_layout: Callable[[str], list[Described]], request: pytest.FixtureRequest) -> list[Described]:
    return describe_layout(request.param)


def test_bug_1_every_tensor_has_a_global_slice_without_global_process_groups(described: list[Described]) -> None:
    for rank in described:
        assert not rank.is_global
        assert rank.weights and not rank.unnamed, rank.unnamed


def test_bug_2_modules_share_no_key(described: list[Described]) -> None:
    owners: dict[str, str] = {}
    for rank in described:
        for one in (*rank.weights, *rank.optimizer):
            assert one.module in ("vision", "language")
            assert owners.setdefault(one.key, one.module) == one.module
    shared = [{key.split(".", 5)[-1].removeprefix("encoders.vit.") for key, owner in owners.items()
               if owner == module and key.startswith("mimo.")} for module in ("vision", "language")]
    assert len(shared[0] & shared[1]) >= 3, "modules have parameters of equal names, which could meet"


def moments_after_load(rank: int, flags: tuple[str, ...], world_size: int) -> dict[str, np.ndarray]:
    """First moments of this rank by key."""
    with started(rank, flags, world_size) as (_, _, state, _, _):
        from mimo.checkpoint.state import optimizer_entries

        return {entry.key: entry.data.numpy().copy() for entry in optimizer_entries(state.held(state.saved())).values()
                if ".exp_avg." in entry.key}


def test_bug_2_modules_get_their_own_moments_back(pool: WorkerPool, tmp_path: Path) -> None:
    flags = ("--layout", "colocated", "--no-use-distributed-optimizer")
    pool.run(train, (*flags, "--save", str(tmp_path)), 1, SAVED_AT, world_size=1)
    found = pool.run(moments_after_load, (*flags, "--load", str(tmp_path)), 1, world_size=1)[0]
    start = "mimo.{}.optimizer.state.exp_avg.{}decoder.layers."
    pairs = 0
    for key, value in found.items():
        other = found.get(key.replace(start.format("language", ""), start.format("vision", "encoders.vit.")))
        if key.startswith(start.format("language", "")) and other is not None and other.shape == value.shape:
            assert np.abs(value).max() > 0 and not np.array_equal(value, other), key
            pairs += 1
    assert pairs >= 2


def test_bug_3_every_element_has_exactly_one_writer(described: list[Described]) -> None:
    writers: dict[str, np.ndarray] = {}
    readers: dict[str, np.ndarray] = {}
    for rank in described:
        for one in (*rank.weights, *rank.optimizer):
            for counts, adds in ((writers, one.writes), (readers, True)):
                counts.setdefault(one.key, np.zeros(one.shape, int))[one.slices] += int(adds)
    wrong = {key: (counts.min(), counts.max()) for key, counts in writers.items() if (counts != 1).any()}
    assert not wrong, wrong
    replicated = any((counts > 1).any() for counts in readers.values())
    assert replicated == any(not one.writes for rank in described for one in (*rank.weights, *rank.optimizer))
    objects = [key for rank in described for key in rank.objects]
    assert len(set(objects)) == len(objects) >= len(described), "each rank writes its own generators"


def test_bug_3_replicas_share_the_writing(describe_layout: Callable[[str], list[Described]]) -> None:
    ranks = describe_layout("colocated-encoder-dp4")
    written = [sum(one.num_bytes for one in rank.weights if one.writes and one.module == "vision") for rank in ranks]
    largest = max(one.num_bytes for rank in ranks for one in rank.weights if one.module == "vision")
    assert max(written) - min(written) <= largest and min(written) > sum(written) / 8, written


def plan_with_a_gap(rank: int, flags: tuple[str, ...], world_size: int) -> tuple[int, str, str]:
    """Calls that give every rank what all ranks have while a save is planned; what is said where the last rank leaves
    a tensor out that it should write, and where nothing is wrong."""
    import torch.distributed as dist
    from megatron.core.dist_checkpointing.mapping import is_main_replica

    from mimo.checkpoint.state import model_entries
    from mimo.checkpoint.writer import make_plan
    from mimo.watchdog.process_exit import ReportedElsewhereError

    with started(rank, flags, world_size) as (parts, _, state, _, _), pytest.MonkeyPatch.context() as patch:
        entries = model_entries(state, state.saved())
        split = next(name for name, one in entries.items() if is_main_replica(one.replica_id)
                     and tuple(one.data.shape) != tuple(one.global_shape)[-one.data.dim():])
        calls, said, real = [], [], dist.all_gather_object
        patch.setattr(dist, "all_gather_object", lambda *args, **kwargs: (calls.append(1), real(*args, **kwargs)))
        for left_out in ((split,) if rank == world_size - 1 else (), ()):
            try:
                make_plan({"model": {name: one for name, one in entries.items() if name not in left_out}},
                          parts.grids, 2)
                said.append("")
            except (ValueError, ReportedElsewhereError) as error:
                said.append(f"{type(error).__name__}: {error}")
        return len(calls), said[0], said[1]


def test_slices_are_compared_on_the_first_rank_and_every_rank_learns_of_a_gap(pool: WorkerPool) -> None:
    found = pool.run(plan_with_a_gap, ("--layout", "colocated", "--encoder-tp", "2", "--llm-tp", "2",
                                       "--sequence-parallel"), 2, world_size=2)
    assert [calls for calls, _, _ in found] == [0, 0]
    assert found[0][1].startswith("ValueError: the checkpoint would not be whole: Invalid sharding pattern")
    assert found[1][1] == "ReportedElsewhereError: rank 0 reports what is wrong"
    assert [last for _, _, last in found] == ["", ""]


def groups_after_load(rank: int, flags: tuple[str, ...], world_size: int, until: int
                      ) -> tuple[dict[str, np.ndarray], list[str]]:
    """State and parameter groups of this rank after training to `until`, saving there if asked."""
    from mimo.checkpoint.save import Saver
    from mimo.training.step import train_step
    from tests.support.steps import inner_optimizers

    with started(rank, flags, world_size) as (parts, loader, state, progress, _):
        while progress.iteration < until:
            assert train_step(parts, loader.next_step()).success
            progress.iteration += 1
        if parts.config.checkpoint.save is not None:
            state.streams = loader.state_dict()
            Saver(state, parts.watchdog).save(progress)
        groups = [str(sorted((key, value) for key, value in group.items() if key != "params"))
                  for info in parts.optimizer.module_infos.values() if info.is_active
                  for inner in inner_optimizers(info.optimizer) for group in inner.optimizer.param_groups]
        return exact_state(parts), groups


@pytest.fixture(scope="module", params=["--use-distributed-optimizer", "--no-use-distributed-optimizer"])
def saved_run(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> SavedRun:
    """A run on three ranks that has saved: its flags, its folder, what `groups_after_load` found on each rank."""
    flags, root = ("--llm-dp", "2", "--bf16", str(request.param)), str(tmp_path_factory.mktemp("saved"))
    return flags, root, pool.run(groups_after_load, (*flags, "--save", root), 3, SAVED_AT, world_size=3)


def test_bug_4_a_module_without_rank_0_gets_its_optimizer_back(pool: WorkerPool, saved_run: SavedRun) -> None:
    flags, root, before = saved_run
    after = pool.run(groups_after_load, (*flags, "--load", root), 3, SAVED_AT, world_size=3)
    for (state, groups), (loaded, loaded_groups) in zip(before[1:], after[1:], strict=True):
        assert groups == loaded_groups and len(groups) >= 2
        assert state.keys() == loaded.keys()
        assert [name for name, value in state.items() if not np.array_equal(value, loaded[name])] == []
        steps = {value.view(np.float32).item() for name, value in loaded.items() if name.endswith(" step")}
        assert steps == {SAVED_AT}


def step_of_size_zero(rank: int, flags: tuple[str, ...], world_size: int
                      ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, np.ndarray], float]:
    """Load, take one step with the learning rate 0: state after the load, weights before and after, gradient norm."""
    from mimo.training.step import train_step
    from tests.support.steps import inner_optimizers

    def weights() -> dict[str, np.ndarray]:
        return {name: bits(parameter) for name, parameter in parts.built.model.named_parameters()}

    with started(rank, flags, world_size) as (parts, loader, _, _, _):
        loaded, before = exact_state(parts), weights()
        for info in parts.optimizer.module_infos.values():
            for inner in inner_optimizers(info.optimizer) if info.is_active else ():
                for group in inner.optimizer.param_groups:
                    group["lr"] = 0.0
        result = train_step(parts, loader.next_step())
        assert result.success and result.grad_norm is not None
        return loaded, before, weights(), result.grad_norm


@pytest.mark.parametrize("optimizer", ["--load-optim", "--no-load-optim"])
def test_bug_7_the_first_step_starts_from_the_loaded_weights(pool, saved_run, optimizer):
    flags, root, saved = saved_run
    found = pool.run(step_of_size_zero, (*flags, "--load", root, optimizer), 3, world_size=3)
    for (state, _), (loaded, before, after, grad_norm) in zip(saved, found, strict=True):
        assert grad_norm > 0
        assert [name for name, value in before.items() if not np.array_equal(value, after[name])] == []
        if optimizer == "--load-optim":  # fp32 copies included
            assert [name for name, value in state.items() if not np.array_equal(value, loaded[name])] == []


@pytest.fixture(scope="module")
def checkpoint(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bugs")
    pool.run(train, (*ALONE, "--save", str(root)), 1, SAVED_AT, world_size=1)
    return root / f"iter_{SAVED_AT:07d}"


ALONE = ("--layout", "colocated")


@pytest.mark.parametrize("flags", ["", "--no-load-optim", "--finetune --load here"])
def test_bug_13_a_missing_weight_is_named_whatever_is_loaded(pool: WorkerPool, checkpoint: Path, flags: str) -> None:
    weights = [key for key in tensors_of(checkpoint) if not key.startswith("mimo.")]
    assert any("input_projections" in key for key in weights) and any(key.endswith("bias") for key in weights)
    changes = [partial(delete, key) for key in weights]
    messages = pool.run(refusals, (*ALONE, *flags.split()), 1, checkpoint, changes, world_size=1)[0]
    for key, message in zip(weights, messages, strict=True):
        assert message is not None and f"missing in the checkpoint (1):\n  {key}" in message


def test_bug_14_only_tensors_that_the_model_has_are_asked_for(pool: WorkerPool, checkpoint: Path) -> None:
    """A tower without a last norm asks for none; one with it is refused, and a norm nobody wants is refused."""
    def loading(*flags: str, changes: Any = (unchanged,)) -> str | None:
        found: str | None = pool.run(refusals, (*ALONE, *flags), 1, checkpoint, list(changes), world_size=1)[0][0]
        return found

    norm = "vision.encoders.vit.ln_post.weight"
    assert not [key for key in tensors_of(checkpoint) if "ln_post" in key or "final" in key and "vision" in key]
    assert loading() is None
    message = loading("--vision-final-layernorm", "--allow-difference", "vision-final-layernorm")
    assert message is not None
    wanted = [line.strip() for line in message.splitlines() if line.startswith("  ")]
    assert len(wanted) == 2 * 3 and all("norm" in name or "ln_post" in name for name in wanted), message
    assert "missing in the checkpoint" in message and "but not in this run" not in message
    refused = loading(changes=[partial(add_tensor, norm)])
    assert refused is not None and "in the checkpoint, but not in this run" in refused and norm in refused


def unchanged(folder: Path) -> None:
    """No change."""
