"""Samples to tensors: the language side and the encoder side of one microbatch.

Both sides count image tokens with the model provider's `num_image_tokens` from the declared image sizes, so they agree
without talking to each other; everything a data set can get wrong is refused here, with the sample's key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from mimo.batch import EncoderBatch, TextBatch
from mimo.protocols import Sample

# (encoder module, height, width in pixels) -> language tokens.
TokenCounter = Callable[[str, int, int], int]


def image_owners(sample: Sample, modules: dict[str, int]) -> list[str]:
    """The encoder module of each image of a sample: the one whose placeholder stands for it.

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
    """Language tokens of each image of a sample. Raises ValueError for a size that its encoder cannot take."""
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


def expand_images(
    sample: Sample, modules: dict[str, int], num_image_tokens: TokenCounter
) -> tuple[np.ndarray, np.ndarray, dict[str, int]]:
    """Repeat each image placeholder once per token of its image.

    Returns:
        Tokens int64 `[n]`, target mask bool `[n]`, and how many of the tokens are image tokens of each module.

    Raises:
        ValueError: as `image_owners` and `image_token_counts`.
    """
    owners = image_owners(sample, modules)
    counts = image_token_counts(sample, owners, num_image_tokens)
    repeats = np.ones(len(sample.tokens), np.int64)
    repeats[np.isin(sample.tokens, list(modules.values()))] = counts
    totals = dict.fromkeys(modules, 0)
    for module, count in zip(owners, counts, strict=True):
        totals[module] += count
    return np.repeat(sample.tokens.astype(np.int64), repeats), np.repeat(sample.target_mask, repeats), totals


def collate_text(
    samples: Sequence[Sample],
    *,
    modules: dict[str, int],
    num_image_tokens: TokenCounter,
    seq_length: int,
    vocab_size: int,
    pad_token_id: int,
) -> TextBatch:
    """Language side of a microbatch: images expanded, labels shifted by one, padded on the right.

    Args:
        samples: the lane's samples, in order.
        modules: encoder names and their placeholder ids; empty without an encoder.
        num_image_tokens: tokens that a module makes of an image of (height, width) pixels.
        seq_length: tokens per sample after expansion and padding.
        vocab_size: ids are below it.
        pad_token_id: fills `input_ids` and `labels` after a sample's end, where the loss mask is 0.

    Raises:
        ValueError: naming the sample, for anything wrong with it.
    """
    if pad_token_id in modules.values():
        raise ValueError(f"--image-token-id {pad_token_id}: is the padding token, which would count as images")
    input_ids = np.full((len(samples), seq_length), pad_token_id, np.int64)
    labels = input_ids.copy()
    loss_mask = np.zeros(input_ids.shape, np.float32)
    image_tokens: dict[str, list[int]] = {module: [] for module in modules}
    num_tokens = 0
    for row, sample in enumerate(samples):
        check_tokens(sample, vocab_size)
        tokens, targets, from_images = expand_images(sample, modules, num_image_tokens)
        length = len(tokens)
        if length > seq_length:
            raise ValueError(
                f"sample {sample.key}: {length} tokens, {sum(from_images.values())} of them from images, are "
                f"{length - seq_length} more than --seq-length {seq_length}"
            )
        input_ids[row, :length] = tokens
        labels[row, : max(length - 1, 0)] = tokens[1:]
        loss_mask[row, : max(length - 1, 0)] = targets[1:]
        for module, count in from_images.items():
            image_tokens[module].append(count)
        num_tokens += length
    return TextBatch(
        keys=tuple(sample.key for sample in samples),
        token_counts={module: tuple(counts) for module, counts in image_tokens.items()},
        input_ids=torch.from_numpy(input_ids),
        labels=torch.from_numpy(labels),
        loss_mask=torch.from_numpy(loss_mask),
        position_ids=torch.arange(seq_length).expand(len(samples), seq_length).contiguous(),
        placeholders={
            module: placeholder_positions(torch.from_numpy(input_ids), token) for module, token in modules.items()
        },
        num_tokens=num_tokens,
    )


def placeholder_positions(input_ids: torch.Tensor, token_id: int) -> torch.Tensor:
    """Where a placeholder stands, in sample order, as indices into `[s * b]` of a sequence-first tensor.

    Args:
        input_ids: int64 `[b, s]`, on the host: on a device this would synchronise.
        token_id: the placeholder.
    """
    sample, position = (input_ids == token_id).nonzero(as_tuple=True)
    return position * input_ids.shape[0] + sample


def checked_images(sample: Sample, num_channels: int) -> list[np.ndarray]:
    """The images of a sample. Raises ValueError for one that is missing or is not what the sample declares."""
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
    pixels: bool = True,
) -> EncoderBatch:
    """Encoder side of a microbatch.

    Args:
        samples: samples of all lanes served, by lane, then in lane order.
        module: the encoder.
        modules: names and placeholder ids of all encoders.
        num_image_tokens: tokens that a module makes of an image of (height, width) pixels.
        num_channels: channels the encoder takes.
        lane_sizes: samples of each lane; sums to `len(samples)`.
        dtype: dtype of `pixel_values`.
        pixels: False on pipeline stages after the first, which receive activations instead of `inputs`.

    Raises:
        ValueError: naming the sample, for a missing image or one that differs from what its sample declares.
    """
    assert sum(lane_sizes) == len(samples), (lane_sizes, len(samples))
    owners = [image_owners(sample, modules) for sample in samples]
    counts = [
        image_token_counts(sample, names, num_image_tokens) for sample, names in zip(samples, owners, strict=True)
    ]
    token_counts = tuple(
        sum(count for count, name in zip(numbers, names, strict=True) if name == module)
        for numbers, names in zip(counts, owners, strict=True)
    )
    owned = [
        (sample.key, image)
        for sample, names in zip(samples if pixels else (), owners if pixels else (), strict=True)
        for image, name in zip(checked_images(sample, num_channels), names, strict=True)
        if name == module
    ]
    for key, image in owned:
        if image.shape != owned[0][1].shape:
            raise ValueError(
                f"sample {key}: an image of {list(image.shape)} cannot share a microbatch with one of "
                f"{list(owned[0][1].shape)} (sample {owned[0][0]}); the data set must give one size"
            )
    inputs = {"pixel_values": torch.from_numpy(np.stack([image for _, image in owned])).to(dtype)} if owned else {}
    return EncoderBatch(
        keys=tuple(sample.key for sample in samples),
        token_counts=token_counts,
        lane_sizes=tuple(lane_sizes),
        inputs=inputs,
    )
