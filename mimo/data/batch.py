"""A microbatch as tensors: the language and encoder sides of a lane, and the part of a context-parallel rank."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache, partial
from typing import Any

import torch

from mimo.visual import Normalisation


def map_tensors[T](value: T, change: Callable[[torch.Tensor], torch.Tensor]) -> T:
    """Return `value` with `change` applied to every tensor in it, through dataclasses and dictionaries.

    This follows the structure rather than a list of names, because some attention kernels hang if a field that was
    forgotten stays on the host.
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
    """Sequences that share a row, one after the other, and do not attend to each other.

    Attributes:
        cu_seqlens: int32 `[sequences + 1]`, the start of each sequence; the last entry is the length of the row.
        max_seqlen: tokens of the longest sequence.
        seq_idx: int32 `[1, tokens]`, the number of each token's sequence, which Mamba layers need; None in encoders.
    """

    cu_seqlens: torch.Tensor
    max_seqlen: int
    seq_idx: torch.Tensor | None = None


@dataclass
class ContextPart:
    """The tokens of a microbatch that one context-parallel rank computes.

    Attributes:
        index: int64 `[s / cp]`, positions of the tokens in their row, in the order of the rank's hidden states.
        rows: for each encoder module, int64: the rows of the lane's encoder output that belong to these tokens.
        slots: for each encoder module, int64: where each of `rows` goes, an index into `[s / cp * b]`.
        owners: for each encoder module, uint8: the context-parallel rank that has the token of each row of the lane's
            encoder output.
    """

    index: torch.Tensor
    rows: dict[str, torch.Tensor]
    slots: dict[str, torch.Tensor]
    owners: dict[str, torch.Tensor]


@dataclass
class TextBatch:
    """Language side of a microbatch, `b` samples of `s` tokens.

    Attributes:
        keys: sample keys, `b`.
        token_counts: for each encoder module, image tokens of each sample, `b` ints.
        input_ids: int64 `[b, s]`.
        labels: int64 `[b, s]`, the next token.
        loss_mask: float32 `[b, s]`, 1 where the label is a target.
        position_ids: int64 `[b, s]`; `[3, b, s]` (time, row, column) for a decoder that rotates three axes.
        placeholders: for each encoder module, the positions that its output fills: int64 indices into `[s * b]`, in
            sample order.
        num_tokens: tokens of all samples, padding excluded.
        packed: the sequences of a packed row, with padding as a sequence of its own (`b` is 1); None if each row is one
            sample.
        skipped: messages about bad samples that the data set skipped before these, with shard and key.
        unbalanced_encoded_tokens: tokens that the encoders' layers would have had without balanced packing.
        lengths: for each row, the tokens of each of its sequences, padding excluded.
        image_lengths: for each encoder module, the image tokens of each image, and of each temporal patch of a video.
        tile_lengths: for each encoder module that joins the tiles of an image, the tokens of each tile in its layers.
        padding: bool `[b, s]`, True at padding that routers must not count; None if there is none.
        part: the tokens that this rank computes, with context parallelism; None: all of them. All other fields describe
            whole rows.
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
    unbalanced_encoded_tokens: int = 0
    lengths: tuple[tuple[int, ...], ...] = ()
    image_lengths: dict[str, tuple[int, ...]] = field(default_factory=dict)
    tile_lengths: dict[str, tuple[int, ...]] = field(default_factory=dict)
    padding: torch.Tensor | None = None
    part: ContextPart | None = None

    def encoded_lengths(self, module: str) -> tuple[int, ...]:
        """Return the tokens of each sequence that the layers of an encoder see: of an image, or of a tile of one."""
        return self.tile_lengths.get(module, self.image_lengths.get(module, ()))

    def own(self, values: torch.Tensor) -> torch.Tensor:
        """Select this rank's tokens from values of all tokens, `[..., s]` to `[..., s / cp]`."""
        return values if self.part is None else values.index_select(-1, self.part.index)


@dataclass
class EncoderBatch:
    """Encoder side of a microbatch: samples of all lanes that this rank serves, in lane order.

    Attributes:
        keys: sample keys.
        token_counts: rows of the encoder's output for each sample; 0 for a sample without images.
        lane_sizes: number of samples of each served lane, in lane order; sums to `len(keys)`.
        inputs: arguments of the encoder, empty if no sample has an image. Images of one size have `pixel_values`, float
            `[images, C, H, W]`. Images that are cut into tiles have `pixel_values` `[tiles, C, H, W]`, image after
            image, the sizes of the images as `imgs_sizes`, and `tile_counts`, an int64 NumPy array `[images]` of the
            tiles of each. Images of any size have `pixel_values`, float `[1, patches, C * P * P]`, image after image
            and row by row (or block by block, with several frames a patch, see `TokenSpec`); `imgs_sizes`, an int64
            NumPy array `[images, 2]` of heights and widths in pixels, which stays on the host because reading it from a
            device would wait for the device; and `packed_seq_params`, `PackedSequences` with one sequence for each
            image. A video is an image for each of its temporal patches.
        normalisation: how `pixel_values`, which are uint8 then, become what the encoder takes; None: they are floats.
        dtype: dtype in which the encoder gets normalised pixels.
    """

    keys: tuple[str, ...]
    token_counts: tuple[int, ...]
    lane_sizes: tuple[int, ...]
    inputs: dict[str, Any]
    normalisation: Normalisation | None = None
    dtype: torch.dtype = torch.float32

    def to(self, device: torch.device) -> EncoderBatch:
        """Copy the tensors to `device`, asynchronously from pinned memory."""
        return map_tensors(self, lambda tensor: tensor.to(device, non_blocking=True))

    def normalised_inputs(self) -> dict[str, Any]:
        """Return `inputs` with pixels as the encoder takes them, computed on the device where they are."""
        return normalised(self.inputs, self.normalisation, self.dtype)


def normalised(inputs: dict[str, Any], normalisation: Normalisation | None, dtype: torch.dtype) -> dict[str, Any]:
    """Return an encoder's inputs with pixels as it takes them.

    The arithmetic is that of `Normalisation.normalise`, operation by operation, so the results are the same bits.

    Args:
        inputs: as in `EncoderBatch`.
        normalisation: how uint8 pixels are normalised; None: they are floats, and nothing changes.
        dtype: dtype of pixels that were uint8.
    """
    pixels = inputs.get("pixel_values")
    if normalisation is None or pixels is None:
        return inputs
    channels = len(normalisation.mean)
    # Channels are the second axis of whole images, and the outer one of a packed patch.
    inner = pixels[0, 0].numel() if pixels.ndim == 4 else pixels.shape[-1] // channels
    scale, mean, std = _constants(normalisation, pixels.device)
    values = pixels.to(torch.float32).view(-1, channels, inner)
    return inputs | {"pixel_values": values.div_(scale).sub_(mean).div_(std).view(pixels.shape).to(dtype)}


@cache
def _constants(normalisation: Normalisation, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return 255, mean and deviation on a device. With 255 as a number, a GPU would multiply by its reciprocal."""
    mean, std = (torch.tensor(values, dtype=torch.float32, device=device)[:, None]
                 for values in (normalisation.mean, normalisation.std))
    return torch.full((1,), 255.0, device=device), mean, std


@dataclass
class Microbatch:
    """One rank's part of a microbatch: `text` on language ranks, `encoders` by module on encoder ranks."""

    text: TextBatch | None
    encoders: dict[str, EncoderBatch]

    def to(self, device: torch.device) -> Microbatch:
        """Copy the tensors to `device`, asynchronously from pinned memory."""
        return map_tensors(self, lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Microbatch:
        """Copy the tensors to page-locked memory."""
        return map_tensors(self, torch.Tensor.pin_memory)


def on_device(microbatches: Sequence[Microbatch], device: torch.device) -> Iterator[Microbatch]:
    """Yield the microbatches on `device`, in order.

    On a GPU, each microbatch is copied from page-locked memory while the one before it is computed, on a stream of its
    own, so that neither the copy nor the kernels wait for the other. At most two microbatches are on the device at a
    time.
    """
    if device.type != "cuda":
        for batch in microbatches:
            yield batch.to(device)
        return
    side = _copy_stream(device)
    ahead = _copy(microbatches[0], device, side) if microbatches else None
    for following in (*microbatches[1:], None):
        assert ahead is not None
        batch, copied = ahead
        ahead = None if following is None else _copy(following, device, side)
        stream = torch.cuda.current_stream(device)
        stream.wait_event(copied)
        # The memory belongs to the side stream's pool. It may return there only after the kernels that read it.
        map_tensors(batch, partial(_used_by, stream))
        yield batch


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the process's only stream for copies. With several, the allocator would keep free memory for each."""
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


def context_positions(stops: Sequence[int], cp: int, rank: int) -> torch.Tensor:
    """Return the positions of a context-parallel rank's tokens in their row, int64 `[stops[-1] / cp]`.

    A causal token attends to all tokens before it, so the end of a sequence costs more than its start. Each sequence
    is therefore cut into `2 * cp` chunks, and rank r takes chunk r and chunk `2 * cp - 1 - r`. Megatron Core's rotary
    positions and Transformer Engine's attention expect this order, with the sequences of a packed row one after the
    other.

    `stops` has the end of each sequence, whose length is a multiple of `2 * cp`.
    """
    found = []
    for start, stop in itertools.pairwise((0, *stops)):
        chunk, rest = divmod(stop - start, 2 * cp)
        assert not rest, f"{stop - start} tokens from {start} on are not a multiple of 2 * {cp}"
        found += [torch.arange(start + rank * chunk, start + (rank + 1) * chunk),
                  torch.arange(stop - (rank + 1) * chunk, stop - rank * chunk)]
    return torch.cat(found)


def with_part(text: TextBatch, cp: int, rank: int) -> TextBatch:
    """Return a microbatch with the tokens of one context-parallel rank in `part`; itself if `cp` is 1."""
    if cp == 1:
        return text
    samples, length = text.input_ids.shape
    stops = (length,) if text.packed is None else text.packed.cu_seqlens[1:].tolist()
    index = context_positions(stops, cp, rank)
    local = torch.full((length,), -1)
    local[index] = torch.arange(len(index))
    owner = torch.empty(length, dtype=torch.uint8)
    for other in range(cp):
        owner[context_positions(stops, cp, other)] = other
    rows, slots, owners = {}, {}, {}
    for module, placeholders in text.placeholders.items():
        own = local[placeholders // samples]
        rows[module] = (own >= 0).nonzero().flatten()
        slots[module] = (own * samples + placeholders % samples)[rows[module]]
        owners[module] = owner[placeholders // samples]
    return replace(text, part=ContextPart(index, rows, slots, owners))
