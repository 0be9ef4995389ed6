"""Greedy decoding of a few held-out samples, to show a person what the model answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from mimo.batch import EncoderBatch, Microbatch, TextBatch
from mimo.checkpoint.agree import gather
from mimo.config.run import RunConfig
from mimo.model.build import set_training
from mimo.protocols import LANGUAGE, ModelProvider
from mimo.training.evaluate import forward_logits, vocabulary_argmax
from mimo.training.step import TrainerParts, run_schedule


def _target_span(text: TextBatch, sample: int) -> tuple[int, int]:
    """First and one past the last position whose label is a target; `(0, 0)` where there is none."""
    positions = text.loss_mask[sample].nonzero().flatten().tolist()
    return (positions[0], positions[-1] + 1) if positions else (0, 0)


def greedy_decode(parts: TrainerParts, microbatches: Sequence[Microbatch]) -> list[tuple[str, list[int], list[int]]]:
    """Decode the target span of every sample, feeding back the model's own tokens. Collective over the world.

    Args:
        parts: this rank's trainer.
        microbatches: this rank's side of one global batch (or its first microbatches).

    Returns:
        `(key, expected tokens, decoded tokens)` of each sample of this rank's lane; empty on encoder ranks.
    """
    microbatches = list(microbatches)
    texts = [batch.text for batch in microbatches if batch.text is not None]
    spans = [[_target_span(text, sample) for sample in range(len(text.keys))] for text in texts]
    longest = torch.tensor([max((stop - start for lane in spans for start, stop in lane), default=0)])
    dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=parts.grids.host)
    inputs = [text.input_ids.clone() for text in texts]
    for ids, lane in zip(inputs, spans, strict=True):
        for sample, (start, _) in enumerate(lane):
            ids[sample, start + 1 :] = 0
    set_training(parts.built.model, False)
    with torch.no_grad():
        for step in range(int(longest.item())):
            texts_now = iter(inputs)
            current = [
                replace(batch, text=replace(batch.text, input_ids=next(texts_now))) if batch.text is not None else batch
                for batch in microbatches
            ]
            tokens = _next_tokens(parts, current)
            for index, (ids, lane) in enumerate(zip(inputs, spans, strict=True)):
                for sample, (start, stop) in enumerate(lane):
                    place = start + step
                    if place < stop and place + 1 < ids.shape[1]:
                        ids[sample, place + 1] = tokens[index, sample, place]
    set_training(parts.built.model, True)
    decoded = []
    for text, ids, lane in zip(texts, inputs, spans, strict=True):
        for sample, (start, stop) in enumerate(lane):
            expected = text.labels[sample, start:stop].tolist()
            decoded.append((text.keys[sample], expected, ids[sample, start + 1 : stop + 1].tolist()))
    return decoded


def _next_tokens(parts: TrainerParts, microbatches: Sequence[Microbatch]) -> torch.Tensor:
    """Argmax at every position, int64 `[microbatches, b, s]` on the host, on every language rank."""
    found: list[torch.Tensor] = []
    groups = parts.grids.collections.get(LANGUAGE)

    def collect(batch: Microbatch, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        assert groups is not None, "logits are computed on the language grid"
        found.append(vocabulary_argmax(logits, groups.tp))
        zero = torch.zeros((), device=logits.device)
        return zero, zero.to(torch.int), zero

    run_schedule(parts, microbatches, partial(forward_logits, consume=collect), forward_only=True)
    if groups is None:
        return torch.empty(0)
    text = microbatches[0].text
    assert text is not None, "language ranks hold text"
    shape = (len(microbatches), *text.input_ids.shape)
    tokens = torch.stack(found) if found else torch.empty(shape, dtype=torch.int64, device=parts.platform.device)
    if groups.pp.size() > 1:
        # Stages before the last need the tokens as their next input.
        dist.broadcast(tokens, src=dist.get_global_rank(groups.pp, groups.pp.size() - 1), group=groups.pp)
    return tokens.cpu()


# Most samples whose images are shown, and most pixels of a side: one rank holds all of them in memory.
MAX_SHOWN_IMAGES, MAX_SHOWN_SIDE = 16, 256


def gather_images(parts: TrainerParts, provider: ModelProvider, steps: Sequence[Sequence[Microbatch]],
                  keys: Sequence[str]) -> dict[str, list[np.ndarray]]:
    """Gather images of some samples on the logging rank, from the ranks that encode them. Collective.

    Args:
        parts: this rank's trainer.
        provider: the model family.
        steps: this rank's side of the batches that hold the samples.
        keys: of the samples, on the logging rank; empty elsewhere.

    Returns:
        uint8 `[height, width, channels]` images by key, each stretched to the whole range of grey; empty elsewhere.
    """
    grids = parts.grids
    found: dict[str, list[np.ndarray]] = {}
    wanted = {key for each in gather(grids, list(keys[:MAX_SHOWN_IMAGES])) for key in each}
    for batch in (batch for microbatches in steps for batch in microbatches):
        for module, encoded in batch.encoders.items():
            place = grids.layout.grids[module].coordinates(grids.rank)
            if place["tp"] == 0 and place["pp"] == 0:
                found |= {key: images for key, images in _images(parts.config, provider, module, encoded).items()
                          if key in wanted and images}
    logging_rank = grids.layout.language.rank_at(pp=-1)
    boxes: list[dict[str, list[np.ndarray]] | None] | None = None
    if grids.rank == logging_rank:
        boxes = [None] * grids.layout.world_size
    dist.gather_object(found, boxes, dst=logging_rank, group=grids.host)
    return {key: images for box in boxes or () if box is not None for key, images in box.items()}


def _images(config: RunConfig, provider: ModelProvider, module: str,
            batch: EncoderBatch) -> dict[str, list[np.ndarray]]:
    """Return the images of each sample of an encoder's microbatch."""
    pixels, sizes = batch.inputs.get("pixel_values"), batch.inputs.get("imgs_sizes")
    if pixels is None:
        return {}
    spec = provider.token_spec(config.model_family)
    pixels = pixels.detach().float().cpu().numpy()
    if pixels.ndim == 4:
        images = list(pixels)
    elif sizes is None:  # another encoder's own form of images
        return {}
    else:
        images, side, first = [], spec.patch_size, 0
        for height, width in sizes.tolist():
            rows, columns = height // side, width // side
            patches = pixels[0, first : first + rows * columns].reshape(rows, columns, spec.num_channels, side, side)
            images.append(patches.transpose(2, 0, 3, 1, 4).reshape(spec.num_channels, height, width))
            first += rows * columns
    by_key: dict[str, list[np.ndarray]] = {}
    left = iter(images)
    for key, count in zip(batch.keys, batch.token_counts, strict=True):
        shown = by_key.setdefault(key, [])
        while count > 0:
            image = next(left)
            count -= provider.num_image_tokens(config.model_family, module, *image.shape[1:])
            shown.append(_shown(image))
    return by_key


def _shown(image: np.ndarray) -> np.ndarray:
    """Return a normalised image `[channels, height, width]` in 8 bits, reduced in size."""
    step = -(-max(image.shape[1:]) // MAX_SHOWN_SIDE)
    small = image[:3, ::step, ::step] if image.shape[0] >= 3 else image[:1, ::step, ::step]
    low, high = float(small.min()), float(small.max())
    return ((small - low) / max(high - low, 1e-6) * 255).astype(np.uint8).transpose(1, 2, 0)
