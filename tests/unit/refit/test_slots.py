"""Tensor slices of a refit as JSON, the tables that two ends exchange, and options."""

from __future__ import annotations

import json

import pytest

from mimo.boxes import Box
from mimo.refit.options import RefitOptions
from mimo.refit.tensor_slices import (
    Address,
    RecvSpec,
    TensorMeta,
    TensorSlice,
    folded,
    holders_from_table,
    holders_table,
    meta_as_json,
    meta_from_json,
    recv_spec_from_table,
    recv_spec_table,
    slice_as_json,
    slice_from_json,
    table_digest,
    unfolded,
    wanted_names,
)
from scripts.bench.refit_shapes import EngineLayout, TrainerLayout
from tests.support.refit_layouts import (
    SmallModel,
    engine_shards,
    holders_of,
    recv_spec_of,
    slices_of,
    trainer_shards,
)


def test_slots_and_entries_survive_json() -> None:
    part = TensorSlice("a", Box((0, 2), (4, 6)), Address("fused", 12, (8, 1)))
    spec = RecvSpec((part,), ("b", "c"))
    assert slice_from_json(json.loads(json.dumps(slice_as_json(part)))) == part
    moved = RecvSpec((TensorSlice("a", part.box, Address("fused", 13, (8, 1))),), ("b", "c"))
    digest, *others = (table_digest(recv_spec_table(each)) for each in (spec, moved, RecvSpec((part,), ("c", "b"))))
    assert digest not in others
    entry = TensorMeta("a", "float32", (2, 3), keep_fp32=True)
    assert meta_from_json(json.loads(json.dumps(meta_as_json(entry)))) == entry


def test_bytes_are_those_of_the_wire() -> None:
    sizes = [TensorMeta("a", dtype, (3, 5)).num_bytes for dtype in ("float32", "bfloat16", "float8_e4m3fn")]
    assert sizes == [60, 30, 15]


MODEL = SmallModel(layers=12)


def test_tables_survive_and_do_not_grow_with_equal_layers() -> None:
    layout = TrainerLayout(tp=2, pp=2)
    slices = [slices_of(MODEL, trainer_shards(MODEL, layout, rank)) for rank in range(layout.ranks)]
    holders = holders_of(slices)
    table = json.loads(json.dumps(holders_table(holders)))
    assert holders_from_table(table) == holders
    assert len(table["patterns"]) == 3 and len(table["blocks"]) == 13  # layers of two stages, and what has no layer

    engine = slices_of(MODEL, engine_shards(MODEL, EngineLayout(tp=2), 1))
    spec = recv_spec_of(MODEL, engine, lambda name: "layers.3." in name or "down" in name)
    table = json.loads(json.dumps(recv_spec_table(spec)))
    assert recv_spec_from_table(table) == spec and wanted_names(table) == set(MODEL.shapes)
    assert len(table["direct"]["blocks"]) == 13 and len(table["direct"]["patterns"]) == 3  # one layer has none
    names = {"model.layers.3.mlp.gate.weight", "model.layers.11.self_attn.q_proj.weight", "lm_head.weight"}
    assert recv_spec_from_table(table, names) == RecvSpec(tuple(part for part in spec.direct if part.name in names),
                                                          tuple(name for name in spec.loader if name in names))


def test_only_the_number_of_the_layer_is_left_out() -> None:
    rows = [["blocks.1.experts.1.up", "local.1.up", 1], ["blocks.2.experts.1.up", "local.2.up", 1],
            ["blocks.3.experts.1.up", "local.2.up", 1], ["norm", "norm.1.x", 2], ["7.norm", "v7.7.x", [7]],
            ["w13.weight", "x.0.y", 0]]
    table = folded(rows)
    assert list(unfolded(table)) == rows
    assert table["blocks"] == [[0, "1"], [0, "2"], [1, "3"], [2, None], [3, "7"], [4, None]]
    assert table["patterns"][0] == [["blocks.*.experts.1.up", "local.*.up", 1]]
    with pytest.raises(ValueError, match=r"a\.\*\.b: a name with '\*'"):
        folded([["a.*.b"]])


def test_everything_that_is_wrong_is_listed_at_once() -> None:
    """Bug 31: a typo that is found late, by some ranks only, is a deadlock."""
    with pytest.raises(ValueError) as error:
        RefitOptions(backend="ucx", dtype="bf16", route="fast", chunk_bytes=0, timeout_s=-1)
    assert str(error.value) == (
        "refit backend 'ucx': known are gloo, nccl, ipc; "
        "refit dtype 'bf16': known are float32, bfloat16, float16, float64, float8_e4m3fn; "
        "refit route 'fast': known are auto, loader; "
        "refit chunk_bytes 0: must be positive; refit timeout_s -1: must be positive")
