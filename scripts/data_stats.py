r"""What a data set gives a model: a page of figures, charts and samples, from samples read as training reads them.

    python scripts/data_stats.py DATASET --tokenizer FOLDER
    python scripts/data_stats.py blend.yaml --tokenizer FOLDER --seq-length 8192 --packing-buffer-size 256 \
        --image-tiling fixed --image-size 448 --pixel-shuffle 2 --out page.html

Samples go through the task encoder of training, in this process. The model is not loaded: --image-size, --patch-size,
--pixel-shuffle and --num-channels say what it would take. An image or tile of h x w pixels gives h/s * w/s image
tokens, where s is patch size times pixel shuffle.
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tyro
from tqdm import tqdm

from data.energon import Config
from data.stats.sizes import ModelSizes

if TYPE_CHECKING:
    from data.stats.page import Report


@dataclass(frozen=True)
class DataFlags(Config):
    """Data set, as in training."""

    # Training's flags that change nothing here, or are given otherwise.
    data_path: tyro.conf.Suppress[str] = ""
    valid_data_path: tyro.conf.Suppress[str] = ""
    num_workers: tyro.conf.Suppress[int] = 0
    max_bad_samples: tyro.conf.Suppress[int] = 100


@dataclass(frozen=True)
class Flags:
    dataset: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DATASET")]
    """Folder prepared with `energon prepare`, or a metadataset YAML that blends several."""
    samples: int = 1000
    """Samples to read, bad ones included; at most one pass over the data set."""
    out: Path = Path("data_stats.html")
    """HTML file to write; it needs no other file and no network."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print the key figures as JSON."""
    data: DataFlags = field(default_factory=DataFlags)
    model: ModelSizes = field(default_factory=ModelSizes)


def read(flags: Flags) -> Report:
    """Read the samples. Raises ValueError, naming flags and values, for what cannot work."""
    # torch, transformers and Energon take seconds to import, and --help needs none of them.
    from data.energon_open import check_prepared
    from data.stats.collect import collect, request_of
    from data.stats.figures import figures, pack_all
    from data.stats.page import Report

    config = replace(flags.data, data_path=flags.dataset)
    if flags.samples < 1:
        raise ValueError(f"--samples {flags.samples}: must be at least 1")
    if flags.out.is_dir() or not flags.out.absolute().parent.is_dir():
        raise ValueError(f"--out {flags.out}: name a file in a folder that exists")
    check_prepared(config, "train")
    request, tiling = request_of(config, flags.model)
    with tqdm(desc="samples", total=flags.samples, disable=None, dynamic_ncols=True, leave=False) as bar:
        collected = collect(config, request, flags.samples, bar.update)
    packings = pack_all(collected.records, config.packing_buffer_size, request.seq_length, request.seed)
    keys = figures(collected, packings, config.packing_buffer_size, flags.model.patch_size)
    return Report(config, flags.model, tiling, request.tokens.image_token_id, collected, packings, keys)


def _spread(values: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:,.1f}".removesuffix(".0") for name, value in values.items()) or "-"


def summary(keys: dict[str, Any]) -> str:
    """The key figures as lines for a terminal."""
    samples, tokens, images = keys["samples"], keys["tokens"], keys["images"]
    lines = [("samples", f"{samples['read']:,} read of {samples['in_one_pass']:,}: {samples['good']:,} good, "
                         f"{samples['bad']:,} bad")]
    lines += [("data set", f"{source['share']:6.1%}  {source['samples']:,} samples  {source['path']}"
                           + (f"  {json.dumps(source['subflavors'])}" if source["subflavors"] else ""))
              for source in keys["sources"]]
    lines += [(f"{name} tokens", _spread(tokens[name])) for name in ("text", "image", "total")]
    lines += [("shares", f"image tokens {tokens['image_share']:.1%}, to learn {tokens['target_share']:.1%} "
                         f"({tokens['target_share_of_text']:.1%} of text)"),
              ("images", f"{images['count']:,} in {images['samples_with_images']:,} samples")]
    lines += [(name, _spread(images[name])) for name in ("width", "height", "tiles", "patches") if images[name]]
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
    return "\n".join(f"{name:<14}{text}" for name, text in lines)


def main(arguments: list[str] | None = None) -> int:
    """Write the page and print the key figures; gives the exit code."""
    description = (__doc__ or "").partition("\n\n")[0] + "\n\n" + (__doc__ or "").rpartition("\n\n")[2]
    flags = tyro.cli(Flags, args=arguments, prog="data_stats.py", description=description,
                     config=(tyro.conf.OmitArgPrefixes,))
    # The page lists bad samples.
    logging.getLogger("mimo.data").setLevel(logging.ERROR)
    try:
        report = read(flags)
        from data.stats.page import page_html

        flags.out.write_text(page_html(report), encoding="utf-8")
    except (ValueError, OSError) as error:
        text = " ".join(str(error).split()).replace("--data-path ", "DATASET ")
        print(f"data_stats.py: error: {text}", file=sys.stderr)
        return 2
    print(json.dumps(report.figures, indent=2) if flags.json else summary(report.figures))
    print(f"page: {flags.out}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
