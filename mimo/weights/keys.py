"""Names of global tensors and the keys, with stacked axes, under which the wheel's checkpoints hold them.

The wheel stacks equal layers of a transformer block on a leading axis (`decoder.layers.7.x` is row 7 of
`decoder.layers.x`), unless the block's layers differ or are those of a hybrid stack, which never does it; experts of a
layer are stacked likewise (`mlp.experts.3.y` is row 3 of `mlp.experts.experts.y`). This is the one place that knows it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_LAYER = re.compile(r"(?P<block>(?:.*\.)?decoder\.layers\.)(?P<number>\d+)\.(?P<rest>.+)")
_EXPERT = re.compile(r"(?P<experts>.*\.experts\.)(?P<number>\d+)\.(?P<rest>.+)")
_STACKED_LAYERS = re.compile(r"(?P<block>(?:.*\.)?decoder\.layers\.)(?P<rest>\D.*)")
_STACKED_EXPERTS = re.compile(r"(?P<experts>.*\.experts\.)experts\.(?P<rest>.+)")


@dataclass(frozen=True)
class StoredTensor:
    """Where a checkpoint holds a global tensor.

    Attributes:
        key: the wheel's key, without the module's name.
        index: position on the stacked axes; empty for a tensor of its own.
        axes: sizes of the stacked axes, as many.
    """

    key: str
    index: tuple[int, ...]
    axes: tuple[int, ...]


def global_name(key: str, index: Sequence[int | str]) -> str:
    """The global name of the tensor at `index` (numbers, or what stands for them) on the stacked axes of `key`.

    >>> global_name("decoder.layers.mlp.experts.experts.linear_fc1.weight", (7, 3))
    'decoder.layers.7.mlp.experts.3.linear_fc1.weight'
    """
    left = list(index)
    layers = _STACKED_LAYERS.fullmatch(key)
    if layers is not None:
        assert left, f"{key} has no layer axis"
        key = f"{layers['block']}{left.pop(0)}.{layers['rest']}"
    experts = _STACKED_EXPERTS.fullmatch(key)
    if experts is not None:
        assert left, f"{key} has no expert axis"
        key = f"{experts['experts']}{left.pop(0)}.{experts['rest']}"
    assert not left, f"{key} has more stacked axes than layers and experts: {tuple(index)}"
    return key


def num_stacked_axes(key: str) -> int:
    """How many leading axes of the tensor at `key` number layers and experts."""
    return sum(pattern.fullmatch(key) is not None for pattern in (_STACKED_LAYERS, _STACKED_EXPERTS))


def split_layer(name: str) -> tuple[str, int, str] | None:
    """The block, the layer's number and the rest of a global name; None outside of a block.

    >>> split_layer("decoder.layers.7.mlp.linear_fc1.weight")
    ('decoder.layers.', 7, 'mlp.linear_fc1.weight')
    """
    layer = _LAYER.fullmatch(name)
    return None if layer is None else (layer["block"], int(layer["number"]), layer["rest"])


def is_expert(name: str) -> bool:
    """Whether a global tensor belongs to one routed expert."""
    return _EXPERT.fullmatch(name) is not None


def stored_tensors(names: Iterable[str], stacked_layers: bool = True) -> dict[str, StoredTensor]:
    """Where a checkpoint of a model with exactly these global tensors holds each of them.

    Args:
        names: of all of them.
        stacked_layers: layers of a block are stacked where all of them have tensors of the same names, as the wheel
            does it for a transformer block without a pattern of dense and MoE layers; else never.
    """
    names = list(names)
    blocks: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    experts: dict[str, set[int]] = defaultdict(set)
    for name in names:
        expert = _EXPERT.fullmatch(name)
        if expert is not None:
            experts[expert["experts"]].add(int(expert["number"]))
        layer = _LAYER.fullmatch(name)
        if layer is not None:
            blocks[layer["block"]][int(layer["number"])].add(layer["rest"])
    stacked = {block: len(layers) for block, layers in blocks.items()
               if stacked_layers and len({frozenset(rest) for rest in layers.values()}) == 1}
    return {name: _stored(name, stacked, {prefix: len(numbers) for prefix, numbers in experts.items()})
            for name in names}


def _stored(name: str, stacked: dict[str, int], num_experts: dict[str, int]) -> StoredTensor:
    index: list[int] = []
    axes: list[int] = []
    key = name
    expert = _EXPERT.fullmatch(name)
    if expert is not None:
        key = f"{expert['experts']}experts.{expert['rest']}"
        index, axes = [int(expert["number"])], [num_experts[expert["experts"]]]
    layer = _LAYER.fullmatch(key)
    if layer is not None and layer["block"] in stacked:
        key = f"{layer['block']}{layer['rest']}"
        index, axes = [int(layer["number"]), *index], [stacked[layer["block"]], *axes]
    assert all(number < size for number, size in zip(index, axes, strict=True)), f"{name}: numbers are not 0 to n - 1"
    return StoredTensor(key, tuple(index), tuple(axes))
