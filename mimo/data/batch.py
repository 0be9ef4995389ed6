"""One microbatch as tensors: what the language side and the encoder side of a lane each hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache, partial
from typing import Any

import torch


def map_tensors[T](value: T, change: Callable[[torch.Tensor], torch.Tensor]) -> T:
    """`value` with `change` applied to every tensor in it, through dataclasses and dictionaries.

    By structure, not by a list of names: a field that was forgotten would stay on the host, which some attention
    kernels answer with a hang.
    """
    if isinstance(value, torch.Tensor):
        return change(value)  # type: ignore[return-value]
    if isinstance(value, dict):
        return {key: map_tensors(entry, change) for key, entry in value.items()}  # type: ignore[return-value]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{each.name: map_tensors(vars(value)[each.name], change) for each in fields(value)})
    return value


@dataclass
class PackedSequences:
    """Several sequences one behind the other in one row, which do not attend to each other.

    Attributes:
        cu_seqlens: int32 `[sequences + 1]`, where each starts; the last entry is the length of the row.
        max_seqlen: tokens of the longest.
        seq_idx: int32 `[1, tokens]`, the number of each token's sequence, for Mamba layers; None for an encoder's.
    """

    cu_seqlens: torch.Tensor
    max_seqlen: int
    seq_idx: torch.Tensor | None = None


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
        packed: where the samples of packed rows start, padding as a sequence of its own, with `b` = 1; None: each row
            is one sample.
        skipped: bad samples that the data set passed over on the way to these, as messages that name shard and key.
        unbalanced_image_tokens: image tokens that the rows would have had without balanced packing.
        lengths: of each row, the tokens of each of its sequences, padding excluded.
        image_lengths: for each encoder module, the image tokens of each image.
        padding: bool `[b, s]`, True at padding that is to leave routers as they are; None: nothing is.
    """

    keys: tuple[str, ...]
    token_counts: dict[str, tuple[int, ...]]
    input_ids: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    placeholders: dict[str, torch.Tensor]
    num_tokens: int
    packed: PackedSequences | None = None
    skipped: tuple[str, ...] = ()
    unbalanced_image_tokens: int = 0
    lengths: tuple[tuple[int, ...], ...] = ()
    image_lengths: dict[str, tuple[int, ...]] = field(default_factory=dict)
    padding: torch.Tensor | None = None

    def to(self, device: torch.device) -> TextBatch:
        """The same batch with its tensors on `device` (asynchronous from pinned memory)."""
        return map_tensors(self, lambda tensor: tensor.to(device, non_blocking=True))


@dataclass
class EncoderBatch:
    """Encoder side of a microbatch: samples of all lanes this rank serves, in lane order.

    Attributes:
        keys: sample keys.
        token_counts: tokens the encoder's output has for each sample (0 for a text-only one).
        lane_sizes: number of samples of each lane served, in lane order; sums to `len(keys)`.
        inputs: what the encoder takes, empty where no sample has an image. Images of one size: `pixel_values` float
            `[images, C, H, W]`. Images of any size: `pixel_values` float `[1, patches, C * P * P]`, image after image
            and row by row; `imgs_sizes` int64 NumPy array `[images, 2]`, height and width in pixels, which stays
            on the host: reading it from a device would wait for that; `packed_seq_params` `PackedSequences`, one
            sequence an image.
    """

    keys: tuple[str, ...]
    token_counts: tuple[int, ...]
    lane_sizes: tuple[int, ...]
    inputs: dict[str, Any]

    def to(self, device: torch.device) -> EncoderBatch:
        """The same batch with its tensors on `device` (asynchronous from pinned memory)."""
        return map_tensors(self, lambda tensor: tensor.to(device, non_blocking=True))


@dataclass
class Microbatch:
    """One rank's part of one microbatch: `text` on language ranks, `encoders` by module on encoder ranks."""

    text: TextBatch | None
    encoders: dict[str, EncoderBatch]

    def to(self, device: torch.device) -> Microbatch:
        """The same microbatch with its tensors on `device` (asynchronous from pinned memory)."""
        return map_tensors(self, lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Microbatch:
        """The same microbatch with its tensors in page-locked memory."""
        return map_tensors(self, torch.Tensor.pin_memory)


# Microbatches on the device, each copied while the one before it is computed.


def on_device(microbatches: Sequence[Microbatch], device: torch.device) -> Iterator[Microbatch]:
    """The microbatches on `device`, in order.

    On a GPU the copy of the next one runs on a stream of its own from page-locked memory, so it waits for no kernel and
    no kernel for it. At most two microbatches are on the device at a time.
    """
    if device.type != "cuda":
        for batch in microbatches:
            yield batch.to(device)
        return
    side = _copy_stream(device)
    ahead = _copy(microbatches[0], device, side) if microbatches else None
    for following in (*microbatches[1:], None):
        assert ahead is not None, "every microbatch but the last has a next one"
        batch, copied = ahead
        ahead = None if following is None else _copy(following, device, side)
        stream = torch.cuda.current_stream(device)
        stream.wait_event(copied)
        # The memory comes from the side stream's pool: it may go back there only after the kernels that read it.
        map_tensors(batch, partial(_used_by, stream))
        yield batch


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """One for the process: the allocator keeps the free memory of every stream apart."""
    return torch.cuda.Stream(device)


def _copy(batch: Microbatch, device: torch.device, stream: torch.cuda.Stream) -> tuple[Microbatch, torch.cuda.Event]:
    with torch.cuda.stream(stream):
        moved = batch.to(device)
        copied = torch.cuda.Event()
        copied.record(stream)
    return moved, copied


def _used_by(stream: torch.cuda.Stream, tensor: torch.Tensor) -> torch.Tensor:
    tensor.record_stream(stream)
    return tensor
