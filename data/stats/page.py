"""The page: one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from data.energon.provider import Config
from data.image_tiling import Tiling
from data.prompts import load_tokenizer
from data.stats.charts import Bars, Group, aspect_bars, histogram, integer_bars, lying_bars, number, share_bars
from data.stats.collect import Collected, Record
from data.stats.figures import Packing
from data.stats.samples import chosen_rows, sample_html
from data.stats.style import CSS

MAX_BAD_ROWS = 100
IMBALANCE_NOTE = (
    "Imbalance: image tokens of the pack that has most, over the mean of the packs of its buffer. 1 is even; lanes "
    "whose packs have fewer image tokens wait for the one that has most."
)


@dataclass(frozen=True)
class Report:
    """Contents of the page.

    Attributes:
        config: the data set's flags.
        flags: the flags that say what was read and for which model, as on a command line.
        model: for which model, in words.
        seq_length: tokens of a row.
        patch_size: pixels a side of a patch; 0 for a model that does not say.
        tiling: how images are tiled; None for a model that takes none.
        image_token_id: placeholder of an image.
        collected: what was read.
        packings: of `pack_all`.
        figures: of `figures`.
    """

    config: Config
    flags: str
    model: str
    seq_length: int
    patch_size: int
    tiling: Tiling | None
    image_token_id: int
    collected: Collected
    packings: Sequence[Packing]
    figures: dict[str, Any]

    @property
    def records(self) -> list[Record]:
        """Good samples."""
        return self.collected.records

    @property
    def chosen(self) -> Packing | None:
        """Packing with the flags as given; None where no sample is good."""
        given = self.config.packing_buffer_size
        return next((packing for packing in self.packings if packing.buffer_size == given), None)


def percent(share: float) -> str:
    """A share for people."""
    return f"{100 * share:.1f} %"


def _key(name: str, value: str, *, wrong: bool = False) -> str:
    return f'<div class="key{" wrong" * wrong}"><span>{name}</span><b>{value}</b></div>'


def _figure(title: str, svg: str, legend: Iterable[tuple[str, str]] = ()) -> str:
    entries = "".join(f'<span><i style="background:var(--{colour})"></i>{name}</span>' for colour, name in legend)
    legend_html = f'<div class="legend">{entries}</div>' if entries else ""
    return f'<section class="figure"><h3>{title}</h3>{legend_html}{svg}</section>'


def _table(heads: Sequence[tuple[str, bool]], rows: Iterable[tuple[str, Sequence[str]]]) -> str:
    """Heads with whether their column is of numbers; rows with their CSS class, cells being HTML."""
    css = [' class="num"' if numeric else "" for _, numeric in heads]
    head = "".join(f"<th{kind}>{name}</th>" for kind, (name, _) in zip(css, heads, strict=True))
    body = "".join(
        f'<tr class="{kind}">' + "".join(f"<td{at}>{cell}</td>" for at, cell in zip(css, cells, strict=True)) + "</tr>"
        for kind, cells in rows
    )
    return f'<div class="card scroll"><table><tr>{head}</tr>{body}</table></div>'


def keys_html(report: Report) -> str:
    """The figures at the top."""
    samples, tokens = report.figures["samples"], report.figures["tokens"]
    parts = [_key("good samples", number(samples["good"])),
             _key("bad samples", number(samples["bad"]), wrong=samples["bad"] > 0)]
    if report.records:
        parts += [_key("mean tokens", number(round(tokens["total"]["mean"], 1))),
                  _key("image tokens", percent(tokens["image_share"])),
                  _key("tokens to learn", percent(tokens["target_share"])),
                  _key("images", number(report.figures["images"]["count"]))]
    if report.chosen is not None:
        name = "row used, packed" if report.chosen.buffer_size else "row used, without packing"
        parts.append(_key(name, percent(report.chosen.utilisation)))
    return f'<div class="keys">{"".join(parts)}</div>'


def flavors(source: Mapping[str, Any]) -> str:
    """Subflavors for people."""
    return ", ".join(f"{name}: {value}" for name, value in source["subflavors"].items())


def sources_html(report: Report) -> str:
    """Samples of each data set of a blend."""
    sources = report.figures["sources"]
    heads = [("data set", False), ("subflavors", False), ("good samples", True), ("share", True), ("tokens", True)]
    if not any(source["subflavors"] for source in sources):
        del heads[1]
    rows = []
    for source in sources:
        meter = f'<span class="meter"><i style="width:{100 * source["share"]:.1f}%"></i></span>'
        cells = [f"<code>{escape(source['path'])}</code>", f"<code>{escape(flavors(source))}</code>",
                 number(source["samples"]), percent(source["share"]) + meter, number(source["tokens"])]
        rows.append(("", cells if len(heads) == len(cells) else [cells[0], *cells[2:]]))
    samples = report.figures["samples"]
    repeated = samples["good"] - samples["distinct"]
    note = f"<p>{number(repeated)} of the samples were met before: a blend repeats small data sets.</p>"
    return "<h2>Data sets</h2>" + (note if repeated else "") + _table(heads, rows)


def tokens_html(report: Report) -> str:
    """Tokens of each sample."""
    records = report.records
    total = [record.length for record in records]
    over = f"row of {number(report.seq_length)}"
    shown = [
        _figure("Text tokens", histogram(integer_bars([record.text_tokens for record in records]),
                                         "text tokens of a sample", "text", "samples")),
        _figure("Image tokens", histogram(integer_bars([record.image_tokens for record in records]),
                                          "image tokens of a sample", "image", "samples")),
        _figure("Length", histogram(integer_bars(total), f"tokens of a sample, in a {over}", "quiet", "samples")),
        _figure("Tokens to learn", histogram(
            share_bars([record.target_tokens / record.text_tokens for record in records if record.text_tokens]),
            "share of a sample's text tokens", "learn", "samples")),
    ]
    tokens = report.figures["tokens"]
    note = (f"<p>{percent(tokens['target_share'])} of all tokens, and {percent(tokens['target_share_of_text'])} of "
            "those of text, are learnt. Image tokens never are.</p>")
    return f'<h2>Tokens</h2>{note}<div class="charts">{"".join(shown)}</div>'


def images_html(report: Report) -> str:
    """Sizes of images, before and after tiling."""
    images = [image for record in report.records for image in record.images]
    if not images:
        return "<h2>Images</h2><p>No sample has an image.</p>"
    shown: list[tuple[str, Bars, str]] = [
        ("Width", integer_bars([image.size[1] for image in images]), "pixels, before tiling"),
        ("Height", integer_bars([image.size[0] for image in images]), "pixels, before tiling"),
        ("Aspect ratio", aspect_bars([image.size[1] / image.size[0] for image in images]),
         "width : height, before tiling"),
    ]
    if report.tiling is not None and report.tiling.kind == "fixed":
        tiles = integer_bars([len(image.tiles) for image in images])
        height, width = report.tiling.tile_size
        shown.append(("Tiles", tiles, f"tiles of {width} x {height} pixels, of an image"))
    elif report.patch_size:
        patches = integer_bars([image.patches(report.patch_size) for image in images])
        shown.append(("Patches", patches, f"patches of {report.patch_size} pixels, of an image"))
    count = report.figures["images"]["samples_with_images"]
    note = f"<p>{number(len(images))} images in {number(count)} of {number(len(report.records))} samples.</p>"
    charts = "".join(_figure(title, histogram(bars, axis, "image", "images")) for title, bars, axis in shown)
    return f'<h2>Images</h2>{note}<div class="charts">{charts}</div>'


def _buffer_name(packing: Packing) -> str:
    return f"buffer of {packing.buffer_size:,}" if packing.buffer_size else "no packing"


def packing_html(report: Report) -> str:
    """How full rows get, and how uneven, with several packing buffers."""
    packings, given = report.packings, report.config.packing_buffer_size
    used = [Group(_buffer_name(packing), [("text", packing.utilisation, percent(packing.utilisation))],
                  packing.buffer_size == given) for packing in packings]
    charts = [_figure("Part of a row that holds tokens", lying_bars(used, "utilisation by buffer size", 1.0))]
    measured = [(packing, packing.imbalance, packing.imbalance_balanced) for packing in packings
                if packing.imbalance is not None and packing.imbalance_balanced is not None]
    if measured:
        most = max(plain for _, plain, _ in measured)
        groups = [Group(_buffer_name(packing), [("quiet", plain, f"{plain:.2f}"), ("image", even, f"{even:.2f}")],
                        packing.buffer_size == given) for packing, plain, even in measured]
        legend = [("quiet", "packed as they fit"), ("image", "with --packing-balance")]
        svg = lying_bars(groups, "imbalance of image tokens", most, (1.0, "even"))
        charts.append(_figure("Imbalance of image tokens", svg, legend))
    heads = [("packing buffer", False), ("samples a row", True), ("row used", True),
             ("imbalance", True), ("with --packing-balance", True)]
    rows = [("chosen" if packing.buffer_size == given else "", [
        _buffer_name(packing) + (" (as given)" if packing.buffer_size == given else ""),
        f"{packing.samples_per_row:.1f}", percent(packing.utilisation),
        *("&ndash;" if value is None else f"{value:.2f}" for value in (packing.imbalance, packing.imbalance_balanced)),
    ]) for packing in packings]
    note = (f"<p>Rows have {number(report.seq_length)} tokens (<code>--seq-length</code>). A buffer is the "
            "number of samples among which a pack is chosen (<code>--packing-buffer-size</code>). "
            f"{IMBALANCE_NOTE if measured else ''}</p>")
    if given > len(report.records):
        note += (f"<p>Only {number(len(report.records))} samples were read, fewer than the buffer of {number(given)} "
                 "holds: read more with --samples.</p>")
    return (f'<h2>Packing</h2>{note}<div class="charts wide">{"".join(charts)}</div>'
            + _table(heads, rows))


def bad_html(report: Report) -> str:
    """Bad samples, each with its reason."""
    bad = report.figures["bad_samples"]
    if not bad:
        return "<h2>Bad samples</h2><p>None.</p>"
    rows = [("", [f"<code>{escape(entry['shard'])}</code>", f"<code>{escape(entry['key'])}</code>",
                  escape(entry["reason"]), number(entry["times"])]) for entry in bad[:MAX_BAD_ROWS]]
    more = f"<p>The first {MAX_BAD_ROWS} of {number(len(bad))}.</p>" if len(bad) > MAX_BAD_ROWS else ""
    heads = [("shard", False), ("key", False), ("reason", False), ("times met", True)]
    return f"<h2>Bad samples</h2><p>Training passes over them.</p>{more}{_table(heads, rows)}"


def samples_html(report: Report) -> str:
    """A few samples, as the model gets them."""
    tokenizer = load_tokenizer(report.config.tokenizer)
    shown = [sample_html(tokenizer, record, row, report.tiling, report.image_token_id)
             for record, row in chosen_rows(report.collected)]
    legend = ('<div class="key-tokens"><span class="token">text</span> a token '
              '&nbsp; <span class="token target">text</span> a token to learn &nbsp; '
              '<span class="token special">&lt;s&gt;</span> a special token &nbsp; '
              '<span class="image">image 1</span> placeholder of an image. Point at a token for its id.</div>')
    return f"<h2>Samples</h2>{legend}{''.join(shown)}"


def page_html(report: Report) -> str:
    """The whole page."""
    config, samples = report.config, report.figures["samples"]
    body = [
        f"<h1>{escape(config.data_path)}</h1>",
        f"<p class='flags'>{number(samples['read'])} samples of the train split, which has "
        f"{number(samples['in_one_pass'])}, measured for {escape(report.model)}, read with<br>"
        f"<code>{escape(report.flags)}</code></p>",
        keys_html(report),
    ]
    if report.records:
        body += [sources_html(report), tokens_html(report), images_html(report), packing_html(report)]
    body.append(bad_html(report))
    if report.records:
        body.append(samples_html(report))
    return (f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
            f'content="width=device-width, initial-scale=1"><title>{escape(config.data_path)}</title>'
            f"<style>{CSS}</style></head><body><main>{''.join(body)}</main></body></html>\n")
