"""Copy models and data to the node's own disk, once per node, before a run reads them from there.

    python scripts/stage.py /shared/models/Qwen3-4B /shared/gsm8k --to /local/stage
    srun --ntasks-per-node=1 python scripts/stage.py hf://Qwen/Qwen3-4B@COMMIT --to /local/stage
    model=$(python scripts/stage.py /shared/models/Qwen3-4B --to /local/stage --print-path)

A source is a folder or a file on a shared file system, or hf://organisation/name[@revision] on the Hugging Face Hub
(hf://datasets/... for data). It becomes TO/NAME, where NAME is the last part of its path. Links are followed. A file
that is there with the right size and time is not copied again, an interrupted copy continues where it stopped, and
files that the source no longer has are removed. If several processes of a node run this program, one copies. The others
wait for it and end with its exit code. TO/.staged.json records which files are there.

A child process reads each file, so that a read that hangs can be given up: the process is killed after --timeout-s
without a byte, and the file is tried again, --retries times at most. The last line says what was done, on stdout, or on
stderr with --print-path. The exit code is 0, 1 if a file could not be copied, or 2 for flags that cannot work. The
program needs no torch.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from stage_files import record
from stage_files.children import Children, Progress, StageError, format_gb
from stage_files.folders import (
    Copy,
    Options,
    check_space,
    copy_all,
    damaged,
    list_sources,
    make_folders,
    missing,
    remove_gone,
    remove_parts,
)
from stage_files.hub import PREFIX, parse, stage_hub
from stage_files.record import NodeLock, Recorded, StagedSource

COUNTS = ("copied", "copied_bytes", "there", "there_bytes", "removed")


def read_flags(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="folder, file or hf://organisation/name[@revision]")
    parser.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="folder on a disk of the node")
    parser.add_argument("--include", action="append", default=[], metavar="PATTERN",
                        help="only files whose relative name matches, as '*.safetensors'; may be given several times")
    parser.add_argument("--timeout-s", type=float, default=120.0,
                        help="seconds without progress after which a file is tried again (default: 120)")
    parser.add_argument("--retries", type=int, default=2, help="further attempts of a file (default: 2)")
    parser.add_argument("--workers", type=int, default=4, help="files at a time (default: 4)")
    parser.add_argument("--limit-mb-s", type=float, default=0.0,
                        help="read folders and files no faster than this, MB (10^6 bytes) a second; 0: no limit")
    parser.add_argument("--block-mib", type=int, default=32,
                        help="MiB between two syncs to disk; an interrupted copy loses up to twice this (default: 32)")
    parser.add_argument("--verify", action="store_true", help="compare the checksums of files that are there")
    parser.add_argument("--dry-run", action="store_true", help="say what would be copied, write nothing")
    parser.add_argument("--print-path", action="store_true", help="on stdout, print each source's local path alone")
    flags = parser.parse_args(arguments)
    for name, least in (("timeout_s", 0.0), ("workers", 1), ("block_mib", 1), ("retries", 0), ("limit_mb_s", 0.0)):
        value = vars(flags)[name]
        if not least <= value < float("inf") or (name == "timeout_s" and not value):
            parser.error(f"--{name.replace('_', '-')} {value:g} is too small")
    flags.to = Path(os.path.abspath(flags.to))
    flags.include = tuple(flags.include)
    try:
        flags.places = find_places(flags.sources, flags.to)
    except ValueError as error:
        parser.error(str(error))
    return flags


def find_places(sources: list[str], folder: Path) -> dict[str, Path]:
    """Return where each source goes, by source as given. No source is opened.

    Raises:
        ValueError: two sources have one name, or one has none.
    """
    places: dict[str, Path] = {}
    for source in sources:
        name = parse(source).name if source.startswith(PREFIX) else Path(os.path.abspath(source)).name
        if not name:
            raise ValueError(f"{source} has no name that its copy could have")
        other = next((other for other, place in places.items() if place.name == name and other != source), None)
        if other is not None:
            raise ValueError(f"{other} and {source} would both become {folder / name}: stage them --to two folders")
        places[source] = folder / name
    return places


def stage(flags: argparse.Namespace, progress: Progress) -> Counter[str]:
    """Copy what is missing and return files and bytes by COUNTS. Raises StageError, which names the file."""
    known = record.load(flags.to)
    before = json.dumps(known, default=vars)
    try:
        counts = stage_local(flags, known, progress)
        for source, place in flags.places.items():
            if source.startswith(PREFIX):
                if place.is_symlink():
                    raise StageError(f"{place} is a link; a copy cannot be made there")
                found = stage_hub(parse(source), flags.to, flags.include, known, progress, workers=flags.workers,
                                  timeout_s=flags.timeout_s, retries=flags.retries, dry_run=flags.dry_run,
                                  verify=flags.verify)
                counts.update(found)
    finally:
        # Files copied before an error stay recorded.
        if not flags.dry_run and json.dumps(known, default=vars) != before:
            record.save(flags.to, known)
    return counts


def stage_local(flags: argparse.Namespace, known: dict[str, StagedSource], progress: Progress) -> Counter[str]:
    """Stage the sources that are folders and files."""
    places = {os.path.abspath(source): place for source, place in flags.places.items()
              if not source.startswith(PREFIX)}
    if not places:
        return Counter()
    options = Options(flags.include, flags.block_mib << 20, round(1e6 * flags.limit_mb_s / flags.workers), flags.verify)
    with Children(flags.workers, flags.timeout_s, flags.retries) as children:
        listings = list_sources(children, places)
        absent, there = missing(listings, options)
        if options.verify:
            wrong = damaged(children, there, known, progress)
            for copy in wrong:
                progress.say(f"{copy.target} differs from {copy.source}: copying it again")
            absent, there = [*absent, *wrong], [copy for copy in there if copy not in wrong]
        counts = Counter({"copied": len(absent), "copied_bytes": sum(copy.wanted.size for copy in absent),
                          "there": len(there), "there_bytes": sum(copy.wanted.size for copy in there)})
        if absent and not flags.dry_run:
            remove_parts(listings, absent)
        check_space(flags.to, absent)
        if flags.dry_run:
            return counts
        earlier = {listing.place.name: known.get(listing.place.name, StagedSource("")) for listing in listings}
        for listing in listings:
            # Files staged with other patterns stay as long as the source has them.
            kept = {name: found for name, found in earlier[listing.place.name].files.items() if name in listing.files}
            known[listing.place.name] = StagedSource(listing.source, [], kept)
        for copy in there:
            known[copy.listing.place.name].files.setdefault(copy.name, copy.wanted)
        make_folders(listings, absent, options)
        progress.total += sum(copy.wanted.size for copy in absent)

        def copied(copy: Copy, sha256: str) -> None:
            known[copy.listing.place.name].files[copy.name] = Recorded(copy.wanted.size, copy.wanted.mtime_ns, sha256)

        copy_all(children, absent, options, progress, copied)
    counts["removed"] = sum(remove_gone(listing, earlier[listing.place.name]) for listing in listings)
    return counts


def request_of(flags: argparse.Namespace) -> str:
    """Return a description that is equal for two processes with the same work."""
    return json.dumps([sorted(map(os.path.abspath, flags.sources)), sorted(flags.include), flags.verify])


def run(flags: argparse.Namespace, progress: Progress) -> Counter[str]:
    """Stage, or wait for another process of this node that does. Raises StageError."""
    if flags.dry_run:
        return stage(flags, progress)
    try:
        flags.to.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StageError(f"--to {flags.to}: {error.strerror}") from error
    with NodeLock(flags.to, request_of(flags)) as lock:
        done = lock.acquire(progress.say)
        if done is not None:
            if done["error"]:
                raise StageError(f"process {done['pid']} of this node failed: {done['error']}")
            counts = Counter(done["counts"])
            return Counter({"there": counts["copied"] + counts["there"],
                            "there_bytes": counts["copied_bytes"] + counts["there_bytes"]})
        try:
            counts = stage(flags, progress)
        except (StageError, OSError) as error:
            lock.finish({"error": str(error), "counts": {}})
            raise StageError(str(error)) from error
        lock.finish({"error": "", "counts": dict(counts)})
        return counts


def summary(flags: argparse.Namespace, host: str, counts: Counter[str], seconds: float) -> str:
    values: dict[str, Any] = {name: counts[name] for name in COUNTS}
    verb = "to copy" if flags.dry_run else "copied"
    removed = f", {values['removed']} removed" if values["removed"] else ""
    noun = "file" if values["copied"] == 1 else "files"
    return (f"{host}: {flags.to}: {values['copied']} {noun} {verb} ({format_gb(values['copied_bytes'])}), "
            f"{values['there']} already there ({format_gb(values['there_bytes'])}){removed}, {seconds:.1f} s")


def main(arguments: list[str] | None = None) -> int:
    flags, began = read_flags(arguments), time.monotonic()
    progress = Progress(socket.gethostname())
    try:
        counts = run(flags, progress)
    except StageError as error:
        print(f"{progress.host}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{progress.host}: interrupted; the same command continues from here", file=sys.stderr)
        return 130
    line = summary(flags, progress.host, counts, time.monotonic() - began)
    print(line, file=sys.stderr if flags.print_path else sys.stdout)
    if flags.print_path:
        print("\n".join(str(flags.places[source]) for source in flags.sources))
    return 0


if __name__ == "__main__":
    sys.exit(main())
