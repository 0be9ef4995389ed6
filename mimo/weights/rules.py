"""The weight map: which Hugging Face tensors are the same numbers as which Megatron tensor.

A rule speaks of whole tensors under global layer and expert numbers. Which slice of one a rank holds (tensor, pipeline
and expert parallelism, gate and up halves) is not repeated here: the wheel's `sharded_state_dict` says it for every
parameter, for loading, exporting and refitting alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class Conversion(Protocol):
    """How the Hugging Face parts of a tensor and the Megatron tensor turn into each other. Works on meta tensors."""

    def to_megatron(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole Megatron tensor. Raises ValueError for parts of another shape, naming the shapes."""
        ...

    def to_hf(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The parts, in the rule's order; views or copies. Raises ValueError for another shape."""
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
        """The part, reshaped."""
        (part,) = parts
        return _reshaped(part, self.hf_shape, self.megatron_shape)

    def to_hf(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensor, reshaped."""
        return [_reshaped(tensor, self.megatron_shape, self.hf_shape)]


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
        """The parts' rows, interleaved."""
        if len(parts) != len(self.rows):
            raise ValueError(f"{len(parts)} parts for {len(self.rows)}")
        for part, rows in zip(parts, self.rows, strict=True):
            if part.shape[0] != self.groups * rows:
                raise ValueError(f"shape {list(part.shape)} does not have {self.groups * rows} rows")
        grouped = [part.reshape(self.groups, rows, *part.shape[1:])
                   for part, rows in zip(parts, self.rows, strict=True)]
        return torch.cat(grouped, dim=1).flatten(0, 1)

    def to_hf(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Each part's rows, gathered from all groups."""
        if tensor.shape[0] != self.groups * sum(self.rows):
            raise ValueError(f"shape {list(tensor.shape)} does not have {self.groups * sum(self.rows)} rows")
        grouped = tensor.reshape(self.groups, sum(self.rows), *tensor.shape[1:])
        return [part.flatten(0, 1) for part in grouped.split(list(self.rows), dim=1)]


@dataclass(frozen=True)
class PaddedRows:
    """A vocabulary: the Megatron tensor has more rows, of zeros after an import and never exported.

    Attributes:
        rows: rows on the Hugging Face side.
        padded_rows: rows on the Megatron side, at least as many.
    """

    rows: int
    padded_rows: int

    def to_megatron(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The part with rows of zeros after its own."""
        (part,) = parts
        if part.shape[0] != self.rows:
            raise ValueError(f"shape {list(part.shape)} does not have {self.rows} rows")
        return torch.cat([part, part.new_zeros(self.padded_rows - self.rows, *part.shape[1:])])

    def to_hf(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The rows that stand for tokens."""
        if tensor.shape[0] != self.padded_rows:
            raise ValueError(f"shape {list(tensor.shape)} does not have {self.padded_rows} rows")
        return [tensor[: self.rows]]


@dataclass(frozen=True)
class Rule:
    """One global Megatron tensor and the Hugging Face tensors it is made of.

    Attributes:
        megatron: name inside the module, layers and experts under their global numbers and in the spelling of the
            wheel's checkpoints: `decoder.layers.7.self_attention.linear_qkv.layer_norm_weight`,
            `decoder.layers.7.mlp.experts.3.linear_fc1.weight`.
        hf: names in the component's own spelling (`model.layers.7.self_attn.q_proj.weight`); see `Style`.
        convert: how they turn into each other.
        keep_fp32: float32 on both sides whatever the model's precision (a router's bias).
    """

    megatron: str
    hf: tuple[str, ...]
    convert: Conversion = Direct()
    keep_fp32: bool = False


@dataclass(frozen=True)
class Style:
    """How one kind of checkpoint spells a module's Hugging Face names.

    Attributes:
        name: for messages, for example `LlavaForConditionalGeneration`.
        rewrites: (regular expression, replacement) of `re.sub`; the first that matches the start of a rule's name is
            applied.
        optional: regular expressions, `re.search`ed in rules' own names, of tensors that this kind of checkpoint may
            lack (a projector, in a vision tower's): a rule all of whose tensors are optional and absent is left out.
    """

    name: str
    rewrites: tuple[tuple[str, str], ...] = ()
    optional: tuple[str, ...] = ()

    def spell(self, name: str) -> str:
        """A rule's name as this kind of checkpoint has it."""
        for pattern, replacement in self.rewrites:
            if re.match(pattern, name):
                return re.sub(pattern, replacement, name, count=1)
        return name

    def may_lack(self, rule: Rule) -> bool:
        """Whether this kind of checkpoint may come without any of a rule's tensors."""
        return all(any(re.search(pattern, name) for pattern in self.optional) for name in rule.hf)


@dataclass(frozen=True)
class WeightMap:
    """Every tensor of one module.

    Attributes:
        rules: one for each global Megatron tensor; tied embeddings have one.
        styles: known spellings, the one to export first.
        ignored: (regular expression, reason) of source tensors, in a style's spelling, that the model has no use for:
            the named allow-list of an import. `re.search`ed.
        repeated: (regular expression, reason) of source tensors that repeat others, such as the output layer of a model
            with tied embeddings: passed over like `ignored` ones, and never copied into an export.
    """

    rules: tuple[Rule, ...]
    styles: tuple[Style, ...] = (Style("own names"),)
    ignored: tuple[tuple[str, str], ...] = ()
    repeated: tuple[tuple[str, str], ...] = ()

    def best_style(self, names: Iterable[str]) -> Style:
        """The style under which most of the rules' tensors are among `names`."""
        present = set(names)
        names_of = [hf for rule in self.rules for hf in rule.hf]
        return max(self.styles, key=lambda style: sum(style.spell(hf) in present for hf in names_of))


def _reshaped(
    tensor: torch.Tensor, expected: tuple[int, ...] | None, wanted: tuple[int, ...] | None
) -> torch.Tensor:
    if expected is not None and tuple(tensor.shape) != expected:
        raise ValueError(f"shape {list(tensor.shape)} is not {list(expected)}")
    return tensor if wanted is None else tensor.reshape(wanted)
