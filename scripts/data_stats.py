r"""Show what a model would get of a data set: figures, charts and samples on one page, read as in training.

    python scripts/data_stats.py DATASET --tokenizer FOLDER --model-provider llava --hf-config FOLDER
    python scripts/data_stats.py --config run.toml --out page.html
    python scripts/data_stats.py train.json --dataset-provider conversations --image-folder images --tokenizer FOLDER
    python scripts/data_stats.py blend.yaml --config run.toml --seq-length 8192 --packing-buffer-size 256

The flags are those of train_hetero.py, and so are their defaults: the model decides how images become pixels and
tokens. Samples go through the task encoder of training, in this process. The model is not loaded.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tyro
from tqdm import tqdm

from data.energon.provider import check_path
from mimo import registry
from mimo.config import toml_file
from mimo.config.cli import parse_as
from mimo.config.trainer import DataConfig, RunConfig
from mimo.grid.lanes import data_request, describe_images
from mimo.grid.layout import build_layout, required_world_size
from mimo.protocols import ComparableProvider, DataRequest

if TYPE_CHECKING:
    from data.stats.page import Report

# Sections of flags that decide how data and model are measured. Others have no effect here.
SECTIONS = ("dataset", "model_family")


@dataclass(frozen=True)
class StatsConfig:
    """Paths that are read and written."""

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DATASET")] = ""
    """Folder prepared with `energon prepare`, or a metadataset YAML that blends several; with --dataset-provider
    conversations, a file or folder of records. Left out: --data-path."""
    samples: int = 1000
    """Samples to read, bad ones included; at most one pass over the data set."""
    out: Path = Path("data_stats.html")
    """HTML file to write; it needs no other file and no network."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print the key figures as JSON."""


@dataclass(frozen=True)
class ShardsConfig(DataConfig):
    """Data: which data set."""

    dataset_provider: str = "energon"
    """energon or conversations."""


@dataclass(frozen=True)
class StatsRunConfig(RunConfig):
    """The flags of a training run, and what is read and written."""

    data: DataConfig = field(default_factory=ShardsConfig)
    stats: StatsConfig = field(default_factory=StatsConfig)


def parse_flags(arguments: list[str] | None) -> StatsRunConfig:
    """Read the command line. Raises ValueError, with flags and values, if they cannot work."""
    run = parse_as(StatsRunConfig, arguments, (__doc__ or "").partition("\n\n")[0])
    stats, name = run.stats, run.data.dataset_provider
    if name not in ("energon", "conversations"):
        raise ValueError(f"--dataset-provider {name}: this program looks at the data sets of energon and conversations")
    if stats.samples < 1:
        raise ValueError(f"--samples {stats.samples}: must be at least 1")
    if stats.out.is_dir():
        raise ValueError(f"--out {stats.out}: is a folder; name a file")
    try:
        stats.out.absolute().parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {stats.out}: its folder cannot be made: {error.strerror}") from error
    return replace(run, dataset=replace(run.dataset, data_path=stats.source or run.dataset.data_path))


def with_tokenizer(run: StatsRunConfig) -> StatsRunConfig:
    """Give the model the tokenizer's image token and vocabulary, unless flags or files set them."""
    from data.stats.collect import tokenizer_image_token

    family = run.model_family
    fields = {field.name: field.default for field in dataclasses.fields(family)}
    if vars(family).get("hf_config"):
        return run
    token, last = tokenizer_image_token(run.dataset.tokenizer)
    changes = {}
    if "image_token_id" in fields and family.image_token_id == fields["image_token_id"]:
        changes["image_token_id"] = token if token >= 0 else last + 1
    if family.vocab_size == fields["vocab_size"]:
        changes["vocab_size"] = max(family.vocab_size, last + 1, changes.get("image_token_id", 0) + 1)
    return replace(run, model_family=replace(family, **changes))


def request_of(run: StatsRunConfig) -> DataRequest:
    """Return the run's request to the data set, in one lane. Raises ValueError for impossible sizes."""
    provider, family = registry.model_provider(run.model.model_provider), run.model_family
    encoders = provider.encoders(family)
    layout = build_layout(run.layout, required_world_size(run.layout, encoders), encoders)
    provider.validate(family, layout, run.train.seq_length)
    request = data_request(layout, provider, family, micro_batch_size=1, seq_length=run.train.seq_length,
                           seed=run.train.seed, split="train")
    return replace(request, num_lanes=1)


def model_of(run: StatsRunConfig, request: DataRequest) -> dict[str, Any]:
    """Describe the model for which the data was measured."""
    tokens, family = request.tokens, vars(run.model_family)
    model = {"provider": run.model.model_provider, "hf_config": family.get("hf_config", ""),
             "image_token_id": tokens.image_token_id, "seq_length": request.seq_length}
    if tokens.image_token_id >= 0 and tokens.image_size:
        height, width = tokens.image_shape
        model |= {"image_size": [height, width], "image_tokens": request.num_image_tokens(height, width)}
    images = describe_images(run, registry.model_provider(run.model.model_provider))
    return model | ({"images": images.removeprefix("images: ")} if images else {})


def in_words(model: dict[str, Any]) -> str:
    source = f" --hf-config {model['hf_config']}" if model["hf_config"] else ""
    parts = [f"--model-provider {model['provider']}{source}"]
    if "image_tokens" in model:
        height, width = model["image_size"]
        parts.append(f"{model['image_tokens']} tokens for an image of {height} x {width} pixels")
    parts.append(model.get("images", "no images"))
    if model["image_token_id"] >= 0:
        parts.append(f"image token {model['image_token_id']}")
    return ", ".join([*parts, f"rows of {model['seq_length']} tokens"])


def given_flags(run: StatsRunConfig) -> str:
    """Return the flags of data and model that differ from their defaults, and a few others."""
    words = [f"--dataset-provider {run.data.dataset_provider}", f"--model-provider {run.model.model_provider}",
             f"--seq-length {run.train.seq_length}", f"--seed {run.train.seed}"]
    for section in SECTIONS:
        values = vars(run)[section]
        for setting in dataclasses.fields(values):
            value, flag = vars(values)[setting.name], toml_file.flag_name(setting.name)
            if flag == "--data-path" or value == setting.default:
                continue
            if isinstance(value, bool):
                words.append(flag if value else f"--no-{flag[2:]}")
            else:
                words.append(f"{flag} " + (" ".join(map(str, value)) if isinstance(value, tuple) else str(value)))
    return " ".join(words)


def read(run: StatsRunConfig) -> Report:
    """Read the samples. Raises ValueError, with flags and values, if they cannot work."""
    stats, config = run.stats, run.dataset
    check_path(config, "train")
    # torch, transformers and Energon take seconds to import, and --help needs none of them.
    from data.energon.open import check_prepared
    from data.image_tiling import tiling_of
    from data.stats.collect import collect
    from data.stats.figures import figures, pack_all
    from data.stats.page import Report

    check_prepared(config, "train")
    run = with_tokenizer(run)
    request = request_of(run)
    with tqdm(desc="samples", total=stats.samples, disable=None, dynamic_ncols=True, leave=False) as bar:
        collected = collect(config, request, stats.samples, bar.update)
    packings = pack_all(collected.records, config.packing_buffer_size, request.seq_length, request.seed)
    provider, family = registry.model_provider(run.model.model_provider), run.model_family
    family = provider.resolved(family) if isinstance(provider, ComparableProvider) else family
    patch_size = vars(family).get("vision_patch_size", 0)
    model = model_of(run, request)
    keys = {"model": model} | figures(collected, packings, config.packing_buffer_size, patch_size)
    tiling = tiling_of(config, request.tokens) if request.tokens.image_token_id >= 0 else None
    return Report(config, given_flags(run), in_words(model), request.seq_length, patch_size, tiling,
                  request.tokens.image_token_id, collected, packings, keys)


def _spread(values: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:,.1f}".removesuffix(".0") for name, value in values.items()) or "-"


def summary(keys: dict[str, Any]) -> str:
    samples, tokens, images = keys["samples"], keys["tokens"], keys["images"]
    lines = [("model", in_words(keys["model"]))]
    lines += [("samples", f"{samples['read']:,} read of {samples['in_one_pass']:,}: {samples['good']:,} good, "
                         f"{samples['bad']:,} bad")]
    lines += [("data set", f"{source['share']:6.1%}  {source['samples']:,} samples  {source['path']}"
                           + (f"  {json.dumps(source['subflavors'])}" if source["subflavors"] else ""))
              for source in keys["sources"]]
    lines += [(f"{name} tokens", _spread(tokens[name])) for name in ("text", "image", "total")]
    lines += [("shares", f"image tokens {tokens['image_share']:.1%}, to learn {tokens['target_share']:.1%} "
                         f"({tokens['target_share_of_text']:.1%} of text)"),
              ("images", f"{images['count']:,} in {images['samples_with_images']:,} samples")]
    lines += [(name, _spread(images[name])) for name in ("width", "height", "tiles", "patches") if images[name]]
    videos = keys["videos"]
    if videos["count"]:
        lines += [("videos", f"{videos['count']:,} in {videos['samples_with_videos']:,} samples")]
        lines += [(f"video {name.replace('_', ' ')}", _spread(videos[name]))
                  for name in ("width", "height", "frames", "sampled_frames", "tokens")]
    chosen = keys["packing"]["chosen_buffer_size"]
    for packing in keys["packing"]["by_buffer_size"]:
        size = packing["buffer_size"]
        text = f"{packing['utilisation']:.1%} of a row used, {packing['samples_per_row']:.1f} samples a row"
        if packing["imbalance"] is not None:
            text += f", imbalance {packing['imbalance']:.2f}, balanced {packing['imbalance_balanced']:.2f}"
        lines.append((f"buffer {size}" if size else "no packing", text + " (as given)" * (size == chosen)))
    lines += [("bad sample", f"{bad['shard']} {bad['key']}: {bad['reason']}") for bad in keys["bad_samples"][:5]]
    if len(keys["bad_samples"]) > 5:
        lines.append(("", f"and {len(keys['bad_samples']) - 5} more, on the page"))
    width = max(14, *(len(name) + 2 for name, _ in lines))
    return "\n".join(f"{name:<{width}}{text}" for name, text in lines)


def main(arguments: list[str] | None = None) -> int:
    """Write the page and print the key figures; gives the exit code."""
    # The page lists bad samples.
    logging.getLogger("mimo.data").setLevel(logging.ERROR)
    try:
        run = parse_flags(arguments)
        report = read(run)
        from data.stats.page import page_html

        run.stats.out.write_text(page_html(report), encoding="utf-8")
    except (ValueError, OSError) as error:
        text = " ".join(str(error).split()).replace("--data-path ", "DATASET ")
        print(f"data_stats.py: error: {text}", file=sys.stderr)
        return 2
    print(json.dumps(report.figures, indent=2) if run.stats.json else summary(report.figures))
    print(f"page: {run.stats.out}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
