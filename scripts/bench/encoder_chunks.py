"""Time the passes of an encoder alone, for several numbers of images at a time.

    python scripts/bench/encoder_chunks.py --device cuda --preset 10b-even
    python scripts/bench/encoder_chunks.py --device cpu --preset smallest --chunks 2 4 --images 8

One process builds the encoder with its projector, and takes microbatches until they have at least --images images. It
runs them forward and backward microbatch by microbatch, and then in each of the sizes of --chunks, as a run with
--encoder-window 0 and --encoder-chunk does. All of these take turns, --rounds times after a round that does not count.
The benchmark passes flags that it does not know to the trainer's configuration. They follow the flags of --preset and
so override them.

`ms an image` is the median over rounds. `over microbatches` is this time divided by the time microbatch by microbatch
in the same round: the median over rounds, with the smallest and the largest ratio. The row of a size that runs out of
memory says so. The last line of output is JSON; above it, a Markdown table shows the same.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mimo import registry
from mimo.config.cli import parse
from mimo.config.trainer import LayoutConfig, RunConfig
from mimo.config.validate import validate
from scripts.bench import presets
from scripts.bench.harness import argument_parser, check_least, device_name, table_of

if TYPE_CHECKING:
    from mimo.platform.base import Platform

BY_MICROBATCH = 0
COLUMNS = {"images at a time": "name", "passes": "passes", "ms an image": "ms", "over microbatches": "ratio",
           "smallest": "ratio_min", "largest": "ratio_max"}

# Time of a pass over each part of the images, by part; None: it ran out of memory.
Times = dict[int, list[float] | None]


def parse_arguments(arguments: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Return the benchmark's own flags, and those of the trainer."""
    parser = argument_parser(__doc__)
    parser.add_argument("--preset", choices=presets.PRESETS,
                        help="model and data (default: h200 on cuda, tiny on cpu)")
    parser.add_argument("--chunks", type=int, nargs="+", default=[4, 8, 16], help="images at a time (4 8 16)")
    parser.add_argument("--images", type=int, default=60, help="images that a round runs, at least (60)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count (5)")
    chosen, further = parser.parse_known_args(arguments)
    check_least(parser, chosen, images=1, rounds=1)
    if min(chosen.chunks) < 1:
        parser.error(f"--chunks {min(chosen.chunks)} is below 1")
    chosen.preset = chosen.preset or presets.DEFAULT[chosen.device]
    return chosen, further


def parts_of(counts: Sequence[int], chunk: int) -> list[slice]:
    """Split images into passes.

    Args:
        counts: images of each microbatch.
        chunk: images of a pass; BY_MICROBATCH: those of a microbatch.
    """
    total, start, found = sum(counts), 0, []
    if chunk != BY_MICROBATCH:
        return [slice(first, min(first + chunk, total)) for first in range(0, total, chunk)]
    for count in counts:
        if count:
            found.append(slice(start, start + count))
        start += count
    return found


def build_encoder(config: RunConfig, grids: Any, platform: Platform) -> Any:
    """Build the run's encoder with its projector, as the trainer does, without a language model."""
    from mimo.model.build import build_context, cast_parameters, layer_impl, params_dtype

    provider = registry.model_provider(config.model.model_provider)
    (name,) = provider.encoders(config.model_family)
    platform.seed(config.train.seed, tp_rank=0, ep_rank=0, expt_tp_rank=0)
    context = build_context(config, grids, name, layer_impl(config, platform))
    spec = provider.encoder_spec(config.model_family, name, context)
    encoder = spec.module.from_spec(spec, is_first_stage=True, is_last_stage=True).to(platform.device)
    cast_parameters(encoder, params_dtype(config))
    return encoder.train()


def read_images(config: RunConfig, grids: Any, platform: Platform, least: int) -> tuple[list[int], list[Any]]:
    """Return the number of images of each microbatch, and all images on the device: size and pixels."""
    from mimo.config.validate import num_microbatches
    from mimo.data.encoder_inputs import split_images
    from mimo.data.loader import open_loader
    from mimo.model.build import params_dtype

    counts: list[int] = []
    images: list[Any] = []
    loader = open_loader(
        grids.layout, 0, model_provider=registry.model_provider(config.model.model_provider),
        model_config=config.model_family, data_provider=config.find_dataset(config.data.dataset_provider),
        data_config=config.dataset, micro_batch_size=config.train.micro_batch_size,
        num_microbatches=num_microbatches(config), seq_length=config.train.seq_length, seed=config.train.seed,
        microbatch_order=config.data.microbatch_order, prefetch=False)
    (name,) = (encoder.name for encoder in grids.layout.encoders)
    while len(images) < least:
        for batch in loader.next_step():
            found = split_images(batch.encoders[name].normalised_inputs())
            counts.append(len(found))
            images += [(size, pixels.to(platform.device, params_dtype(config))) for size, pixels in found]
    loader.close()
    return counts, images


def run_parts(encoder: Any, images: Sequence[Any], parts: Sequence[slice], platform: Platform) -> float:
    """Encode all images part by part, each with its backward pass. Returns seconds an image."""
    from mimo.data.encoder_inputs import join_images

    platform.synchronize()
    started = time.perf_counter()
    for part in parts:
        inputs = join_images([pixels for _, pixels in images[part]], [size for size, _ in images[part]])
        output = encoder(encoder_inputs=inputs, hidden_states=None)
        output.backward(output.detach())
    platform.synchronize()
    elapsed = time.perf_counter() - started
    encoder.zero_grad(set_to_none=True)
    return elapsed / len(images)


def measure(chosen: argparse.Namespace, config: RunConfig, grids: Any, platform: Platform) -> dict[str, Any]:
    """Run all rounds and return the figures."""
    from scripts.bench.rl_sweep_rank import is_out_of_memory

    encoder = build_encoder(config, grids, platform)
    counts, images = read_images(config, grids, platform, chosen.images)
    parts = {chunk: parts_of(counts, chunk) for chunk in (BY_MICROBATCH, *chosen.chunks)}
    times: Times = {chunk: [] for chunk in parts}
    for number in range(1 + chosen.rounds):
        for chunk in parts:
            measured = times[chunk]
            if measured is None:
                continue
            try:
                each = run_parts(encoder, images, parts[chunk], platform)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                times[chunk] = None
                encoder.zero_grad(set_to_none=True)
                continue
            if number:
                measured.append(each)
    return {"images": len(images), "microbatches": len(counts), "images_a_microbatch": counts,
            "rows": [row(chunk, len(parts[chunk]), times) for chunk in parts]}


def row(chunk: int, passes: int, times: Times) -> dict[str, Any]:
    """Return the figures of one way to split the images."""
    own, others = times[chunk], times[BY_MICROBATCH]
    ratios = [one / other for one, other in zip(own or [], others or [], strict=False)]
    return {"chunk": chunk, "name": str(chunk) if chunk else "those of a microbatch", "passes": passes,
            "error": "out of memory" if own is None else "",
            "ms": 1000 * statistics.median(own) if own else None, "ms_all": [1000 * each for each in own or []],
            "ratio": statistics.median(ratios) if ratios else None, "ratio_min": min(ratios, default=None),
            "ratio_max": max(ratios, default=None)}


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and return the exit code."""
    chosen, further = parse_arguments(arguments)
    try:
        config = parse([*presets.flags(chosen.device, chosen.preset), *further, "--train-iters", "1"])
        config = replace(config, layout=LayoutConfig(layout="colocated"))
        layout = validate(config, 1)
        if len(layout.encoders) != 1 or config.model.frozen:
            raise ValueError("the benchmark needs a model with one encoder, all of which trains")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    # Imported late: torch and Megatron take seconds.
    from mimo.training.run import launch

    figures: dict[str, Any] = {}

    def body(config: RunConfig, grids: Any, platform: Platform) -> None:
        figures.update(measure(chosen, config, grids, platform))

    with tempfile.TemporaryDirectory(prefix="encoder-chunks-") as folder:
        launch(replace(config, observe=replace(config.observe, run_dir=folder)), layout, body)
    print(table_of(COLUMNS, figures["rows"], error_cell=2), flush=True)
    print(json.dumps({"device": chosen.device, "device_name": device_name(chosen.device), "preset": chosen.preset,
                      "micro_batch_size": config.train.micro_batch_size, "rounds": chosen.rounds, **figures}),
          flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
