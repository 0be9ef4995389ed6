"""Single samples as HTML: images as the model gets them, text token by token."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

import numpy as np
from PIL import Image

from data.energon.task_encoder import Row
from data.image_tiling import Tiling, best_pinpoint, fixed_grid
from data.stats.collect import Collected, ImageRecord, Record, VideoRecord
from mimo.report.summary import number

NUM_SHOWN = 8
MAX_IMAGES = 12  # of a sample
MAX_TOKENS = 2000  # of a sample
MAX_FRAMES = 6  # of a video
# Most tokens that may share a character: one for each of its bytes, at most four, and some around them.
MAX_SHARED = 8
# Pixels on the page. Small images are enlarged until the shorter side has SMALLEST, as long as the longer side stays
# within LARGEST. THUMBNAIL is a height.
SMALLEST, LARGEST, THUMBNAIL = 96, 320, 160
LOSSLESS_SIDE = 128  # images up to this side are PNG, larger ones JPEG
REPLACEMENT = chr(0xFFFD)


def chosen_rows(collected: Collected) -> list[tuple[Record, Row]]:
    """Return the samples to show: the first ones of each source, sources in turn."""
    shown: list[tuple[Record, Row]] = []
    for turn in range(max(map(len, collected.rows.values()), default=0)):
        for rows in collected.rows.values():
            if turn < len(rows) and len(shown) < NUM_SHOWN:
                index, row = rows[turn]
                shown.append((collected.records[index], row))
    return shown


def picture(pixels: np.ndarray, tiling: Tiling) -> str:
    """Return pixels `[C, height, width]`, uint8 or normalised float32, as a `data:` URL of an image."""
    levels = pixels
    if pixels.dtype != np.uint8:
        mean, std = (np.array(values, np.float32)[:, None, None] for values in (tiling.mean, tiling.std))
        levels = np.rint(np.clip(pixels * std + mean, 0, 1) * 255).astype(np.uint8)
    levels = levels.transpose(1, 2, 0)
    image = Image.fromarray(levels[..., 0] if levels.shape[2] == 1 else levels)
    small = max(image.size) <= LOSSLESS_SIDE
    buffer = io.BytesIO()
    image.save(buffer, "PNG") if small else image.save(buffer, "JPEG", quality=85)
    content = base64.b64encode(buffer.getvalue()).decode()
    return f"data:image/{'png' if small else 'jpeg'};base64,{content}"


def _tile(pixels: np.ndarray, tiling: Tiling, scale: float) -> str:
    height, width = pixels.shape[1:]
    crisp = ' class="crisp"' if scale > 1 else ""
    return (f'<img{crisp} src="{picture(pixels, tiling)}" width="{width * scale:.0f}" height="{height * scale:.0f}" '
            f'alt="{width} x {height} pixels" title="{width} x {height} pixels">')


def image_html(position: int, image: ImageRecord, tiles: Sequence[np.ndarray], tiling: Tiling, tokens: int) -> str:
    """Return an image: its tiles in their grid, and a thumbnail beside them.

    Args:
        position: among the images of the sample, from 1.
        image: its sizes.
        tiles: `[C, height, width]` each.
        tiling: how it was tiled.
        tokens: language tokens that it becomes.
    """
    height, width = tiles[0].shape[1:]
    rows, cols = fixed_grid(*image.size, tiling) if tiling.kind == "fixed" else (1, 1)
    if tiling.kind == "anyres":  # the whole image is shown behind its tiles
        grid = best_pinpoint(*image.size, tiling.pinpoints)
        rows, cols, tiles = grid[0] // height, grid[1] // width, [*tiles[1:], tiles[0]]
    shorter, longer = sorted([rows * height, cols * width])
    scale = LARGEST / longer if longer > LARGEST else max(min(SMALLEST // shorter, LARGEST // longer), 1)
    cells = "".join(_tile(tile, tiling, scale) for tile in tiles[: rows * cols])
    small = min(scale * rows, THUMBNAIL / height)
    thumbnail = "".join(_tile(tile, tiling, small) for tile in tiles[rows * cols :])
    grid = f'<div class="tiles" style="grid-template-columns:repeat({cols},max-content)">{cells}</div>'
    size = f"{image.size[1]} x {image.size[0]}"
    made = (f"{cols} x {rows} tiles of " if rows * cols > 1 else "") + f"{width} x {height}"
    made += " and a thumbnail" if thumbnail else ""
    beside = f'<div class="tiles thumbnail">{thumbnail}</div>' if thumbnail else ""
    return (f'<figure><div class="shown">{grid}{beside}</div><figcaption><b>image {position}</b> {size} pixels '
            f"&rarr; {made}; {number(tokens)} tokens</figcaption></figure>")


def video_html(position: int, video: VideoRecord, frames: Sequence[np.ndarray], tiling: Tiling) -> str:
    """Return a video: some of its sampled frames, spread over it.

    Args:
        position: among the videos of the sample, from 1.
        video: its sizes.
        frames: `[C, height, width]` each.
        tiling: how images are normalised.
    """
    shown = [frames[round(index)] for index in np.linspace(0, len(frames) - 1, min(len(frames), MAX_FRAMES))]
    scale = min(THUMBNAIL / video.resized[0], 1)
    cells = "".join(_tile(frame, tiling, scale) for frame in shown)
    grid = f'<div class="tiles" style="grid-template-columns:repeat({len(shown)},max-content)">{cells}</div>'
    (height, width), (rows, columns) = video.size, video.resized
    return (f'<figure><div class="shown">{grid}</div><figcaption><b>video {position}</b> {number(video.num_frames)} '
            f"frames of {width} x {height} pixels &rarr; {number(video.sampled)} of {columns} x {rows}; "
            f"{number(video.tokens)} tokens</figcaption></figure>")


def pieces(tokenizer: Any, ids: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Yield the text of each token with 1, or of several tokens that share a character, with their number."""
    start = 0
    before: list[int] = []
    for end in range(1, len(ids) + 1):
        # The text of a token, such as a leading space, may depend on the token before it.
        old = tokenizer.decode(before, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        piece = list(ids[start:end])
        new = tokenizer.decode(before + piece, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if new.endswith(REPLACEMENT) and end - start < MAX_SHARED and end < len(ids):
            continue
        yield (new[len(old) :] if new.startswith(old) else tokenizer.decode(piece)), len(piece)
        before, start = piece, end


def _token(text: str, ids: Sequence[int], css: str) -> str:
    """Return a token. Line breaks are both shown and made, and a token without text is a dot."""
    shown = escape(text).replace("\n", "<i>&crarr;</i>\n") or "&middot;"
    return f'<span class="{css}" title="{"id" if len(ids) == 1 else "ids"} {" ".join(map(str, ids))}">{shown}</span>'


def text_html(tokenizer: Any, row: Row, record: Record, image_token_id: int, *, is_joined: bool) -> str:
    """Return the text of a sample, with marks for token boundaries, tokens to learn and placeholders of images.

    `is_joined` says that an image of several tiles has one placeholder.
    """
    ids, targets = row.tokens.tolist()[:MAX_TOKENS], row.target_mask.tolist()
    special = set(tokenizer.all_special_ids)
    parts: list[str] = []
    counts = [len(image.tiles) for image in record.images]
    start = image = 0
    while start < len(ids):
        if ids[start] == image_token_id:
            image += 1
            start += 1 if is_joined else counts[image - 1]
            parts.append(f'<span class="image">image {image}'
                         + (f" &middot; {counts[image - 1]} tiles" if counts[image - 1] > 1 else "") + "</span>")
            continue
        end = start
        while end < len(ids) and ids[end] != image_token_id:
            end += 1
        for text, count in pieces(tokenizer, ids[start:end]):
            stop = start + count
            css = ["token"] + ["target"] * any(targets[start:stop]) + ["special"] * (ids[start] in special)
            parts.append(_token(text, ids[start:stop], " ".join(css)))
            start = stop
    if len(row.tokens) > MAX_TOKENS:
        parts.append(f'<span class="more">and {number(len(row.tokens) - MAX_TOKENS)} more tokens</span>')
    return f'<div class="tokens">{"".join(parts)}</div>'


def sample_html(tokenizer: Any, record: Record, row: Row, tiling: Tiling | None, image_token_id: int) -> str:
    """Return one sample; `tiling` is None for a model that takes no images."""
    figures, start = [], 0
    is_joined = tiling is not None and tiling.is_joined
    tiles = [tile for each in row.images if is_joined or each.ndim == 3
             for tile in (each.numpy() if is_joined else [each.numpy()])]
    for position, image in enumerate(record.images, 1):
        end = start + len(image.tiles)
        if position <= MAX_IMAGES and tiling is not None:
            figures.append(image_html(position, image, tiles[start:end], tiling, image.tokens))
        start = end
    if len(record.images) > MAX_IMAGES:
        figures.append(f'<p class="more">and {len(record.images) - MAX_IMAGES} more images</p>')
    if tiling is not None:
        frames = [frame for part in row.images if part.ndim == 4 and not is_joined for frame in part.numpy()]
        for position, video in enumerate(record.videos, 1):
            figures.append(video_html(position, video, frames[: video.sampled], tiling))
            del frames[: video.sampled]
    shard, _, key = record.name.partition(" ")
    facts = (f"{number(record.length)} tokens: {number(record.text_tokens)} of text, {number(record.image_tokens)} of "
             f"images; {number(record.target_tokens)} to learn")
    shown = f'<div class="figures">{"".join(figures)}</div>' if figures else ""
    return (f'<article class="sample"><header><h3>{escape(key)}</h3><span>{escape(shard)}</span><span>{facts}</span>'
            f"</header>{shown}{text_html(tokenizer, row, record, image_token_id, is_joined=is_joined)}</article>")
