"""The same samples as packed rows on any layout and one by one on one process; inside worker processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch

from mimo.config.cli import parse
from mimo.config.validate import validate
from mimo.data.batch import Microbatch
from mimo.grid.lanes import needs_of, sequence_multiple
from mimo.protocols import Sample, VideoSize
from mimo.registry import model_provider
from mimo.visual import ImageSize
from tests.support import equality
from tests.support.global_state import Piece, assemble, read_gradients, worst_errors
from tests.support.routed_data import pack as join

VISION = "vision"
SEQ_LENGTH = 32
BASE = f"""--dataset-provider mock --device cpu --no-bf16 --transformer-impl local --seq-length {SEQ_LENGTH}
--global-batch-size 4 --micro-batch-size 1 --train-iters 1 --lr 1e-3 --lr-decay-style constant --num-generations 0
--watchdog-timeout-s 60 --hidden-size 32 --num-attention-heads 4 --vocab-size 96 --moe-aux-loss-coeff 0""".split()
# Of decoders without a pattern of layers.
LAYERS = ("--num-layers", "2", "--ffn-hidden-size", "48")
# Text tokens and images of each sample of each pack: padded rows, one without an image, one that a sample fills.
PACKS: tuple[tuple[tuple[int, int], ...], ...] = (
    ((7, 1), (5, 0), (4, 2)), ((1, 0), (9, 1), (6, 0)), ((3, 0), (4, 0)), ((SEQ_LENGTH, 0),))


@dataclass
class Outcome:
    """Results of a run.

    Attributes:
        losses: sample key -> loss of each token of the sample, 0 where there is no target; last language stage only.
        gradients: gradients of the sum of all losses, divided by the targets.
        rows: tokens of each sequence of each row, for the checks of the samples themselves.
    """

    losses: dict[str, np.ndarray] = field(default_factory=dict)
    gradients: list[Piece] = field(default_factory=list)
    rows: list[tuple[int, ...]] = field(default_factory=list)


def make_samples(token_spec: Any, sizes: Sequence[ImageSize]) -> list[list[Sample]]:
    """Return the samples of `PACKS`, images and videos of the sizes in turn; a text model's have none."""
    rng, with_images = np.random.default_rng(4), token_spec.image_token_id >= 0
    remaining, packs = iter(sizes), []
    for number, pack in enumerate(PACKS):
        samples = []
        for place, (length, num_images) in enumerate(pack):
            own = [next(remaining) for _ in range(num_images)] if with_images else []
            places = np.sort(rng.integers(0, length, size=len(own)))
            ids = [token_spec.video_token_id if isinstance(size, VideoSize) else 95 for size in own]
            # Ids of text are below those of placeholders, 94 and 95.
            tokens = np.insert(rng.integers(1, 94, size=length), places, np.array(ids, np.int64))
            images = [rng.standard_normal(token_spec.pixel_shape(size), dtype=np.float32) for size in own]
            samples.append(Sample(f"{number}.{place}", tokens, tokens < 94, own, images))
        packs.append(samples)
    return packs


def microbatch(rows: Sequence[Sample], parts: Any, seq_length: int | None) -> Microbatch:
    """This rank's side of a microbatch.

    Args:
        rows: one row for each lane.
        parts: this rank's trainer.
        seq_length: tokens of a row; None: as many as the row has.
    """
    from mimo.data.batch import with_part
    from mimo.data.collate import Placeholders, collate_encoder, collate_text, expand_images

    config, layout, rank = parts.config, parts.grids.layout, parts.grids.rank
    provider, family = model_provider(config.model.model_provider), config.model_family
    images = Placeholders.of(provider, family, layout)
    text, encoders = None, {}
    if rank in layout.language.ranks:
        row = rows[layout.language.coordinates(rank)["dp"]]
        length = seq_length or len(expand_images(row, images).tokens)
        text = collate_text([row], images=images, seq_length=length, pad_token_id=0,
                            vocab_size=provider.token_spec(family).vocab_size,
                            sequence_multiple=sequence_multiple(layout))
        text = with_part(text, layout.language.cp, layout.language.coordinates(rank)["cp"])
    for grid in layout.encoders:
        needs = [need for need in needs_of(layout, rank, 1) if need.module == grid.name]
        if needs:
            lanes = [need.share.lane for need in needs]
            encoders[grid.name] = collate_encoder(
                [rows[lane] for lane in lanes], module=grid.name, images=images, lane_sizes=[1] * len(lanes),
                dtype=torch.float32, pixels=needs[0].pixels)
    return Microbatch(text, encoders)


def run(rank: int, flags: tuple[str, ...], world_size: int, together: bool, sizes: Sequence[ImageSize] = ((16, 16),) * 4
        ) -> Outcome:
    """Losses and gradients of the samples.

    Args:
        rank: this process.
        flags: model and layout.
        world_size: number of processes.
        together: as packed rows; else each sample in a microbatch of its own, on one process.
        sizes: height and width of the images in pixels.
    """
    from mimo.training import step
    from mimo.training.evaluate import whole_rows

    config = parse([*BASE, *(() if "--hybrid-layer-pattern" in flags else LAYERS), *flags])
    with equality.open_trainer(config, validate(config, world_size)) as parts:
        packs = make_samples(model_provider(config.model.model_provider).token_spec(config.model_family), sizes)
        if together:
            rows, lanes = [join(samples) for samples in packs], parts.grids.layout.num_lanes
            groups = [rows[start : start + lanes] for start in range(0, len(rows), lanes)]
            batches = [microbatch(group, parts, config.train.seq_length) for group in groups]
        else:
            batches = [microbatch([sample], parts, None) for samples in packs for sample in samples]
        outcome = Outcome()

        def collect(batch: Microbatch, losses: torch.Tensor) -> Any:
            text = batch.text
            assert text is not None
            whole = whole_rows(text, losses.detach(), parts.grids.collections["language"].cp)
            whole = (whole * text.loss_mask).numpy()[0]
            starts = [0, len(whole)] if text.packed is None else text.packed.cu_seqlens.tolist()
            outcome.rows.append(tuple(np.diff(starts).tolist()))
            # Behind the last sample comes the padding.
            for key, start, length in zip(text.keys[0].split(), starts, text.lengths[0], strict=False):
                outcome.losses[key] = whole[start : start + length]
            return step.loss_function(batch, losses)

        def forward(microbatches: Iterator[Microbatch], model: Any) -> Any:
            batch = next(microbatches)
            return model(batch), partial(collect, batch)

        def keep_gradients() -> tuple[bool, float, int]:
            outcome.gradients = read_gradients(parts.built.model)
            return True, 0.0, 0

        parts.optimizer.step = keep_gradients
        with mock.patch.object(step, "forward_step", forward):
            step.train_step(parts, batches, force_all_reduce=True)
    return outcome


def differences(expected: Outcome, found: Sequence[Outcome], tolerance: float) -> list[str]:
    """List where ranks differ by more than `tolerance`, relative to the largest loss and to each gradient's norm."""
    wrong, seen = [], set()
    largest = max(float(np.abs(losses).max()) for losses in expected.losses.values())
    for rank, outcome in enumerate(found):
        for key, losses in outcome.losses.items():
            seen.add(key)
            assert losses.shape == expected.losses[key].shape, (key, losses.shape)
            error = float(np.abs(losses - expected.losses[key]).max()) / largest
            if not error < tolerance:
                wrong.append(f"losses of sample {key} on rank {rank}: {error:.1e}")
    assert seen == expected.losses.keys(), seen ^ expected.losses.keys()
    errors = worst_errors(assemble(expected.gradients), [outcome.gradients for outcome in found])
    return wrong + [f"gradient of {name}: {error:.1e}" for name, error in errors.items() if not error < tolerance]
