"""Contents of a Megatron checkpoint of a whole model, found from its index alone."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from mimo.protocols import MegatronSource
from tests.support.spawn import WorkerPool

SOURCE = MegatronSource("path", "--load-single", {
    "vision": {"encoders.v.": "vision_model.", "input_projections.0.": "vision_projection."},
    "language": {"": "language_model."},
}, ((r"^vision_model\.head\.", "a head"),))
BOTH = ("vision", "language")


def index_of(**shapes: tuple[int, ...]) -> Metadata:
    """Return an index of whole bf16 tensors; `__` in a name is a dot."""
    entries = {}
    for name, shape in shapes.items():
        size = torch.Size(shape)
        chunk = ChunkStorageMetadata(torch.Size([0] * len(shape)), size)
        entries[name.replace("__", ".")] = TensorStorageMetadata(TensorProperties(torch.bfloat16), size, [chunk])
    return Metadata({**entries, "rng_state/shard_0_1": BytesStorageMetadata()})


def contents(rank: int, index: Metadata, modules: tuple[str, ...]) -> Any:
    """(root, global name -> (shape, key, index, axes), keys in part, passed over), or the error, in a worker."""
    from mimo.weights.import_megatron import contents_of

    try:
        found = contents_of(index, SOURCE, modules)
    except ValueError as error:
        return str(error)
    tensors = {name: (tensor.shape, tensor.stored.key, tensor.stored.index, tensor.stored.axes)
               for name, tensor in found.tensors.items()}
    return found.root, tensors, found.incomplete, found.passed_over


@pytest.mark.parametrize("root", ["", "module__", "model__module__"])
def test_layers_and_experts_have_names_of_their_own(pool: WorkerPool, root: str) -> None:
    index = index_of(**{
        f"{root}language_model__decoder__layers__mlp__linear_fc1__weight": (2, 8, 4),
        f"{root}language_model__decoder__layers__mlp__experts__experts__linear_fc1__weight": (2, 3, 8, 4),
        f"{root}vision_model__decoder__layers__0__norm__weight": (4,),
        f"{root}vision_model__head__weight": (9,),
        "optimizer__state__exp_avg__language_model__x": (5,),
        "chained_0__optimizer__state__exp_avg__language_model__x": (5,),
    })
    outer = root.replace("__", ".")
    (found,) = pool.run(contents, index, BOTH)
    block, norm = "language_model.decoder.layers", "vision_model.decoder.layers.0.norm.weight"
    assert found == (outer, {
        **{f"{block}.{layer}.mlp.linear_fc1.weight": ((8, 4), f"{outer}{block}.mlp.linear_fc1.weight", (layer,), (2,))
           for layer in range(2)},
        **{f"{block}.{layer}.mlp.experts.{expert}.linear_fc1.weight":
           ((8, 4), f"{outer}{block}.mlp.experts.experts.linear_fc1.weight", (layer, expert), (2, 3))
           for layer in range(2) for expert in range(3)},
        norm: ((4,), outer + norm, (), ()),
    }, [], {"a head": 1})


def test_modules_that_the_run_does_not_have_may_stay_unread(pool: WorkerPool) -> None:
    index = index_of(language_model__x=(1,), vision_model__x=(1,), vision_projection__x=(1,), other__x=(1,))
    ((_, tensors, _, _),) = pool.run(contents, index, ("language",))
    assert set(tensors) == {"language_model.x", "other.x"}


@pytest.mark.parametrize(("index", "message"), [
    (index_of(vision__encoders__v__x=(1,), language__x=(1,)), "checkpoint of this trainer.*--load.*--finetune"),
    (index_of(a__language_model__x=(1,), b__language_model__x=(1,)), r"under a\., b\.: which of them"),
    (index_of(embedding__x=(1,), decoder__x=(1,)), r"not a checkpoint of a whole model with .*holds decoder\.\*, emb"),
    (index_of(), "it holds no tensors"),
], ids=["own", "two", "text", "empty"])
def test_another_kind_of_checkpoint_is_described(pool: WorkerPool, index: Metadata, message: str) -> None:
    (found,) = pool.run(contents, index, BOTH)
    assert isinstance(found, str) and re.search(message, found), found


def lines_of(rank: int, problems: list[tuple[str, str]]) -> list[str]:
    from mimo.weights.import_megatron import grouped

    return grouped(problems)


def test_problems_of_all_layers_are_one_line(pool: WorkerPool) -> None:
    alike = [(f"decoder.layers.{layer}.x", " [4]") for layer in range(12)]
    assert pool.run(lines_of, alike) == [["decoder.layers.0.x [4], and 11 like it in other layers or experts"]]
    assert pool.run(lines_of, [*alike[:2], ("decoder.layers.10.x", ": shape")]) == [[
        "decoder.layers.0.x [4], and 1 like it in other layers or experts", "decoder.layers.10.x: shape"]]
    (lines,) = pool.run(lines_of, [(f"part{number}.x", "") for number in range(25)])
    assert len(lines) == 21 and lines[-1] == "... and 5 more"


def lengths_of(rank: int, names: tuple[str, ...]) -> dict[str, int]:
    from mimo.weights.import_megatron import count_series

    lengths: dict[str, int] = {}
    for name in names:
        count_series(name, lengths)
    return lengths


def test_series_of_layers_and_experts_are_counted(pool: WorkerPool) -> None:
    names = ("a.layers.0.experts.3.x", "a.layers.10.experts.1.x", "a.norm.x")
    assert pool.run(lengths_of, names) == [{"a.layers": 11, "a.layers.*.experts": 4}]
