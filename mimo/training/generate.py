"""Greedy decoding of a few held-out samples, to show a person what the model answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from mimo.batch import Microbatch, TextBatch
from mimo.model.build import set_training
from mimo.protocols import LANGUAGE
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
