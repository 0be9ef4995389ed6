"""Makes the plan that `--dry-run` prints: work and parameters of each rank, and bytes over the bridge."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from mimo.config.trainer import RunConfig
from mimo.config.validate import PROJECTOR, num_microbatches
from mimo.grid.lanes import describe_images, describe_videos, has_eight_bit_pixels
from mimo.grid.spec import GridSpec, Layout, lane_shares
from mimo.protocols import LANGUAGE, DeepStackProvider, ModelProvider, ParameterShape
from mimo.text import counted, format_bytes, span, table

AXES = ("tp", "cp", "dp", "pp", "ep", "expt_tp", "expt_dp")
MAX_RANKS_LISTED = 16
MAX_LINES = 10
# First parts of the names of a projector's parameters, which belong to the encoder's module.
PROJECTOR_NAMES = ("projector", "merger", "mergers", "level_merger")
# Pixels a side of the example image for an encoder that takes any size, rounded down to a size that it takes.
ANY_IMAGE_SIZE = 512


def total_parameters(shapes: Iterable[ParameterShape]) -> int:
    return sum(math.prod(shape.shape) * shape.count for shape in shapes)


def parameters_per_rank(shapes: Iterable[ParameterShape], grid: GridSpec, stage: int) -> int:
    """Count the parameters that one rank of a pipeline stage holds (the fullest one if a split is uneven)."""
    if not 0 <= stage < grid.pp:
        raise ValueError(f"stage {stage} is not in 0-{grid.pp - 1} of grid {grid.name!r}")
    # Consecutive runs of layers whose lengths differ by at most one, unless the layout says otherwise.
    starts = [0, *itertools.accumulate(grid.stage_layers or (1,) * grid.pp)]
    ways = {"none": 1, "tp": grid.tp, "expert": grid.ep * grid.expt_tp}
    total = 0
    for shape in shapes:
        if shape.stage == "layer":
            count = starts[stage + 1] * shape.count // starts[-1] - starts[stage] * shape.count // starts[-1]
        else:
            places = {"first": (0,), "last": (grid.pp - 1,), "ends": (0, grid.pp - 1)}[shape.stage]
            count = shape.count if stage in places else 0
        total += -(-math.prod(shape.shape) * count // ways[shape.split])
    return total


def trained_shapes(config: RunConfig, module: str, shapes: Iterable[ParameterShape]) -> list[ParameterShape]:
    """Return the parameters of a module that train. Encoder and projector are in one module and frozen separately."""
    def part(shape: ParameterShape) -> str:
        return PROJECTOR if module != LANGUAGE and shape.name.split(".")[0] in PROJECTOR_NAMES else module

    return [shape for shape in shapes if part(shape) not in config.model.frozen]


def num_levels(provider: ModelProvider, config: Any, module: str) -> int:
    """Count the levels that an encoder sends besides its output."""
    return provider.num_levels(config, module) if isinstance(provider, DeepStackProvider) else 0


def bridge_width(provider: ModelProvider, config: Any, module: str) -> int:
    """Return the columns of an encoder's output and its levels, as they cross the bridge."""
    return provider.hidden_size(config) * (1 + num_levels(provider, config, module))


def bridge_bytes(*, image_tokens: int, hidden_size: int, dtype_bytes: int) -> int:
    """Count the bytes of activations that cross the bridge for one microbatch; as many bytes of gradients go back.

    Args:
        image_tokens: encoder output tokens of the microbatch, summed over its samples.
        hidden_size: columns of a token; see `bridge_width`.
        dtype_bytes: bytes of an element (2 for bfloat16, 4 for float32).

    The copies inside the receiving replica (to its other tensor-parallel ranks) are not counted.
    """
    return image_tokens * hidden_size * dtype_bytes


def dry_run_report(config: RunConfig, layout: Layout, provider: ModelProvider) -> str:
    """Return the plan of a run as text, a few dozen lines for any world size."""
    parts = [*grid_parts(config, layout, provider), _batch_lines(config, layout, provider)]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def grid_parts(config: RunConfig, layout: Layout, provider: ModelProvider) -> list[list[str]]:
    """Return paragraphs of lines about the layout, the grids, their lanes and ranks, and the parameters."""
    return [
        [f"layout {layout.kind}, {counted(layout.world_size, 'rank')}, {counted(layout.num_lanes, 'lane')}"],
        table([["grid", "ranks", *AXES], *([name, span(grid.ranks), *(str(getattr(grid, axis)) for axis in AXES)]
                                           for name, grid in layout.grids.items())]),
        _lane_lines(config, layout),
        _rank_map(layout),
        _parameter_table(config, layout, provider),
    ]


def _lane_lines(config: RunConfig, layout: Layout) -> list[str]:
    """Describe which encoder data-parallel rank serves which lane."""
    if not layout.encoders:
        return [f"lanes: language dp rank l reads lane l of {layout.num_lanes}"]
    if layout.encoder_window is not None:
        images = (f"every {layout.encoder_window} microbatches" if layout.encoder_window else "a whole iteration")
        how = "by cost" if config.layout.encoder_balance else "in order"
        return [f"images of {images}, of all lanes, are dealt {how} to the {counted(encoder.dp, 'replica')} of "
                f"{encoder.name}" for encoder in layout.encoders]
    size, lines = config.train.micro_batch_size, []
    for encoder in layout.encoders:
        lines.append(f"lanes of {encoder.name} (lane l is language dp rank l)")
        served = []
        for dp in range(encoder.dp):
            shares = lane_shares(encoder.dp, layout.num_lanes, size, dp)
            lanes = span(range(shares[0].lane, shares[-1].lane + 1))
            samples = span(range(shares[0].start, shares[0].stop))
            part = f", samples {samples}" if encoder.dp > layout.num_lanes else ""
            served.append(f"  {encoder.name} dp {dp} -> lane{'s' if len(shares) > 1 else ''} {lanes}{part}")
        lines += _shortened(served)
    return lines


def _rank_map(layout: Layout) -> list[str]:
    """List every rank of a small world, or the ranges of ranks of each replica and stage of a big one."""
    if layout.world_size <= MAX_RANKS_LISTED:
        lines = ["rank map"]
        for rank in range(layout.world_size):
            places = []
            for name in layout.modules_of(rank):
                grid, position = layout.grids[name], layout.grids[name].coordinates(rank)
                places.append(f"{grid.name} " + " ".join(f"{axis} {position[axis]}" for axis in position
                                                         if axis != "cp" or grid.cp > 1))
            lines.append(f"  rank {rank:>2}  " + "; ".join(places))
        return lines
    lines = ["rank map (tp varies fastest, then cp, dp, pp)"]
    for name, grid in layout.grids.items():
        blocks = []
        for stage in range(grid.pp):
            for dp in range(grid.dp):
                first = grid.rank_at(dp=dp, pp=stage)
                ranks = span(range(first, first + grid.tp * grid.cp))
                blocks.append(f"  {name} dp {dp}" + (f" pp {stage}" if grid.pp > 1 else "") + f"  ranks {ranks}")
        lines += _shortened(blocks)
    return lines


def _parameter_table(config: RunConfig, layout: Layout, provider: ModelProvider) -> list[str]:
    rows = [["parameters", "total", "on a rank (largest stage)"]]
    for name, grid in layout.grids.items():
        shapes = provider.parameter_shapes(config.model_family, name)
        largest = max(parameters_per_rank(shapes, grid, stage) for stage in range(grid.pp))
        frozen = " (frozen)" if name in config.model.frozen else ""
        rows.append([name + frozen, f"{total_parameters(shapes):,}", f"{largest:,}"])
    return table(rows) + _optimizer_lines(config, layout, provider)


def optimizer_shards(config: RunConfig, shapes: Sequence[ParameterShape], grid: GridSpec, stage: int) -> float:
    """Return the number of parameters for which a rank of a stage keeps optimizer state."""
    experts = [shape for shape in shapes if shape.split == "expert"]
    others = [shape for shape in shapes if shape.split != "expert"]
    if not config.optim.use_distributed_optimizer:
        return parameters_per_rank(shapes, grid, stage)
    return (parameters_per_rank(others, grid, stage) / (grid.dp * grid.cp)
            + parameters_per_rank(experts, grid, stage) / grid.expt_dp)


def _optimizer_lines(config: RunConfig, layout: Layout, provider: ModelProvider) -> list[str]:
    """Say what the precision-aware optimizer saves on the rank that keeps most of each trained module's state."""
    optim, lines = config.optim, list[str]()
    if not optim.use_precision_aware_optimizer:
        return lines
    usual, own = replace(optim, use_precision_aware_optimizer=False), optim.bytes_per_parameter(config.model.bf16)
    before = usual.bytes_per_parameter(config.model.bf16)
    for name, grid in layout.grids.items():
        shapes = trained_shapes(config, name, provider.parameter_shapes(config.model_family, name))
        if shapes:
            most = max(optimizer_shards(config, shapes, grid, stage) for stage in range(grid.pp))
            lines.append(f"optimizer state of {name}: {own} bytes a parameter instead of {before}, "
                         f"{format_bytes(round(own * most))} on a rank (largest stage), which saves "
                         f"{format_bytes(round((before - own) * most))}")
    return lines


def _batch_lines(config: RunConfig, layout: Layout, provider: ModelProvider) -> list[str]:
    train = config.train
    lines = [f"batch: {counted(num_microbatches(config), 'microbatch', 'es')} per iteration "
             f"(--global-batch-size {train.global_batch_size} = {num_microbatches(config)} * --micro-batch-size "
             f"{train.micro_batch_size} * {counted(layout.num_lanes, 'lane')})"]
    hidden = provider.hidden_size(config.model_family)
    dtype, dtype_bytes = ("bf16", 2) if config.model.bf16 else ("fp32", 4)
    cp = layout.language.cp
    if cp > 1:
        lines.append(f"context parallelism: each of {cp} ranks computes {train.seq_length // cp} of the "
                     f"{train.seq_length} tokens of a whole row, chunks r and {2 * cp - 1} - r of {2 * cp} on rank r")
    lines += logits_lines(config, layout, provider)
    if not layout.encoders:
        return lines
    lines += filter(None, (describe(config, provider) for describe in (describe_images, describe_videos)))
    spec = provider.token_spec(config.model_family)
    side = max(ANY_IMAGE_SIZE // spec.size_multiple, 1) * spec.size_multiple
    height, width = spec.image_shape if spec.image_size and spec.tiles is None else (side, side)
    family = config.model_family
    each, stored = ((1, "8 bits, which the encoder's ranks normalise") if has_eight_bit_pixels(config, provider)
                    else (4, "float32"))
    tiles = "" if spec.tiles is None else f" in {counted(spec.tiles.count(height, width), 'tile')}"
    lines.append(f"pixels: {format_bytes(each * math.prod(spec.pixel_shape((height, width))))} for an image of "
                 f"{height}x{width}{tiles} from the data set to its encoder, in {stored}")
    # The encoder of a homogeneous layout is on the ranks that take its output.
    for encoder in layout.encoders if layout.kind != "homogeneous" else ():
        tokens = provider.num_image_tokens(family, encoder.name, height, width)
        levels = num_levels(provider, family, encoder.name)
        lane = bridge_bytes(image_tokens=tokens * train.micro_batch_size,
                            hidden_size=bridge_width(provider, family, encoder.name), dtype_bytes=dtype_bytes)
        whose = "bridge" if len(layout.encoders) == 1 else f"bridge of {encoder.name}"
        lines.append(f"{whose}: {format_bytes(lane)} per lane and microbatch, "
                     f"{format_bytes(lane * layout.num_lanes)} over all lanes, forward and again backward")
        columns = f"hidden size {hidden}" + (f" and {counted(levels, 'DeepStack level')}" if levels else "")
        lines.append(f"  (one {height}x{width} image per sample = {tokens} tokens, {columns}, {dtype})")
        if spec.video_token_id >= 0:
            lines.append(f"  (a video of this size: as much for every {spec.temporal_patch_size} frames)")
        if cp > 1:
            lines.append(f"  the {cp} context-parallel ranks of a lane each get the rows of their own tokens, "
                         f"{format_bytes(lane // cp)} on average, and send back their gradients")
        features = tokens if spec.tiles is None else spec.tiles.count(height, width) * spec.tiles.num_tokens
        lines += _prefetch_lines(config, layout, provider, encoder, features * dtype_bytes)
    ahead = config.layout.encoder_run_ahead
    if ahead:
        stages = max(encoder.pp for encoder in layout.encoders) + layout.language.pp
        kept, usual = (min(stages + more, num_microbatches(config)) for more in (ahead, 0))
        lines.append(f"encoder run-ahead: activations of up to {counted(kept, 'microbatch', 'es')} on each rank of an "
                     f"encoder's first stage ({usual} without)")
    return lines


def logits_lines(config: RunConfig, layout: Layout, provider: ModelProvider) -> list[str]:
    """Say what --logits-chunk-size saves on a rank of the last language stage."""
    chunk, tokens = config.model.logits_chunk_size, config.text_tokens[0] // layout.language.cp
    if chunk is None:
        return []
    shapes, chunk = provider.parameter_shapes(config.model_family, LANGUAGE), min(chunk, tokens)
    output = max((shape.shape for shape in shapes if shape.stage != "layer"), key=lambda shape: shape[0])
    # Logits and their gradients: padding rows of the vocabulary are masked in a tensor of their own.
    each = (4 if config.model.bf16 else 8) * output[0] // layout.language.tp
    # The float32 sum of the weight's gradient, a chunk's part of it, and the sum in the weight's precision.
    gradient = 8 * output[0] * output[1] // layout.language.tp
    return [f"logits: of {chunk} tokens at a time (--logits-chunk-size), about {format_bytes(chunk * each)} on a rank "
            f"instead of {format_bytes(tokens * each)}; the backward pass needs up to {format_bytes(gradient)} for the "
            "gradient of the output layer"]


def _prefetch_lines(config: RunConfig, layout: Layout, provider: ModelProvider, encoder: GridSpec,
                    column_bytes: int) -> list[str]:
    """Return a line on the bytes of a queue of features, for a family that lists a projector.

    `column_bytes` is the size of one column of an image's features.
    """
    depth, size = config.train.encoder_prefetch_depth, config.train.micro_batch_size
    widths = [shape.shape[1] for shape in provider.parameter_shapes(config.model_family, encoder.name)
              if shape.name in ("projector.linear_fc1.weight", "merger.linear_fc1.weight", "mergers.linear_fc1.weight")]
    if not depth or not widths:
        return []
    columns = widths[0] * (1 + num_levels(provider, config.model_family, encoder.name))
    samples = max(sum(share.stop - share.start for share in lane_shares(encoder.dp, layout.num_lanes, size, dp))
                  for dp in range(encoder.dp))
    return [f"encoder prefetch: up to {counted(depth, 'microbatch', 'es')} of features on each rank of {encoder.name}, "
            f"{format_bytes(depth * samples * column_bytes * columns)} ({columns} columns)"]


def _shortened(lines: list[str]) -> list[str]:
    """Return the first lines and the last line of a long list."""
    if len(lines) <= MAX_LINES:
        return lines
    return [*lines[: MAX_LINES - 2], f"  ... {len(lines) - MAX_LINES + 1} more ...", lines[-1]]
