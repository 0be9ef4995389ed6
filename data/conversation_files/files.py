"""Files of records with random access: JSON lines, JSON lists, Parquet, and Arrow as `datasets` saves it."""

from __future__ import annotations

import errno
import json
import mmap
import os
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote

import numpy as np

from data.conversation_files.remote import Cache, is_url
from data.conversations import Video, from_data_url

if TYPE_CHECKING:
    import pyarrow

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# White space between the values of a JSON document.
JSON_SPACE = re.compile(r"[ \t\r\n]*")
# Bytes of a file that are examined at a time.
CHUNK = 1 << 24
# Longest line, in bytes, that is read to find out whether it has only blanks.
MOST_BLANKS = 64
# Most entries of a folder, which may have millions of images, that a hint examines.
HINT_ENTRIES = 1000
JSON_SUFFIXES = (".jsonl", ".json")
SUFFIXES = (*JSON_SUFFIXES, ".parquet", ".arrow")
HINT = "; names are relative to --image-folder, or else to the folder of the data"


class RecordFile(Protocol):
    """A file of records.

    Attributes:
        path: the file.
        block_starts: number of the first record of each block that can only be read as a whole, then the number of all
            records; empty if records can be read one by one.
    """

    path: Path
    block_starts: Sequence[int]

    def __len__(self) -> int: ...

    def read_block(self, block: int) -> Any:
        """Read a block of a file that has some. Raises ValueError if it is damaged."""
        ...

    def raw(self, index: int, block: Any = None) -> Any:
        """Return a record as it is stored; in a file with blocks, `block` is the record's block.

        Raises:
            ValueError: the file has become shorter.
        """
        ...

    def parse(self, raw: Any) -> Any:
        """Parse what `raw` returned. Raises ValueError if it is damaged."""
        ...

    def name(self, index: int) -> str:
        """Return the place of a record in its file, without spaces, such as `line:12`."""
        ...


class JsonRecords(RecordFile):
    """A JSON file with a record on each line, or with one list of records, whichever its content shows.

    Only the positions of the records are kept in memory, and several processes may use the same object. The file is
    opened for each record, because a data set may have more files than a process may keep open.

    Args:
        path: the file.

    Raises:
        ValueError: the file has neither form; the message names file and line.
    """

    block_starts = ()

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.stat().st_size:
            raise ValueError(f"{path}: is empty")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            first = re.compile(rb"(?:%s)?\s*(\S)" % BYTE_ORDER_MARK).match(content)
            if first is None:
                raise ValueError(f"{path}: holds white space only")
            if first[1] == b"[":
                self._starts, self._ends, self._lines = _list_places(path, content)
            elif first[1] == b"{":
                self._starts, self._ends, self._lines = _line_places(content)
                self._check_lines(content)
            else:
                raise ValueError(f"{path}: begins with {first[1].decode('latin-1')!r}; expected JSON, an object "
                                 "on each line or one list of objects")
        if not len(self._starts):
            raise ValueError(f"{path}: has no record")

    def _check_lines(self, content: mmap.mmap) -> None:
        """Refuse a JSON document that is one object over several lines, of which each line would be a bad sample."""
        first = content[self._starts[0] : self._ends[0]]
        try:
            json.loads(first)
        except ValueError as error:
            if self.path.suffix == ".json":
                raise ValueError(f"{self.path}: is neither a list of objects nor an object on each line; write the "
                                 f"list of records alone ({error})") from error

    def __len__(self) -> int:
        return len(self._starts)

    def raw(self, index: int, block: Any = None) -> bytes:
        start, end = int(self._starts[index]), int(self._ends[index])
        with self.path.open("rb", buffering=0) as file:
            data = os.pread(file.fileno(), end - start, start)
        if len(data) != end - start:
            raise ValueError(f"{self.path}: has become shorter")
        return data

    def parse(self, raw: bytes) -> Any:
        try:
            return json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"is not JSON: {error}") from error

    def name(self, index: int) -> str:
        return f"line:{self._lines[index]}"


def _line_places(content: mmap.mmap) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return start, end and number of each line that is not empty. Blanks are empty, unless there are very many."""
    size = len(content)
    breaks = [start + np.flatnonzero(np.frombuffer(content[start : start + CHUNK], np.uint8) == ord("\n"))
              for start in range(0, size, CHUNK)]
    ends = np.concatenate([*breaks, [size]]).astype(np.int64)
    starts = np.concatenate([[0], ends[:-1] + 1]).astype(np.int64)
    if content[: len(BYTE_ORDER_MARK)] == BYTE_ORDER_MARK:
        starts[0] = len(BYTE_ORDER_MARK)
    lengths = ends - starts
    kept = lengths > 0
    for index in np.flatnonzero(kept & (lengths <= MOST_BLANKS)):  # also the line breaks of Windows
        kept[index] = bool(content[starts[index] : ends[index]].strip())
    return starts[kept], ends[kept], np.flatnonzero(kept) + 1


def _list_places(path: Path, content: mmap.mmap) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return start, end and line of each element of a JSON list."""
    # One character for each byte, so that positions in the text are positions in the file. Only strings have bytes that
    # are not ASCII, and the content of strings does not matter here.
    text = content[:].decode("latin-1")
    decoder = json.JSONDecoder()
    places: list[tuple[int, int]] = []
    lines: list[int] = []
    line, counted = 1, 0
    try:
        at = JSON_SPACE.match(text, text.index("[") + 1).end()  # type: ignore[union-attr]
        while text[at : at + 1] != "]":
            _, end = decoder.raw_decode(text, at)
            line, counted = line + text.count("\n", counted, at), at
            places.append((at, end))
            lines.append(line)
            at = JSON_SPACE.match(text, end).end()  # type: ignore[union-attr]
            if text[at : at + 1] == ",":
                at = JSON_SPACE.match(text, at + 1).end()  # type: ignore[union-attr]
            elif text[at : at + 1] != "]":
                raise json.JSONDecodeError("expected , or ]", text, at)
        after = JSON_SPACE.match(text, at + 1).end()  # type: ignore[union-attr]
        if after != len(text):
            raise json.JSONDecodeError("text after the list", text, after)
    except RecursionError as error:
        raise ValueError(f"{path}: is not a JSON list that can be read: the record at line {line} or after it is "
                         "nested too deeply") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: is not a JSON list: line {error.lineno} column {error.colno}: {error.msg}"
                         ) from error
    starts, ends = np.array(places, np.int64).reshape(-1, 2).T
    return starts, ends, np.array(lines, np.int64)


class TableRecords(RecordFile):
    """A file of rows, which pyarrow has parsed."""

    def parse(self, raw: Any) -> Any:
        return raw

    def name(self, index: int) -> str:
        return f"row:{index + 1}"


class ParquetRecords(TableRecords):
    """A Parquet file, whose row groups are its blocks. Raises ValueError if it is not one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        groups = self._open().metadata
        sizes = [groups.row_group(group).num_rows for group in range(groups.num_row_groups)]
        self.block_starts = [0, *accumulate(sizes)]
        if not self.block_starts[-1]:
            raise ValueError(f"{path}: has no record")

    def _open(self) -> Any:
        # Importing it takes time, and JSON files do not need it.
        import pyarrow
        from pyarrow import parquet

        try:
            return parquet.ParquetFile(self.path, pre_buffer=False)
        except pyarrow.ArrowException as error:
            raise ValueError(f"{self.path}: is not a Parquet file: {error}") from error

    def __len__(self) -> int:
        return self.block_starts[-1]

    def read_block(self, block: int) -> pyarrow.Table:
        import pyarrow

        # Workers are forks, in which Arrow's threads do not run, and which must not share an open file.
        with self._open() as file:
            try:
                return file.read_row_group(block, use_threads=False)
            except (pyarrow.ArrowException, IndexError) as error:
                raise ValueError(f"{self.path}: cannot read row group {block}: {error}") from error

    def raw(self, index: int, block: Any = None) -> Any:
        start = self.block_starts[bisect_right(self.block_starts, index) - 1]
        return _row(block, index - start)


class ArrowRecords(TableRecords):
    """A file of Arrow batches, mapped into memory. Raises ValueError if it is not one."""

    block_starts = ()

    def __init__(self, path: Path) -> None:
        import pyarrow

        self.path = path
        try:
            content = pyarrow.memory_map(str(path))
            if content.read(6) == b"ARROW1":
                file = pyarrow.ipc.open_file(content)
                self._batches = [file.get_batch(number) for number in range(file.num_record_batches)]
            else:  # a stream, as `datasets` writes it
                content.seek(0)
                self._batches = list(pyarrow.ipc.open_stream(content))
        except pyarrow.ArrowException as error:
            raise ValueError(f"{path}: is not an Arrow file: {error}") from error
        self._starts = [0, *accumulate(batch.num_rows for batch in self._batches)]
        if not self._starts[-1]:
            raise ValueError(f"{path}: has no record")

    def __len__(self) -> int:
        return self._starts[-1]

    def raw(self, index: int, block: Any = None) -> Any:
        number = bisect_right(self._starts, index) - 1
        return _row(self._batches[number], index - self._starts[number])


def _row(table: pyarrow.Table | pyarrow.RecordBatch, row: int) -> Any:
    """Return a row as plain objects. A key that a record of a table lacks is null there, so nulls are left out."""
    (record,) = table.slice(row, 1).to_pylist()
    return _without_nulls(record)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def open_file(path: Path) -> RecordFile:
    """Open a file of records, once in a process while it stays the same. Raises ValueError if that is not possible."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path}: expected a file in {', '.join(SUFFIXES)}")
    try:
        status = path.stat()
        return _open(path, status.st_size, status.st_mtime_ns)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error


@cache
def _open(path: Path, size: int, modified: int) -> RecordFile:
    """Open a file. Its size and the time of its last change are arguments, so that a changed file is opened again."""
    kinds: dict[str, type[RecordFile]] = {".parquet": ParquetRecords, ".arrow": ArrowRecords}
    return kinds.get(path.suffix, JsonRecords)(path)  # type: ignore[call-arg]


class MissingImageError(ValueError):
    """A record names an image or a video that is not there.

    Attributes:
        place: the name in the record; empty if no file can have it.
    """

    def __init__(self, message: str, place: str) -> None:
        super().__init__(message)
        self.place = place


class FolderImages:
    """Images and videos of a record, each a file, bytes in the record itself, or a `data:` URL.

    Attributes:
        folder: folder to which names are relative.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def images(self) -> list[tuple[str, bytes]]:
        """Return nothing, because a record has only the images that it names."""
        return []

    def videos(self) -> list[tuple[str, Video]]:
        """Return nothing, because a record has only the videos that it names."""
        return []

    def load(self, place: Any, kind: str = "image") -> tuple[str, bytes]:
        """Return name and bytes of an image.

        Args:
            place: its name, bytes or URL, or a mapping of `datasets` with them.
            kind: `image` or `video`, for messages.

        Raises:
            ValueError: there is no such image.
            OSError: the file system fails.
        """
        if isinstance(place, Mapping):  # an image of `datasets`
            data = place.get("bytes")
            if isinstance(data, bytes):
                return str(place.get("path") or "of the record"), data
            place = place.get("path")
        if isinstance(place, bytes):
            return "of the record", place
        if not isinstance(place, str):
            article = "an" if kind == "image" else "a"
            raise ValueError(f"{article} {kind} is {type(place).__name__}, expected the name of a file")
        if place.startswith("data:"):
            return from_data_url(place, kind)
        return place, self._read(place, kind)

    def _read(self, place: str, kind: str) -> bytes:
        if is_url(place):
            raise ValueError(f"{kind} {place[:200]!r} is on the network, from where only files below --image-folder "
                             f"are read; give {place[:200].rpartition('/')[0]!r} or a folder above it")
        path = self.folder / place.removeprefix("file://")
        try:
            return path.read_bytes()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError) as error:
            raise MissingImageError(f"{kind} {place[:200]!r}: there is no file {path}", place) from error
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            named, example = ("an image", "image/png") if kind == "image" else ("a video", "video/mp4")
            raise MissingImageError(f"{kind} {place[:60]!r}...: is too long for the name of a file; {named} in base64 "
                                    f"needs `data:{example};base64,` before it", "") from None

    def load_video(self, place: Any) -> tuple[str, Video]:
        """Return name and content of a video. A file stays on disk, of which a packing buffer may hold thousands.

        Raises the errors of `load`.
        """
        name = place.get("path") if isinstance(place, Mapping) and not place.get("bytes") else place
        if isinstance(name, str) and not name.startswith("data:"):
            path = self.folder / name.removeprefix("file://")
            try:
                if path.is_file():
                    return name, path
            except OSError:
                pass  # too long for a file name, which `load` reports
        return self.load(place, "video")

    def hint(self, place: str) -> str:
        """Return the end of a message that names a nearby folder with a missing image. It may take seconds."""
        if not place:
            return ""
        name = Path(place.removeprefix("file://"))
        with os.scandir(self.folder) as entries:
            children = sorted(self.folder / entry.name for entry in islice(entries, HINT_ENTRIES) if entry.is_dir())
        for folder in (*children, *self.folder.parents[:3]):
            if (folder / name).is_file():
                return f"; --image-folder {folder} would have it"
        for count in range(1, len(name.parts)):
            if self.folder.joinpath(*name.parts[count:]).is_file():
                return (f", but {self.folder.joinpath(*name.parts[count:])}; put the images into "
                        f"{self.folder.joinpath(*name.parts[:count])}, as the record names them")
        return HINT


class StoreImages(FolderImages):
    """Images and videos of a record below a URL; otherwise like `FolderImages`.

    Args:
        base: URL to which names are relative. Images with a URL of their own have to be below it.
        cache: cache of the images.
    """

    def __init__(self, base: str, cache: Cache) -> None:
        self._base, self._cache = base.rstrip("/"), cache

    def load_video(self, place: Any) -> tuple[str, Video]:
        # Returns the content, because the file in the cache may be deleted before it is decoded.
        return self.load(place, "video")

    def _read(self, place: str, kind: str) -> bytes:
        name = place.removeprefix(f"{self._base}/")
        # `::` would chain file systems.
        if is_url(name) or name.startswith(("/", "file:")) or ".." in name.split("/") or "::" in name:
            raise ValueError(f"{kind} {place[:200]!r} is not below --image-folder {self._base}, the only place from "
                             "which files are read")
        # The name of a file may hold characters that mean something else in an address.
        is_file_name = name == place and self._base.startswith(("http://", "https://"))
        url = f"{self._base}/{quote(name) if is_file_name else name}"
        try:
            return self._cache.image(url)
        except FileNotFoundError as error:
            raise MissingImageError(f"{kind} {place[:200]!r}: there is no {url}", place) from error

    def hint(self, place: str) -> str:
        return HINT


def images_of(place: Path | str, cache: Cache) -> FolderImages:
    """Return the images of a folder or, if `place` is a str, below a URL."""
    return FolderImages(place) if isinstance(place, Path) else StoreImages(place, cache)
