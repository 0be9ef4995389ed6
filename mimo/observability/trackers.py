"""Trackers that write a run's figures, and answers of its model, to files: JSON Lines and TensorBoard."""

from __future__ import annotations

import base64
import contextlib
import errno
import io
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Literal

import numpy as np

Value = float | None
"""One figure: a number or a truth value, or None if the iteration does not have it."""

GenerationKind = Literal["held-out", "training"]
"""Origin of the prompts of generations."""

# Names that trackers do not draw as curves: the axes, and truth values.
NOT_CURVES = ("iteration", "consumed_samples", "success")
# A skipped iteration consumes no samples, so several of them would share one point on an axis of samples.
NOT_BY_SAMPLES = ("optim/skipped-iterations",)
# Times of a step do not depend on samples, and there are too many of these curves to write them twice.
TIMELINE = "perf/timeline/"
# Limits of what generations.jsonl has of a prompt: answers, images, and characters of each text.
MAX_ANSWERS, MAX_IMAGES, MAX_CHARACTERS = 8, 4, 1500
# Most pixels of a side of these images, because one rank holds all of them in memory.
MAX_SHOWN_SIDE = 256
# Seconds until TensorBoard's event file is opened again after a failure, because each failed attempt costs a thread.
REOPEN_S = 60.0


class Tracker:
    """Destination of figures and of answers of the model, which takes what it has a method for."""

    def log(self, step: int, samples: int, record: Mapping[str, Value]) -> None:
        """Write the figures of iteration `step`, after `samples` consumed samples."""

    def show(self, step: int, generations: Sequence[Generation], kind: GenerationKind) -> None:
        """Write answers of the model."""

    def mark_failed(self) -> None:
        """Tell a server that the run ends with an error. May be called on any thread."""

    def close(self) -> None:
        """Flush and release. A second call does nothing."""


# Groups of curves, and the names in metrics.jsonl that belong to each. The first match counts. A name without a match
# belongs to `train`, where trackers, which sort by name, show `lm loss` first.
_GROUPS = tuple((group, re.compile(pattern)) for group, pattern in (
    ("val", r".* validation"),
    ("moe", r"moe/.*|.*(load_balancing_loss|z_loss|aux_loss)(_layer_\d+)?"),
    ("perf", r"timeline/.*|iteration-time|tokens-per-s-per-gpu|tflops|mfu|(hardware-)?flops/.*|peak-memory-bytes/.*|"
             r"allocation-retries/.*|microbatches|refit-bytes|.*-s(/.*)?"),
    ("data", r"(image-|text-)?tokens|packing-utilisation|bad-samples|encoder-imbalance.*"),
    ("optim", r"grad-norm|num-zeros|learning-rate(/.*)?|loss-scale|batch-size|skipped-iterations|policy-version"),
    ("rollout", r"reward.*|completion-length.*|truncated-completions|(equal-reward|asked)-prompts|rollout-.*"),
    ("policy", r"entropy.*|.*kl.*|.*clipped.*|importance.*|.*dlogp.*|.*ratio.*|.*advantage.*|.*probe.*"),
))


def tag_of(name: str) -> str:
    """Return the tag that trackers use for a figure of metrics.jsonl: its group and name, such as `train/lm loss`."""
    group = next((group for group, pattern in _GROUPS if pattern.fullmatch(name)), "train")
    return f"{group}/{name.removesuffix(' validation').removeprefix(f'{group}/')}"


def curves(record: Mapping[str, Value]) -> dict[str, float]:
    """Return the figures of a record that make curves, by tag."""
    return {tag_of(name): float(value) for name, value in record.items()
            if value is not None and name not in NOT_CURVES}


@dataclass(frozen=True)
class Answer:
    """Text that the model has generated.

    Attributes:
        text: the text, without special tokens.
        reward: its reward; None in supervised training.
        advantage: its advantage over the other answers to the prompt; None if it was not trained on.
        truncated: whether the limit of tokens cut it.
    """

    text: str
    reward: float | None = None
    advantage: float | None = None
    truncated: bool = False


@dataclass(frozen=True)
class Generation:
    """Answers of the model to a sample or prompt.

    Attributes:
        key: key of the sample or prompt.
        answers: one answer to a held-out sample or prompt; all completions of a prompt that was trained on.
        expected: the expected answer.
        prompt: text of the prompt; empty in supervised training, where it is not known.
        images: uint8 `[height, width, channels]` each, 1 or 3 channels; of many, the first ones are enough.
        num_images: number of the prompt's images; None if these are all.
    """

    key: str
    answers: Sequence[Answer]
    expected: str
    prompt: str = ""
    images: Sequence[np.ndarray] = ()
    num_images: int | None = None

    def verdict(self, answer: Answer) -> str:
        """Return the reward or the expected answer, such as `reward 1` or `is '12'`."""
        return f"is {self.expected!r}" if answer.reward is None else f"reward {answer.reward:g}"

    @property
    def said(self) -> list[str]:
        """Lines for the console."""
        return [f"{self.key}: {'read ' if each.reward is None else ''}{each.text!r}, {self.verdict(each)}"
                for each in self.answers]

    def to_dict(self) -> dict[str, Any]:
        """Return what generations.jsonl has of it. Long texts are shortened; there are images as `data:` URLs."""
        return {"key": self.key, "prompt": _shortened(self.prompt), "expected": _shortened(self.expected),
                "num_answers": len(self.answers),
                "answers": [asdict(each) | {"text": _shortened(each.text)} for each in self.answers[:MAX_ANSWERS]],
                "num_images": len(self.images) if self.num_images is None else self.num_images,
                "images": [_data_url(image) for image in self.images[:MAX_IMAGES]]}


def _place(line: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what no two lines of a run have in common."""
    return line.get("iteration"), line.get("kind"), line.get("key")


def _shortened(text: str) -> str:
    """Leave out the middle of a long text: questions and results are often at its end."""
    left_out = len(text) - MAX_CHARACTERS
    if left_out <= 0:
        return text
    half = MAX_CHARACTERS // 2
    return f"{text[:half]} [... {left_out:,} characters ...] {text[-half:]}"


def _data_url(image: np.ndarray) -> str:
    """Return an image, uint8 `[height, width, channels]`, as PNG or JPEG, whichever is smaller."""
    from PIL import Image

    picture = Image.fromarray(image[..., 0] if image.shape[2] == 1 else image)
    encoded = {}
    for kind in ("png", "jpeg"):
        file = io.BytesIO()
        picture.save(file, kind)
        encoded[kind] = file.getvalue()
    smaller = min(encoded, key=lambda kind: len(encoded[kind]))
    return f"data:image/{smaller};base64,{base64.b64encode(encoded[smaller]).decode()}"


def _kept_lines(text: str, last_iteration: int) -> list[str]:
    """Return the complete lines of an earlier file up to an iteration. The last one is cut if its writer was killed."""
    kept = []
    for line in text.splitlines():
        try:
            record: Any = json.loads(line)
        except json.JSONDecodeError:
            continue
        iteration = record.get("iteration") if isinstance(record, dict) else None
        if isinstance(iteration, int) and iteration <= last_iteration:
            kept.append(line)
    return kept


class JsonLines(Tracker):
    """File of one JSON object a line, each with its `iteration`.

    Every line is strict JSON, and the operating system has it when `append` returns. After a failure the file is opened
    again, because a file system that comes back may need that.
    """

    def __init__(self, path: Path, resume_iteration: int = 0) -> None:
        """Open `path`. A new run empties the file; a resumed run drops the lines after `resume_iteration`.

        Raises:
            OSError: the file cannot be written.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        lines: list[str] = []
        if resume_iteration > 0 and path.exists():
            lines = _kept_lines(path.read_text(encoding="utf-8", errors="replace"), resume_iteration)
        # The old file is replaced atomically, so that a kill here cannot lose the history.
        fresh = path.with_name(path.name + ".tmp")
        fresh.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        os.replace(fresh, path)
        self._path = path
        # Up to this size the file holds complete lines.
        self._size = path.stat().st_size
        self._file: FileIO | None = self._open()

    def append(self, data: bytes) -> None:
        """Append a line, its end included. Raises OSError if it cannot be written."""
        try:
            if self._file is None:
                self._file = self._open()
            if self._file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        except OSError:
            with contextlib.suppress(OSError):
                self.close()
            raise
        self._size += len(data)

    def close(self) -> None:
        """Close the file. A second call does nothing. Raises OSError if the disk does not take the rest."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _open(self) -> FileIO:
        """Open the file and cut off an incomplete last line, which a full disk may leave."""
        file = FileIO(self._path, "a")
        if file.tell() > self._size:
            file.truncate(self._size)
        self._size = min(self._size, file.seek(0, os.SEEK_END))
        return file


class JsonlTracker(JsonLines):
    """Writes the figures: `iteration`, `consumed_samples`, `wall_time` (seconds since 1970) and those of the record."""

    def log(self, step: int, samples: int, record: Mapping[str, Value]) -> None:
        """Append one line; None becomes null. Raises OSError if it cannot be written."""

        def json_value(value: Value) -> float | str | None:
            # JSON has neither NaN nor infinity.
            if isinstance(value, float) and not math.isfinite(value):
                return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
            return value

        line = {**record, "iteration": step, "consumed_samples": samples, "wall_time": time.time()}
        first = ("iteration", "consumed_samples", "wall_time")
        ordered = {name: json_value(line[name]) for name in (*first, *(name for name in line if name not in first))}
        self.append((json.dumps(ordered, allow_nan=False) + "\n").encode())


class GenerationsTracker(JsonLines):
    """Writes answers of the model with their prompts and images, up to a size. Figures are left to `JsonlTracker`.

    A line depends only on what it shows, so that a resumed run continues the file exactly as it would have been. If a
    finished run is extended, the answers of its old end stay.
    """

    def __init__(self, path: Path, resume_iteration: int, limit_bytes: int, say: Callable[[str], None]) -> None:
        """Open `path` like `JsonLines`.

        `say` is called once, when a line would make the file larger than `limit_bytes`.
        """
        super().__init__(path, resume_iteration)
        # A finished run that is started again evaluates again.
        self._kept = {_place(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()}
        self._limit, self._say, self._said = limit_bytes, say, False

    def show(self, step: int, generations: Sequence[Generation], kind: GenerationKind) -> None:
        """Append a line for each prompt. Raises OSError if one cannot be written."""
        for each in generations:
            line = {"iteration": step, "kind": kind, **each.to_dict()}
            if _place(line) in self._kept:
                continue
            data = (json.dumps(line, allow_nan=False) + "\n").encode()
            if self._size + len(data) <= self._limit:
                self.append(data)
            elif not self._said:
                self._said = True
                self._say(f"{self._path} has reached its size (--generations-mib): answers of iteration {step} and "
                          "later ones may be missing in it")


class TensorBoardTracker(Tracker):
    """Writes TensorBoard scalars by iteration, and on request also as `"<tag> vs samples"` by consumed samples.

    The figures of a step's timeline are only by iteration. All figures of an axis are one event, because an event for
    each figure, as `SummaryWriter.add_scalar` writes it, would take milliseconds of every step.
    """

    # Seconds that an event may stay in memory; a rank that is forced to exit loses no more than that.
    FLUSH_S = 10

    def __init__(self, folder: Path, *, by_samples: bool = False) -> None:
        """Open a new event file in `folder`.

        Raises:
            ValueError: the package tensorboard is not installed.
            OSError: the folder cannot be written.
        """
        try:
            from tensorboard.compat.proto.summary_pb2 import Summary
            from torch.utils.tensorboard import FileWriter
        except ModuleNotFoundError as error:
            raise ValueError(f"--tensorboard-dir {folder}: the package tensorboard is not installed") from error
        self._make: Callable[[], Any] = lambda: FileWriter(str(folder), flush_secs=self.FLUSH_S)
        self._summary, self._reopen_at, self._by_samples = Summary, 0.0, by_samples
        self._writer: Any = self._make()

    def log(self, step: int, samples: int, record: Mapping[str, Value]) -> None:
        """Add a point to each curve of the record.

        Raises:
            OSError: these or earlier points could not be written. A later call opens a new event file.
        """
        if self._writer is None:
            if time.monotonic() < self._reopen_at:
                return
            self._reopen_at = time.monotonic() + REOPEN_S
            self._writer = self._make()
        points = curves(record)
        try:
            self._add(points, step)
            if self._by_samples:
                self._add({f"{name} vs samples": value for name, value in points.items()
                           if name not in NOT_BY_SAMPLES and not name.startswith(TIMELINE)}, samples)
        except OSError:
            self._drop()
            raise

    def show(self, step: int, generations: Sequence[Generation], kind: GenerationKind) -> None:
        """Add a table of held-out answers, and the images of their samples. Raises OSError if that fails."""
        from torch.utils.tensorboard import summary

        if self._writer is None or not generations or kind != "held-out":
            return
        rows = [[cell.replace("|", "\\|").replace("\n", "<br>")
                 for cell in (each.key, answer.text, each.verdict(answer))]
                for each in generations for answer in each.answers]
        table = "\n".join(f"| {' | '.join(row)} |" for row in [["sample", "answer", "verdict"], ["---"] * 3, *rows])
        try:
            self._writer.add_summary(summary.text("generations/answers", table), step)
            for each in generations:
                for number, image in enumerate(each.images):
                    name = f"generations/{each.key}" + (f"/{number}" if number else "")
                    self._writer.add_summary(summary.image(name, image, dataformats="HWC"), step)
        except OSError:
            self._drop()
            raise

    def _drop(self) -> None:
        """Close an event file after a failure: the thread that writes it has ended."""
        failed, self._writer, self._reopen_at = self._writer, None, time.monotonic() + REOPEN_S
        with contextlib.suppress(OSError):
            failed.close()

    def _add(self, points: Mapping[str, float], position: int) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in points.items()]
        self._writer.add_summary(self._summary(value=values), position)

    def close(self) -> None:
        """Flush and close the event file. A second call does nothing. Raises OSError if the disk refuses it."""
        if self._writer is not None:
            self._writer.close()


class FileTracker(Tracker):
    """Wraps a tracker of files. If the disk fails, this is reported once and the run continues."""

    def __init__(self, path: Path, tracker: Tracker, say: Callable[[str], None]) -> None:
        self._path, self._tracker, self._say = path, tracker, say
        self._said = False

    def log(self, step: int, samples: int, record: Mapping[str, Value]) -> None:
        with self._failures_reported():
            self._tracker.log(step, samples, record)

    def show(self, step: int, generations: Sequence[Generation], kind: GenerationKind) -> None:
        with self._failures_reported():
            self._tracker.show(step, generations, kind)

    def close(self) -> None:
        with self._failures_reported():
            self._tracker.close()

    @contextlib.contextmanager
    def _failures_reported(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._said:
                self._said = True
                self._say(f"{self._path}: cannot be written: {error}; the run goes on and tries again with later "
                          "figures")
