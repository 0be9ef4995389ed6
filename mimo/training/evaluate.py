"""Loss and exact match on the held-out split, through the same grids and schedule as training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import unwrap_model

from mimo.comm import gather, gather_at
from mimo.config.trainer import RunConfig
from mimo.data.batch import EncoderBatch, Microbatch, TextBatch
from mimo.data.encoder_inputs import PatchOrder, unpatchify
from mimo.model.build import set_training
from mimo.model.mimo_model import FunctionOfText
from mimo.model.vocabulary import TokenFunction
from mimo.observability.trackers import MAX_SHOWN_SIDE
from mimo.protocols import LANGUAGE, ModelProvider
from mimo.training.step import TrainerParts, run_schedule


@dataclass(frozen=True)
class Evaluation:
    """Figures of a held-out split.

    Attributes:
        loss: mean over its target tokens.
        exact_match: share of samples whose every target token is the argmax under teacher forcing.
        num_samples: samples counted, those with a target.
    """

    loss: float
    exact_match: float
    num_samples: int


def vocabulary_argmax(logits: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the index of the largest logit over a vocabulary that is split across `group`.

    `logits` is this rank's slice, `[..., vocab / tp]`.

    Returns:
        int64 `[...]`, the same on every rank of the group; the lowest index wins a tie.
    """
    values, indices = logits.float().max(dim=-1)
    indices = indices + group.rank() * logits.shape[-1]
    if group.size() == 1:
        return indices
    all_values = [torch.empty_like(values) for _ in range(group.size())]
    all_indices = [torch.empty_like(indices) for _ in range(group.size())]
    dist.all_gather(all_values, values.contiguous(), group=group)
    dist.all_gather(all_indices, indices.contiguous(), group=group)
    winner = torch.stack(all_values).argmax(dim=0, keepdim=True)
    return torch.stack(all_indices).gather(0, winner).squeeze(0)


def whole_rows(text: TextBatch, own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Gather the values of whole rows `[b, s, ...]` from those of each context-parallel rank's, `[b, s / cp, ...]`."""
    if text.part is None:
        return own
    index = text.part.index.to(own.device)
    values, places = ([torch.empty_like(each) for _ in range(group.size())] for each in (own, index))
    dist.all_gather(values, own.contiguous(), group=group)
    dist.all_gather(places, index, group=group)
    whole = own.new_empty((*text.input_ids.shape, *own.shape[2:]))
    whole[:, torch.cat(places)] = torch.cat(values, dim=1)
    return whole


def _loss_and_choice(model: Any, groups: ProcessGroupCollection | None, text: TextBatch) -> TokenFunction:
    """Return what evaluation reads of the logits: each token's loss and the most likely token."""
    assert groups is not None, "logits are computed on the language grid"
    language, tp = unwrap_model(model.language_model), groups.tp

    def compute(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # The loss may overwrite the logits.
        chosen = vocabulary_argmax(logits, tp)
        return language.compute_language_model_loss(labels.t(), logits).t(), chosen

    return TokenFunction(compute, (text.own(text.labels),))


def _score(
    groups: ProcessGroupCollection | None,
    counted: Iterator[list[bool]],
    batch: Microbatch,
    values: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the schedule's loss triple for one microbatch.

    The report is `[loss sum, target tokens, exactly matched samples, samples]`. `counted` yields, for each microbatch
    in order, which of its samples count; `values` are those of `_loss_and_choice`.
    """
    text = batch.text
    assert text is not None and groups is not None, "logits are computed where text is, on the language grid"
    labels, targets = text.own(text.labels), text.own(text.loss_mask)
    losses, chosen = values
    keep = torch.tensor(next(counted), device=losses.device)
    mask = targets * keep[:, None]
    # A sample without a target has nothing to match.
    keep = keep & (text.loss_mask > 0).any(dim=1)
    matched = ((chosen == labels) | (targets == 0)).all(dim=1).int()
    counts_samples = groups.cp.rank() == 0
    if groups.cp.size() > 1:
        # A sample matches if every rank's part of it does.
        dist.all_reduce(matched, op=dist.ReduceOp.MIN, group=groups.cp)
    report = torch.stack(
        [
            (losses.float() * mask).sum().double(),
            mask.sum().double(),
            (matched.bool() & keep).sum().double() * counts_samples,
            keep.sum().double() * counts_samples,
        ]
    )
    return report[0], report[1].to(torch.int), report


def forward_values(
    batches: Iterator[Microbatch], model: Any, function: FunctionOfText | None,
    consume: Callable[[Microbatch, Any], Any],
) -> Any:
    """Run a forward step (Megatron Core's `forward_step_func`) and pass numbers of the last stage's tokens on.

    Without `function`, these are the logits of all tokens. `consume` gets the microbatch and the numbers, and returns
    the schedule's loss triple.
    """
    batch = next(batches)
    return model(batch, with_labels=False, function=function), partial(consume, batch)


def evaluate(parts: TrainerParts, steps: Iterable[list[Microbatch]], num_samples: int | None) -> Evaluation:
    """Evaluate on global batches. Collective over the world.

    `steps` are this rank's side of the batches, from the start of the split. The split has `num_samples` samples, or no
    end (None). Samples that repeat after its end are not counted.
    """
    layout, rank = parts.grids.layout, parts.grids.rank
    totals = torch.zeros(4, dtype=torch.float64, device=parts.platform.device)
    groups = parts.grids.collections[LANGUAGE] if parts.is_last_language_stage else None
    model = parts.built.model
    set_training(model, False)
    position = layout.language.coordinates(rank)["dp"] if parts.is_last_language_stage else 0
    with torch.no_grad():
        for microbatches in steps:
            # Lanes take turns in the order of the split, so that a sample's position there follows from its own.
            plan = []
            for batch in microbatches:
                samples = range(len(batch.text.keys) if batch.text is not None else 0)
                indices = [position + layout.num_lanes * sample for sample in samples]
                plan.append([num_samples is None or index < num_samples for index in indices])
                position += layout.num_lanes * len(samples)
            score = partial(forward_values, function=partial(_loss_and_choice, model, groups),
                            consume=partial(_score, groups, iter(plan)))
            with parts.watchdog.waiting("evaluation", is_work=True):
                reports = run_schedule(parts, microbatches, score, forward_only=True)
            if parts.counts_losses:
                totals += torch.stack(reports).sum(dim=0)
        dist.all_reduce(totals)
    set_training(model, True)
    loss_sum, tokens, matched, samples_seen = totals.tolist()
    return Evaluation(loss_sum / max(tokens, 1.0), matched / max(samples_seen, 1.0), int(samples_seen))


def greedy_decode(parts: TrainerParts, microbatches: Sequence[Microbatch]) -> list[tuple[str, list[int], list[int]]]:
    """Decode the targets of every sample, feeding back the model's own tokens. Collective over the world.

    What lies between the answers of a conversation stays as it is.

    Returns:
        `(key, expected tokens, decoded tokens)` of each sample of this rank's lane; empty on encoder ranks.
    """
    microbatches = list(microbatches)
    texts = [batch.text for batch in microbatches if batch.text is not None]
    # For each sample, the positions whose label is a target. The label is the token at the next position.
    targets = [[text.loss_mask[sample].nonzero().flatten().tolist() for sample in range(len(text.keys))]
               for text in texts]
    most = torch.tensor([max((len(places) for lane in targets for places in lane), default=0)])
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=parts.grids.host)
    # The expected answer must not be in the input: decoding fills it in, token by token.
    inputs = [text.input_ids.clone() for text in texts]
    decoded: list[list[list[int]]] = [[[] for _ in lane] for lane in targets]
    for ids, lane in zip(inputs, targets, strict=True):
        for sample, places in enumerate(lane):
            ids[sample, [place + 1 for place in places if place + 1 < ids.shape[1]]] = 0
    set_training(parts.built.model, False)
    with torch.no_grad():
        for step in range(int(most.item())):
            texts_now = iter(inputs)
            current = [
                replace(batch, text=replace(batch.text, input_ids=next(texts_now))) if batch.text is not None else batch
                for batch in microbatches
            ]
            tokens = next_tokens(parts, current)
            for index, (ids, lane) in enumerate(zip(inputs, targets, strict=True)):
                for sample, places in enumerate(lane):
                    if step < len(places):
                        token = int(tokens[index][sample, places[step]])
                        decoded[index][sample].append(token)
                        if places[step] + 1 < ids.shape[1]:
                            ids[sample, places[step] + 1] = token
    set_training(parts.built.model, True)
    return [(text.keys[sample], text.labels[sample, places].tolist(), found)
            for text, lane, answers in zip(texts, targets, decoded, strict=True)
            for sample, (places, found) in enumerate(zip(lane, answers, strict=True))]


def next_tokens(parts: TrainerParts, microbatches: Sequence[Microbatch]) -> list[torch.Tensor]:
    """Return each microbatch's argmax at every position, int64 `[b, s]` on the host; nothing without language model."""
    found: list[torch.Tensor] = []
    groups = parts.grids.collections.get(LANGUAGE)

    def choose(text: TextBatch) -> TokenFunction:
        assert groups is not None, "logits are computed on the language grid"
        tp = groups.tp
        return TokenFunction(lambda logits: (vocabulary_argmax(logits, tp),))

    def collect(batch: Microbatch, chosen: tuple[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        assert batch.text is not None and groups is not None, "logits are computed where text is"
        found.append(whole_rows(batch.text, chosen[0], groups.cp))
        zero = torch.zeros((), device=found[-1].device)
        return zero, zero.to(torch.int), zero

    run_schedule(parts, microbatches, partial(forward_values, function=choose, consume=collect), forward_only=True)
    if groups is None:
        return []
    shapes = [batch.text.input_ids.shape for batch in microbatches if batch.text is not None]
    sizes = [shape.numel() for shape in shapes]
    tokens = torch.cat([each.flatten() for each in found]) if found else torch.empty(
        sum(sizes), dtype=torch.int64, device=parts.platform.device)
    if groups.pp.size() > 1:
        # Stages before the last need the tokens as their next input.
        dist.broadcast(tokens, src=dist.get_global_rank(groups.pp, groups.pp.size() - 1), group=groups.pp)
    return [each.view(shape) for each, shape in zip(tokens.cpu().split(sizes), shapes, strict=True)]


# Most samples whose images are shown, because one rank holds all of them in memory.
MAX_SHOWN_IMAGES = 16


def gather_images(parts: TrainerParts, provider: ModelProvider, steps: Sequence[Sequence[Microbatch]],
                  keys: Sequence[str]) -> dict[str, list[np.ndarray]]:
    """Gather images of some samples on the logging rank, from the ranks that encode them. Collective.

    `steps` are this rank's side of the batches that hold the samples; only the logging rank names keys.

    Returns:
        Images by key, uint8 `[height, width, channels]`, with contrast stretched to the full range; empty elsewhere.
    """
    grids = parts.grids
    found: dict[str, list[np.ndarray]] = {}
    wanted = {key for each in gather(grids, list(keys[:MAX_SHOWN_IMAGES])) for key in each}
    for batch in (batch for microbatches in steps for batch in microbatches):
        for module, encoded in batch.encoders.items():
            place = grids.layout.grids[module].coordinates(grids.rank)
            if grids.layout.encoder_window is not None or (place["tp"] == 0 and place["pp"] == 0):
                found |= {key: images for key, images in _images(parts.config, provider, module, encoded).items()
                          if key in wanted and images}
    # The last stage of the first lane writes the run's records.
    boxes = gather_at(grids, found, grids.layout.language.rank_at(pp=-1))
    return {key: images for box in boxes or () for key, images in box.items()}


def _images(config: RunConfig, provider: ModelProvider, module: str,
            batch: EncoderBatch) -> dict[str, list[np.ndarray]]:
    """Return the images of each sample of an encoder's microbatch."""
    inputs = batch.normalised_inputs()
    pixels, sizes = inputs.get("pixel_values"), inputs.get("imgs_sizes")
    if pixels is None:
        return {}
    pixels = pixels.detach().float().cpu().numpy()
    if "tile_counts" in inputs:  # the first tile is the whole image
        firsts = np.cumsum([0, *inputs["tile_counts"][:-1]])
        images = list(zip(pixels[firsts], inputs["imgs_sizes"].tolist(), strict=True))
    elif pixels.ndim == 4:
        images = [(image, image.shape[1:]) for image in pixels]
    elif sizes is None:  # an encoder whose input is not made of images or patches
        return {}
    else:
        images, first, order = [], 0, PatchOrder.of(provider.token_spec(config.model_family))
        assert order is not None, "sizes come with packed patches"
        for height, width in sizes.tolist():
            stop = first + height * width // order.patch_size**2
            images.append((unpatchify(pixels[0, first:stop], (height, width), order), (height, width)))
            first = stop
    by_key: dict[str, list[np.ndarray]] = {}
    left = iter(images)
    for key, count in zip(batch.keys, batch.token_counts, strict=True):
        shown = by_key.setdefault(key, [])
        while count > 0:
            image, size = next(left)
            count -= provider.num_image_tokens(config.model_family, module, *size)
            shown.append(_shown(image))
    return by_key


def _shown(image: np.ndarray) -> np.ndarray:
    """Return a normalised image `[channels, height, width]` in 8 bits, reduced in size."""
    step = -(-max(image.shape[1:]) // MAX_SHOWN_SIDE)
    small = image[:3, ::step, ::step] if image.shape[0] >= 3 else image[:1, ::step, ::step]
    low, high = float(small.min()), float(small.max())
    return ((small - low) / max(high - low, 1e-6) * 255).astype(np.uint8).transpose(1, 2, 0)
