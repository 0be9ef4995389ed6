"""The page of a data set: one HTML file that needs no other file and no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from data.energon.provider import Config
from data.hf_tokenizer import load_tokenizer
from data.image_tiling import Tiling
from data.stats.charts import Bars, Series, aspect_bars, histogram, integer_bars, lying_bars, share_bars
from data.stats.collect import Collected, Record
from data.stats.figures import Packing
from data.stats.samples import chosen_rows, sample_html
from mimo.report.html import document, section, table
from mimo.report.summary import number

MAX_BAD_ROWS = 100
IMBALANCE_NOTE = (
    "Imbalance: the image tokens (tiles, if the model takes tiles) of the pack with the most of them, divided by the "
    "mean over the packs of its buffer. 1 is even. Lanes whose packs have fewer wait for the one with the most."
)


@dataclass(frozen=True)
class Report:
    """Contents of the page.

    Attributes:
        config: the data set's flags.
        flags: the command-line flags that determine what was read and for which model.
        model: name of the model for which the samples were read.
        seq_length: tokens of a row.
        patch_size: pixels along a side of a patch; 0 for a model that does not declare it.
        tiling: how images are tiled; None for a model that takes none.
        image_token_id: placeholder of an image.
        collected: what was read.
        packings: result of `pack_all`.
        figures: result of `figures`.
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
        return self.collected.records

    @property
    def chosen(self) -> Packing | None:
        """Packing with the flags as given; None if no sample is good."""
        given = self.config.packing_buffer_size
        return next((packing for packing in self.packings if packing.buffer_size == given), None)


def percent(share: float) -> str:
    """Format a share from 0 to 1 as a percentage."""
    return f"{100 * share:.1f} %"


def _key(name: str, value: str, *, wrong: bool = False) -> str:
    return f'<div class="key{" wrong" * wrong}"><span>{name}</span><b>{value}</b></div>'


def keys_html(report: Report) -> str:
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
    return ", ".join(f"{name}: {value}" for name, value in source["subflavors"].items())


def sources_html(report: Report) -> str:
    """List the data sets of a blend, with their numbers of samples and tokens."""
    sources = report.figures["sources"]
    has_flavors = any(source["subflavors"] for source in sources)
    heads = ["data set", *(["subflavors"] if has_flavors else []), "good samples", "share", "tokens"]
    rows = []
    for source in sources:
        meter = f'<span class="meter"><i style="width:{100 * source["share"]:.1f}%"></i></span>'
        cells = [f"<code>{escape(source['path'])}</code>", f"<code>{escape(flavors(source))}</code>",
                 number(source["samples"]), percent(source["share"]) + meter, number(source["tokens"])]
        rows.append(cells if has_flavors else [cells[0], *cells[2:]])
    samples = report.figures["samples"]
    repeated = samples["good"] - samples["distinct"]
    note = f"<p>{number(repeated)} of the samples were met before: a blend repeats small data sets.</p>"
    return section("Data sets", [note if repeated else "", table(heads, rows, numeric_from=1 + has_flavors)])


def tokens_html(report: Report) -> str:
    records = report.records
    shown = [
        histogram("Text tokens", integer_bars([record.text_tokens for record in records]), "text tokens of a sample",
                  "text", "samples"),
        histogram("Image tokens", integer_bars([record.image_tokens for record in records]),
                  "image tokens of a sample", "image", "samples"),
        histogram("Length", integer_bars([record.length for record in records]),
                  f"tokens of a sample, in a row of {number(report.seq_length)}", "quiet", "samples"),
        histogram("Tokens to learn",
                  share_bars([record.target_tokens / record.text_tokens for record in records if record.text_tokens]),
                  "share of a sample's text tokens", "learn", "samples"),
    ]
    tokens = report.figures["tokens"]
    return section("Tokens", shown, f"{percent(tokens['target_share'])} of all tokens, and "
                   f"{percent(tokens['target_share_of_text'])} of text tokens, are learnt. Image tokens never are.")


def images_html(report: Report) -> str:
    images = [image for record in report.records for image in record.images]
    if not images:
        return "<h2>Images</h2><p>No sample has an image.</p>"
    shown: list[tuple[str, Bars, str]] = [
        ("Width", integer_bars([image.size[1] for image in images]), "pixels, before tiling"),
        ("Height", integer_bars([image.size[0] for image in images]), "pixels, before tiling"),
        ("Aspect ratio", aspect_bars([image.size[1] / image.size[0] for image in images]),
         "width : height, before tiling"),
    ]
    if report.tiling is not None and report.tiling.kind in ("fixed", "anyres"):
        tiles = integer_bars([len(image.tiles) for image in images])
        height, width = report.tiling.tile_size
        shown.append(("Tiles", tiles, f"tiles of {width} x {height} pixels, of an image"))
    elif report.patch_size:
        patches = integer_bars([image.patches(report.patch_size) for image in images])
        shown.append(("Patches", patches, f"patches of {report.patch_size} pixels, of an image"))
    count = report.figures["images"]["samples_with_images"]
    return section("Images", [histogram(title, bars, axis, "image", "images") for title, bars, axis in shown],
                   f"{number(len(images))} images in {number(count)} of {number(len(report.records))} samples.")


def videos_html(report: Report) -> str:
    """Chart the frames and sizes of videos; empty without videos."""
    videos = [video for record in report.records for video in record.videos]
    if not videos:
        return ""
    shown = [
        ("Frames", integer_bars([video.num_frames for video in videos]), "frames in a video"),
        ("Sampled frames", integer_bars([video.sampled for video in videos]), "frames that the model gets"),
        ("Height", integer_bars([video.resized[0] for video in videos]), "pixels, as the model gets it"),
        ("Tokens", integer_bars([video.tokens for video in videos]), "language tokens of a video"),
    ]
    count = report.figures["videos"]["samples_with_videos"]
    return section("Videos", [histogram(title, bars, axis, "image", "videos") for title, bars, axis in shown],
                   f"{number(len(videos))} videos in {number(count)} of {number(len(report.records))} samples.")


def _buffer_name(packing: Packing) -> str:
    return f"buffer of {packing.buffer_size:,}" if packing.buffer_size else "no packing"


def packing_html(report: Report) -> str:
    """Show how full and how uneven rows get with several sizes of the packing buffer."""
    packings, given = report.packings, report.config.packing_buffer_size
    names = [f"<b>{_buffer_name(packing)}</b>" if packing.buffer_size == given else _buffer_name(packing)
             for packing in packings]
    used = [packing.utilisation for packing in packings]
    charts = [lying_bars("Part of a row that holds tokens", names,
                         [Series("used", "text", used, list(map(percent, used)))], 1.0)]
    measured = [(name, packing.imbalance, packing.imbalance_balanced)
                for name, packing in zip(names, packings, strict=True)
                if packing.imbalance is not None and packing.imbalance_balanced is not None]
    if measured:
        plain, even = [one for _, one, _ in measured], [one for _, _, one in measured]
        series = [Series("packed as they fit", "quiet", plain, [f"{one:.2f}" for one in plain]),
                  Series("with --packing-balance", "image", even, [f"{one:.2f}" for one in even])]
        charts.append(lying_bars("Imbalance of the encoder's work", [name for name, _, _ in measured], series,
                                 max(plain), (1.0, "even")))
    heads = ["packing buffer", "samples a row", "row used", "imbalance", "with --packing-balance"]
    rows = [[name + (" (as given)" if packing.buffer_size == given else ""), f"{packing.samples_per_row:.1f}",
             percent(packing.utilisation),
             *("&ndash;" if value is None else f"{value:.2f}"
               for value in (packing.imbalance, packing.imbalance_balanced))]
            for name, packing in zip(names, packings, strict=True)]
    note = (f"<p>The shares are those of rows of {number(report.seq_length)} tokens (<code>--seq-length</code>); "
            "without packing, most rows are shorter (<code>--row-lengths</code>). A buffer is the "
            "number of samples among which a pack is chosen (<code>--packing-buffer-size</code>). "
            f"{IMBALANCE_NOTE if measured else ''}</p>")
    if given > len(report.records):
        note += (f"<p>Only {number(len(report.records))} samples were read, fewer than the buffer of {number(given)} "
                 "holds: read more with --samples.</p>")
    return f'<h2>Packing</h2>{note}<div class="charts pairs">{"".join(charts)}{table(heads, rows)}</div>'


def bad_html(report: Report) -> str:
    bad = report.figures["bad_samples"]
    if not bad:
        return "<h2>Bad samples</h2><p>None.</p>"
    rows = [[f"<code>{escape(entry['shard'])}</code>", f"<code>{escape(entry['key'])}</code>",
             escape(entry["reason"]), number(entry["times"])] for entry in bad[:MAX_BAD_ROWS]]
    more = f" The first {MAX_BAD_ROWS} of {number(len(bad))}." if len(bad) > MAX_BAD_ROWS else ""
    return section("Bad samples", [table(["shard", "key", "reason", "times met"], rows, numeric_from=3)],
                   f"Training skips them.{more}")


def samples_html(report: Report) -> str:
    tokenizer = load_tokenizer(report.config.tokenizer)
    shown = [sample_html(tokenizer, record, row, report.tiling, report.image_token_id)
             for record, row in chosen_rows(report.collected)]
    legend = ('<div class="key-tokens"><span class="token">text</span> a token '
              '&nbsp; <span class="token target">text</span> a token to learn &nbsp; '
              '<span class="token special">&lt;s&gt;</span> a special token &nbsp; '
              '<span class="image">image 1</span> placeholder of an image. Point at a token for its id.</div>')
    return f"<h2>Samples</h2>{legend}{''.join(shown)}"


def page_html(report: Report) -> str:
    config, samples = report.config, report.figures["samples"]
    body = [
        f"<h1>{escape(config.data_path)}</h1>",
        f"<p class='flags'>{number(samples['read'])} samples of the train split, which has "
        f"{number(samples['in_one_pass'])}, measured for {escape(report.model)}, read with<br>"
        f"<code>{escape(report.flags)}</code></p>",
        keys_html(report),
    ]
    if report.records:
        body += [sources_html(report), tokens_html(report), images_html(report), videos_html(report),
                 packing_html(report)]
    body.append(bad_html(report))
    if report.records:
        body.append(samples_html(report))
    return document(escape(config.data_path), CSS, "".join(body))


# Rules beside those of mimo/report/html.py, which every page has.
CSS = """
:root { --text: #2a78d6; --image: #d9622b; --learn: #1a8f66; --quiet: #b4b2a8; --faint: #7a7872; --token: #eeede8;
  --token-edge: #b9b7ad; --learn-back: #cdeedd; --learn-edge: #3f9a74; --image-back: #fbe3d6; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --text: #4b95ea; --image: #e5793f; --learn: #2bab7e; --quiet: #6a6861;
  --faint: #98968c; --token: #262624; --token-edge: #56544d; --learn-back: #123d2d; --learn-edge: #2f8f6a;
  --image-back: #4a2513; --bad: #f2887f; } }
p.flags { max-width: none; }
p:not(.flags) code { white-space: nowrap; }
td { overflow-wrap: anywhere; }
.charts { grid-template-columns: repeat(auto-fill, minmax(min(100%, 290px), 1fr)); }
.charts.pairs { grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); }
.charts > p { grid-column: 1 / -1; margin: 0; }
.keys { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin-top: 20px; }
.key { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px 16px; }
.key span { display: block; color: var(--soft); font-size: 13px; }
.key b { display: block; font-size: 24px; line-height: 1.3; font-weight: 600; }
.key.wrong b { color: var(--bad); }
.meter { display: inline-block; width: 90px; height: 8px; border-radius: 4px; background: var(--line);
  margin-left: 10px; overflow: hidden; vertical-align: 1px; }
@media (max-width: 600px) { .meter { display: none; } }
.meter i { display: block; height: 100%; background: var(--text); }
.sample { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 16px 18px;
  margin-bottom: 12px; }
.sample header { display: flex; flex-wrap: wrap; gap: 2px 18px; align-items: baseline; margin-bottom: 12px; }
.sample header span, .more { color: var(--soft); font-size: 13px; }
.figures { display: flex; flex-wrap: wrap; gap: 16px; margin-bottom: 14px; }
.figures figure { max-width: 100%; overflow-x: auto; padding: 0; border: 0; background: none; }
.shown { display: flex; gap: 12px; align-items: flex-end; }
.tiles { display: grid; gap: 2px; padding: 2px; background: var(--image); width: max-content; }
.tiles.thumbnail { background: var(--quiet); }
.tiles img { display: block; }
.crisp { image-rendering: pixelated; }
.figures figcaption { max-width: 340px; }
.tokens { font: 13px/2 ui-monospace, "SF Mono", "DejaVu Sans Mono", monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; max-height: 30em; overflow-y: auto; }
.token, .image { background: var(--token); border-left: 1px solid var(--token-edge); padding: 2px 0; }
.target { background: var(--learn-back); border-left-color: var(--learn-edge); }
.special { color: var(--faint); }
.target.special { color: var(--learn); }
.token i { font-style: normal; color: var(--faint); }
.image { background: var(--image-back); border-left-color: var(--image); padding: 2px 7px; }
.key-tokens { margin-bottom: 12px; color: var(--soft); font-size: 13px; }
.key-tokens span { margin-right: 4px; color: var(--ink);
  font: 13px ui-monospace, "SF Mono", "DejaVu Sans Mono", monospace; }
.key-tokens .special { color: var(--faint); }
"""
