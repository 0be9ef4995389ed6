"""Compare context parallelism with tensor parallelism on rows of one long video each.

    python scripts/bench/long_rows.py --device cuda --lengths 32768 65536 131072
    python scripts/bench/long_rows.py --device cuda --part longest

The model and its data are those of --preset long-video; further flags go to train_hetero.py and override it. A step is
one row, which --gpus ranks share by `--llm-cp` or by `--llm-tp` with sequence parallelism. In both, the layout is
colocated and all ranks share the video's frames. There are two parts:

    speed    tokens/s of both layouts at each of --lengths. A length that is given several times is repeated in turns,
             and `context_over_tensor` compares the medians. Each layout recomputes as many layers as
             --context-recomputed and --tensor-recomputed say for that length, or as few as fit, according to the
             planner. One that runs out of memory recomputes one layer more. With --frames, at the first length there is
             a third, homogeneous layout, in which every context-parallel rank encodes all frames. The time of its
             encoder, divided by that of the first layout, is `frames`.
    longest  the longest row that trains with one GPU, and with --gpus context-parallel and then tensor-parallel ranks,
             at equal recomputation. Rows grow until the memory is full, from the longest one that the planner expects
             to fit into 90 % of it on. `longest` is the longest row of context parallelism, divided by the shortest one
             for which one GPU had no room, and `longest_tensor` that of tensor parallelism.

The last line of output is JSON; above it, a Markdown table shows the same.
"""

from __future__ import annotations

import json
import shlex
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mimo.config.cli import parse
from mimo.config.trainer import RunConfig
from mimo.config.validate import validate
from mimo.planner.costs import GIB, Costs, Profile
from mimo.planner.gpus import GPUS
from mimo.planner.predict import Step
from mimo.planner.workload import SampleSize, draw_samples
from scripts.bench import presets
from scripts.bench.harness import argument_parser, check_gpus, check_least, device_name, memory_gib, table_of
from scripts.bench.run_series import FULL, Outcome, run_all
from scripts.training_runs import quiet

COLUMNS = {"tokens of a row": "length", "layout": "layout", "GPUs": "gpus", "recomputed layers": "recomputed",
           "ms a step": "step_ms", "tokens/s a GPU": "tokens_per_s", "encoder ms": "encoder_ms",
           "peak GiB": "peak_gib", "planned GiB": "planned_gib"}
ERROR_CELL = 4
ONE, CONTEXT, TENSOR, REPEATED = "one GPU", "context parallel", "tensor parallel", "context parallel, frames on each"
# Rows of `longest`, as shares of the longest one that the planner expects to fit. The other layouts continue from what
# one GPU had no room for, times their GPUs; tensor parallelism needs less memory and begins where context parallelism
# ended.
GROWTH = (1.0, 1.08, 1.16, 1.24, 1.32, 1.4)
MULTIPLES = (0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6)
LEAST = 1024
# Plans may use this share of a GPU's memory for tensors. The driver, NCCL and the allocator need the rest.
PLANNED_SHARE = 0.9
# Flags of the trainer that rows differ in.
FIXED = {"--seq-length", "--global-batch-size", "--train-iters", "--mock-video-min-frames", "--mock-video-frames",
         "--layout", "--encoder-dp", "--encoder-window", "--llm-cp", "--llm-tp", "--llm-dp", "--llm-pp", "--recompute",
         "--recompute-num-layers"}


@dataclass(frozen=True)
class Row:
    """A layout with rows of one length.

    Attributes:
        layout: one of the names above.
        length: `--seq-length`.
        recomputed: number of language layers that are recomputed.
        config: the run.
        planned_gib: memory of tensors that the planner expects.
    """

    layout: str
    length: int
    recomputed: int
    config: RunConfig
    planned_gib: float

    @property
    def name(self) -> str:
        return f"{self.layout} {self.length} {self.recomputed}"


class Bench:
    """One invocation.

    Args:
        arguments: the command line; None for that of the process.
    """

    def __init__(self, arguments: list[str] | None) -> None:
        parser = argument_parser(__doc__)
        parser.add_argument("--part", choices=("speed", "longest"), default="speed")
        parser.add_argument("--gpus", type=int, default=2, help="ranks that share a row (2)")
        parser.add_argument("--preset", choices=presets.PRESETS, default="long-video")
        parser.add_argument("--lengths", type=int, nargs="+", default=[32768, 65536, 131072],
                            help="tokens of a row for `speed`")
        parser.add_argument("--text-tokens", type=int, default=600, help="tokens of a row that are not the video's")
        parser.add_argument("--pair-tokens", type=int, default=196, help="tokens of two frames")
        parser.add_argument("--steps", type=int, default=4, help="timed steps; one less for each further length")
        parser.add_argument("--warmup-steps", type=int, default=1)
        parser.add_argument("--memory-limit-gib", type=float,
                            help="GiB that a rank may use (default: all there is)")
        parser.add_argument("--context", default="", metavar="FLAGS", help="further flags of context parallelism")
        parser.add_argument("--tensor", default="", metavar="FLAGS", help="further flags of tensor parallelism")
        for name in ("context", "tensor"):
            parser.add_argument(f"--{name}-recomputed", type=int, nargs="+", metavar="N",
                                help=f"recomputed layers of {name} parallelism at each length")
        parser.add_argument("--frames", action="store_true", help="run the third layout")
        parser.add_argument("--recomputed", type=int, default=0, help="recomputed layers for `longest`")
        self.chosen, self.further = parser.parse_known_args(arguments)
        fixed = {word.partition("=")[0] for word in self.further} & FIXED
        if fixed:
            parser.error(f"{', '.join(sorted(fixed))}: this program chooses the value for each row")
        other = {"speed": ("recomputed",), "longest": ("context", "tensor", "context_recomputed", "tensor_recomputed",
                                                       "frames")}[self.chosen.part]
        for name in other:
            if vars(self.chosen)[name]:
                parser.error(f"--{name.replace('_', '-')} has no effect with --part {self.chosen.part}")
        for name in ("context", "tensor"):
            given = vars(self.chosen)[f"{name}_recomputed"]
            if given is not None and len(given) != len(self.chosen.lengths):
                parser.error(f"--{name}-recomputed {' '.join(map(str, given))}: give a number for each of "
                             f"{len(self.chosen.lengths)} --lengths")
        check_least(parser, self.chosen, gpus=2, steps=1, warmup_steps=1, recomputed=0)
        check_gpus(self.chosen.device, self.chosen.gpus)
        self._samples: dict[int, list[SampleSize]] = {}
        found = memory_gib(self.chosen.device)
        usable = self.chosen.memory_limit_gib or found
        self.limit = PLANNED_SHARE * usable if usable else float("inf")

    def row(self, layout: str, length: int, recomputed: int, steps: int) -> Row:
        chosen = self.chosen
        step = 2 * chosen.gpus * chosen.gpus  # rows are cut into chunks for each context- and tensor-parallel rank
        length = length // step * step
        frames = 2 * max((length - chosen.text_tokens) // chosen.pair_tokens, 1)
        ranks = 1 if layout == ONE else chosen.gpus
        words = {ONE: ["colocated", "--encoder-dp", "1"],
                 CONTEXT: ["colocated", "--encoder-dp", str(ranks), "--llm-cp", str(ranks)],
                 TENSOR: ["colocated", "--encoder-dp", str(ranks), "--llm-tp", str(ranks), "--sequence-parallel"],
                 REPEATED: ["homogeneous", "--llm-cp", str(ranks)]}[layout]
        flags = [*presets.flags(chosen.device, chosen.preset), "--seq-length", str(length), "--global-batch-size", "1",
                 "--mock-video-min-frames", str(frames), "--mock-video-frames", str(frames),
                 "--train-iters", str(chosen.warmup_steps + steps), *self.further, "--layout", *words,
                 *shlex.split({CONTEXT: chosen.context, TENSOR: chosen.tensor}.get(layout, ""))]
        if layout != REPEATED:
            flags += ["--encoder-window", "1"]
        if recomputed:
            flags += ["--recompute", "full", "--recompute-num-layers", str(recomputed)]
        config = quiet(parse(flags))
        plan = Step(config, validate(config, ranks), Costs(config, Profile(GPUS["H200"])))
        if length not in self._samples:
            self._samples[length] = draw_samples(config, plan.costs.provider, 1)
        needed, _, _ = plan.memory(plan.batches(self._samples[length]))
        return Row(layout, length, recomputed, config, needed / GIB)

    def least_recomputed(self, layout: str, length: int, steps: int) -> Row:
        """Plan a run that recomputes as few layers as fit."""
        low, high = 0, self.layers
        while low < high:
            middle = (low + high) // 2
            if self.row(layout, length, middle, steps).planned_gib <= self.limit:
                high = middle
            else:
                low = middle + 1
        return self.row(layout, length, low, steps)

    @property
    def layers(self) -> int:
        count: int = self.row(ONE, self.chosen.lengths[0], 0, 1).config.model_family.num_layers
        return count

    def run(self, rows: list[Row], folder: Path, *, until_failure: bool = False) -> list[dict[str, Any]]:
        """Run rows of as many GPUs in one launch, and return their figures."""
        ranks = 1 if rows[0].layout == ONE else self.chosen.gpus
        # A length may be there several times, and each run has a folder of its own.
        names = [f"{number} {each.name}" for number, each in enumerate(rows)]
        outcomes = run_all([each.config for each in rows], names, folder, ranks, self.chosen.warmup_steps, 1,
                           self.chosen.memory_limit_gib, until_failure=until_failure)
        return [self.figures(row, outcome) for row, outcome in zip(rows, outcomes, strict=False)]

    def figures(self, row: Row, outcome: Outcome) -> dict[str, Any]:
        ranks = 1 if row.layout == ONE else self.chosen.gpus
        replicas = ranks if row.layout != REPEATED else 1
        busy = [seconds for name, seconds in outcome.busy_s.items() if name != "language"]
        return {"length": row.length, "layout": row.layout, "gpus": ranks, "recomputed": row.recomputed,
                "step_ms": outcome.step_ms, "tokens_per_s": outcome.tokens_per_s, "tflops": outcome.tflops,
                "encoder_ms": 1000 * busy[0] / replicas if busy else None, "peak_gib": outcome.peak_gib,
                "planned_gib": row.planned_gib, "losses": outcome.losses, "error": outcome.error}

    def speed(self, folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        rows = []
        distinct = list(dict.fromkeys(self.chosen.lengths))
        for number, length in enumerate(self.chosen.lengths):
            steps = max(self.chosen.steps - distinct.index(length), 1)
            for layout, given in ((CONTEXT, self.chosen.context_recomputed), (TENSOR, self.chosen.tensor_recomputed)):
                rows.append(self.least_recomputed(layout, length, steps) if given is None
                            else self.row(layout, length, given[number], steps))
            if number == 0 and self.chosen.frames:
                rows.append(self.row(REPEATED, length, rows[0].recomputed, steps))
        found = self.run(rows, folder)
        for row, figures in zip(list(rows), list(found), strict=True):
            steps = row.config.train.train_iters - self.chosen.warmup_steps
            while figures["error"] in FULL and row.layout != REPEATED and row.recomputed < self.layers:
                row = self.row(row.layout, row.length, row.recomputed + 1, steps)
                found += [figures := self.run([row], folder)[0]]
        ended: dict[tuple[str, int], list[dict[str, Any]]] = {}
        for each in found:
            if not each["error"]:
                ended.setdefault((each["layout"], each["length"]), []).append(each)
        medians = {key: statistics.median(each["tokens_per_s"] for each in turns) for key, turns in ended.items()}
        ratios = {str(length): medians[CONTEXT, length] / medians[TENSOR, length]
                  for length in dict.fromkeys(row.length for row in rows)
                  if (CONTEXT, length) in ended and (TENSOR, length) in ended}
        summary: dict[str, Any] = {"context_over_tensor": ratios}
        pair = [ended.get((layout, rows[0].length), [{}])[0].get("encoder_ms") for layout in (REPEATED, CONTEXT)]
        if pair[0] is not None and pair[1] is not None:
            summary["frames"] = pair[0] / pair[1]
        return found, summary

    def longest(self, folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        recomputed = self.chosen.recomputed
        least = self.row(ONE, LEAST, recomputed, 1)
        if least.planned_gib > self.limit:
            raise SystemExit(f"--memory-limit-gib: a row of {LEAST} tokens needs {least.planned_gib:.3g} GiB of "
                             f"tensors, and a plan may use {self.limit:.3g} ({PLANNED_SHARE:.0%} of the limit)")
        most = least.config.model_family.max_position_embeddings
        low, high = LEAST, most
        while high - low > 512:
            middle = (low + high) // 2
            if self.row(ONE, middle, recomputed, 1).planned_gib <= self.limit:
                low = middle
            else:
                high = middle
        found = self.run([self.row(ONE, int(low * factor), recomputed, 1) for factor in GROWTH], folder,
                         until_failure=True)
        full = [each["length"] for each in found if each["error"] in FULL]
        summary: dict[str, Any] = {"one_gpu_fits": max((each["length"] for each in found if not each["error"]),
                                                       default=None)}
        if full:
            summary["one_gpu_does_not_fit"] = full[0]
            multiples = [factor * self.chosen.gpus for factor in MULTIPLES]
            for layout, key in ((CONTEXT, "longest"), (TENSOR, "longest_tensor")):
                rows = [self.row(layout, int(full[0] * factor), recomputed, 1) for factor in multiples
                        if full[0] * factor <= most]
                own = self.run(rows, folder, until_failure=True) if rows else []
                ended = [each["length"] for each in own if not each["error"]]
                summary[key] = max(ended, default=0) / full[0]
                multiples = multiples[max(len(ended) - 1, 0):]
                found += own
        return found, summary


def main(arguments: list[str] | None = None) -> int:
    bench = Bench(arguments)
    with tempfile.TemporaryDirectory() as folder:
        found, summary = vars(Bench)[bench.chosen.part](bench, Path(folder))
    print(table_of(COLUMNS, found, ERROR_CELL))
    print(json.dumps({"device": device_name(bench.chosen.device), "part": bench.chosen.part,
                      "limit_gib": bench.limit, "rows": found, **summary}))
    return 0 if any(not each["error"] for each in found) else 1


if __name__ == "__main__":
    sys.exit(main())
