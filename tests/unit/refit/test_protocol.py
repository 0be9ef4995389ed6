"""The protocol of a refit, both ends on threads of this process, around a small model.

Whatever is wrong is an error on all ranks within seconds, and the engine serves nothing until a whole sync has come.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import queue
import re
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mimo.refit import messages as checksums
from mimo.refit import plan as planning
from mimo.refit.delta import Announcement
from mimo.refit.rendezvous import RefitError, Rendezvous, StoreAddress
from mimo.refit.sender import WINDOW, Trainer, WeightSender
from mimo.refit.transport.p2p import Wire
from mimo.rollout.engine import RolloutEngine
from tests.support.echo_engine import engine_options
from tests.support.memory import peak_bytes
from tests.support.refit_faults import (
    NAMES,
    OPTIONS,
    SHAPES,
    Ranks,
    holders_of,
    is_right,
    refuses,
    serves,
    whole_weights,
)

# No error of these tests may take as long as a time-out.
IMPATIENT = dataclasses.replace(OPTIONS, timeout_s=120)
# The limit is that of the test itself, because the fixture of the first one imports vLLM.
pytestmark = [pytest.mark.timeout(60, func_only=True), pytest.mark.usefixtures("plain_engine")]


def engine_of(workers: int = 1, load_format: str = "dummy") -> RolloutEngine:
    return RolloutEngine(engine_options(workers, load_format))


def connected(world_size: int = 2, workers: int = 1, **options: Any) -> tuple[Ranks, RolloutEngine]:
    """Two ends that have met."""
    ranks, engine = Ranks.of(world_size), engine_of(workers)
    raised = ranks.connect(engine, workers, dataclasses.replace(IMPATIENT, **options))
    assert raised == [None] * world_size
    return ranks, engine


def messages_of(raised: Sequence[Any]) -> list[str]:
    """Return the error of each rank."""
    assert all(isinstance(each, (RefitError, ValueError)) for each in raised), raised
    return [str(each) for each in raised]


@pytest.mark.parametrize(("world_size", "workers", "route"), [(1, 1, "auto"), (3, 2, "auto"), (2, 3, "loader")])
def test_three_syncs_with_other_weights_in_other_memory(world_size: int, workers: int, route: str) -> None:
    ranks, engine = connected(world_size, workers, route=route, verify=True)
    assert refuses(engine)
    for seed in range(3):
        ranks.set(seed)
        assert [report.version for report in ranks.send(f"policy {seed}")] == [f"policy {seed}"] * world_size
        assert is_right(engine, seed) and not is_right(engine, seed + 1) and engine.version == f"policy {seed}"
    assert Ranks.of(1).connect(engine, workers, dataclasses.replace(IMPATIENT, route=route)) == [None]
    assert is_right(engine, 2)  # a new trainer does not stop what is served


def test_parameters_that_lie_column_by_column() -> None:
    """Bug 29."""
    ranks, engine = Ranks.of(2, transposed=True), engine_of()
    ranks.connect(engine, 1)
    ranks.send("policy")
    assert is_right(engine, 0) and not ranks.weights[0].tensors["embed.weight"].is_contiguous()


def test_nothing_of_a_sync_is_kept() -> None:
    """Bug 17: neither messages nor the trainer's tensors."""
    ranks, engine = connected()
    ranks.send("first")
    old = [weakref.ref(tensor) for each in ranks.weights for tensor in each.tensors.values()]
    ranks.set(1)
    gc.collect()
    assert not any(each() is not None for each in old)
    assert not [each for each in gc.get_objects() if type(each) is torch.Tensor and each.dtype == torch.uint8]
    ranks.send("second")
    assert is_right(engine, 1)


def test_messages_are_counted_by_chunks_not_by_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug 16."""
    sent: list[int] = []
    exchange = Wire.exchange

    def count(self: Wire, sends: Any, receives: Any) -> Any:
        sent.extend(message.numel() for _, message in sends)
        return exchange(self, sends, receives)

    monkeypatch.setattr(Wire, "exchange", count)
    for chunk_bytes, num_chunks in ((1 << 20, 1), (320, 6)):
        ranks, _ = connected(2, 1, chunk_bytes=chunk_bytes)
        sent.clear()
        reports = ranks.send("policy")
        # The vector travels from one of the ranks that have it.
        assert 2 * num_chunks - 1 <= len(sent) <= 2 * num_chunks < 2 * len(NAMES) or num_chunks == 1 == len(sent) / 2
        assert sum(sent) == reports[0].wire_bytes


def change(ranks: Ranks, whole: dict[str, torch.Tensor], name: str, row: int) -> None:
    """Change a row of a tensor, on the ranks that have it."""
    whole[name][row] += 0.5
    for each in ranks.weights:
        for part in each.slices:
            if part.name == name and part.box.starts[0] <= row < part.box.stops[0]:
                each.tensors[name][row - part.box.starts[0]] += 0.5


# Two rows of a matrix.
BLOCK_BYTES = 2 * SHAPES["head.weight"][1] * 4


@pytest.mark.parametrize(("world_size", "workers"), [(2, 2), (3, 1)])
def test_a_delta_refit_sends_the_blocks_that_have_changed_and_no_others(world_size: int, workers: int) -> None:
    ranks, engine = connected(world_size, workers, delta=True, block_bytes=BLOCK_BYTES)
    whole, everything = whole_weights(0), ranks.send("first")[0]
    assert not everything.is_delta and serves(engine, whole)
    ranks.set(0)  # the same weights in other memory
    nothing = ranks.send("again")[0]
    assert nothing.is_delta and nothing.wire_bytes == 0 and engine.version == "again" and serves(engine, whole)
    for number, (name, row, blocks) in enumerate([
            ("blocks.3.weight", 1, workers), ("embed.weight", 11, workers), ("head.weight", 0, 1)]):
        change(ranks, whole, name, row)
        report = ranks.send(f"row {number}")[0]
        assert report.direct_bytes <= report.wire_bytes <= 1.2 * blocks * BLOCK_BYTES and serves(engine, whole)
    # The loader reloads whole modules: weight and bias, of 24 bytes each.
    change(ranks, whole, "scale.bias", 2)
    report = ranks.send("loader")[0]
    assert report.direct_bytes == 0 and report.wire_bytes <= 1.4 * workers * 48 and serves(engine, whole)
    ranks.set(1)
    report = ranks.send("all")[0]
    assert report.is_delta and everything.wire_bytes <= report.wire_bytes <= 1.2 * everything.wire_bytes
    assert is_right(engine, 1)


@pytest.mark.parametrize("count", [0, 1, 8, 9])
def test_an_announcement_takes_eight_bytes_and_a_bit_for_each_block(count: int) -> None:
    sums = [(-1) ** place << 62 for place in range(count)]
    announced = Announcement([place % 3 == 0 for place in range(count)], sums)
    packed = announced.packed()
    assert len(packed) == 8 * count + (count + 7) // 8 and Announcement.unpacked(packed, count) == announced


def test_a_delta_refit_after_one_that_failed_sends_everything() -> None:
    ranks, engine = connected(2, 2, delta=True)
    ranks.send("first")
    ranks.set(1)
    ranks.weights[1].before_view = fail_at("blocks.5.weight")
    assert all(isinstance(each, Exception) for each in ranks.send("broken")) and refuses(engine)
    ranks.weights[1].before_view = lambda name: None
    assert ranks.connect(engine, 2, dataclasses.replace(IMPATIENT, delta=True)) == [None, None]
    assert not ranks.send("mended")[0].is_delta and is_right(engine, 1)
    assert ranks.send("same")[0].wire_bytes == 0


def fail_at(name: str) -> Callable[[str], None]:
    def fail(used: str) -> None:
        if used == name:
            raise OSError("made to fail")

    return fail


def test_weights_of_an_engine_that_are_not_those_of_the_sync_before_are_found() -> None:
    ranks, engine = connected(1, 1, delta=True, block_bytes=BLOCK_BYTES)
    ranks.send("first")
    (worker,) = engine._llm.workers
    with torch.no_grad():
        worker.model.blocks[2].weight[4, 4] += 1  # a block that is not sent
    (told,) = messages_of(ranks.send("second"))
    assert re.search(r"worker 0: blocks\.2\.weight \[4:6, 0:6\] has checksum -?\d+ in blocks\.2\.weight, and -?\d+ on "
                     "trainer rank 0, after a refit of what has changed", told), told
    assert refuses(engine)
    assert ranks.connect(engine, 1, dataclasses.replace(IMPATIENT, delta=True)) == [None]
    ranks.send("third")
    worker.weight_transfer_engine.guard.sync = None  # as after loading from a disk
    (told,) = messages_of(ranks.send("fourth"))
    assert "worker 0: only changes since sync 1 are sent, and its weights are not of a sync" in told


def test_set_up_costs_no_collective_and_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug 26."""
    called: list[str] = []
    for name in dir(dist):
        if name.startswith(("all_", "broadcast", "gather", "scatter", "reduce", "send", "recv", "isend", "irecv",
                            "barrier", "new_group", "batch_")):
            monkeypatch.setattr(dist, name, lambda *args, called=called, name=name, **kwargs: called.append(name))
    ranks, engine = Ranks.of(1), engine_of()
    trainer = Trainer(0, 1, lambda value: value, "127.0.0.1", torch.device("cpu"))
    made: list[WeightSender] = []
    taken = peak_bytes(lambda: made.append(WeightSender(ranks.weights[0], trainer, engine, 1, OPTIONS)))
    assert (taken, called) == (0, [])
    ranks.senders = made
    ranks.send("policy")
    assert is_right(engine, 0) and not called


def test_memory_of_a_sync_is_that_of_a_few_chunks() -> None:
    """Bug 27."""
    ranks, engine = Ranks.of(1), engine_of()
    taken = {}

    class Client:
        """The engine's calls, one of them watched."""

        init_weight_transfer_engine = staticmethod(engine.init_weight_transfer_engine)
        start_weight_update = staticmethod(engine.start_weight_update)
        finish_weight_update = staticmethod(engine.finish_weight_update)

        @staticmethod
        def update_weights(update_info: dict[str, Any]) -> None:
            taken["receiver"] = peak_bytes(lambda: engine.update_weights(update_info))

    ranks.connect(Client(), 1)
    taken["sender"] = peak_bytes(lambda: ranks.senders[0].send("policy"))
    total = sum(4 * torch.Size(shape).numel() for shape in SHAPES.values())
    own = sum(tensor.nbytes for tensor in ranks.weights[0].tensors.values())
    live = sum(tensor.nbytes for tensor in engine._llm.workers[0].model.parameters())
    assert is_right(engine, 0) and own == live == total > 5 * OPTIONS.chunk_bytes
    # Of its own: messages under way and the one being packed. The tensors themselves are touched as views.
    assert taken["sender"] - own <= (WINDOW + 1) * (OPTIONS.chunk_bytes + 32)
    assert taken["receiver"] - live <= 2 * (OPTIONS.chunk_bytes + 32)


def altered(change: Callable[[list[Any]], list[Any]]) -> Callable[..., list[Any]]:
    """`send_plan`, of rank 1 with a change."""
    original = planning.send_plan

    def plan(*args: Any) -> list[Any]:
        operations = original(*args)
        return change(operations) if args[-1] == 1 else operations

    return plan


def dropped(operations: list[Any]) -> list[Any]:
    return operations[:2] + operations[3:]


def reordered(operations: list[Any]) -> list[Any]:
    return [*operations[:2], operations[3], operations[2], *operations[4:]]


def renamed(operations: list[Any]) -> list[Any]:
    return [*operations[:2], dataclasses.replace(operations[2], name="other"), *operations[3:]]


def other_box(operations: list[Any]) -> list[Any]:
    one = operations[2]
    return [*operations[:2], dataclasses.replace(one, box=dataclasses.replace(one.box, starts=one.box.stops,
                                                                             stops=one.box.stops)), *operations[3:]]


@pytest.mark.parametrize("change", [dropped, reordered, renamed, other_box])
@pytest.mark.parametrize("side", ["trainer", "worker"])
def test_plans_that_differ_are_told_on_both_sides(monkeypatch, side, change):
    if side == "trainer":
        monkeypatch.setattr(planning, "send_plan", altered(change))
    refused: queue.SimpleQueue[str] = queue.SimpleQueue()
    ranks, engine = connected(2, 1, chunk_bytes=1 << 20)
    if side == "worker":
        worker = engine._llm.workers[0].weight_transfer_engine._connection
        worker._by_sender[1] = change(worker._by_sender[1])
        worker._digests["1"] = planning.digest(worker._entries, worker._by_sender[1])
    start = engine.update_weights

    def update(update_info: dict[str, Any]) -> None:
        try:
            start(update_info)
        except RefitError as error:
            refused.put(str(error))
            raise

    monkeypatch.setattr(engine, "update_weights", update)
    first, second = messages_of(ranks.send("policy"))
    # Operations are sorted by tensor: the third of rank 1 is of the first block (the vector comes from rank 1).
    place = r"item 2: trainer rank 1 has .*, worker 0 has .*"
    for told in (second, refused.get(timeout=10)):
        assert re.search(place, told), told
    assert "worker 0 and trainer rank 1 disagree about what is sent" in first
    assert refuses(engine)


def test_another_dtype_on_one_side() -> None:
    ranks, engine = Ranks.of(2), engine_of()
    entries = ranks.weights[1].entries
    entries[2] = dataclasses.replace(entries[2], dtype="bfloat16")
    assert ranks.connect(engine, 1, IMPATIENT) == [None, None]
    _, second = messages_of(ranks.send("policy"))
    assert "trainer rank 1 has blocks.0.weight bfloat16" in second
    assert "worker 0 has blocks.0.weight float32" in second
    assert refuses(engine)


def test_metadata_of_two_workers_that_are_swapped() -> None:
    ranks, engine = connected(2, 2)
    ranks.senders[0]._metadata.reverse()
    for told in messages_of(ranks.send("policy")):
        assert "what it was told is what worker" in told
    assert refuses(engine)


def test_a_rank_with_the_holders_of_an_earlier_layout() -> None:
    ranks, engine = Ranks.of(2), engine_of()
    ranks.weights[1].holders = holders_of(ranks.weights[1].entries, 3)
    first, second = messages_of(ranks.connect(engine, 1, IMPATIENT))
    assert "trainer rank 1 does not hold what was agreed on" in second and "embed.weight [4:8, 0:6]" in second
    assert "set-up failed: trainer rank 1: ValueError: trainer rank 1 does not hold" in first
    assert refuses(engine)


def test_workers_trace_their_loaders_while_the_trainer_finds_its_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    from mimo.refit import receiver

    ranks, engine, traced = Ranks.of(2), engine_of(), threading.Event()
    trace, holders = receiver.plan_taken, ranks.weights[0].holders
    ranks.weights[0].holders = {}

    def noted(*args: Any) -> Any:
        taken = trace(*args)
        traced.set()
        return taken

    def locate() -> None:
        assert traced.wait(30), "the worker waits for the boxes"
        ranks.weights[0].holders = holders

    monkeypatch.setattr(receiver, "plan_taken", noted)
    monkeypatch.setattr(ranks.weights[0], "locate", locate)
    assert ranks.connect(engine, 1, IMPATIENT) == [None, None]
    ranks.send("policy")
    assert is_right(engine, 0)


def test_boxes_that_are_not_found_end_the_set_up_of_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, engine = Ranks.of(2), engine_of()

    def locate() -> None:
        raise ValueError("the weight map does not fit the model")

    monkeypatch.setattr(ranks.weights[0], "locate", locate)
    for told in messages_of(ranks.connect(engine, 1, IMPATIENT)):
        assert "the weight map does not fit the model" in told
    assert refuses(engine)
    assert Ranks.of(2).connect(engine, 1, IMPATIENT) == [None, None]


def test_a_rank_whose_layout_is_another() -> None:
    """Rows were moved from one rank to the other since the holders were gathered on the first."""
    ranks, engine = Ranks.of(2), engine_of()
    stale = Ranks.of(3).weights[1]
    stale.set(0)
    ranks.weights[1].holders, ranks.weights[1].slices = stale.holders, stale.slices
    ranks.weights[1].tensors = stale.tensors
    assert ranks.connect(engine, 1, IMPATIENT) == [None, None]
    _, second = messages_of(ranks.send("policy"))
    assert "item 0: trainer rank 1 has embed.weight float32 [4:8, 0:6]" in second
    assert "worker 0 has embed.weight float32 [6:12, 0:6]" in second


@pytest.mark.parametrize(("shapes", "told"), [
    (SHAPES | {"other.weight": (4, 4)}, r"other\.weight"),
    ({name: shape for name, shape in SHAPES.items() if name != "blocks.3.weight"}, r"blocks\.3\.weight: 36 of 36 "),
    (SHAPES | {"blocks.2.weight": (8, 8)}, r"blocks\.2\.weight is refused: .*\[8, 8\] for \[6, 6\]"),
    (SHAPES | {"scale.weight": (7,)}, r"scale\.weight is refused: .*\[7\] for \[6\]"),
], ids=["a-tensor-too-many", "a-tensor-too-few", "another-size", "another-size-through-the-loader"])
def test_a_trainer_of_another_model_is_refused(shapes: dict[str, tuple[int, ...]], told: str) -> None:
    ranks, engine = Ranks.of(2, shapes=shapes), engine_of()
    for message in messages_of(ranks.connect(engine, 1, IMPATIENT)):
        assert re.search(f"worker 0: .*{told}", message), message
    assert refuses(engine)
    again = Ranks.of(2)
    assert again.connect(engine, 1, IMPATIENT) == [None, None]
    again.send("policy")
    assert is_right(engine, 0)


def test_a_tensor_that_nobody_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader that passes over what it does not know."""
    engine = engine_of()
    model = engine._llm.workers[0].model
    load = model.load_weights
    monkeypatch.setattr(model, "load_weights", lambda weights: load(
        (name, tensor) for name, tensor in weights if name in SHAPES))
    ranks = Ranks.of(2, shapes=SHAPES | {"other.weight": (4, 4)})
    for message in messages_of(ranks.connect(engine, 1, IMPATIENT)):
        assert "1 tensors of the trainer are taken by no worker" in message and "other.weight" in message


@pytest.mark.parametrize("load_format", ["dummy", "auto"])
def test_an_engine_serves_nothing_after_a_broken_sync_until_a_whole_one(load_format: str) -> None:
    """A rank raises while bytes move, in the second sync."""
    ranks, engine = Ranks.of(2), engine_of(2, load_format)
    assert refuses(engine) == (load_format == "dummy")
    ranks.connect(engine, 2, IMPATIENT)
    ranks.send("first")
    assert is_right(engine, 0)
    ranks.set(1)

    def fail(name: str) -> None:
        if name == "blocks.5.weight":
            raise MemoryError("no memory for blocks.5")

    ranks.weights[1].before_view = fail
    first, second = ranks.send("second")
    assert isinstance(first, RefitError) and isinstance(second, MemoryError)
    assert "sync 2 failed: trainer rank 1: MemoryError: no memory for blocks.5" in str(first)
    assert refuses(engine)
    # The workers, too, for who calls them past the engine.
    engine.version = "forced"
    assert refuses(engine)
    engine.version = None
    for told in messages_of(ranks.send("third")):
        assert "this sender is closed" in told
    again = Ranks.of(2, seed=3)
    assert again.connect(engine, 2, IMPATIENT) == [None, None]
    engine.version = "forced"
    assert refuses(engine)  # having met a trainer again makes them no better
    engine.version = None
    again.send("fourth")
    assert is_right(engine, 3) and engine.version == "fourth"


def test_a_worker_that_fails_while_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, engine = connected(2, 2)
    ranks.send("first")
    model = engine._llm.workers[1].model
    load = model.load_weights

    def fail(weights: Any) -> None:
        raise OSError("a disk is full")

    monkeypatch.setattr(model, "load_weights", fail)
    for told in messages_of(ranks.send("second")):
        assert "worker 1: OSError: a disk is full" in told
    assert refuses(engine)
    monkeypatch.setattr(model, "load_weights", load)
    again = Ranks.of(1, seed=2)
    again.connect(engine, 2, IMPATIENT)
    again.send("third")
    assert is_right(engine, 2)


def test_an_update_that_its_trainer_never_ended() -> None:
    """vLLM refuses to begin while one is open."""
    ranks, engine = connected()
    ranks.send("first")
    engine.start_weight_update()
    assert refuses(engine)
    ranks.set(1)
    ranks.send("second")
    assert is_right(engine, 1)


def test_an_engine_that_never_answers_is_named_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, engine = connected()
    for sender in ranks.senders:
        sender._rendezvous.timeout_s = 1
    release = threading.Event()
    monkeypatch.setattr(engine, "finish_weight_update", lambda version: release.wait(30))
    first, second = messages_of(ranks.send("policy"))
    assert "trainer rank 0 waits for the engine's answer; nothing came within 1 s" in first
    assert "trainer rank 0 waits for the engine's answer" in second
    release.set()
    assert refuses(engine)


@pytest.mark.parametrize("verify", [True, False])
def test_one_bit_that_changes_under_way_is_found(monkeypatch: pytest.MonkeyPatch, verify: bool) -> None:
    from mimo.refit import receiver

    ranks, engine = connected(1, 1, verify=verify)
    copy_all, chunks = receiver.copy_all, itertools.count()

    def damaged(targets: Sequence[torch.Tensor], boxes: Sequence[torch.Tensor]) -> None:
        if next(chunks) == 2:
            boxes[1].view(6, 6).view(torch.int32)[4, 1] ^= 4
        copy_all(targets, boxes)

    monkeypatch.setattr(receiver, "copy_all", damaged)
    raised = ranks.send("policy")
    live = engine._llm.workers[0].model.blocks[3].weight
    assert not torch.equal(live, ranks.weights[0].tensors["blocks.3.weight"])  # so the change was one
    if verify:
        assert "worker 0: chunk 2 from trainer rank 0: blocks.3.weight [0:6, 0:6] arrived with checksum" in str(raised)
    assert refuses(engine) == verify


def test_a_box_that_is_not_written_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from mimo.refit import receiver

    ranks, engine = connected(2, 1, verify=True)
    copy_all = receiver.copy_all

    def forgetful(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        kept = targets[-1].clone()
        copy_all(targets, sources)
        if targets[-1].shape == (3 * 6,):
            targets[-1].copy_(kept)

    monkeypatch.setattr(receiver, "copy_all", forgetful)
    for told in messages_of(ranks.send("policy")):
        assert "blocks.1.weight [0:3, 0:6] arrived with checksum" in told
        assert "read back from blocks.1.weight, where it was written to, it has" in told


def test_a_tensor_that_comes_with_the_values_of_the_sync_before_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "MIN_ELEMENTS", 30)
    ranks, engine = connected(1, 1, verify=True)
    assert ranks.send("policy 0")[0].version == "policy 0"
    stale = ranks.weights[0].tensors["blocks.3.weight"].clone()
    (sender,) = ranks.senders
    sender.is_changed = True
    ranks.set(1)
    assert ranks.send("policy 1")[0].version == "policy 1"
    ranks.set(0)
    assert ranks.send("policy 2")[0].version == "policy 2"
    ranks.set(1)
    ranks.weights[0].tensors["blocks.3.weight"] = stale
    (told,) = messages_of(ranks.send("policy 3"))
    assert ("worker 0: 1 tensors came with the values of the sync before, though the trainer has changed every "
            "tensor: blocks.3.weight") in told
    assert refuses(engine)


def test_a_sequence_that_is_not_the_announced_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 sends as it planned, but in the end says that it sent something else."""
    ranks, engine = connected()
    rendezvous = ranks.senders[1]._rendezvous
    publish = rendezvous.publish
    monkeypatch.setattr(rendezvous, "publish", lambda key, value: publish(
        key, {"0": "other"} if key == "sync 1/running/1" else value))
    for told in messages_of(ranks.send("policy")):
        assert "trainer rank 1 sent worker 0 another sequence of tensors than was announced" in told
    assert refuses(engine)


def test_a_first_rank_without_a_store_is_told_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not keep the others waiting for the address."""
    def fail(cls: type[Rendezvous], *args: Any) -> Rendezvous:
        raise RefitError("no port is free")

    monkeypatch.setattr(Rendezvous, "host", classmethod(fail))
    assert messages_of(Ranks.of(2).connect(None, 1, IMPATIENT)) == ["set-up failed: no port is free"] * 2


def test_a_rank_that_does_not_reach_the_store_stops_all_before_their_first_collective(monkeypatch):
    ranks, join = Ranks.of(2), Rendezvous.join

    def fail_on_second_rank(place: StoreAddress, who: str, limit: float, listener: int | None = None) -> Rendezvous:
        if who == "trainer rank 1":
            raise RefitError(f"{who} cannot reach the refit store")
        return join(place, who, limit, listener)

    def locate() -> None:
        raise AssertionError("this collective of all ranks would not end")

    monkeypatch.setattr(Rendezvous, "join", fail_on_second_rank)
    for weights in ranks.weights:
        monkeypatch.setattr(weights, "locate", locate)
    first, second = messages_of(ranks.connect(engine_of(), 1, dataclasses.replace(IMPATIENT, timeout_s=2)))
    assert "waits for trainer rank 1" in first
    assert second == "trainer rank 1 cannot reach the refit store"
