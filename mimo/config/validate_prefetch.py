"""Checks of encoder prefetch: what has to be frozen and where, for features to be good in any step."""

from __future__ import annotations

from mimo.config.run import RunConfig
from mimo.grid.spec import Layout

MAX_STEPS_AHEAD = 4
"""Iterations ahead whose data may be asked for. A reader of lanes keeps its place for a few more, no others."""


def check_prefetch(config: RunConfig, layout: Layout, num_microbatches: int) -> None:
    """Check --encoder-prefetch-depth.

    Args:
        config: the run.
        layout: its layout.
        num_microbatches: microbatches of an iteration.

    Raises:
        ValueError: what does not fit, with its flag and value.
    """
    depth, frozen = config.train.encoder_prefetch_depth, config.model.frozen
    flag = f"--encoder-prefetch-depth {depth}"
    if depth < 0:
        raise ValueError(f"{flag} is below 0; 0 is off")
    if not depth:
        return
    if not layout.encoders:
        raise ValueError(f"{flag}: a run without encoder has nothing to prefetch; leave it out")
    if layout.kind != "disjoint":
        raise ValueError(f"{flag} with --layout {layout.kind}: ranks that hold both modules have no time to spare; use "
                         "--layout disjoint, or leave it out")
    trains = [encoder.name for encoder in layout.encoders if encoder.name not in frozen]
    if trains:
        raise ValueError(f"{flag} with --freeze {config.model.freeze!r}: {', '.join(trains)} trains, and its features "
                         f"would be those of weights from before the step; add {','.join(trains)} to --freeze, or "
                         "leave it out")
    stages = max(encoder.pp for encoder in layout.encoders)
    if stages > 1:
        raise ValueError(f"{flag} with --encoder-pp {stages}: only an encoder of one stage is prefetched; use "
                         "--encoder-pp 1 (--encoder-tp may be above 1)")
    if steps_ahead(depth, num_microbatches) > MAX_STEPS_AHEAD:
        raise ValueError(f"{flag}: an iteration has {num_microbatches} microbatches (--global-batch-size "
                         f"{config.train.global_batch_size}), and data is read at most {MAX_STEPS_AHEAD} iterations "
                         f"ahead; at most {MAX_STEPS_AHEAD * num_microbatches}")


def steps_ahead(depth: int, num_microbatches: int) -> int:
    """Iterations after the present one whose data a queue of `depth` microbatches may need."""
    return -(-depth // num_microbatches)
