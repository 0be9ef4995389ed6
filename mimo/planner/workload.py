"""Sizes of the samples of a run, on which the time of its steps depends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from mimo.config.trainer import RunConfig
from mimo.config.validate import row_multiple
from mimo.grid.lanes import LaneOrder, data_request, in_order, lane_order
from mimo.grid.spec import GridSpec, Layout
from mimo.protocols import LANGUAGE, CheckedDataProvider, Lane, ModelProvider, RoutedDataProvider, Sample
from mimo.visual import count_tokens, num_pictures


@dataclass(frozen=True)
class SampleSize:
    """One sample, or one packed row.

    Attributes:
        text_tokens: tokens without padding, less those of `images`. So a model that joins the tokens of tiles has the
            difference here.
        images: tokens that the encoder makes from each image, from each tile of an image whose tiles it joins, and
            from each temporal patch of a video.
        is_packed: whether it is a packed row. A microbatch has only one of these.
        tiles: for a model that joins the tokens of tiles, how many of `images` are the tiles of each image. The trainer
            deals whole images to encoder replicas. Empty: each of `images` is dealt by itself.
    """

    text_tokens: int
    images: tuple[int, ...] = ()
    is_packed: bool = False
    tiles: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of text and images."""
        return self.text_tokens + sum(self.images)

    @property
    def whole_images(self) -> list[tuple[int, ...]]:
        """Images as the trainer deals them to encoder replicas, each as the tokens of its tiles."""
        left = iter(self.images)
        return [tuple(islice(left, count)) for count in self.tiles or (1,) * len(self.images)]


# Samples of an iteration, by microbatch, lane and row.
Microbatches = list[list[list[SampleSize]]]


def draw_samples(config: RunConfig, provider: ModelProvider, count: int) -> list[SampleSize]:
    """Return the sizes of the first samples of a run, in the order in which it sees them.

    Raises:
        ValueError: the data set cannot be read.
    """
    family = config.model_family
    encoders = () if config.layout.llm_only else provider.encoders(family)
    module = encoders[0] if encoders else ""
    samples, spec = _stream(config, provider, module), provider.token_spec(family)
    found = []
    for _ in range(count):
        sample = next(samples)
        counts = [count_tokens(provider, family, module, *size) for size in sample.image_sizes]
        tiles: tuple[int, ...] = ()
        if spec.tiles is not None:
            tiles = tuple(spec.tiles.count(*size[:2]) for size in sample.image_sizes)
            tokens = (spec.tiles.num_tokens,) * sum(tiles)
        else:
            pictures = [num_pictures(size, spec.temporal_patch_size) for size in sample.image_sizes]
            tokens = tuple(each // number for each, number in zip(counts, pictures, strict=True)
                           for _ in range(number))
        length = len(sample.tokens) - len(counts) + sum(counts)
        found.append(SampleSize(length - sum(tokens), tokens, bool(sample.lengths), tiles))
    return found


def _stream(config: RunConfig, provider: ModelProvider, module: str) -> Iterator[Sample]:
    dataset, tokens = config.find_dataset(config.data.dataset_provider), provider.token_spec(config.model_family)
    if not isinstance(dataset, RoutedDataProvider):
        if isinstance(dataset, CheckedDataProvider):
            dataset.validate(config.dataset, tokens)
        # A stream that is opened for the language model makes no pixels.
        yield from dataset.stream(config.dataset, tokens, Lane(LANGUAGE, 0, 1, config.train.seed))
        return
    one_lane = Layout("disjoint", 1, (GridSpec(module),) if module else (), GridSpec(LANGUAGE))
    request = data_request(one_lane, provider, config.model_family, micro_batch_size=config.train.micro_batch_size,
                           seq_length=config.train.seq_length, seed=config.train.seed, split="train")
    dataset.validate(config.dataset, request)
    reader = dataset.reader(config.dataset, request, [0])
    try:
        reader.start()
        while True:
            yield reader.read(0)
    finally:
        reader.close()


def order_of(config: RunConfig, layout: Layout) -> LaneOrder:
    """Return the order of the microbatches of each lane of a run."""
    return lane_order(config.data.microbatch_order, layout, config.find_dataset(config.data.dataset_provider),
                      rows_differ=row_multiple(config, layout) < config.train.seq_length)


def iterations(samples: Sequence[SampleSize], config: RunConfig, layout: Layout, *, num_lanes: int,
               num_microbatches: int) -> Iterator[Microbatches]:
    """Yield the samples of each whole iteration. Lane l of n lanes has the samples l, l + n, l + 2 n and so on.

    The run may have more lanes and microbatches than are given here.
    """
    micro_batch_size = config.train.micro_batch_size
    rows = micro_batch_size * num_microbatches
    order = order_of(config, layout)

    def cost(batch: list[SampleSize]) -> Any:
        pixels = sum(sum(sample.images) for sample in batch)
        return (max(sample.num_tokens for sample in batch), pixels) if order.by_length else pixels

    for start in range(0, len(samples) - rows * num_lanes + 1, rows * num_lanes):
        lanes = [[[samples[start + (microbatch * micro_batch_size + row) * num_lanes + lane]
                   for row in range(micro_batch_size)] for microbatch in range(num_microbatches)]
                 for lane in range(num_lanes)]
        lanes = [[lane[number] for number in in_order(order, list(map(cost, lane)))] for lane in lanes]
        yield [list(batch) for batch in zip(*lanes, strict=True)]


def longest_in_windows(lanes: Sequence[Sequence[int]], windows: Sequence[Sequence[int]]) -> list[int]:
    """Return the lengths of each microbatch's rows in the lane with the most tokens in the microbatch's window.

    Lanes that encode their images together wait for each other once a window. `lanes` has the length of the rows of
    each microbatch, lane by lane.
    """
    found = [0] * len(lanes[0])
    for window in windows:
        slowest = max(([lane[microbatch] for microbatch in window] for lane in lanes), key=sum)
        for microbatch, length in zip(window, slowest, strict=True):
            found[microbatch] = length
    return found
