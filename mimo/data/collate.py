"""Turns samples into tensors: the language side and the encoder side of a microbatch.

Both sides count image tokens with the model provider's `num_image_tokens` from the declared image sizes, so they agree
without communication. Whatever a data set can get wrong is refused here, with the key of the sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, Self

import numpy as np
import torch

from mimo.data.batch import EncoderBatch, PackedSequences, TextBatch
from mimo.data.encoder_inputs import PatchOrder, merge_inputs, packed_patches, tiled_images, whole_images
from mimo.grid.lanes import row_length
from mimo.grid.spec import Layout
from mimo.protocols import ModelProvider, Sample
from mimo.text import counted
from mimo.visual import (
    ImageSize,
    Tiles,
    TokenGrid,
    TokenGridProvider,
    VideoProvider,
    VideoSize,
    count_tokens,
    find_grid,
    multimodal_positions,
    num_pictures,
    pixel_shape,
)

# (encoder module, *ImageSize) -> language tokens.
TokenCounter = Callable[..., int]
# The same arguments -> the same tokens as a grid.
GridFinder = Callable[..., TokenGrid]


@dataclass(frozen=True)
class Placeholders:
    """How the images and videos of a model become tokens, and which token ids stand for them.

    Attributes:
        modules: for each encoder, the id of its placeholder for images; empty for a text model.
        num_image_tokens: counts the tokens that a module makes of an image or a video.
        num_channels: channels of an image.
        patches: how encoders take images as packed patches; None if they take whole images.
        token_grid: returns the same tokens as a grid, for a decoder that rotates three axes; None for a decoder that
            rotates one.
        video_ids: for each encoder that takes videos, the id of its placeholder for them.
        tiles: how an image is cut into tiles whose tokens the encoder joins; None if it is not.
    """

    modules: dict[str, int]
    num_image_tokens: TokenCounter
    num_channels: int = 3
    patches: PatchOrder | None = None
    token_grid: GridFinder | None = None
    video_ids: dict[str, int] = field(default_factory=dict)
    tiles: Tiles | None = None

    @classmethod
    def of(cls, provider: ModelProvider, config: Any, layout: Layout) -> Self:
        """Find the image tokens of a model on the encoders of a layout."""
        tokens, ids = provider.token_spec(config), provider.special_token_ids(config)
        names = [grid.name for grid in layout.encoders]
        video_ids = provider.video_token_ids(config) if isinstance(provider, VideoProvider) else {}
        return cls({name: ids[name] for name in names}, partial(count_tokens, provider, config), tokens.num_channels,
                   PatchOrder.of(tokens),
                   partial(find_grid, provider, config) if isinstance(provider, TokenGridProvider) else None,
                   {name: video_ids[name] for name in names if name in video_ids}, tokens.tiles)

    def tile_lengths(self, rows: Sequence[Expanded], samples: Sequence[Sample]) -> dict[str, tuple[int, ...]]:
        """Return `TextBatch.tile_lengths` of rows that are expanded samples."""
        tiles = self.tiles
        if tiles is None:
            return {}
        return {module: tuple(
            tiles.num_tokens for row, sample in zip(rows, samples, strict=True)
            for owner, size in zip(row.owners, sample.image_sizes, strict=True) if owner == module
            for _ in range(tiles.count(*size[:2]))) for module in self.modules}


def image_owners(sample: Sample, images: Placeholders) -> list[str]:
    """Return the encoder module of each image of a sample: the module whose placeholder stands for it.

    Raises:
        ValueError: placeholders and images do not match, a placeholder is a target, or there is no encoder.
    """
    if not images.modules:
        if sample.image_sizes:
            raise ValueError(
                f"sample {sample.key}: has {counted(len(sample.image_sizes), 'image')}, but the layout has no encoder "
                "(--llm-only): the data set must be text only"
            )
        return []
    if not images.video_ids and any(isinstance(size, VideoSize) for size in sample.image_sizes):
        # Counting the tokens of a video raises the family's own error, which names the family.
        image_token_counts(sample, [next(iter(images.modules))] * len(sample.image_sizes), images.num_image_tokens)
    ids = [*images.modules.values(), *images.video_ids.values()]
    found = sample.tokens[np.isin(sample.tokens, ids)].tolist()
    named = f"token id {ids[0]}" if len(ids) == 1 else f"token ids {ids}"
    if len(found) != len(sample.image_sizes):
        raise ValueError(
            f"sample {sample.key}: {counted(len(found), 'image placeholder')} ({named}) but "
            f"{counted(len(sample.image_sizes), 'image')}"
        )
    if (np.isin(sample.tokens, ids) & sample.target_mask).any():
        raise ValueError(f"sample {sample.key}: an image placeholder ({named}) is marked as a target")
    module_of = {token: module for ids in (images.modules, images.video_ids) for module, token in ids.items()}
    for position, (token, size) in enumerate(zip(found, sample.image_sizes, strict=True)):
        if isinstance(size, VideoSize) != (token in images.video_ids.values()):
            raise ValueError(f"sample {sample.key}: placeholder {position} (token id {token}) does not stand for "
                             f"{described(position, size)}; a video has the placeholder "
                             f"{' or '.join(map(str, images.video_ids.values()))}")
    return [module_of[token] for token in found]


def image_token_counts(sample: Sample, owners: Sequence[str], num_image_tokens: TokenCounter) -> list[int]:
    """Count the language tokens of each image of a sample. Raises ValueError if an encoder cannot take a size."""
    counts = []
    for position, (module, size) in enumerate(zip(owners, sample.image_sizes, strict=True)):
        try:
            counts.append(num_image_tokens(module, *size))
        except ValueError as error:
            raise ValueError(f"sample {sample.key}: {described(position, size)}: {error}") from error
    return counts


def described(position: int, size: ImageSize) -> str:
    """Describe an image or a video of a sample, for messages."""
    pixels = f"{size[0]}x{size[1]} pixels"
    if isinstance(size, VideoSize):
        return f"video {position} of {size.frames} frames of {pixels}"
    return f"image {position} of {pixels}"


def check_tokens(sample: Sample, vocab_size: int) -> None:
    """Raise ValueError unless tokens are int `[T]` ids of the vocabulary with a bool mask `[T]`."""
    tokens, mask = sample.tokens, sample.target_mask
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"sample {sample.key}: tokens are {tokens.dtype} {list(tokens.shape)}, expected integers [T]")
    if mask.shape != tokens.shape or mask.dtype != np.bool_:
        raise ValueError(
            f"sample {sample.key}: target_mask is {mask.dtype} {list(mask.shape)}, expected bool {list(tokens.shape)}"
        )
    outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if outside.size:
        raise ValueError(f"sample {sample.key}: token id {outside[0]} is not below --vocab-size {vocab_size}")


@dataclass
class Expanded:
    """A row with every image placeholder repeated once per token of its image.

    Attributes:
        tokens: int64 `[n]`.
        targets: bool `[n]`.
        images: for each module, the tokens of each of its images, and of each temporal patch of its videos.
        ends: end of each sample of a pack, one past its last token; `(n,)` for a single sample.
        owners: module of each image or video, in order.
        starts: index of the first token of each image or video, in order.
        counts: tokens of each image or video, in order.
    """

    tokens: np.ndarray
    targets: np.ndarray
    images: dict[str, list[int]]
    ends: np.ndarray
    owners: list[str]
    starts: np.ndarray
    counts: list[int]

    @property
    def image_tokens(self) -> dict[str, int]:
        """Number of image tokens of each module."""
        return {module: sum(counts) for module, counts in self.images.items()}

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sample of a pack."""
        return tuple(np.diff(self.ends, prepend=0).tolist())

    def places(self, module: str) -> np.ndarray:
        """Return the indices of the tokens of a module's images, int64, in order; ids are not searched for."""
        return np.concatenate([np.empty(0, np.int64), *(
            np.arange(start, start + count) for start, count, owner in zip(
                self.starts, self.counts, self.owners, strict=True) if owner == module)])


def expand_images(sample: Sample, images: Placeholders) -> Expanded:
    """Repeat each image placeholder once for each token of its image.

    Raises:
        ValueError: as `image_owners` and `image_token_counts`; or the lengths of a pack do not fit its tokens.
    """
    owners = image_owners(sample, images)
    counts = image_token_counts(sample, owners, images.num_image_tokens)
    repeats = np.ones(len(sample.tokens), np.int64)
    is_image = np.isin(sample.tokens, [*images.modules.values(), *images.video_ids.values()])
    repeats[is_image] = counts
    lengths: dict[str, list[int]] = {module: [] for module in images.modules}
    for module, count, size in zip(owners, counts, sample.image_sizes, strict=True):
        # The encoder takes each temporal patch of a video as an image.
        pictures = num_pictures(size, images.patches.temporal_patch_size if images.patches else 1)
        lengths[module] += [count // pictures] * pictures
    tokens = np.repeat(sample.tokens.astype(np.int64), repeats)
    ends = np.array([len(tokens)])
    if sample.lengths:
        if sum(sample.lengths) != len(sample.tokens) or min(sample.lengths) < 1:
            raise ValueError(f"sample {sample.key}: a pack of {len(sample.tokens)} tokens says that its samples have "
                             f"{list(sample.lengths)}")
        ends = np.cumsum(repeats)[np.cumsum(sample.lengths) - 1]
    starts = (np.cumsum(repeats) - repeats)[is_image]
    return Expanded(tokens, np.repeat(sample.target_mask, repeats), lengths, ends, owners, starts, counts)


def image_grids(sizes: Sequence[ImageSize], row: Expanded, token_grid: GridFinder) -> list[tuple[int, TokenGrid]]:
    """Return the first token's index and the grid of each image of an expanded row, in order."""
    return [(int(start), token_grid(module, *size))
            for start, module, size in zip(row.starts, row.owners, sizes, strict=True)]


def collate_text(
    samples: Sequence[Sample],
    *,
    images: Placeholders,
    seq_length: int,
    vocab_size: int,
    pad_token_id: int,
    sequence_multiple: int = 1,
    row_multiple: int | None = None,
) -> TextBatch:
    """Make the language side of a microbatch: images expanded, labels shifted by one, padding on the right.

    Args:
        samples: the lane's samples, in order.
        images: how images become tokens.
        seq_length: most tokens of a sample after expansion and padding.
        vocab_size: upper bound of token ids.
        pad_token_id: fills `input_ids` and `labels` after a sample's end, where the loss mask is 0.
        sequence_multiple: the samples of a pack are padded to multiples of this, each at its end.
        row_multiple: rows have the length of the longest one, rounded up to a multiple of this, but no more than
            `seq_length`; None: all have `seq_length`.

    Raises:
        ValueError: something is wrong with a sample, which the message names.
    """
    if pad_token_id in images.modules.values():
        raise ValueError(f"--image-token-id {pad_token_id}: is the padding token; the two have to differ")
    if len(samples) > 1 and any(sample.lengths for sample in samples):
        raise ValueError(f"sample {samples[0].key}: packed rows need --micro-batch-size 1, it is {len(samples)}")
    rows = [_row(sample, images, seq_length, vocab_size) for sample in samples]
    is_packed = bool(samples and samples[0].lengths)
    stops, places = rows[0].ends if rows else np.zeros(1, np.int64), [np.arange(len(row.tokens)) for row in rows]
    if is_packed:
        stops, places[0] = _aligned(rows[0], sequence_multiple, seq_length, samples[0].key)
        rows[0].starts = places[0][rows[0].starts]
    longest = int(stops[-1]) if is_packed else max((len(row.tokens) for row in rows), default=0)
    length = row_length(longest, row_multiple or seq_length, seq_length)
    input_ids = np.full((len(samples), length), pad_token_id, np.int64)
    labels = input_ids.copy()
    loss_mask = np.zeros(input_ids.shape, np.float32)
    padding = np.ones(input_ids.shape, bool)
    for index, (row, at) in enumerate(zip(rows, places, strict=True)):
        input_ids[index, at] = row.tokens
        # A sample without tokens counts as one, so that no mean is over nothing.
        padding[index, at if len(at) else 0] = False
        labels[index, at[:-1]] = row.tokens[1:]
        loss_mask[index, at[:-1]] = row.targets[1:]
        # The last token of a sample predicts nothing, because the token after it belongs to another sample.
        last = at[row.ends[row.ends > 0] - 1]
        labels[index, last], loss_mask[index, last] = pad_token_id, 0
    packed = packed_sequences(stops, length) if is_packed else None
    if images.token_grid is None:
        position_ids = positions_of(packed, length).expand(len(samples), length).contiguous()
    else:
        # Padding behind a single sample continues its positions, because nothing attends to it.
        lengths = [length] if packed is None else packed.cu_seqlens.diff().tolist()
        position_ids = torch.from_numpy(np.stack(
            [multimodal_positions(lengths, image_grids(sample.image_sizes, row, images.token_grid))
             for sample, row in zip(samples, rows, strict=True)], axis=1))
    return TextBatch(
        keys=tuple(sample.key for sample in samples),
        token_counts={module: tuple(row.image_tokens[module] for row in rows) for module in images.modules},
        input_ids=torch.from_numpy(input_ids),
        labels=torch.from_numpy(labels),
        loss_mask=torch.from_numpy(loss_mask),
        position_ids=position_ids,
        # In sample order, as indices into a tensor whose first axis is the sequence.
        placeholders={module: torch.from_numpy(np.concatenate([
            np.empty(0, np.int64), *(row.places(module) * len(rows) + index for index, row in enumerate(rows))]))
            for module in images.modules},
        num_tokens=sum(len(row.tokens) for row in rows),
        packed=packed,
        skipped=tuple(message for sample in samples for message in sample.skipped),
        unbalanced_encoded_tokens=sum(sample.unbalanced_encoded_tokens or 0 for sample in samples),
        lengths=tuple(row.lengths for row in rows),
        image_lengths={module: tuple(count for row in rows for count in row.images[module])
                       for module in images.modules},
        tile_lengths=images.tile_lengths(rows, samples),
        # Given even without padding: without a mask, routers assume that every lane has as many tokens as theirs.
        padding=torch.from_numpy(padding),
    )


def _aligned(row: Expanded, multiple: int, seq_length: int, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Pad the samples of a pack; return where each then ends, and the position of each token in the row.

    Causal layers never show padding at the end of a sample to its tokens.

    Raises:
        ValueError: the padded samples are longer than the row. The message names the pack.
    """
    lengths = np.diff(row.ends, prepend=0)
    stops = np.cumsum(-(-lengths // multiple) * multiple)
    if stops[-1] > seq_length:
        raise ValueError(f"sample {key}: its {len(lengths)} samples have {stops[-1]} tokens, each padded to a multiple "
                         f"of {multiple} (twice --llm-cp), which are more than --seq-length {seq_length}: the data set "
                         "has to leave room (sequence_multiple of DataRequest or Lane)")
    shifts = np.concatenate([[0], stops[:-1]]) - (row.ends - lengths)
    return stops, np.arange(len(row.tokens)) + np.repeat(shifts, lengths)


def _row(sample: Sample, images: Placeholders, seq_length: int, vocab_size: int) -> Expanded:
    """Check and expand a sample. Raises ValueError for anything wrong with it."""
    check_tokens(sample, vocab_size)
    row = expand_images(sample, images)
    length = len(row.tokens)
    if length > seq_length:
        raise ValueError(
            f"sample {sample.key}: {length} tokens, {sum(row.image_tokens.values())} of them from images, are "
            f"{length - seq_length} more than --seq-length {seq_length}"
        )
    return row


def positions_of(packed: PackedSequences | None, row_length: int) -> torch.Tensor:
    """Return the position of each token of a row in its sequence, int64 `[row_length]`."""
    if packed is None:
        return torch.arange(row_length)
    return torch.cat([torch.arange(int(length)) for length in packed.cu_seqlens.diff()])


def packed_sequences(ends: np.ndarray, row_length: int) -> PackedSequences:
    """Return the sequences of a packed row, with padding as one of its own.

    Args:
        ends: end of each sample, one past its last token, or past its own padding.
        row_length: tokens of the row, padding included.
    """
    stops = [int(end) for end in ends]
    if stops[-1] < row_length:
        stops.append(row_length)
    cu_seqlens = torch.tensor([0, *stops], dtype=torch.int32)
    lengths = cu_seqlens.diff()
    # Computed on the host: on the device, Megatron Core would wait for it.
    seq_idx = torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32), lengths.long())[None]
    return PackedSequences(cu_seqlens, int(lengths.max()), seq_idx)


def checked_images(sample: Sample, num_channels: int, tiles: Tiles | None) -> list[np.ndarray]:
    """Return the images of a sample. Raises ValueError for one that is missing or differs from its declaration."""
    levels = sample.normalisation
    dtype, reason = (np.float32, "") if levels is None else (np.uint8, " with a normalisation")
    if levels is not None and not len(levels.mean) == len(levels.std) == num_channels:
        raise ValueError(f"sample {sample.key}: its normalisation has {len(levels.mean)} means and {len(levels.std)} "
                         f"deviations; the encoder takes {num_channels} channels")
    num_present = 0 if sample.images is None else len(sample.images)
    if sample.images is None or num_present != len(sample.image_sizes):
        raise ValueError(f"sample {sample.key}: declares {counted(len(sample.image_sizes), 'image')} but holds "
                         f"{num_present}")
    for position, (image, size) in enumerate(zip(sample.images, sample.image_sizes, strict=True)):
        kind, axes, expected = "image", "channels, height, width", pixel_shape(size, num_channels, tiles)
        if len(expected) == 4:
            kind, axes = ("video", f"frames, {axes}") if isinstance(size, VideoSize) else (kind, f"tiles, {axes}")
        if image.shape != expected or image.dtype != dtype:
            raise ValueError(
                f"sample {sample.key}: {kind} {position} is {image.dtype} {list(image.shape)}, declared "
                f"{np.dtype(dtype)} {list(expected)} ({axes}){reason}"
            )
        if not np.isfinite(image).all():
            raise ValueError(f"sample {sample.key}: {kind} {position} has pixels that are not finite")
    return sample.images


def collate_encoder(
    samples: Sequence[Sample],
    *,
    module: str,
    images: Placeholders,
    lane_sizes: Sequence[int],
    dtype: torch.dtype,
    pixels: bool = True,
) -> EncoderBatch:
    """Make the encoder side of a microbatch.

    Args:
        samples: samples of all served lanes, in lane order.
        module: the encoder.
        images: how images become tokens, of all encoders.
        lane_sizes: samples of each lane; sums to `len(samples)`.
        dtype: dtype in which the encoder takes pixels; uint8 images keep theirs until it does.
        pixels: False on pipeline stages after the first, which receive activations instead of pixels.

    Raises:
        ValueError: an image is missing, or differs from its declaration or from the others. The message names its
            sample.
    """
    assert sum(lane_sizes) == len(samples), (lane_sizes, len(samples))
    token_counts, lanes = [], []
    shown = [sample for sample in samples if sample.image_sizes] if pixels else []
    normalisation = shown[0].normalisation if shown else None
    stored = dtype if normalisation is None else torch.uint8
    for sample in shown:
        if sample.normalisation != normalisation:
            raise ValueError(f"sample {sample.key}: its images have the normalisation {sample.normalisation}, those of "
                             f"sample {shown[0].key} have {normalisation}; the data set must give all images one, or "
                             "all of them as float32")
    # Key and size of the first image. An encoder that takes whole images takes only one size in a microbatch.
    first: tuple[str, Any] | None = None
    for stop, size in zip(accumulate(lane_sizes), lane_sizes, strict=True):
        held: list[Any] = []
        sizes: list[ImageSize] = []
        for sample in samples[stop - size : stop]:
            owners = image_owners(sample, images)
            counts = image_token_counts(sample, owners, images.num_image_tokens)
            token_counts.append(sum(count for count, owner in zip(counts, owners, strict=True) if owner == module))
            own = checked_images(sample, images.num_channels, images.tiles) if pixels else [None] * len(owners)
            for image, shape, owner in zip(own, sample.image_sizes, owners, strict=True):
                if owner == module:
                    first = first or (sample.key, shape)
                    if images.tiles is None:
                        _check_size(sample.key, shape, first, images.patches)
                    held.append(image)
                    sizes.append(shape)
        if images.patches is not None:
            lanes.append(packed_patches(held if pixels else None, sizes, images.patches, stored))
        elif images.tiles is not None:
            lanes.append(tiled_images(held if pixels else None, sizes, images.tiles, stored))
        else:
            lanes.append(whole_images(held, stored) if pixels else {})
    return EncoderBatch(
        keys=tuple(sample.key for sample in samples),
        token_counts=tuple(token_counts),
        lane_sizes=tuple(lane_sizes),
        inputs=merge_inputs(lanes),
        normalisation=normalisation,
        dtype=dtype,
    )


def _check_size(key: str, size: ImageSize, first: tuple[str, ImageSize], patches: PatchOrder | None) -> None:
    """Raise ValueError if an image does not fit the microbatch, given the key and size of the first image."""
    height, width = size[:2]
    if patches is not None:
        unit = patches.patch_size * patches.merge_size
        if height % unit or width % unit:
            raise ValueError(f"sample {key}: an image of {height}x{width} pixels is not whole "
                             f"{'patches' if patches.merge_size == 1 else 'blocks of patches'} of {unit}x{unit}")
    elif size != first[1]:
        raise ValueError(
            f"sample {key}: an image of {height}x{width} pixels cannot share a microbatch with one of "
            f"{first[1][0]}x{first[1][1]} (sample {first[0]}); the data set must give one size"
        )
