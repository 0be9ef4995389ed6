"""Tensor slices of a refit as JSON, and their bytes."""

from __future__ import annotations

import json

from mimo.boxes import Box
from mimo.refit.tensor_slices import (
    Address,
    RecvSpec,
    TensorMeta,
    TensorSlice,
    meta_as_json,
    meta_from_json,
    recv_spec_table,
    slice_as_json,
    slice_from_json,
    table_digest,
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
