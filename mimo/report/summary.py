"""The figures behind the answers at the top: what was learned, how fast, who waited."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mimo.observability.spans import Kind
from mimo.protocols import LANGUAGE
from mimo.report.run_reader import EVALUATED, Floats, Run, Table

# Parts of a step as the page shows them: their order and their words. Colours go by kind, see `mimo.report.page.CSS`.
OTHER_MODULES = "other-modules"
# Work is drawn solid and waits are hatched, so that readers who see no colours can tell them apart.
WORK = (Kind.FORWARD, Kind.BACKWARD, Kind.GRADIENT_SYNC, Kind.OPTIMIZER)
WAITS = (Kind.BRIDGE_WAIT, Kind.PIPELINE_WAIT, Kind.DATA_WAIT, Kind.IDLE)
PASSES = (Kind.FORWARD, Kind.BACKWARD)
ORDER: tuple[str, ...] = (*map(str, WORK), OTHER_MODULES, *map(str, WAITS), str(Kind.OTHER))
WORDS = {
    Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.GRADIENT_SYNC: "gradient reduction",
    Kind.OPTIMIZER: "optimizer", Kind.BRIDGE_WAIT: "waiting at the bridge",
    Kind.PIPELINE_WAIT: "waiting in the pipeline", Kind.DATA_WAIT: "waiting for data",
    Kind.IDLE: "waiting for all ranks", Kind.OTHER: "other",
    OTHER_MODULES: "other modules on the same ranks",
}
KIND_OF_PART = {WORDS[kind]: kind for kind in ORDER}

# A run's first and last loss are means over this share of its iterations, but over no more than `WINDOW` and, if there
# are enough, no less than `LEAST_WINDOW`.
WINDOW, WINDOW_SHARE, LEAST_WINDOW = 10, 0.1, 3
# Speeds leave out this share of the iterations at the start, but at most `WARM_UP`, while caches, loaders and kernels
# get warm.
WARM_UP, WARM_UP_SHARE = 10, 0.2
# Of at least `LEAST_TRIMMED` steady iterations, this share of the fastest and of the slowest is not typical.
TRIMMED, LEAST_TRIMMED = 0.1, 10
# A change below this share of the first value, or below this number of standard errors, does not count.
LEAST_CHANGE, LEAST_ERRORS = 0.01, 2.0
# The page mentions a last held-out loss that is this far above the best one.
RISE = 0.05
# Prefetched passes may exceed the forward part that contains them by this factor, because other events time them.
PREFETCH_SLACK = 1.05


@dataclass(frozen=True)
class Learning:
    """Change of the loss, or of the reward.

    Attributes:
        key: `lm loss` or `reward`.
        first, last: means over the first and the last iterations.
        window: iterations of each mean.
        change: 1 for better, -1 for worse, 0 for neither.
        held_out: figures of the last evaluation, by name; empty without one.
        held_out_first: figures of the first evaluation, if there are several.
        best: iteration and figure of the best evaluation, if the last one is clearly worse.
    """

    key: str
    first: float
    last: float
    window: int
    change: int
    held_out: Mapping[str, float]
    held_out_first: Mapping[str, float]
    best: tuple[int, float] | None


@dataclass(frozen=True)
class Speed:
    """Medians over the steady iterations; None if a run has no such figure."""

    iteration_s: float
    tokens_per_s: float | None
    tflops: float | None
    mfu: float | None
    num_iterations: int


@dataclass(frozen=True)
class ModuleTime:
    """Seconds of a module's step, means over its ranks and the typical iterations.

    Attributes:
        parts: seconds by part, in the order of `ORDER`; they sum to the step.
        step_s: seconds of the step.
        beside_s: most seconds of passes that are not in these parts, because the timeline does not show the encoder's
            own stream.
        host_bound_s: seconds of passes in which the device may have waited for the host; 0 on a CPU.
    """

    parts: Mapping[str, float]
    step_s: float
    beside_s: float = 0.0
    host_bound_s: float = 0.0

    def share(self, part: str) -> float:
        """Return the share of a part in the step."""
        return self.parts.get(part, 0.0) / self.step_s if self.step_s else 0.0

    @property
    def passes_s(self) -> float:
        """Seconds of forward and backward passes."""
        return sum(self.parts.get(part, 0.0) for part in PASSES)


def steady(steps: Table) -> Table:
    """Return the iterations without the first ones."""
    return steps[min(WARM_UP, max(int(WARM_UP_SHARE * len(steps)), int(len(steps) > 1))):]


def typical(steps: Table) -> Table:
    """Return the steady iterations without the fastest and the slowest tenth, so that a few stalls change no mean."""
    table = steady(steps)
    times = table.get("iteration-time")
    if len(table) < LEAST_TRIMMED or not np.isfinite(times).all():
        return table
    low, high = np.quantile(times, [TRIMMED, 1 - TRIMMED])
    return table[(times >= low) & (times <= high)]


def finite(values: Floats) -> Floats:
    return values[np.isfinite(values)]


def median(values: Floats) -> float | None:
    """Return the median of the finite values; None if there are none."""
    kept = finite(values)
    return float(np.median(kept)) if len(kept) else None


def mean(values: Floats) -> float | None:
    """Return the mean of the finite values; None if there are none."""
    kept = finite(values)
    return float(kept.mean()) if len(kept) else None


def learning(run: Run) -> Learning | None:
    """Summarise the loss, or the reward in reinforcement learning; None without figures."""
    key = "reward" if run.learns_from_rewards else "lm loss"
    values = finite(run.steps.get(key))
    if not len(values):
        return None
    window = max(1, min(LEAST_WINDOW, len(values) // 2), min(WINDOW, int(WINDOW_SHARE * len(values))))
    head, tail = values[:window], values[-window:]
    first, last = float(head.mean()), float(tail.mean())
    # A single iteration tells nothing about the spread.
    error = math.sqrt(float(head.var(ddof=1) + tail.var(ddof=1)) / window) if window > 1 else math.inf
    gain = (last - first) * (1 if key == "reward" else -1)
    change = 0
    if len(values) > 1 and abs(gain) > max(LEAST_CHANGE * abs(first), LEAST_ERRORS * error):
        change = 1 if gain > 0 else -1

    def held_out(place: int) -> dict[str, float]:
        figures = {name.removesuffix(EVALUATED): float(column[place])
                   for name, column in run.evaluations.columns.items() if name.endswith(EVALUATED)}
        return {name: value for name, value in figures.items() if math.isfinite(value)}

    num_evaluations = len(run.evaluations)
    return Learning(key, first, last, window, change, held_out(-1) if num_evaluations else {},
                    held_out(0) if num_evaluations > 1 else {}, _best(run.evaluations, key))


def lost_since(steps: Table, key: str) -> int | None:
    """Return the iteration after the last finite figure; None if the last figure is finite, or none is."""
    held = np.flatnonzero(np.isfinite(steps.get(key)))
    if not len(held) or held[-1] == len(steps) - 1:
        return None
    return int(steps.iterations[held[-1] + 1])


def _best(evaluations: Table, key: str) -> tuple[int, float] | None:
    values = evaluations.get(key + EVALUATED)
    if len(values) < 2 or not np.isfinite(values).all():
        return None
    place = int(values.argmax() if key == "reward" else values.argmin())
    best, last = float(values[place]), float(values[-1])
    return (int(evaluations.iterations[place]), best) if abs(last - best) > RISE * abs(best) else None


def speed(run: Run) -> Speed | None:
    """Summarise how fast the run was; None without figures."""
    table = steady(run.steps)
    taken = median(table.get("iteration-time"))
    if taken is None:
        return None
    return Speed(taken, median(table.get("tokens-per-s-per-gpu")), median(table.get("tflops")),
                 median(table.get("mfu")), len(table))


def module_times(run: Run) -> dict[str, ModuleTime]:
    """Return where each module's time went; empty without a timeline."""
    table, found = typical(run.steps), {}

    # On the stream that computes, encoder prefetch is included in the encoder's forward part. On a stream of its own it
    # is not, which shows if it took longer than that part. Then all of it counts as beside the parts.
    ahead_s = mean(table.get("encoder-prefetch-s")) or 0.0
    most_s = max((mean(table.get(f"timeline/{module}/{Kind.FORWARD}-max-s")) or 0.0
                  for module in run.modules if module != LANGUAGE), default=0.0)
    beside_s = ahead_s if ahead_s > PREFETCH_SLACK * most_s else 0.0

    for module in run.modules:
        step_s = mean(table.get(f"timeline/{module}/step-s"))
        if step_s is not None:
            means = {part: mean(table.get(f"timeline/{module}/{part}-s")) for part in ORDER}
            found[module] = ModuleTime({part: value for part, value in means.items() if value is not None}, step_s,
                                       0.0 if module == LANGUAGE else beside_s,
                                       mean(table.get(f"timeline/{module}/host-bound-s")) or 0.0)
    return found


def ideal_s(times: Mapping[str, ModuleTime]) -> float | None:
    """Return the seconds of an ideal step, in which the slowest grid does its passes and nothing else.

    On grids that share their ranks the passes of all modules come one after the other. None where passes beside the
    timeline may make another grid the slowest, or the slowest one slower.
    """
    if any(OTHER_MODULES in each.parts for each in times.values()):
        return sum(each.passes_s for each in times.values())
    longest = max(each.passes_s for each in times.values())
    return longest if all(each.passes_s + each.beside_s <= longest for each in times.values()) else None


def most_waiting(times: Mapping[str, ModuleTime]) -> str:
    """Return the module that spends the largest share of its step at the bridge."""
    return max(times, key=lambda name: times[name].share(Kind.BRIDGE_WAIT))


@dataclass(frozen=True)
class Stops:
    """Times between iterations.

    Attributes:
        after: iteration that each one follows, float64 `[n]`.
        seconds: float64 `[n]`.
        evaluation_s: the part from the end of the iteration to the end of an evaluation, seconds, float64 `[n]`. Later
            pauses, such as the one before a resumed run, do not belong to it.
        checkpoint_s: the part in which training stood still for a checkpoint, seconds, float64 `[n]`.
    """

    after: Floats
    seconds: Floats
    evaluation_s: Floats
    checkpoint_s: Floats


def stops(run: Run) -> Stops | None:
    """Return the times from the end of one iteration to the beginning of the next; None without two iterations."""
    steps = run.steps
    if len(steps) < 2 or not steps.has("wall_time"):
        return None
    gaps = np.diff(steps.get("wall_time")) - steps.get("iteration-time")[1:]
    after = steps.iterations[:-1]
    checkpoint = np.nan_to_num(steps.get("checkpoint-s")[1:])
    ended = dict(zip(run.evaluations.iterations.tolist(), run.evaluations.get("wall_time").tolist(), strict=True))
    evaluated = np.array([ended.get(iteration, math.nan) for iteration in after.tolist()]) - steps.get("wall_time")[:-1]
    return Stops(after.astype(np.float64), np.maximum(np.nan_to_num(gaps), 0.0),
                 np.maximum(np.nan_to_num(evaluated), 0.0), checkpoint)


# Parts of an iteration of reinforcement learning.

WAIT = "other waits for completions"
# Keys of the parts that the trainer waits for, and of its own work, with their words.
ENGINE_PARTS = {"memory-s": "memory to and fro", "refit-s": "refit", "rollout-s": "rollout", "reward-s": "reward"}
OWN_PARTS = {"log-probs-s": "log-probs", "reference-s": "reference", "update-s": "update"}
# Parts are drawn like kinds of a training step: the trainer's own work is solid, waits for the engine are hatched.
KIND_OF_RL: Mapping[str, str] = {
    "rollout": Kind.BRIDGE_WAIT, "refit": Kind.PIPELINE_WAIT, "memory to and fro": Kind.DATA_WAIT, "reward": Kind.IDLE,
    WAIT: Kind.OTHER, "log-probs": Kind.BACKWARD, "reference": Kind.GRADIENT_SYNC, "update": Kind.FORWARD,
    "rest": "rest",
}
# The sum of parts may exceed the whole by this factor, because different clocks time them.
SLACK = 1.02


def rl_parts(run: Run) -> tuple[dict[str, float], float, float]:
    """Return where an iteration went.

    Rollouts beside the update count as far as the trainer waited for them.

    Returns:
        Seconds by part, means over the typical iterations, empty without figures; of the whole iteration; and of the
        trainer's waiting for completions.
    """
    if not run.steps.has("rollout-wait-s"):
        return {}, 0.0, 0.0
    table = typical(run.steps)
    total, waited = (mean(table.get(key)) or 0.0 for key in ("iteration-time", "rollout-wait-s"))
    engine = {name: mean(table.get(key)) or 0.0 for key, name in ENGINE_PARTS.items()}
    # With rollouts beside the update, the engine's times overlap the trainer's and say nothing about its waits.
    in_turn = sum(engine.values()) <= SLACK * waited
    parts = engine | {WAIT: max(waited - sum(engine.values()), 0.0)} if in_turn else {WAIT: waited}
    parts |= {name: mean(table.get(key)) or 0.0 for key, name in OWN_PARTS.items()}
    parts["rest"] = max(total - sum(parts.values()), 0.0)
    return {name: value for name, value in parts.items() if value > 0}, total, waited


# Numbers for people.


def number(value: float) -> str:
    """Return a number with four significant digits: `12,345`, `123.5`, `0.04321`, `4.3e-13`."""
    if not math.isfinite(value):
        return "not finite"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) >= 1e-3 else f"{value:.3g}"


def seconds(value: float) -> str:
    """Return a time: `3.2 ms`, `0.243 s`, `121 s`, `2 h 5 min`."""
    if value >= 3600:
        return f"{int(value // 3600)} h {int(value % 3600 // 60)} min"
    if value >= 600:
        return f"{int(value // 60)} min {int(value % 60)} s"
    if value >= 0.1:
        return f"{value:.3g} s"
    if value >= 1e-4:
        return f"{1000 * value:.3g} ms"
    return f"{1e6 * value:.3g} us"


def percent(share: float) -> str:
    """Return a share: `7.3 %`, `93 %`."""
    return f"{100 * share:.0f} %" if share >= 0.0995 else f"{100 * share:.1f} %"


def size(num_bytes: float) -> str:
    """Return a size in bytes: `1.5 GiB`."""
    for unit, unit_bytes in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= unit_bytes:
            return f"{num_bytes / unit_bytes:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def joined(words: list[str]) -> str:
    """Return `a`, `a and b`, or `a, b and c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def rounded(value: float) -> str:
    """Return a number with three significant digits: `2.81`, `0.156`, `12,300`."""
    return number(float(f"{value:.3g}")) if math.isfinite(value) else number(value)
