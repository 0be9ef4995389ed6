"""How many rows of encoder output move where, for every microbatch of a step, from the data both sides already hold.

The wheel sends shapes over the device before each payload, which makes the host wait for the GPU at every transfer.
Both sides of a lane know the token counts of their samples, so nothing has to be sent: they are only compared, once
a step, over the host (`mimo.bridge.handshake`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from mimo.batch import EncoderBatch, Microbatch, TextBatch
from mimo.grid.spec import GridSpec, Layout, lane_shares, lane_sources
from mimo.protocols import LANGUAGE

# rows[microbatch][peer]: rows of encoder output, in the order in which peers are concatenated.
Rows = list[list[int]]


def rows_to_lanes(batch: EncoderBatch) -> list[int]:
    """Rows of one microbatch's encoder output that belong to each lane, in lane order."""
    ends = list(accumulate(batch.lane_sizes, initial=0))
    return [sum(batch.token_counts[start:stop]) for start, stop in zip(ends, ends[1:], strict=False)]


def rows_from_sources(text: TextBatch, module: str, encoder: GridSpec, layout: Layout, lane: int) -> list[int]:
    """Rows of one lane's microbatch that each encoder data-parallel rank feeds, in sample order."""
    counts = text.token_counts[module]
    sources = lane_sources(encoder.dp, layout.num_lanes, len(text.keys), lane)
    return [sum(counts[share.start : share.stop]) for _, share in sources]


def lanes_of(encoder: GridSpec, layout: Layout, rank: int, micro_batch_size: int) -> list[int]:
    """Lanes that the encoder replica of `rank` serves, in order."""
    dp = encoder.coordinates(rank)["dp"]
    return [share.lane for share in lane_shares(encoder.dp, layout.num_lanes, micro_batch_size, dp)]


def sources_of(encoder: GridSpec, layout: Layout, rank: int, micro_batch_size: int) -> list[int]:
    """Encoder data-parallel ranks that feed the lane of language rank `rank`, in sample order."""
    lane = layout.grids[LANGUAGE].coordinates(rank)["dp"]
    return [dp for dp, _ in lane_sources(encoder.dp, layout.num_lanes, micro_batch_size, lane)]


def source_rows(module: str, microbatches: Sequence[Microbatch]) -> Rows:
    """`rows_to_lanes` of every microbatch of a step."""
    return [rows_to_lanes(batch.encoders[module]) for batch in microbatches]


def destination_rows(module: str, layout: Layout, rank: int, microbatches: Sequence[Microbatch]) -> Rows:
    """`rows_from_sources` of every microbatch of a step, for the lane of language rank `rank`."""
    lane = layout.grids[LANGUAGE].coordinates(rank)["dp"]
    rows = []
    for batch in microbatches:
        assert batch.text is not None, "language ranks hold text"
        rows.append(rows_from_sources(batch.text, module, layout.grids[module], layout, lane))
    return rows
