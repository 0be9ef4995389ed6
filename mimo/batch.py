"""One microbatch as tensors: what the language side and the encoder side of a lane each hold."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass
class TextBatch:
    """Language side of a microbatch, `b` samples of `s` tokens.

    Attributes:
        keys: sample keys, `b`.
        token_counts: for each encoder module, image tokens of each sample, `b` ints.
        input_ids: int64 `[b, s]`.
        labels: int64 `[b, s]`, the next token.
        loss_mask: float32 `[b, s]`, 1 where the label is a target.
        position_ids: int64 `[b, s]`.
        placeholders: for each encoder module, where its rows go: int64 indices into `[s * b]`, in sample order.
        num_tokens: tokens of all samples, padding excluded.
    """

    keys: tuple[str, ...]
    token_counts: dict[str, tuple[int, ...]]
    input_ids: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    placeholders: dict[str, torch.Tensor]
    num_tokens: int

    def to(self, device: torch.device) -> TextBatch:
        """The same batch with its tensors on `device` (asynchronous from pinned memory)."""
        moved = {name: getattr(self, name).to(device, non_blocking=True)
                 for name in ("input_ids", "labels", "loss_mask", "position_ids")}
        placeholders = {name: positions.to(device, non_blocking=True) for name, positions in self.placeholders.items()}
        return replace(self, **moved, placeholders=placeholders)


@dataclass
class EncoderBatch:
    """Encoder side of a microbatch: samples of all lanes this rank serves, in lane order.

    Attributes:
        keys: sample keys.
        token_counts: tokens the encoder's output has for each sample (0 for a text-only one).
        lane_sizes: number of samples of each lane served, in lane order; sums to `len(keys)`.
        inputs: keyword arguments of the encoder, for example `pixel_values` float `[images, C, H, W]`;
            empty where no sample has an image.
    """

    keys: tuple[str, ...]
    token_counts: tuple[int, ...]
    lane_sizes: tuple[int, ...]
    inputs: dict[str, torch.Tensor]

    def to(self, device: torch.device) -> EncoderBatch:
        """The same batch with its tensors on `device` (asynchronous from pinned memory)."""
        return replace(self, inputs={name: value.to(device, non_blocking=True) for name, value in self.inputs.items()})


@dataclass
class Microbatch:
    """What one rank holds of one microbatch: `text` on language ranks, `encoders` by module on encoder ranks."""

    text: TextBatch | None
    encoders: dict[str, EncoderBatch]

    def to(self, device: torch.device) -> Microbatch:
        """The same microbatch with its tensors on `device` (asynchronous from pinned memory)."""
        text = self.text.to(device) if self.text is not None else None
        return Microbatch(text, {name: side.to(device) for name, side in self.encoders.items()})
