"""Key figures of what was read, as plain data."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from data.packing import imbalance, select_from_buffer, utilisation
from data.stats.collect import Collected, Record

BUFFER_SIZES = (16, 64, 256, 1024)


@dataclass(frozen=True)
class Packing:
    """Result of packing with one size of the buffer.

    Attributes:
        buffer_size: as given; 0: no packing, one sample a row.
        buffers: buffers that were filled.
        rows: packs, or single samples.
        samples_per_row: mean.
        utilisation: share of the rows' tokens that are used, 0 to 1.
        imbalance: encoded tokens of the pack that has most over the mean of its buffer, mean over buffers; None without
            images or packing.
        imbalance_balanced: the same with --packing-balance.
    """

    buffer_size: int
    buffers: int
    rows: int
    samples_per_row: float
    utilisation: float
    imbalance: float | None
    imbalance_balanced: float | None


def pack(records: Sequence[Record], buffer_size: int, seq_length: int, seed: int) -> Packing:
    """Pack samples like the only worker of a run would.

    Samples that do not fill a last buffer are left out, unless there are no others.
    """
    lengths = [record.length for record in records]
    costs = [record.encoded_tokens for record in records]
    if not buffer_size:
        share = utilisation([[index] for index in range(len(lengths))], lengths, seq_length)
        return Packing(0, 0, len(lengths), 1.0, share, None, None)
    num_packs, num_samples, used, plain, balanced = 0, 0, 0, [], []
    waiting: list[int] = []
    unread = 0
    while unread + buffer_size - len(waiting) <= len(lengths) or not plain:
        end = min(unread + buffer_size - len(waiting), len(lengths))
        part, unread = [*waiting, *range(unread, end)], end
        sizes, encoded = [lengths[index] for index in part], [costs[index] for index in part]
        num_waiting = len(waiting) if len(part) == buffer_size else None
        # As in `VlmTaskEncoder.select_packs`, both times.
        packs, _, left = select_from_buffer(sizes, None, seq_length, np.random.default_rng([seed, 0, len(plain)]),
                                            num_waiting)
        evened, before, _ = select_from_buffer(sizes, encoded, seq_length,
                                               np.random.default_rng([seed, 0, len(plain)]), num_waiting)
        waiting = [part[index] for index in left]
        num_packs, num_samples = num_packs + len(packs), num_samples + len(part) - len(left)
        used += sum(sizes) - sum(sizes[index] for index in left)
        plain.append(imbalance(before))
        balanced.append(imbalance([sum(encoded[index] for index in indices) for indices in evened]))
    has_images = any(costs)
    return Packing(
        buffer_size=buffer_size,
        buffers=len(plain),
        rows=num_packs,
        samples_per_row=num_samples / num_packs,
        utilisation=used / (num_packs * seq_length),
        imbalance=statistics.fmean(plain) if has_images else None,
        imbalance_balanced=statistics.fmean(balanced) if has_images else None,
    )


def pack_all(records: Sequence[Record], chosen: int, seq_length: int, seed: int) -> list[Packing]:
    """Pack with the chosen buffer size, with others that the samples fill, and not at all; by rising size."""
    if not records:
        return []
    sizes = {0, chosen, *(size for size in BUFFER_SIZES if size <= len(records))}
    return [pack(records, size, seq_length, seed) for size in sorted(sizes)]


def spread(values: Sequence[int]) -> dict[str, float]:
    """Return the smallest, median, mean, 95th percentile and largest of some values; empty without values."""
    if not values:
        return {}
    return {
        "min": int(min(values)),
        "median": float(np.median(values)),
        "mean": float(np.mean(values)),
        "p95": float(np.percentile(values, 95)),
        "max": int(max(values)),
    }


def figures(collected: Collected, packings: Sequence[Packing], chosen: int, patch_size: int) -> dict[str, Any]:
    """Return key figures, ready for JSON: counts in samples, images or tokens, sizes in pixels, shares from 0 to 1.

    Patches are counted only where `patch_size` is above 0.
    """
    records = collected.records
    images = [image for record in records for image in record.images]
    videos = [video for record in records for video in record.videos]
    total = sum(record.length for record in records)
    targets = sum(record.target_tokens for record in records)
    text = sum(record.text_tokens for record in records)
    counts = Counter(record.source for record in records)
    return {
        "samples": {
            "read": collected.num_read,
            "good": len(records),
            "bad": collected.bad.total(),
            "distinct": len({(record.source, record.name) for record in records}),
            "in_one_pass": sum(collected.sizes),
        },
        "sources": [
            {"path": path, "subflavors": json.loads(flavors or "{}"), "samples": count, "share": count / len(records),
             "tokens": sum(record.length for record in records if record.source == (path, flavors))}
            for (path, flavors), count in counts.most_common()
        ],
        "tokens": {
            "total": spread([record.length for record in records]),
            "text": spread([record.text_tokens for record in records]),
            "image": spread([record.image_tokens for record in records]),
            "image_share": (total - text) / total if total else 0.0,
            "target_share": targets / total if total else 0.0,
            "target_share_of_text": targets / text if text else 0.0,
        },
        "images": {
            "count": len(images),
            "samples_with_images": sum(bool(record.images) for record in records),
            "height": spread([image.size[0] for image in images]),
            "width": spread([image.size[1] for image in images]),
            "tiles": spread([len(image.tiles) for image in images]),
            "patches": spread([image.patches(patch_size) for image in images]) if patch_size else {},
        },
        "videos": {
            "count": len(videos),
            "samples_with_videos": sum(bool(record.videos) for record in records),
            "height": spread([video.size[0] for video in videos]),
            "width": spread([video.size[1] for video in videos]),
            "frames": spread([video.num_frames for video in videos]),
            "sampled_frames": spread([video.sampled for video in videos]),
            "tokens": spread([video.tokens for video in videos]),
        },
        "packing": {"chosen_buffer_size": chosen, "by_buffer_size": [asdict(packing) for packing in packings]},
        "bad_samples": [
            {"shard": name.partition(" ")[0], "key": name.partition(" ")[2], "reason": reason, "times": times}
            for (name, reason), times in collected.bad.most_common()
        ],
    }
