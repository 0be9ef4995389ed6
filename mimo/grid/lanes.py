"""Assigns lanes to the ranks that read them, and samples of a lane to the ranks that need them, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

from mimo.config.trainer import RunConfig
from mimo.grid.spec import LaneShare, Layout, lane_shares
from mimo.protocols import (
    LANGUAGE,
    DataRequest,
    EightBitDataProvider,
    ImageDataProvider,
    ModelProvider,
    RoutedDataProvider,
    VideoDataProvider,
    VideoProvider,
)
from mimo.visual import count_tokens


@dataclass(frozen=True)
class Need:
    """One module's part of one lane on one rank.

    Attributes:
        module: name of the module.
        share: the lane, and the samples of each of its microbatches.
        pixels: whether the images are needed, too, as on the first pipeline stage of an encoder.
    """

    module: str
    share: LaneShare
    pixels: bool


def needs_of(layout: Layout, rank: int, micro_batch_size: int) -> tuple[Need, ...]:
    """Return everything that a rank needs, module by module, lanes in order.

    Language ranks need the text of their lane on every pipeline stage. Only the first stage uses the tokens and only
    the last one the labels, but text is small, and keys and counts are needed everywhere. With encoder windows, the
    reader of a lane has its pixels, and deals them to the replicas once all ranks know the sizes of all images.
    """
    needs = []
    for module in layout.modules_of(rank):
        grid = layout.grids[module]
        position = grid.coordinates(rank)
        if module == LANGUAGE:
            shares: tuple[LaneShare, ...] = (LaneShare(position["dp"], 0, micro_batch_size),)
        elif layout.encoder_window is not None:
            shares = tuple(LaneShare(lane, 0, micro_batch_size) for lane in lanes_read_by(layout, rank))
        else:
            assert max(grid.dp, layout.num_lanes) % min(grid.dp, layout.num_lanes) == 0, (grid.dp, layout.num_lanes)
            shares = lane_shares(grid.dp, layout.num_lanes, micro_batch_size, position["dp"])
        pixels = module != LANGUAGE and (position["pp"] == 0 or layout.encoder_window is not None)
        needs += [Need(module, share, pixels) for share in shares]
    return tuple(needs)


def reader_of(layout: Layout, lane: int) -> int:
    """Return the rank that reads a lane for all ranks.

    On disjoint grids, this is a rank of the first encoder: the one that encodes the lane's first samples. Pixels are
    thus decoded where they are used. In the other layouts, it is the lane's first language rank.
    """
    if layout.encoders and layout.kind == "disjoint":
        encoder = layout.encoders[0]
        return encoder.rank_at(dp=lane * encoder.dp // layout.num_lanes)
    return layout.language.rank_at(dp=lane)


def lanes_read_by(layout: Layout, rank: int) -> tuple[int, ...]:
    """Return the lanes of which `rank` is the reader, in order."""
    return tuple(lane for lane in range(layout.num_lanes) if reader_of(layout, lane) == rank)


def needs_from(layout: Layout, reader: int, rank: int, micro_batch_size: int) -> tuple[Need, ...]:
    """Select what `rank` needs of the lanes that `reader` reads, in the order of `needs_of`."""
    return tuple(need for need in needs_of(layout, rank, micro_batch_size)
                 if reader_of(layout, need.share.lane) == reader)


class LaneOrder(Enum):
    """Order of the microbatches of a lane within an iteration, see `lane_order`."""

    READ = "as the data set gives them"
    CHEAP_ENDS = "those with the fewest pixels first and last"
    SHORT_ENDS = "those with the shortest rows first and last"
    LONG_ENDS = "those with the longest rows first and last"

    @property
    def by_length(self) -> bool:
        """Whether the lengths of rows decide."""
        return self in (LaneOrder.SHORT_ENDS, LaneOrder.LONG_ENDS)


def lane_order(wanted: str, layout: Layout, data_provider: object, *, rows_differ: bool) -> LaneOrder:
    """Return how a run orders the microbatches of each lane. All ranks agree.

    The order matters where ranks wait for each other within an iteration:

    - On disjoint grids, and in pipelines that begin with an encoder, ranks wait for the first microbatch to be encoded,
      and nothing hides the encoder's backward pass of the last one. So these two should have few pixels.
    - Pipeline stages, and lanes that share experts, an encoder or encoder windows, wait for each other in every
      microbatch or window. If neighbours, and the microbatches of all lanes, are about equally long, they wait less.
      The ends of a pipeline cannot be hidden, so the shortest microbatches belong there.
    - With encoder windows, all ranks encode while the pipeline fills and drains, which hides the ends. So the longest
      microbatches, which tend to have the most images, belong there.

    A rank that reads only its share of a lane does not know the other rows. This is so with an indexed data set where
    several replicas of an encoder share a lane, whose order then stays as it is.

    Args:
        wanted: `DataConfig.microbatch_order`.
        layout: the run's layout.
        data_provider: the run's data set.
        rows_differ: whether the rows of a microbatch are as long as its samples. If not, all have --seq-length tokens.
    """
    windows, language = layout.encoder_window is not None, layout.language
    whole = windows or all(encoder.dp <= layout.num_lanes for encoder in layout.encoders)
    if wanted == "read" or not (whole or isinstance(data_provider, RoutedDataProvider)):
        return LaneOrder.READ
    is_disjoint = layout.kind == "disjoint" and bool(layout.encoders)
    if wanted == "lengths" and rows_differ and not is_disjoint:
        if language.pp > 1:
            return LaneOrder.LONG_ENDS if windows and not layout.encoder_spans_stages else LaneOrder.SHORT_ENDS
        shares_encoder = layout.kind == "colocated" and (
            windows or any(encoder.dp < layout.num_lanes for encoder in layout.encoders))
        if layout.num_lanes > 1 and (language.shares_experts or shares_encoder):
            return LaneOrder.SHORT_ENDS
    begins_with_encoder = is_disjoint or (layout.kind == "homogeneous" and language.pp > 1)
    return LaneOrder.CHEAP_ENDS if begins_with_encoder else LaneOrder.READ


def in_order(order: LaneOrder, costs: Sequence[Any]) -> list[int]:
    """Return the numbers of a lane's microbatches in the order in which they run.

    Args:
        order: from `lane_order`.
        costs: for an order by length, the tokens of the longest row of each microbatch and its pixels; otherwise its
            pixels.
    """
    numbers = list(range(len(costs)))
    if order is LaneOrder.READ:
        return numbers
    if order is LaneOrder.CHEAP_ENDS:
        return cheap_ends(costs)
    numbers.sort(key=costs.__getitem__, reverse=order is LaneOrder.LONG_ENDS)
    # From both ends towards the middle: the first of them comes last, because backward passes take longer.
    return [*numbers[1::2], *numbers[::2][::-1]]


def cheap_ends(costs: Sequence[float]) -> list[int]:
    """Return the order of a lane's microbatches in which the cheapest is last and the next cheapest first.

    A backward pass takes about twice as long as a forward pass, so together these two leave the language model the
    least to wait for. All others keep their order, and equal costs change nothing.
    """
    last = min(reversed(range(len(costs))), key=costs.__getitem__)
    others = [number for number in range(len(costs)) if number != last]
    if others:
        others.insert(0, others.pop(others.index(min(others, key=costs.__getitem__))))
    return [*others, last]


def sequence_multiple(layout: Layout) -> int:
    """Return the number of tokens of which each sample of a packed row needs a multiple, padding included.

    Context-parallel ranks each take two chunks of every sample.
    """
    return 2 * layout.language.cp if layout.language.cp > 1 else 1


def row_length(longest: int, multiple: int, most: int) -> int:
    """Return the length of the rows of a microbatch, whose longest sample has `longest` tokens; at least a multiple."""
    return min(-(-max(longest, 1) // multiple) * multiple, most)


def data_request(layout: Layout, model_provider: ModelProvider, model_config: Any, *, micro_batch_size: int,
                 seq_length: int, seed: int, split: str) -> DataRequest:
    """Return the request of a run to a data set that is read once for all ranks."""
    module = layout.encoders[0].name if layout.encoders else ""
    return DataRequest(
        tokens=model_provider.token_spec(model_config),
        num_image_tokens=partial(count_tokens, model_provider, model_config, module),
        num_lanes=layout.num_lanes, micro_batch_size=micro_batch_size, seq_length=seq_length, seed=seed, split=split,
        sequence_multiple=sequence_multiple(layout))


def describe_images(config: RunConfig, model_provider: ModelProvider) -> str | None:
    """Return a line on how image files become pixels in a run; None if it reads no such files."""
    dataset = config.find_dataset(config.data.dataset_provider)
    tokens = model_provider.token_spec(config.model_family)
    if not isinstance(dataset, ImageDataProvider) or not isinstance(dataset, RoutedDataProvider) or (
            tokens.image_token_id < 0):
        return None
    chosen = dataset.image_processing(config.dataset, tokens)
    details = [f"--image-tiling {chosen.tiling}", f"--image-resample {chosen.resample}"]
    if tokens.image_size:
        details.insert(1, f"(the encoder takes {tokens.image_shape[0]} x {tokens.image_shape[1]} pixels)")
    for name in ("max_tiles", "min_patches", "max_patches", "min_side"):
        if value := vars(chosen)[name]:
            details.append(f"--{name.replace('_', '-')} {value}")
    if chosen.use_thumbnail:
        details.append("--use-thumbnail")
    # One value stands for all channels.
    mean, std = (" ".join(map(str, values[:1] if len(set(values)) == 1 else values))
                 for values in (chosen.mean, chosen.std))
    return f"images: {' '.join(details)} --image-mean {mean} --image-std {std}"


def check_engine_tiles(config: RunConfig, model_provider: ModelProvider) -> None:
    """Raise ValueError if vLLM, which cuts images into tiles itself, would resize them in another way than the run."""
    dataset, tokens = config.find_dataset(config.data.dataset_provider), model_provider.token_spec(config.model_family)
    if tokens.tiles is not None and isinstance(dataset, ImageDataProvider):
        resample = dataset.image_processing(config.dataset, tokens).resample
        if resample != "bicubic":
            raise ValueError(f"--image-resample {resample}: vLLM resizes the tiles of an image with --image-resample "
                             "bicubic")


def has_eight_bit_pixels(config: RunConfig, model_provider: ModelProvider) -> bool:
    """Whether the samples of a run have 8-bit pixels, which the encoder's ranks normalise."""
    dataset, tokens = config.find_dataset(config.data.dataset_provider), model_provider.token_spec(config.model_family)
    return isinstance(dataset, EightBitDataProvider) and dataset.normalisation(config.dataset, tokens) is not None


def describe_videos(config: RunConfig, model_provider: ModelProvider) -> str | None:
    """Return a line on how video files become pixels in a run; None if it reads none."""
    dataset = config.find_dataset(config.data.dataset_provider)
    if not isinstance(dataset, VideoDataProvider) or not isinstance(model_provider, VideoProvider):
        return None
    chosen = dataset.video_processing(config.dataset, model_provider.token_spec(config.model_family))
    if chosen is None:
        return None
    names = ["min_pixels", "max_pixels", *(["max_tokens"] if chosen.max_tokens else [])]
    names = ["num_frames", *names] if chosen.num_frames else ["fps", "min_frames", "max_frames", *names]
    details = [f"--video-{name.replace('_', '-')} {vars(chosen)[name]}" for name in names]
    return f"videos: --video-processing {chosen.rule} {' '.join(details)}"
