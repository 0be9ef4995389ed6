"""Makes tensors of samples: the language side and the encoder side of a microbatch.

Both sides count image tokens with the model provider's `num_image_tokens` from the declared image sizes, so they agree
without communication. Whatever a data set can get wrong is refused here, with the key of the sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from mimo.data.batch import EncoderBatch, PackedSequences, TextBatch
from mimo.data.positions import TokenGrid, multimodal_positions
from mimo.protocols import Sample, TokenSpec

# Inputs of an encoder: the images of each lane as tensors, and all lanes of a rank as one batch.
#
# The tables give the axis on which the lanes' tensors are concatenated, field by field. Shapes cannot tell: two tensors
# that happen to be equally long could just as well be stacked.


# Fields of `EncoderBatch.inputs` -> axis.
WHOLE_IMAGES = {"pixel_values": 0}
PACKED_PATCHES = {"pixel_values": 1, "imgs_sizes": 0}
PACKED_SEQ_PARAMS = "packed_seq_params"


def whole_images(images: Sequence[np.ndarray], dtype: torch.dtype) -> dict[str, Any]:
    """Return images of one size, float32 `[C, H, W]`, as `pixel_values` `[images, C, H, W]`; empty without images."""
    return {"pixel_values": torch.from_numpy(np.stack(images)).to(dtype)} if images else {}


@dataclass(frozen=True)
class PatchOrder:
    """How images become patches: the fields of the same names in `TokenSpec`."""

    patch_size: int
    merge_size: int = 1
    temporal_patch_size: int = 1

    @classmethod
    def of(cls, tokens: TokenSpec) -> PatchOrder | None:
        """Return the patches that an encoder takes; None if it takes whole images."""
        if not tokens.packs_patches:
            return None
        return cls(tokens.patch_size, tokens.merge_size, tokens.temporal_patch_size)


def patchify(image: np.ndarray, order: PatchOrder) -> np.ndarray:
    """Cut an image `[C, H, W]` into patches `[H / P * W / P, C * T * P * P]`; a patch is a flat `[C, T, P, P]`.

    Patches come row by row, or with a merge size above 1 block by block, each block row by row. The T frames of a patch
    are the image itself.
    """
    channels, height, width = image.shape
    patch, merge, frames = order.patch_size, order.merge_size, order.temporal_patch_size
    assert height % (patch * merge) == 0 and width % (patch * merge) == 0, (image.shape, order)
    grid = image.reshape(channels, height // (patch * merge), merge, patch, width // (patch * merge), merge, patch)
    patches = grid.transpose(1, 4, 2, 5, 0, 3, 6).reshape(-1, channels, 1, patch**2)
    return np.repeat(patches, frames, axis=2).reshape(-1, channels * frames * patch**2)


def unpatchify(patches: np.ndarray, size: tuple[int, int], order: PatchOrder) -> np.ndarray:
    """Return the image of `[C, height, width]` whose patches these are; the inverse of `patchify`."""
    (height, width), patch, merge, frames = size, order.patch_size, order.merge_size, order.temporal_patch_size
    channels = patches.shape[1] // (frames * patch**2)
    single = patches.reshape(-1, channels, frames, patch**2)[:, :, 0]
    grid = single.reshape(height // (patch * merge), width // (patch * merge), merge, merge, channels, patch, patch)
    return grid.transpose(4, 0, 2, 5, 1, 3, 6).reshape(channels, height, width)


def packed_patches(images: Sequence[np.ndarray] | None, sizes: Sequence[tuple[int, int]], order: PatchOrder,
                   dtype: torch.dtype) -> dict[str, Any]:
    """Return images of any size as one sequence of patches.

    Args:
        images: float32 `[C, height, width]` each; None if only their sizes are needed.
        sizes: `(height, width)` of each image, multiples of the patch size.
        order: how they become patches.
        dtype: dtype of the patches.

    Returns:
        The fields of packed patches in `EncoderBatch.inputs`, `pixel_values` only with images; empty without sizes.
    """
    if not sizes:
        return {}
    imgs_sizes = np.array(sizes, np.int64)
    patches = (imgs_sizes // order.patch_size).prod(axis=1)
    inputs: dict[str, Any] = {}
    if images is not None:
        pixels = np.concatenate([patchify(image, order) for image in images])
        inputs["pixel_values"] = torch.from_numpy(pixels)[None].to(dtype)
    cu_seqlens = torch.tensor([0, *patches.cumsum()], dtype=torch.int32)
    return inputs | {"imgs_sizes": imgs_sizes, PACKED_SEQ_PARAMS: PackedSequences(cu_seqlens, int(patches.max()))}


def merge_sequences(parts: Sequence[PackedSequences]) -> PackedSequences:
    """Concatenate packed sequences."""
    starts, offset = [parts[0].cu_seqlens[:1]], 0
    for part in parts:
        starts.append(part.cu_seqlens[1:] + offset)
        offset += int(part.cu_seqlens[-1])
    return PackedSequences(torch.cat(starts), max(part.max_seqlen for part in parts))


def merge_inputs(lanes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Concatenate the inputs of several lanes, in lane order. Lanes without images are empty.

    Raises:
        TypeError: a field is in no table above, or the lanes do not have the same fields.
    """
    present = [lane for lane in lanes if lane]
    if not present:
        return {}
    fields = list(present[0])
    for lane in present:
        if lane.keys() != present[0].keys():
            raise TypeError(f"lanes of one encoder with the fields {fields} and {list(lane)} cannot be merged")
    axes = PACKED_PATCHES if PACKED_SEQ_PARAMS in fields else WHOLE_IMAGES
    merged: dict[str, Any] = {}
    for name in fields:
        values = [lane[name] for lane in present]
        if name == PACKED_SEQ_PARAMS and all(isinstance(value, PackedSequences) for value in values):
            merged[name] = merge_sequences(values)
        elif name in axes and all(isinstance(value, torch.Tensor) for value in values):
            merged[name] = values[0] if len(values) == 1 else torch.cat(values, dim=axes[name])
        elif name in axes and all(isinstance(value, np.ndarray) for value in values):
            merged[name] = np.concatenate(values, axis=axes[name])
        else:
            raise TypeError(f"encoder input {name!r} ({type(values[0]).__name__}): there is no rule for merging lanes")
    return merged


def split_images(inputs: Mapping[str, Any]) -> list[tuple[tuple[int, int], torch.Tensor]]:
    """Take an encoder's inputs apart, image by image; the inverse of `join_images`.

    Returns:
        Height and width in pixels of each image with its pixels: `[C, H, W]`, or `[patches, channels]` where the
        encoder takes packed patches. The tensors are views.
    """
    if not inputs:
        return []
    pixels = inputs["pixel_values"]
    if PACKED_SEQ_PARAMS not in inputs:
        return [((image.shape[1], image.shape[2]), image) for image in pixels]
    sizes = [(int(height), int(width)) for height, width in inputs["imgs_sizes"]]
    # Patches are square and all of one size, so an image has its share of them by area.
    area = sum(height * width for height, width in sizes)
    lengths = [height * width * pixels.shape[1] // area for height, width in sizes]
    return list(zip(sizes, pixels[0].split(lengths), strict=True))


def join_images(pixels: Sequence[torch.Tensor], sizes: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Make an encoder's inputs of single images, on the device where they are.

    Args:
        pixels: of each image, as `split_images` gives them.
        sizes: height and width of each image in pixels.
    """
    if pixels[0].ndim == 3:
        return {"pixel_values": torch.stack(list(pixels))}
    lengths = [patches.shape[0] for patches in pixels]
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return {"pixel_values": torch.cat(list(pixels))[None], "imgs_sizes": np.array(sizes, np.int64),
            PACKED_SEQ_PARAMS: PackedSequences(starts.to(pixels[0].device, non_blocking=True), max(lengths))}


# (encoder module, height, width in pixels) -> language tokens.
TokenCounter = Callable[[str, int, int], int]
# The same arguments -> these tokens as a grid.
GridFinder = Callable[[str, int, int], TokenGrid]


def image_owners(sample: Sample, modules: dict[str, int]) -> list[str]:
    """Return the encoder module of each image of a sample: the module whose placeholder stands for it.

    Raises:
        ValueError: placeholders and images do not match, a placeholder is a target, or there is no encoder.
    """
    if not modules:
        if sample.image_sizes:
            raise ValueError(
                f"sample {sample.key}: has {len(sample.image_sizes)} images, but the layout has no encoder "
                "(--llm-only): the data set must be text only"
            )
        return []
    ids = list(modules.values())
    is_image = np.isin(sample.tokens, ids)
    named = f"token id {ids[0]}" if len(ids) == 1 else f"token ids {ids}"
    if is_image.sum() != len(sample.image_sizes):
        raise ValueError(
            f"sample {sample.key}: {is_image.sum()} image placeholders ({named}) but {len(sample.image_sizes)} images"
        )
    if (is_image & sample.target_mask).any():
        raise ValueError(f"sample {sample.key}: an image placeholder ({named}) is marked as a target")
    module_of = {token: module for module, token in modules.items()}
    return [module_of[token] for token in sample.tokens[is_image].tolist()]


def image_token_counts(sample: Sample, owners: Sequence[str], num_image_tokens: TokenCounter) -> list[int]:
    """Count the language tokens of each image of a sample. Raises ValueError if an encoder cannot take a size."""
    counts = []
    for position, (module, (height, width)) in enumerate(zip(owners, sample.image_sizes, strict=True)):
        try:
            counts.append(num_image_tokens(module, height, width))
        except ValueError as error:
            raise ValueError(f"sample {sample.key}: image {position} of {height}x{width} pixels: {error}") from error
    return counts


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
        images: for each module, the tokens of each of its images.
        ends: end of each sample of a pack, one past its last token; `(n,)` for a single sample.
        owners: module of each image, in order.
        starts: index of the first token of each image, in order.
    """

    tokens: np.ndarray
    targets: np.ndarray
    images: dict[str, list[int]]
    ends: np.ndarray
    owners: list[str]
    starts: np.ndarray

    @property
    def image_tokens(self) -> dict[str, int]:
        """Number of image tokens of each module."""
        return {module: sum(counts) for module, counts in self.images.items()}

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sample of a pack."""
        return tuple(np.diff(self.ends, prepend=0).tolist())


def expand_images(sample: Sample, modules: dict[str, int], num_image_tokens: TokenCounter) -> Expanded:
    """Repeat each image placeholder once for each token of its image. Raises ValueError as the functions above."""
    owners = image_owners(sample, modules)
    counts = image_token_counts(sample, owners, num_image_tokens)
    repeats, is_image = np.ones(len(sample.tokens), np.int64), np.isin(sample.tokens, list(modules.values()))
    repeats[is_image] = counts
    images: dict[str, list[int]] = {module: [] for module in modules}
    for module, count in zip(owners, counts, strict=True):
        images[module].append(count)
    tokens = np.repeat(sample.tokens.astype(np.int64), repeats)
    ends = np.array([len(tokens)])
    if sample.lengths:
        if sum(sample.lengths) != len(sample.tokens) or min(sample.lengths) < 1:
            raise ValueError(f"sample {sample.key}: a pack of {len(sample.tokens)} tokens says that its samples have "
                             f"{list(sample.lengths)}")
        ends = np.cumsum(repeats)[np.cumsum(sample.lengths) - 1]
    starts = (np.cumsum(repeats) - repeats)[is_image]
    return Expanded(tokens, np.repeat(sample.target_mask, repeats), images, ends, owners, starts)


def image_grids(sample: Sample, row: Expanded, token_grid: GridFinder) -> list[tuple[int, TokenGrid]]:
    """Return the first token's index and the grid of each image of an expanded row, in order."""
    return [(int(start), token_grid(module, *size))
            for start, module, size in zip(row.starts, row.owners, sample.image_sizes, strict=True)]


def collate_text(
    samples: Sequence[Sample],
    *,
    modules: dict[str, int],
    num_image_tokens: TokenCounter,
    seq_length: int,
    vocab_size: int,
    pad_token_id: int,
    token_grid: GridFinder | None = None,
    sequence_multiple: int = 1,
) -> TextBatch:
    """Make the language side of a microbatch: images expanded, labels shifted by one, padding on the right.

    Args:
        samples: the lane's samples, in order.
        modules: encoder names and their placeholder ids; empty without an encoder.
        num_image_tokens: counts the tokens that a module makes of an image of (height, width) pixels.
        seq_length: tokens per sample after expansion and padding.
        vocab_size: upper bound of token ids.
        pad_token_id: fills `input_ids` and `labels` after a sample's end, where the loss mask is 0.
        token_grid: returns the tokens of an image as a grid, for a decoder that rotates three axes; None for one.
        sequence_multiple: the samples of a pack are padded to multiples of this, each at its end.

    Raises:
        ValueError: naming the sample, for anything wrong with it.
    """
    if pad_token_id in modules.values():
        raise ValueError(f"--image-token-id {pad_token_id}: is the padding token, which would count as images")
    if len(samples) > 1 and any(sample.lengths for sample in samples):
        raise ValueError(f"sample {samples[0].key}: packed rows need --micro-batch-size 1, it is {len(samples)}")
    rows = [_row(sample, modules, num_image_tokens, seq_length, vocab_size) for sample in samples]
    input_ids = np.full((len(samples), seq_length), pad_token_id, np.int64)
    labels = input_ids.copy()
    loss_mask = np.zeros(input_ids.shape, np.float32)
    stops = rows[0].ends if rows else np.zeros(1, np.int64)
    for index, row in enumerate(rows):
        places = np.arange(len(row.tokens))
        if samples[index].lengths:
            stops, places = _aligned(row, sequence_multiple, seq_length, samples[index].key)
            row.starts = places[row.starts]
        input_ids[index, places] = row.tokens
        labels[index, places[:-1]] = row.tokens[1:]
        loss_mask[index, places[:-1]] = row.targets[1:]
        # The last token of a sample predicts nothing, because the token after it belongs to another sample.
        last = places[row.ends[row.ends > 0] - 1]
        labels[index, last], loss_mask[index, last] = pad_token_id, 0
    packed = packed_sequences(stops, seq_length) if samples and samples[0].lengths else None
    if token_grid is None:
        position_ids = positions_of(packed, seq_length).expand(len(samples), seq_length).contiguous()
    else:
        # Padding behind a single sample continues its positions, because nothing attends to it.
        lengths = [seq_length] if packed is None else packed.cu_seqlens.diff().tolist()
        position_ids = torch.from_numpy(np.stack(
            [multimodal_positions(lengths, image_grids(sample, row, token_grid))
             for sample, row in zip(samples, rows, strict=True)], axis=1))
    return TextBatch(
        keys=tuple(sample.key for sample in samples),
        token_counts={module: tuple(row.image_tokens[module] for row in rows) for module in modules},
        input_ids=torch.from_numpy(input_ids),
        labels=torch.from_numpy(labels),
        loss_mask=torch.from_numpy(loss_mask),
        position_ids=position_ids,
        placeholders={
            module: placeholder_positions(torch.from_numpy(input_ids), token) for module, token in modules.items()
        },
        num_tokens=sum(len(row.tokens) for row in rows),
        packed=packed,
        skipped=tuple(message for sample in samples for message in sample.skipped),
        unbalanced_image_tokens=sum(sample.unbalanced_image_tokens or 0 for sample in samples),
        lengths=tuple(row.lengths for row in rows),
        image_lengths={module: tuple(count for row in rows for count in row.images[module]) for module in modules},
    )


def _aligned(row: Expanded, multiple: int, seq_length: int, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Return where each sample of a pack ends once it is padded to a multiple, and the place of each token in the row.

    Causal layers never show padding at the end of a sample to its tokens.

    Raises:
        ValueError: the padded samples are longer than the row; names the pack.
    """
    lengths = np.diff(row.ends, prepend=0)
    stops = np.cumsum(-(-lengths // multiple) * multiple)
    if stops[-1] > seq_length:
        raise ValueError(f"sample {key}: its {len(lengths)} samples have {stops[-1]} tokens, each padded to a multiple "
                         f"of {multiple} (twice --llm-cp), which are more than --seq-length {seq_length}: the data set "
                         "has to leave room (sequence_multiple of DataRequest or Lane)")
    shifts = np.concatenate([[0], stops[:-1]]) - (row.ends - lengths)
    return stops, np.arange(len(row.tokens)) + np.repeat(shifts, lengths)


def _row(sample: Sample, modules: dict[str, int], num_image_tokens: TokenCounter, seq_length: int,
         vocab_size: int) -> Expanded:
    """Check and expand a sample. Raises ValueError for anything wrong with it."""
    check_tokens(sample, vocab_size)
    row = expand_images(sample, modules, num_image_tokens)
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


def placeholder_positions(input_ids: torch.Tensor, token_id: int) -> torch.Tensor:
    """Return the positions of a placeholder, in sample order, as indices into `[s * b]` of a sequence-first tensor.

    Args:
        input_ids: int64 `[b, s]`, on the host, because this would wait for a device.
        token_id: id of the placeholder.
    """
    sample, position = (input_ids == token_id).nonzero(as_tuple=True)
    return position * input_ids.shape[0] + sample


def checked_images(sample: Sample, num_channels: int) -> list[np.ndarray]:
    """Return the images of a sample. Raises ValueError for one that is missing or differs from its declaration."""
    num_present = 0 if sample.images is None else len(sample.images)
    if sample.images is None or num_present != len(sample.image_sizes):
        raise ValueError(f"sample {sample.key}: declares {len(sample.image_sizes)} images but holds {num_present}")
    for position, (image, size) in enumerate(zip(sample.images, sample.image_sizes, strict=True)):
        expected = (num_channels, *size)
        if image.shape != expected or image.dtype != np.float32:
            raise ValueError(
                f"sample {sample.key}: image {position} is {image.dtype} {list(image.shape)}, declared float32 "
                f"{list(expected)} (channels, height, width)"
            )
        if not np.isfinite(image).all():
            raise ValueError(f"sample {sample.key}: image {position} has pixels that are not finite")
    return sample.images


def collate_encoder(
    samples: Sequence[Sample],
    *,
    module: str,
    modules: dict[str, int],
    num_image_tokens: TokenCounter,
    num_channels: int,
    lane_sizes: Sequence[int],
    dtype: torch.dtype,
    patches: PatchOrder | None = None,
    pixels: bool = True,
) -> EncoderBatch:
    """Make the encoder side of a microbatch.

    Args:
        samples: samples of all served lanes, in lane order.
        module: the encoder.
        modules: names and placeholder ids of all encoders.
        num_image_tokens: counts the tokens that a module makes of an image of (height, width) pixels.
        num_channels: channels that the encoder takes.
        lane_sizes: samples of each lane; sums to `len(samples)`.
        dtype: dtype of `pixel_values`.
        patches: how images become packed patches; None if the encoder takes whole images.
        pixels: False on pipeline stages after the first, which receive activations instead of pixels.

    Raises:
        ValueError: names the sample; an image is missing or differs from its declaration.
    """
    assert sum(lane_sizes) == len(samples), (lane_sizes, len(samples))
    token_counts, lanes = [], []
    first: tuple[str, Any] | None = None
    for stop, size in zip(accumulate(lane_sizes), lane_sizes, strict=True):
        images: list[Any] = []
        sizes: list[tuple[int, int]] = []
        for sample in samples[stop - size : stop]:
            owners = image_owners(sample, modules)
            counts = image_token_counts(sample, owners, num_image_tokens)
            token_counts.append(sum(count for count, owner in zip(counts, owners, strict=True) if owner == module))
            held = checked_images(sample, num_channels) if pixels else [None] * len(owners)
            for image, shape, owner in zip(held, sample.image_sizes, owners, strict=True):
                if owner == module:
                    first = first or (sample.key, shape)
                    _check_size(sample.key, shape, first, patches)
                    images.append(image)
                    sizes.append(shape)
        if patches is not None:
            lanes.append(packed_patches(images if pixels else None, sizes, patches, dtype))
        else:
            lanes.append(whole_images(images, dtype) if pixels else {})
    return EncoderBatch(
        keys=tuple(sample.key for sample in samples),
        token_counts=tuple(token_counts),
        lane_sizes=tuple(lane_sizes),
        inputs=merge_inputs(lanes),
    )


def _check_size(key: str, size: tuple[int, int], first: tuple[str, tuple[int, int]], patches: PatchOrder | None) -> (
        None):
    """Raise ValueError if an image does not fit the microbatch, given the key and size of the first image."""
    height, width = size
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
