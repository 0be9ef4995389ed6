"""Tables that two ends of a refit exchange: what they say, reading some of it alone, and that they stay small."""

from __future__ import annotations

import json

import pytest

from mimo.refit.tensor_slices import (
    RecvSpec,
    folded,
    holders_from_table,
    holders_table,
    recv_spec_from_table,
    recv_spec_table,
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
