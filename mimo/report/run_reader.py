"""Reader of a run's folder: figures by column, flags, steps of all ranks, and what is broken."""

from __future__ import annotations

import json
import math
import re
import tomllib
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mimo.text import counted

METRICS, FLAGS, START, STALL_SUMMARY = "metrics.jsonl", "run_config.toml", "startup.json", "stall-summary.txt"
GENERATIONS = "generations.jsonl"
IMAGE_URL = re.compile(r"data:image/(png|jpeg);base64,[A-Za-z0-9+/=]+")
# The name of every figure of an evaluation ends like this.
EVALUATED = " validation"
# Every record of an iteration has this key, in every kind of run.
STEP_KEY = "iteration-time"
# Most characters of the report of a stall that the page shows.
SHOWN_OF_STALL = 4000
# Seconds within which all reports of one stall are written.
SAME_STALL_S = 10.0

# Most steps of all ranks that are read, because the files of thousands of ranks are large.
MAX_STEPS = 6
STEP_FILE = re.compile(r"step-(\d+)\.json")

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Table:
    """Records as columns, by iteration.

    Attributes:
        iterations: int64 `[n]`, increasing; 1 for the first of a run.
        columns: float64 `[n]` by key, NaN where a record has none.
    """

    iterations: NDArray[np.int64]
    columns: Mapping[str, Floats]

    def __len__(self) -> int:
        return len(self.iterations)

    def get(self, key: str) -> Floats:
        """Return a column, or NaN for every record if no record has this key."""
        return self.columns.get(key, np.full(len(self), math.nan))

    def has(self, key: str) -> bool:
        """Whether any record has a finite figure of this key."""
        return key in self.columns and bool(np.isfinite(self.columns[key]).any())

    def __getitem__(self, rows: slice | NDArray[Any]) -> Table:
        """Select records by a slice, a mask or their indices."""
        return Table(self.iterations[rows], {key: column[rows] for key, column in self.columns.items()})


@dataclass(frozen=True)
class Predicted:
    """Prediction of `mimo plan` for a run.

    Attributes:
        step_s: seconds of a step.
        bound_s: the same if transfers took no time and images were shared out evenly.
        tokens_per_s: tokens of text and images without padding, per GPU.
        memory_gib: allocated memory of the fullest rank, at its peak.
        fullest: description of that rank.
        other_data: whether the prediction has another data set, or other flags of it, than the run.
    """

    step_s: float
    bound_s: float
    tokens_per_s: float
    memory_gib: float
    fullest: str
    other_data: bool = False


@dataclass(frozen=True)
class Run:
    """Everything that the page needs of a run.

    Attributes:
        path: its folder.
        steps: figures of the iterations.
        evaluations: figures of the evaluations, whose keys end in ` validation`.
        flags: flags of the run by section; empty if `run_config.toml` is missing or broken.
        timelines: `timeline/step-N.json` by iteration, a few of them.
        num_timelines: number of these files.
        start: seconds until the end of the first iteration by phase, of `startup.json`; empty without one.
        problems: sentences about the run or its files, each on something that went wrong.
        stall: report of a stall, shortened; empty without one.
        generations: answers of the model, lines of generations.jsonl in their order.
        predicted: prediction of `mimo plan` for it; None if none was given.
    """

    path: Path
    steps: Table
    evaluations: Table
    flags: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    timelines: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    num_timelines: int = 0
    start: Mapping[str, float] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    stall: str = ""
    generations: tuple[Mapping[str, Any], ...] = ()
    predicted: Predicted | None = None

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def learns_from_rewards(self) -> bool:
        """Whether this is a run of reinforcement learning."""
        return self.steps.has("reward")

    @property
    def modules(self) -> list[str]:
        """Modules with figures of their own, as the run orders them."""
        found: list[str] = []
        for prefix in ("timeline/", "peak-memory-bytes/"):
            for key in self.steps.columns:
                module = key.removeprefix(prefix).removesuffix("/step-s")
                if key in (f"{prefix}{module}/step-s", f"peak-memory-bytes/{module}") and module not in found:
                    found.append(module)
        return found

    @property
    def planned_iterations(self) -> int | None:
        """Iterations that the flags ask for; None if they do not say."""
        train = self.flags.get("train", {})
        if isinstance(train.get("train-iters"), int):
            return int(train["train-iters"])
        samples, batch = train.get("train-samples"), train.get("global-batch-size")
        if not isinstance(samples, int) or not isinstance(batch, int) or batch <= 0:
            return None
        return -(-samples // batch)  # the last iteration may go past them


def _figure(value: object) -> float:
    """Return a value of a record as a number. null and everything that is no number become NaN."""
    if isinstance(value, bool | int | float):
        return float(value)
    return {"Infinity": math.inf, "-Infinity": -math.inf}.get(value, math.nan) if isinstance(value, str) else math.nan


class _Columns:
    """Collects records as columns of numbers; those of a long run are too many to keep as they are."""

    def __init__(self) -> None:
        self._count = 0
        self._columns: dict[str, array[float]] = {}

    def add(self, record: Mapping[str, Any]) -> None:
        for key, value in record.items():
            column = self._columns.get(key)
            if column is None:
                column = self._columns[key] = array("d")
            if len(column) < self._count:
                column.extend(repeat(math.nan, self._count - len(column)))  # of earlier records without this key
            # A long run has millions of values, most of which need no conversion.
            column.append(value if type(value) is float else _figure(value))
        self._count += 1

    def table(self) -> Table:
        """Return all records. If an iteration has several, the last one counts."""
        full = {key: np.append(column, np.full(self._count - len(column), math.nan))
                for key, column in self._columns.items()}
        every = full.get("iteration", np.empty(0)).astype(np.int64)
        # `np.unique` finds the first place of a value. Reversed, this is the last record of an iteration.
        iterations, places = np.unique(every[::-1], return_index=True)
        return Table(iterations, {key: column[::-1][places] for key, column in full.items()})


def _parsed(text: bytes) -> Any:
    """Return a JSON document, or None if it is broken, like the last line of a run that was killed may be."""
    try:
        return json.loads(text)
    except ValueError:  # not JSON, or not UTF-8
        return None


# Each reader of a file returns what it could read, and adds sentences about what is broken to `problems`.


def _read_metrics(path: Path, problems: list[str]) -> tuple[Table, Table]:
    steps, evaluations, broken, last_is_broken = _Columns(), _Columns(), 0, False
    with path.open("rb") as file:
        for line in file:
            if not line.strip():
                last_is_broken = False
                continue
            record = _parsed(line)
            last_is_broken = not isinstance(record, dict) or not isinstance(record.get("iteration"), int)
            if last_is_broken:
                broken += 1
            elif STEP_KEY in record:
                steps.add(record)
            elif any(key.endswith(EVALUATED) for key in record):
                evaluations.add(record)
    if broken:
        which = "The last line" if broken == 1 and last_is_broken else counted(broken, "line")
        problems.append(f"{which} of {METRICS} cannot be read and {'is' if broken == 1 else 'are'} left out"
                        + (": the run ended while it was written." if last_is_broken else "."))
    return steps.table(), evaluations.table()


def _read_flags(path: Path, problems: list[str]) -> dict[str, dict[str, Any]]:
    unknown, found = "what the run was meant to be is not known.", {}
    if not path.is_file():
        problems.append(f"There is no {FLAGS}: {unknown}")
        return {}
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # TOML or UTF-8
        problems.append(f"{FLAGS} cannot be read ({error}): {unknown}")
    return {name: section for name, section in found.items() if isinstance(section, dict)}


def _is_timeline(document: object) -> bool:
    """Whether a JSON document has the parts of `mimo.observability.timeline` that the page needs."""
    if not isinstance(document, dict) or not isinstance(document.get("iteration"), int):
        return False
    ranks = document.get("ranks")
    return isinstance(ranks, list) and bool(ranks) and all(
        isinstance(rank, dict) and {"rank", "modules", "intervals"} <= rank.keys() and rank["intervals"]
        for rank in ranks)


def evenly(count: int, most: int) -> list[int]:
    """Return at most `most` of `count` places, evenly spread from the first to the last."""
    if count <= most:
        return list(range(count))
    return sorted({round(index * (count - 1) / (most - 1)) for index in range(most)})


def _read_timelines(folder: Path, problems: list[str]) -> tuple[dict[int, dict[str, Any]], int]:
    """Return some of the steps of all ranks, and how many there are."""
    steps = sorted((int(match[1]), path) for path in folder.glob("step-*.json")
                   if (match := STEP_FILE.fullmatch(path.name)))
    found = {}
    for place in evenly(len(steps), MAX_STEPS):
        iteration, path = steps[place]
        document = _parsed(path.read_bytes())
        if _is_timeline(document):
            found[iteration] = document
        else:
            problems.append(f"timeline/{path.name} cannot be read and is left out.")
    return found, len(steps)


def _read_start(path: Path, problems: list[str]) -> dict[str, float]:
    document = _parsed(path.read_bytes()) if path.is_file() else {"phases": {}}
    phases = document.get("phases") if isinstance(document, dict) else None
    if isinstance(phases, dict) and all(isinstance(value, int | float) for value in phases.values()):
        return phases
    problems.append(f"{START} cannot be read and is left out.")
    return {}


def _is_generation(line: object) -> bool:
    """Whether a JSON document has the parts of a line of generations.jsonl that the page needs."""
    if not isinstance(line, dict) or not isinstance(line.get("iteration"), int):
        return False
    answers, images = line.get("answers"), line.get("images")
    if not isinstance(answers, list) or not answers or not isinstance(images, list):
        return False
    figures = [answer.get(name) for answer in answers if isinstance(answer, dict) for name in ("reward", "advantage")]
    return (all(isinstance(line.get(name), str) for name in ("kind", "key", "prompt", "expected"))
            and all(isinstance(line.get(name), int) for name in ("num_answers", "num_images"))
            and all(isinstance(answer, dict) and isinstance(answer.get("text"), str) and "truncated" in answer
                    for answer in answers)
            and all(value is None or isinstance(value, int | float) for value in figures)
            and all(isinstance(image, str) and IMAGE_URL.fullmatch(image) for image in images))


def _read_generations(path: Path, problems: list[str]) -> tuple[dict[str, Any], ...]:
    """Return the lines of generations.jsonl; of the same prompt in the same iteration the last one."""
    found, broken = {}, 0
    for text in path.read_bytes().splitlines() if path.is_file() else ():
        line = _parsed(text)
        if _is_generation(line):
            found[line["iteration"], line["kind"], line["key"]] = line
        else:
            broken += 1
    if broken:
        problems.append(f"{counted(broken, 'line')} of {GENERATIONS} cannot be read and "
                        f"{'is' if broken == 1 else 'are'} left out.")
    return tuple(found.values())


def began_unix_s(steps: Table) -> float:
    """Return when the first iteration began, in seconds since the epoch, or NaN if its record does not say."""
    return float(steps.get("wall_time")[0] - steps.get(STEP_KEY)[0]) if len(steps) else math.nan


def _read_stall(folder: Path, began: float, problems: list[str]) -> str:
    """Return the last stall's summary, or else the first rank's report, unless it is from before the run `began`."""
    written = {path: path.stat().st_mtime for path in [folder / STALL_SUMMARY, *sorted(folder.glob("stall-rank*.txt"))]
               if path.is_file()}
    written = {path: at for path, at in written.items() if not at < began}  # NaN leaves none out
    if not written:
        return ""
    chosen = next(path for path, at in written.items() if at >= max(written.values()) - SAME_STALL_S)
    problems.append(f"A stall ended the run, or an earlier one in this folder: see {chosen.name} below.")
    return chosen.read_text(encoding="utf-8", errors="replace")[:SHOWN_OF_STALL]


def _iteration_problems(steps: Table, planned: int | None) -> list[str]:
    if not len(steps):
        return ["No iteration was finished: there are no figures to show."]
    problems = []
    last = int(steps.iterations[-1])
    if planned is not None and last < planned:
        problems.append(f"The figures end at iteration {last:,} of {planned:,}: the run was stopped, died, or still "
                        "goes on.")
    missing = last - int(steps.iterations[0]) + 1 - len(steps)
    if missing:
        problems.append(f"{missing:,} iterations between the first and the last have no figures.")
    skipped = int((steps.get("success") == 0).sum())
    if skipped:
        problems.append(f"{skipped:,} iterations were skipped: a gradient was not finite.")
    if "lm loss" in steps.columns:
        wrong = int((~np.isfinite(steps.get("lm loss"))).sum())
        if wrong:
            problems.append(f"The loss of {wrong:,} iterations is not finite.")
    return problems


def read_run(path: Path) -> Run:
    """Read a run folder. A run that died or still goes on is read as far as it came.

    Raises:
        ValueError: it is not a run folder.
        OSError: a file in it cannot be opened.
    """
    wanted = f"a run folder (--run-dir of train_hetero.py or train_rl.py) has {METRICS}"
    if not path.is_dir():
        raise ValueError(f"{path}: there is no such folder; {wanted}")
    if not (path / METRICS).is_file():
        raise ValueError(f"{path}: not a run folder: there is no {path / METRICS}; {wanted}, {FLAGS} and perhaps "
                         "timeline/step-N.json")
    problems: list[str] = []
    steps, evaluations = _read_metrics(path / METRICS, problems)
    later: list[str] = []  # after those of the iterations, which need the flags
    stall = _read_stall(path, began_unix_s(steps), later)
    flags = _read_flags(path / FLAGS, later)
    timelines, num_timelines = _read_timelines(path / "timeline", later)
    start = _read_start(path / START, later)
    generations = _read_generations(path / GENERATIONS, later)
    run = Run(path, steps, evaluations, flags, timelines, num_timelines, start, stall=stall, generations=generations)
    return replace(run, problems=(*problems, *_iteration_problems(steps, run.planned_iterations), *later))


def with_prediction(run: Run, path: Path) -> Run:
    """Return a run with the prediction that `mimo plan --out` wrote for its layout.

    Raises:
        ValueError: the file has no predictions, or none for this model, batch or layout.
        OSError: the file cannot be opened.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        shared: dict[str, dict[str, Any]] = document["run"]
        layouts = [*document["layouts"], *([document["own"]] if document["own"] else [])]
        found = next((each for each in layouts if not _differing(run, each["settings"])), None)
        values = None if found is None else {each.name: found[each.name] for each in fields(Predicted)
                                             if each.name in found}
    except (ValueError, KeyError, TypeError) as problem:
        raise ValueError(f"--plan {path}: not a file of `mimo plan --out` ({problem!r})") from None
    same = ("train", "model-family", "optim", "ddp")
    differing = _differing(run, {name: shared[name] for name in same if name in shared})
    if differing:
        raise ValueError(f"--plan {path} is of another run than {run.path}: its {', '.join(differing)} differ")
    if values is None:
        raise ValueError(f"--plan {path} has no prediction for the layout of {run.path}; `mimo plan` also predicts the "
                         f"layout of the run's own flags: add --config {run.path / FLAGS} to it")
    other_data = bool(_differing(run, {name: shared[name] for name in ("data", "dataset") if name in shared}))
    return replace(run, predicted=Predicted(**values, other_data=other_data))


def _differing(run: Run, sections: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the flags whose values in a run are not those of a plan; of some sections only those of the plan."""
    found = []
    for name, expected in sections.items():
        given = run.flags.get(name, {})
        keys = expected if name in ("train", "data", "optim", "ddp") else {**given, **expected}
        found += [f"--{key}" for key in keys if given.get(key) != expected.get(key)]
    return found
