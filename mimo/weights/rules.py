"""The weight map: rules that assign Hugging Face tensors to Megatron tensors with the same values.

A rule is about whole tensors under global layer and expert numbers. Megatron Core's `sharded_state_dict` says which
slice of a tensor a rank holds (tensor, pipeline and expert parallelism, gate and up halves), for loading, exporting and
refitting alike.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Protocol, runtime_checkable

import torch

# Names of global tensors, and the keys with stacked axes under which Megatron Core's checkpoints hold them.
#
# Megatron Core stacks equal layers of a transformer block on a leading axis: `decoder.layers.7.x` is row 7 of
# `decoder.layers.x`. It does not if the layers differ, and never in a hybrid stack. Experts of a layer are stacked
# likewise: `mlp.experts.3.y` is row 3 of `mlp.experts.experts.y`. No other module knows about this.


_LAYER = re.compile(r"(?P<block>(?:.*\.)?decoder\.layers\.)(?P<number>\d+)\.(?P<rest>.+)")
_EXPERT = re.compile(r"(?P<experts>.*\.experts\.)(?P<number>\d+)\.(?P<rest>.+)")
_STACKED_LAYERS = re.compile(r"(?P<block>(?:.*\.)?decoder\.layers\.)(?P<rest>\D.*)")
_STACKED_EXPERTS = re.compile(r"(?P<experts>.*\.experts\.)experts\.(?P<rest>.+)")


@dataclass(frozen=True)
class StoredTensor:
    """Place of a global tensor in a checkpoint.

    Attributes:
        key: Megatron Core's key, without the module's name.
        index: position on the stacked axes; empty for a tensor that is not stacked.
        axes: size of each stacked axis.
    """

    key: str
    index: tuple[int, ...]
    axes: tuple[int, ...]


def global_name(key: str, index: Sequence[int | str]) -> str:
    """Return the global name of the tensor at `index` (numbers or placeholders) on the stacked axes of `key`.

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
    """Count the leading axes of the tensor at `key` that number layers and experts."""
    return sum(pattern.fullmatch(key) is not None for pattern in (_STACKED_LAYERS, _STACKED_EXPERTS))


def split_layer(name: str) -> tuple[str, int, str] | None:
    """Split a global name into block, number of the layer and rest; None outside of a block.

    >>> split_layer("decoder.layers.7.mlp.linear_fc1.weight")
    ('decoder.layers.', 7, 'mlp.linear_fc1.weight')
    """
    layer = _LAYER.fullmatch(name)
    return None if layer is None else (layer["block"], int(layer["number"]), layer["rest"])


def is_expert(name: str) -> bool:
    """Whether a global tensor belongs to one routed expert."""
    return _EXPERT.fullmatch(name) is not None


def stored_tensors(names: Iterable[str], stacked_layers: bool = True) -> dict[str, StoredTensor]:
    """Return the place of each tensor in a checkpoint of a model with exactly these global tensors.

    `stacked_layers` says whether layers of a block are stacked if all of them have tensors of the same names, as
    Megatron Core does for a transformer block without a pattern of dense and MoE layers.
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


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive rows (of axis 0) of a Megatron tensor that are consecutive rows of one of its parts.

    Attributes:
        first: number of the first row in the Megatron tensor.
        count: number of rows.
        part: number of the part.
        part_first: number of the first row in the part.
    """

    first: int
    count: int
    part: int
    part_first: int


class Conversion(Hashable, Protocol):
    """Conversion between the Hugging Face parts of a tensor and the Megatron tensor. Works on meta tensors, too."""

    def to_megatron(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Make the whole Megatron tensor. Raises ValueError, which names the shapes, if the parts do not fit."""
        ...

    def to_hf(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Make the parts, in the rule's order, as views or copies. Raises ValueError if the shape does not fit."""
        ...

    def segments(self, rows: int) -> list[Segment] | None:
        """Describe what `to_hf` does with the rows of a Megatron tensor of `rows` rows, in their order.

        Rows in no segment belong to no part. None if a row of the Megatron tensor is not a row of a part; then the only
        part is the whole tensor in another shape.
        """
        ...


@lru_cache(maxsize=4096)  # layers and experts are alike
def hf_shapes(convert: Conversion, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the parts that a conversion makes of a Megatron tensor. Raises as `Conversion.to_hf`."""
    return tuple(tuple(part.shape) for part in convert.to_hf(torch.empty(shape, device="meta")))


@runtime_checkable
class SeveralForms(Protocol):
    """A conversion of one part that files have in several forms. It reads each of them, and writes the first."""

    def forms(self) -> list[tuple[int, ...]]:
        """Return the shapes of the part."""
        ...


@dataclass(frozen=True)
class Direct:
    """One part with the same values.

    Attributes:
        hf_shape: shape on the Hugging Face side where it differs (a class token `[hidden]` is `[1, 1, hidden]` here).
        megatron_shape: shape on the Megatron side where it differs.
    """

    hf_shape: tuple[int, ...] | None = None
    megatron_shape: tuple[int, ...] | None = None

    def to_megatron(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        (part,) = parts
        return _reshaped(part, self.hf_shape, self.megatron_shape)

    def to_hf(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [_reshaped(tensor, self.megatron_shape, self.hf_shape)]

    def segments(self, rows: int) -> list[Segment] | None:
        if self.hf_shape is not None and self.hf_shape[:1] != (rows,):  # the reshape mixes rows with other axes
            return None
        return [Segment(0, rows, 0, 0)]


@dataclass(frozen=True)
class Fused:
    """Rows of several parts, interleaved by group: `rows[0]` of part 0, `rows[1]` of part 1, ..., the next group.

    Query, key and value are fused by query group, `rows=(queries_per_group * head_dim, head_dim, head_dim)`; gate and
    up have one group, `rows=(inner, inner)`. Axis 0 of weights and biases alike.

    Attributes:
        groups: number of groups.
        rows: rows of each part in one group.
    """

    groups: int
    rows: tuple[int, ...]

    def to_megatron(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        if len(parts) != len(self.rows):
            raise ValueError(f"{len(parts)} parts for {len(self.rows)}")
        for part, rows in zip(parts, self.rows, strict=True):
            if part.shape[0] != self.groups * rows:
                raise ValueError(f"shape {list(part.shape)} does not have {self.groups * rows} rows")
        grouped = [part.reshape(self.groups, rows, *part.shape[1:])
                   for part, rows in zip(parts, self.rows, strict=True)]
        return torch.cat(grouped, dim=1).flatten(0, 1)

    def to_hf(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        if tensor.shape[0] != self.groups * sum(self.rows):
            raise ValueError(f"shape {list(tensor.shape)} does not have {self.groups * sum(self.rows)} rows")
        grouped = tensor.reshape(self.groups, sum(self.rows), *tensor.shape[1:])
        return [part.flatten(0, 1) for part in grouped.split(list(self.rows), dim=1)]

    def segments(self, rows: int) -> list[Segment]:
        starts = [0, *accumulate(self.rows)]
        return [Segment(group * starts[-1] + starts[part], count, part, group * count)
                for group in range(self.groups) for part, count in enumerate(self.rows)]


@dataclass(frozen=True)
class PaddedRows:
    """Vocabulary whose Megatron tensor has more rows. They are zeros after an import and are never exported.

    Attributes:
        rows: rows on the Hugging Face side.
        padded_rows: rows on the Megatron side, at least as many.
    """

    rows: int
    padded_rows: int

    def to_megatron(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        (part,) = parts
        if part.shape[0] != self.rows:
            raise ValueError(f"shape {list(part.shape)} does not have {self.rows} rows")
        return torch.cat([part, part.new_zeros(self.padded_rows - self.rows, *part.shape[1:])])

    def to_hf(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        if tensor.shape[0] != self.padded_rows:
            raise ValueError(f"shape {list(tensor.shape)} does not have {self.padded_rows} rows")
        return [tensor[: self.rows]]

    def segments(self, rows: int) -> list[Segment]:
        return [Segment(0, self.rows, 0, 0)]


@dataclass(frozen=True)
class Rows:
    """Some rows of a Hugging Face tensor. The other rows belong to other rules.

    Megatron has separate tensors for parts of such a tensor (z, x, B, C and dt of a Mamba layer's projection), because
    tensor parallelism splits each of them by itself. The rules that share a tensor divide its first axis among them.
    The tensor can be written to a file or an engine once all these rules have given their rows.

    Attributes:
        first: number of the first row.
        count: number of rows.
        total: rows of the whole tensor.
    """

    first: int
    count: int
    total: int


@dataclass(frozen=True)
class Rule:
    """A global Megatron tensor and the Hugging Face tensors that it is made of.

    Attributes:
        megatron: name inside the module, layers and experts under their global numbers and as in Megatron
            Core's checkpoints: `decoder.layers.7.self_attention.linear_qkv.layer_norm_weight`,
            `decoder.layers.7.mlp.experts.3.linear_fc1.weight`.
        hf: names in the component's own naming scheme (`model.layers.7.self_attn.q_proj.weight`); see `NamingScheme`.
        convert: conversion between them.
        keep_fp32: whether both sides are float32 whatever the model's precision is, as a router's bias is.
        rows: rows that `convert` is about if several rules make the Hugging Face tensor; otherwise None.
    """

    megatron: str
    hf: tuple[str, ...]
    convert: Conversion = Direct()
    keep_fp32: bool = False
    rows: Rows | None = None

    def __post_init__(self) -> None:
        assert self.rows is None or len(self.hf) == 1, f"{self.megatron}: rows of {len(self.hf)} tensors"

    @property
    def row_slice(self) -> slice | None:
        """Slice of the tensors' first axis to read; None for all of it."""
        return None if self.rows is None else slice(self.rows.first, self.rows.first + self.rows.count)

    def part_shapes(self, shapes: Iterable[Sequence[int]]) -> list[tuple[int, ...]]:
        """Return the shapes of the parts that `convert` takes, given those of the Hugging Face tensors.

        Raises:
            ValueError: a tensor has another number of rows than the rules that share it.
        """
        if self.rows is None:
            return [tuple(shape) for shape in shapes]
        (shape,) = shapes
        return [_with_rows(shape, self.rows.total, self.rows.count)]

    def tensor_shape(self, part: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the Hugging Face tensor of a part of `convert`. Raises ValueError as `part_shapes`."""
        return tuple(part) if self.rows is None else _with_rows(part, self.rows.count, self.rows.total)


def split_rules(megatron: Iterable[str], hf: str, counts: Iterable[int]) -> list[Rule]:
    """Return rules for Megatron tensors that are consecutive rows of one Hugging Face tensor.

    Names and `counts` of rows are in the order of the rows.
    """
    counts = list(counts)
    return [Rule(name, (hf,), rows=Rows(sum(counts[:number]), counts[number], sum(counts)))
            for number, name in enumerate(megatron)]


@dataclass(frozen=True)
class NamingScheme:
    """Hugging Face names of a module's tensors in one kind of checkpoint.

    Attributes:
        name: name of the scheme for messages, for example `LlavaForConditionalGeneration`.
        rewrites: pairs of regular expression and replacement for `re.sub`. The first one that matches the start of a
            rule's name is applied.
        optional: regular expressions, for `re.search` in rules' own names, of tensors that this kind of checkpoint may
            lack, such as the projector in that of a vision tower. A rule is left out if all its tensors are optional
            and absent.
    """

    name: str
    rewrites: tuple[tuple[str, str], ...] = ()
    optional: tuple[str, ...] = ()

    def apply(self, name: str) -> str:
        """Return a rule's name in this scheme."""
        for pattern, replacement in self.rewrites:
            if re.match(pattern, name):
                return re.sub(pattern, replacement, name, count=1)
        return name

    def may_lack(self, rule: Rule) -> bool:
        """Whether this kind of checkpoint may lack all of a rule's tensors."""
        return all(any(re.search(pattern, name) for pattern in self.optional) for name in rule.hf)


@dataclass(frozen=True)
class Repeated:
    """Source tensors that repeat another one, such as the output layer of a model with tied embeddings.

    Attributes:
        pattern: regular expression of their names in a naming scheme, for `re.search`.
        megatron: Megatron name of the rule whose source tensor they repeat.
        why: why they have the same values, and how to load a model in which they do not.
    """

    pattern: str
    megatron: str
    why: str


@dataclass(frozen=True)
class WeightMap:
    """Rules for every tensor of a module.

    Attributes:
        rules: one rule for each global Megatron tensor; tied embeddings have one.
        schemes: known naming schemes. Exports use the first.
        ignored: pairs of regular expression, for `re.search`, and reason, for source tensors that the model does not
            use. An import refuses all other unused tensors.
        repeated: source tensors that repeat others. They are ignored if they have the same values, refused if they do
            not, and never copied into an export.
        stacked_layers: whether checkpoints of the module stack equal layers, see `stored_tensors`.
        engine_rules: rules for a rollout engine, if it takes other tensors than files hold; empty: the same.
    """

    rules: tuple[Rule, ...]
    schemes: tuple[NamingScheme, ...] = (NamingScheme("own names"),)
    ignored: tuple[tuple[str, str], ...] = ()
    repeated: tuple[Repeated, ...] = ()
    stacked_layers: bool = True
    engine_rules: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        shared: dict[str, list[Rows]] = {}
        for rule in self.rules:
            if rule.rows is not None:
                shared.setdefault(rule.hf[0], []).append(rule.rows)
        for name, parts in shared.items():
            row = 0
            for part in sorted(parts, key=lambda part: part.first):
                assert part.first == row and part.total == parts[0].total, f"{name}: rows {parts} do not fit together"
                row += part.count
            assert row == parts[0].total, f"{name}: rows {parts} are not all of it"

    def for_engine(self) -> WeightMap:
        """Return the map whose tensors a rollout engine takes."""
        return replace(self, rules=self.engine_rules, engine_rules=()) if self.engine_rules else self

    def stored(self) -> dict[str, StoredTensor]:
        """Return the place of each rule's tensor in a checkpoint, by Megatron name."""
        return stored_tensors((rule.megatron for rule in self.rules), self.stacked_layers)

    def best_scheme(self, names: Iterable[str]) -> NamingScheme:
        """Return the naming scheme under which most of the rules' tensors are among `names`."""
        present = set(names)
        names_of = [hf for rule in self.rules for hf in rule.hf]
        return max(self.schemes, key=lambda scheme: sum(scheme.apply(hf) in present for hf in names_of))


def _reshaped(
    tensor: torch.Tensor, expected: tuple[int, ...] | None, wanted: tuple[int, ...] | None
) -> torch.Tensor:
    if expected is not None and tuple(tensor.shape) != expected:
        raise ValueError(f"shape {list(tensor.shape)} is not {list(expected)}")
    return tensor if wanted is None else tensor.reshape(wanted)


def _with_rows(shape: Sequence[int], expected: int, wanted: int) -> tuple[int, ...]:
    if not shape or shape[0] != expected:
        raise ValueError(f"shape {list(shape)} does not have {expected} rows")
    return (wanted, *shape[1:])
