"""Plans of a refit: every worker gets exactly what it wants, both ends agree, and whatever does not fit has a name."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo.boxes import Box
from mimo.refit.plan import (
    Op,
    bytes_moved,
    bytes_needed,
    check_holders,
    check_plan,
    check_recv_spec,
    chunks,
    described,
    digest,
    encoded,
    first_difference,
    grouped,
    receive_plan,
    send_plan,
    within,
)
from mimo.refit.tensor_slices import Address, Holder, Holders, RecvSpec, TensorMeta, TensorSlice
from scripts.bench.refit_shapes import EngineLayout, TrainerLayout
from tests.support.refit_layouts import (
    PADDING,
    SmallModel,
    Tensors,
    engine_shards,
    holders_of,
    packed,
    recv_spec_of,
    slices_of,
    trainer_shards,
    unpacked,
)

MODEL = SmallModel()
AT = "model.layers.1"


@dataclass
class Ends:
    """Knowledge and tensors of both ends of a refit."""

    entries: Sequence[TensorMeta]
    holders: Holders
    slices: list[list[TensorSlice]]
    specs: dict[int, RecvSpec]
    ranks: list[Tensors]
    workers: list[Tensors]

    def sent(self, rank: int) -> dict[int, list[Op]]:
        return grouped(send_plan(self.entries, self.holders, self.slices[rank], self.specs, rank), "receiver")

    def received(self, worker: int) -> list[Op]:
        return receive_plan(self.entries, self.holders, self.specs[worker], worker)


def ends_of(model: SmallModel, trainer: TrainerLayout, engine: EngineLayout,
            through_loader: Callable[[str], bool] = lambda name: False) -> Ends:
    ranks = [trainer_shards(model, trainer, rank) for rank in range(trainer.ranks)]
    workers = [engine_shards(model, engine, worker) for worker in range(engine.workers)]
    slices = [slices_of(model, tensors) for tensors in ranks]
    alike: dict[RecvSpec, RecvSpec] = {}
    specs = [recv_spec_of(model, slices_of(model, tensors), through_loader) for tensors in workers]
    return Ends(model.entries, holders_of(slices), slices,
                {worker: alike.setdefault(each, each) for worker, each in enumerate(specs)}, ranks, workers)


def fields(operations: Sequence[Op]) -> list[tuple]:
    return [(each.entry, each.name, each.box, each.sender, each.receiver, each.target) for each in operations]


def expected_of(model: SmallModel, shards: Tensors, spec: RecvSpec) -> Tensors:
    """Return a worker's tensors after a transfer: its own slicing, but for what only its loader would write."""
    loader = [model.whole[name] for name in spec.loader]
    numbers = np.concatenate([each.reshape(-1) for each in loader]) if loader else np.array([], int)
    return {name: np.where(np.isin(tensor, numbers), PADDING, tensor) for name, tensor in shards.items()} | dict(
        zip(spec.loader, loader, strict=True))


def transfer(model: SmallModel, trainer: TrainerLayout, engine: EngineLayout,
             through_loader: Callable[[str], bool] = lambda name: False) -> Ends:
    """Plan on both ends, move numbers, and compare with what each worker's own slicing gives."""
    ends = ends_of(model, trainer, engine, through_loader)
    check_holders(ends.entries, ends.holders)
    sent = [ends.sent(rank) for rank in range(trainer.ranks)]
    for worker, spec in ends.specs.items():
        check_recv_spec(ends.entries, spec)
        operations = ends.received(worker)
        check_plan(ends.entries, ends.holders, spec, operations)
        expected = expected_of(model, ends.workers[worker], spec)
        live = {name: np.full(tensor.shape, PADDING) for name, tensor in expected.items()}
        received = grouped(operations, "sender")
        assert received.keys() == {rank for rank, plan in enumerate(sent) if worker in plan}
        for rank, part in received.items():
            assert fields(part) == fields(sent[rank][worker])
            message = packed(sent[rank][worker], ends.ranks[rank])
            assert unpacked(part, message, live) == len(message)
        for name, tensor in expected.items():
            assert np.array_equal(live[name], tensor), f"worker {worker}: {name}"
        assert bytes_moved(operations, ends.entries) == bytes_needed(spec, ends.entries) == sum(
            model.element_bytes[tensor[tensor != PADDING]].sum() for tensor in expected.values())
    return ends


@st.composite
def layouts(draw: st.DrawFn) -> tuple[SmallModel, TrainerLayout, EngineLayout]:
    """Draw a model and layouts of up to 64 ranks on either side."""
    model = SmallModel(layers=draw(st.integers(2, 3)), kv_heads=draw(st.sampled_from([1, 2, 8])),
                       experts=draw(st.sampled_from([4, 6])), gated=draw(st.booleans()),
                       shared_expert=draw(st.booleans()), tied=draw(st.booleans()))
    tp, pp = draw(st.sampled_from([1, 2, 4, 8])), draw(st.integers(1, 2))
    dp = draw(st.sampled_from([each for each in (1, 2, 3, 4, 8, 16, 64) if tp * pp * each <= 64]))
    etp, ep = draw(st.sampled_from([(etp, ep) for etp in (1, 2, 4, 8) for ep in (1, 2, 3, 4)
                                    if tp * dp % (etp * ep) == 0 and model.experts % ep == 0]))
    trainer = TrainerLayout(tp, pp, dp, ep, etp)
    tp, pp, is_ep = draw(st.sampled_from([1, 2, 4, 8])), draw(st.integers(1, 2)), draw(st.booleans())
    dp = draw(st.sampled_from([each for each in (1, 2, 3, 4) if is_ep or 16 % (tp * each) == 0]))
    replicas = draw(st.sampled_from([each for each in (1, 2, 3, 8, 64) if tp * pp * dp * each <= 64]))
    return model, trainer, EngineLayout(tp, pp, dp, is_ep, replicas)


@settings(max_examples=40, deadline=None)
@given(layouts(), st.sampled_from(["", "_proj", "experts", "norm|embed", "."]))
def test_every_layout_gets_exactly_what_it_wants(case, loader):
    transfer(*case, lambda name: bool(loader and re.search(loader, name)))


SPLITS = {
    "one-rank": (MODEL, TrainerLayout(), EngineLayout()),
    **{f"gate-and-up-halves-tp{tp}": (SmallModel(layers=1), TrainerLayout(tp=2), EngineLayout(tp=tp))
       for tp in (1, 2, 4, 8)},
    **{f"two-kv-heads-tp{tp}-to-tp{other}": (SmallModel(layers=1, kv_heads=2), TrainerLayout(tp=tp),
                                             EngineLayout(tp=other)) for tp, other in ((8, 1), (1, 8), (8, 4), (4, 8))},
    "expert-ranks-are-not-tp-ranks": (MODEL, TrainerLayout(tp=2, dp=4, ep=4), EngineLayout(tp=4)),
    # Only up: no half of a fused tensor is left for a gate, and no up projection goes missing.
    "experts-without-gate": (SmallModel(gated=False, experts=2), TrainerLayout(ep=2, dp=2), EngineLayout(tp=2)),
    "engine-of-stages-and-replicas": (MODEL, TrainerLayout(tp=2, pp=2), EngineLayout(tp=2, pp=2, dp=2, ep=True)),
    "tied-embeddings-on-two-stages": (SmallModel(tied=True), TrainerLayout(pp=2), EngineLayout(pp=2)),
    "more-workers-than-experts": (MODEL, TrainerLayout(), EngineLayout(tp=8, dp=2, ep=True)),
}


@pytest.mark.parametrize("case", SPLITS)
def test_layouts_that_went_wrong_elsewhere(case: str) -> None:
    transfer(*SPLITS[case])


@pytest.mark.parametrize("prefix", ["model", "backbone", "language_model.model"])
def test_each_stage_sends_its_own_layers_whatever_they_are_called(prefix: str) -> None:
    model = SmallModel(prefix=prefix)
    ends = transfer(model, TrainerLayout(pp=2, tp=2), EngineLayout(tp=4))
    for operation in itertools.chain.from_iterable(ends.received(worker) for worker in range(4)):
        if ".layers." in operation.name:
            assert operation.sender // 2 == int(operation.name.split(".layers.")[1].split(".")[0])
    assert {each.name for rank in (0, 1) for part in ends.sent(rank).values() for each in part}.isdisjoint(
        {f"{prefix}.norm.weight", "lm_head.weight"})


def test_the_reference_lays_ranks_out_as_megatron_does() -> None:
    from megatron.core.parallel_state import RankGenerator  # takes long, and nothing else here needs it

    layout, model = TrainerLayout(tp=2, pp=2, dp=4, ep=4), SmallModel(experts=4, layers=2)
    shards = [trainer_shards(model, layout, rank) for rank in range(layout.ranks)]
    dense = RankGenerator(tp=2, ep=1, dp=4, pp=2, cp=1, order="tp-cp-ep-dp-pp")
    expert = RankGenerator(tp=1, ep=4, dp=2, pp=2, cp=1, order="tp-cp-ep-dp-pp")
    for generator, name, is_alike in (
            (dense, "decoder.layers.0.linear_proj", ("dp", "tp")),
            (expert, "decoder.layers.0.experts.0.linear_fc1", ("dp", "ep"))):
        replicas, parts = is_alike
        for group in generator.get_ranks(replicas):
            assert all(np.array_equal(shards[rank][name], shards[group[0]][name]) for rank in group)
        for group in generator.get_ranks(parts):
            firsts = [shards[rank][name].flat[0] for rank in group]
            assert firsts == sorted(set(firsts))
    for group in dense.get_ranks("pp"):
        assert "embedding" in shards[group[0]] and "output_layer" in shards[group[1]]


def in_words(entries: Sequence[TensorMeta]) -> list[str]:
    return [f"{entry.name} {entry.dtype} {list(entry.shape)} {entry.keep_fp32}" for entry in entries]


def refusal(trainer: Ends, engine: Ends) -> str:
    """Return the errors of both ends when they set up a refit, from what each believes; empty if they agree."""
    difference = first_difference(in_words(trainer.entries), in_words(engine.entries), "the trainer", "worker 0")
    try:
        check_holders(trainer.entries, trainer.holders)
        sent = [trainer.sent(rank) for rank in range(len(trainer.slices))]
        for worker, spec in engine.specs.items():
            check_recv_spec(engine.entries, spec)
            operations = engine.received(worker)
            check_plan(engine.entries, engine.holders, spec, operations)
            received = grouped(operations, "sender")
            for rank, plan in enumerate(sent):
                mine, theirs = plan.get(worker, []), received.get(rank, [])
                if digest(trainer.entries, mine) != digest(engine.entries, theirs):
                    difference = difference or first_difference(
                        described(trainer.entries, mine), described(engine.entries, theirs),
                        f"trainer rank {rank}", f"worker {worker}")
    except ValueError as error:
        return difference + str(error)
    return difference


def renamed(ends: Ends, old: str, new: str) -> Ends:
    names = {name: name for name in ends.holders} | {old: new}
    return replace(ends, entries=[replace(entry, name=names[entry.name]) for entry in ends.entries],
                   holders={names[name]: boxes for name, boxes in ends.holders.items()},
                   slices=[[replace(part, name=names[part.name]) for part in own] for own in ends.slices])


def of_ranks(ends: Ends, ranks: dict[int, int]) -> Holders:
    """Holders with ranks under other numbers."""
    return {name: [Holder(held.box, tuple(sorted(ranks.get(rank, rank) for rank in held.ranks))) for held in boxes]
            for name, boxes in ends.holders.items()}


def without(ends: Ends, name: str) -> Ends:
    return replace(ends, entries=[entry for entry in ends.entries if entry.name != name],
                   holders={each: boxes for each, boxes in ends.holders.items() if each != name},
                   slices=[[part for part in own if part.name != name] for own in ends.slices])


def wanting(ends: Ends, change: Callable[[TensorSlice], TensorSlice | None]) -> Ends:
    """Return a worker that wants changed slices."""
    return replace(ends, specs={worker: RecvSpec(tuple(filter(None, map(change, spec.direct))), spec.loader)
                                for worker, spec in ends.specs.items()})


def moved(part: TensorSlice, name: str, offset: int) -> TensorSlice:
    return part if part.name != name else replace(part, address=replace(part.address, offset=offset))


UP, GATE, QUERY = (f"{AT}.mlp.experts.1.up_proj.weight", f"{AT}.mlp.experts.1.gate_proj.weight",
                   f"{AT}.self_attn.q_proj.weight")
ROUTER = f"{AT}.mlp.gate.e_score_correction_bias"
Change = Callable[[Ends], Ends]


def same(ends: Ends) -> Ends:
    return ends


# What is wrong: what the trainer has instead, what the engine has instead, and what the message must say.
MUTATIONS: dict[str, tuple[Change, Change, str]] = {
    "names-of-another-expert-rank": (
        lambda ends: replace(ends, slices=[ends.slices[1], ends.slices[0], *ends.slices[2:]]), same,
        r"trainer rank 0 does not hold.*experts\.0\.\w+\.weight .* should be there and is not"),
    "trainer-ranks-mixed-up": (same, lambda ends: replace(ends, holders=of_ranks(ends, {0: 1, 1: 0})),
                               r"trainer rank 0 has model\.embed_tokens\.weight bfloat16 .*, worker 0 has"),
    "workers-mixed-up": (
        same, lambda ends: replace(ends, specs={0: ends.specs[1], 1: ends.specs[0]}),
        r"trainer rank 0 has model\.embed_tokens\.weight bfloat16 .*, worker 0 has model\.layers\.0\.mlp\.gate"),
    "reordered": (same, lambda ends: replace(ends, entries=[*ends.entries[:-2], *ends.entries[:-3:-1]]),
                  r"the trainer has model\.norm\.weight.*, worker 0 has lm_head\.weight"),
    "regrouped-by-dtype": (
        same, lambda ends: replace(ends, entries=sorted(ends.entries, key=lambda entry: entry.dtype)),
        r"item 9: the trainer has model\.layers\.0\.mlp\.gate\.weight float32.*, worker 0 has .*experts.*bfloat16"),
    "dropped-by-the-trainer": (lambda ends: without(ends, UP), lambda ends: without(ends, UP),
                               rf"unknown: {re.escape(UP)} \(direct\) is not in the chunk plan"),
    "dropped-by-the-holders": (
        lambda ends: replace(ends, holders=without(ends, UP).holders), same, f"missing: no rank holds {re.escape(UP)}"),
    "dropped-from-the-chunk-plan": (
        lambda ends: replace(ends, entries=without(ends, UP).entries), same, f"left over: {re.escape(UP)}"),
    "dropped-by-a-stage": (
        lambda ends: replace(ends, slices=without(ends, UP).slices), same, rf"does not hold.*{re.escape(UP)}"),
    "not-taken": (same, lambda ends: wanting(ends, lambda part: None if part.name == UP else part),
                  rf"has {re.escape(UP)} bfloat16 .*, worker 0 has"),
    "renamed": (lambda ends: renamed(ends, UP, f"{AT}.mlp.experts.1.other.weight"), same,
                rf"the trainer has .*experts\.1\.other\.weight.*, worker 0 has {re.escape(UP)}"),
    "renamed-as-megatron-does": (
        lambda ends: renamed(ends, QUERY, "decoder.layers.1.self_attention.linear_qkv.weight"),
        lambda ends: renamed(ends, QUERY, "decoder.layers.1.self_attention.linear_qkv.weight"),
        rf"unknown: {re.escape(QUERY)} \(direct\)"),
    "another-dtype": (
        same, lambda ends: replace(ends, entries=[replace(entry, dtype="float16") if entry.name == UP else entry
                                                  for entry in ends.entries]),
        rf"the trainer has {re.escape(UP)} bfloat16 .*, worker 0 has {re.escape(UP)} float16"),
    "rounded-router": (
        lambda ends: replace(ends, entries=[replace(entry, dtype="bfloat16") for entry in ends.entries]), same,
        rf"{re.escape(ROUTER)} must stay float32 and would travel as bfloat16"),
    "earlier-layout-of-the-trainer": (
        lambda ends: replace(ends, holders=ends_of(MODEL, TrainerLayout(tp=4), EngineLayout()).holders), same,
        r"trainer rank 0 does not hold.*model\.embed_tokens\.weight \[0:\d+, 0:8\] should be there"),
    "earlier-layout-at-the-engine": (
        same, lambda ends: replace(ends, holders=ends_of(MODEL, TrainerLayout(tp=4), EngineLayout()).holders),
        r"trainer rank 0 has model\.embed_tokens\.weight \w+ \[0:12, .*, worker 0 has model\.embed_\S+ \w+ \[0:8"),
    "gate-and-up-in-one-place": (
        same, lambda ends: wanting(ends, lambda part: moved(part, UP, next(
            each.address.offset for each in ends.specs[0].direct if each.name == GATE))),
        rf"target: .*{re.escape(UP)}.* are both written to {AT}\.w13_weight"),
}


@pytest.mark.parametrize("case", MUTATIONS)
def test_whatever_the_ends_see_differently_is_named(case: str) -> None:
    change_trainer, change_engine, message = MUTATIONS[case]
    ends = ends_of(MODEL, TrainerLayout(tp=2, dp=1, ep=2), EngineLayout(tp=2))
    assert refusal(ends, ends) == ""
    found = refusal(change_trainer(ends), change_engine(ends))
    assert re.search(message, found, re.DOTALL), found


@given(st.lists(st.tuples(st.integers(0, 40), st.sampled_from(["float32", "bfloat16"])), max_size=12),
       st.integers(1, 120), st.integers(0, 200))
def test_chunks_are_the_plan_in_order(sizes: list[tuple[int, str]], max_bytes: int, seed: int) -> None:
    entries = [TensorMeta(f"layers.{number}", dtype, (size,)) for number, (size, dtype) in enumerate(sizes)]
    found = chunks(entries, max_bytes)
    assert list(itertools.chain.from_iterable(found)) == list(range(len(entries)))
    for chunk in found:
        assert chunk and (len(chunk) == 1 or sum(entries[number].num_bytes for number in chunk) <= max_bytes)
    for first, second in itertools.pairwise(found):
        assert sum(entries[number].num_bytes for number in (*first, second.start)) > max_bytes
    numbers = sorted(np.random.default_rng(seed).integers(0, len(entries), 5)) if entries else []
    operations = [Op(int(number), f"layers.{number}", Box.whole((1,)), Address("a", 0, (1,)), 0, 0)
                  for number in numbers]
    parts = [list(within(operations, chunk)) for chunk in found]
    assert list(itertools.chain.from_iterable(parts)) == operations
    assert all(each.entry in chunk for chunk, part in zip(found, parts, strict=True) for each in part)
    assert b"".join(encoded(entries, part) for part in parts) == encoded(entries, operations)


def test_a_chunk_may_be_full() -> None:
    entries = [TensorMeta(f"layers.{number}", "float32", (size,)) for number, size in enumerate((1, 1, 2, 9, 1))]
    assert chunks(entries, 8) == [range(2), range(2, 3), range(3, 4), range(4, 5)]
    assert chunks([], 8) == []


def test_equal_boxes_of_tensors_of_other_widths_lie_elsewhere() -> None:
    entries = [TensorMeta(f"layers.{width}", "float32", (4, width)) for width in (6, 2)]
    holders = {entry.name: [Holder(Box.whole(entry.shape), (0,))] for entry in entries}
    slices = [TensorSlice(entry.name, Box.whole(entry.shape), Address(entry.name, 0, (entry.shape[1], 1)))
              for entry in entries]
    spec = RecvSpec(tuple(TensorSlice(entry.name, Box((2, 0), entry.shape), Address(entry.name, 0, (9, 1)))
                          for entry in entries), ())
    check_plan(entries, holders, spec, receive_plan(entries, holders, spec, 0))
    assert [each.source.offset for each in send_plan(entries, holders, slices, {0: spec}, 0)] == [12, 4]


@pytest.mark.parametrize(("tp", "replicas"), [(8, 2), (8, 16), (4, 64), (1, 3), (8, 8)])
def test_replicas_send_the_same_number_of_workers_an_entry(tp: int, replicas: int) -> None:
    """Workers that want the same are tp apart, which divides by the number of replicas or is a divisor of it."""
    entries = [TensorMeta(f"layers.{number}", "bfloat16", (4,)) for number in range(4)]
    holders = {entry.name: [Holder(Box.whole((4,)), tuple(range(replicas)))] for entry in entries}
    spec = RecvSpec(tuple(TensorSlice(entry.name, Box.whole((4,)), Address(entry.name, 0, (1,)))
                          for entry in entries), ())
    group = range(tp * 64)[3 % tp::tp]
    counts = Counter((each.entry, each.sender) for worker in group
                     for each in receive_plan(entries, holders, spec, worker))
    assert max(counts.values()) - min(counts.values()) <= 64 // replicas / 4 + 1
    assert len(counts) == len(entries) * replicas


def test_the_first_difference_names_both_sides() -> None:
    entries = [TensorMeta("a", "float32", (2,)), TensorMeta("b", "bfloat16", (4, 3))]
    operations = [Op(number, entry.name, Box.whole(entry.shape), Address("x", 0, (1,) * len(entry.shape)), 5, 1)
                  for number, entry in enumerate(entries)]
    mine = described(entries, operations)
    assert first_difference(mine, mine, "trainer rank 5", "worker 1") == ""
    assert first_difference(mine, mine[:1], "trainer rank 5", "worker 1") == (
        "item 1: trainer rank 5 has b bfloat16 [0:4, 0:3] of entry 1 from trainer rank 5, worker 1 has nothing more")
