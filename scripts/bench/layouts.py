"""Compare how fast a model trains on disjoint, colocated and homogeneous layouts of the same GPUs.

    python scripts/bench/layouts.py --device cuda --gpus 4
    python scripts/bench/layouts.py --device cpu --gpus 2
    python scripts/bench/layouts.py --device cuda --gpus 4 --disjoint "--encoder-dp 1 --llm-dp 3" --rounds 3

There are three kinds of layouts. In a `homogeneous` layout, the encoder is on the ranks of the first language stage
with the same tensor- and data-parallel sizes. In a `colocated` layout, both modules are on all ranks with sizes of
their own. In a `disjoint` layout, they are on different ranks.

First the benchmark searches each kind. Of all layouts on --gpus ranks that the trainer accepts, it tries --candidates
for --search-steps iterations each. Of homogeneous and colocated layouts, it prefers those that split the modules least.
Of disjoint layouts, it prefers those whose shares of GPUs are nearest to the shares of work; earlier runs say how many
FLOPs each module has. Then it improves each candidate (scripts/bench/layout_search.py): it tries cuts of pipelines
around the cut that FLOPs suggest, encoder windows of 1, 2 and all microbatches, the least recomputation that fits, and
larger microbatches. --no-variants leaves this out. --homogeneous, --colocated and --disjoint name layouts in place of a
search. --list prints the layouts with which the search would begin. After each part of the search a line says how long
its runs took and how many are next.

Then the best layouts of each kind take --rounds turns of --warmup-steps and --steps iterations. The benchmark passes
flags that it does not know to train_hetero.py. They follow the flags of --preset and so override them.

All runs have the same global batches and start from the same weights. Timed iterations repeat the batches of the
warmup, so that none of their shapes is new (except with --encoder-prefetch-depth, which looks ahead). It is an error
if the losses of the first --loss-steps iterations differ from those of the best homogeneous layout by more than
--loss-tolerance, as a share. The row of a layout that runs out of memory says so.

tokens/s and TFLOP/s are per GPU. They come from the timed iterations of all rounds. Layouts that were not the best of
their kind have only the fewer iterations of the search, and their rows say `in the search`. Tokens are those of text
and images without padding, and FLOPs are those of the model (docs/flops.md). `over homogeneous` is tokens/s divided by
that of the best homogeneous layout: the median over rounds, and from three rounds on the 95 % interval of the mean
(Student's t). `eta split` of a disjoint layout is the best that its division of whole GPUs allows: for each grid its
share of GPUs is divided by its share of the work, and the smallest of these ratios counts. Work is counted in FLOPs,
and in JSON also in GPU-seconds of the passes, which `busy_s` has for each module. The last line of output is JSON;
above it, a Markdown table shows the same. `allocation_retries` in JSON is how often a step found the device full and
had to wait until the allocator had freed what it kept. A layout that has any would be faster if it needed less memory.

With --profile FILE, which `mimo plan --measure FILE` has written, each row also has three figures of the planner for
these batches: the predicted step, its bound (the step if transfers took no time, docs/predictions.md) and `bound /
step`, the share of the bound that was reached. With --list, predictions and bounds are printed without a run, also on a
host without GPUs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from dataclasses import replace

from mimo import registry
from mimo.config.cli import parse
from mimo.config.validate import validate
from mimo.observability.flops import FlopsProvider, SequenceSums, forward_flops
from mimo.planner.costs import Costs, Profile
from mimo.planner.predict import predict
from mimo.planner.workload import draw_samples
from mimo.protocols import LANGUAGE
from scripts.bench import presets
from scripts.bench.harness import argument_parser, check_gpus, check_least, device_name, memory_gib, table_of
from scripts.bench.layout_search import (
    DISJOINT,
    HOMOGENEOUS,
    KINDS,
    Candidate,
    Trial,
    Variants,
    Work,
    by_split,
    eta_split,
    given,
    search,
)
from scripts.bench.run_series import FULL, OUT_OF_MEMORY, Outcome, run_all
from scripts.training_runs import quiet

# Data and weights are random. The losses of two unrelated models differ by about 2e-3.
TOLERANCE = {"bf16": 5e-4, "fp32": 1e-4}
# Norms reveal a gradient of the wrong scale or a missing path, which random targets hide. They are less exact.
GRAD_NORM_FACTOR = 20


def parse_arguments(arguments: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Return the benchmark's own flags, and those that it passes to the trainer."""
    parser = argument_parser(__doc__)
    parser.add_argument("--gpus", type=int, required=True, help="ranks of every layout; processes on the CPU")
    parser.add_argument("--preset", choices=presets.PRESETS,
                        help="model, data and batch (default: h200 on cuda, tiny on cpu)")
    parser.add_argument("--kind", action="append", choices=KINDS, help="kinds to compare (default: all three)")
    for kind in KINDS:
        parser.add_argument(f"--{kind}", action="append", default=[], metavar="FLAGS",
                            help=f"a {kind} layout in place of the search; may be given several times")
    parser.add_argument("--candidates", type=int, default=6, help="layouts of each kind to begin with (6)")
    parser.add_argument("--only", action="append", default=[], metavar="WORDS",
                        help="search only layouts whose flags contain these, such as '--llm-pp 2'; may be given "
                        "several times")
    parser.add_argument("--no-variants", dest="variants", action="store_false",
                        help="do not try cuts, windows, recomputation and larger microbatches of these layouts")
    parser.add_argument("--cuts", type=int, default=5, help="cuts of each pipeline to try (5)")
    parser.add_argument("--search-minutes", type=float, help="start no further run of the search after this time")
    parser.add_argument("--list", action="store_true", help="print the layouts with which the search begins, and exit")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="costs of `mimo plan --measure`, for predictions")
    parser.add_argument("--search-steps", type=int, default=2, help="timed iterations of each (2)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of the best layouts of each kind (3)")
    parser.add_argument("--steps", type=int, default=5, help="timed iterations of a turn (5)")
    parser.add_argument("--warmup-steps", type=int, default=3, help="iterations of every run before the timed ones (3)")
    parser.add_argument("--loss-steps", type=int, default=3, help="first iterations whose losses are compared (3)")
    parser.add_argument("--loss-tolerance", type=float, help="largest difference of losses, as a share "
                        f"(default: {TOLERANCE['bf16']} in bf16, {TOLERANCE['fp32']} in fp32)")
    parser.add_argument("--memory-limit-gib", type=float, help="GiB that a rank may use (default: all there is)")
    parser.add_argument("--fresh-processes", action="store_true",
                        help="start new processes for every run, not only for every phase")
    parser.add_argument("--out", type=Path, help="folder of the runs (default: a temporary one, deleted at the end)")
    chosen, further = parser.parse_known_args(arguments)
    check_least(parser, chosen, gpus=2, candidates=1, search_steps=1, rounds=1, steps=1, warmup_steps=1, loss_steps=1,
                cuts=1, search_minutes=0)
    if chosen.loss_steps > chosen.warmup_steps + chosen.search_steps:
        parser.error(f"--loss-steps {chosen.loss_steps}: the shortest runs have --warmup-steps {chosen.warmup_steps} + "
                     f"--search-steps {chosen.search_steps} iterations")
    chosen.preset = chosen.preset or presets.DEFAULT[chosen.device]
    chosen.kind = [kind for kind in KINDS if kind in (chosen.kind or KINDS)]
    return chosen, further


class Bench:
    """One invocation.

    Args:
        chosen: the command line.
        flags: flags of the trainer.
        folder: receives all runs.
    """

    def __init__(self, chosen: argparse.Namespace, flags: list[str], folder: Path) -> None:
        self.chosen, self.folder = chosen, folder
        if not chosen.list:
            check_gpus(chosen.device, chosen.gpus)
        self.base = quiet(parse(flags))
        encoders = registry.model_provider(self.base.model.model_provider).encoders(self.base.model_family)
        if len(encoders) != 1 or self.base.layout.llm_only:
            raise ValueError(f"--model-provider {self.base.model.model_provider} has {len(encoders)} encoders here: "
                             "the comparison needs a model with one encoder")
        (self.encoder,) = encoders
        self.refused: dict[str, list[tuple[str, str]]] = {}
        self.found: dict[str, list[Candidate]] = {}
        for kind in chosen.kind:
            named = vars(chosen)[kind]
            self.found[kind], self.refused[kind] = (
                (given(flags, kind, named, chosen.gpus), []) if named else search(self.base, kind, chosen.gpus))
            if chosen.only and not named:
                self.found[kind] = [candidate for candidate in self.found[kind]
                                    if any(words in candidate.flags for words in chosen.only)]
        if not any(self.found.values()):
            if chosen.only:
                raise ValueError(f"--only {', '.join(chosen.only)}: no layout of {chosen.gpus} ranks has these flags")
            words, reason = self.refused[chosen.kind[0]][0]
            raise ValueError(f"no layout of {chosen.gpus} ranks works; {words}: {reason}")
        self.searched: dict[str, Outcome] = {}
        self.rounds: list[dict[str, Outcome]] = []
        self.pruned = dict.fromkeys(chosen.kind, 0)
        gpu_gib = chosen.memory_limit_gib or (None if chosen.list else memory_gib(chosen.device))
        self._variants = Variants(self.base, chosen.gpus, gpu_gib, chosen.cuts)
        self._profile = None if chosen.profile is None else Profile.load(chosen.profile)
        self._samples = [] if self._profile is None else draw_samples(
            self.base, Costs(self.base, self._profile).provider, self.num_batches * self.base.train.global_batch_size)
        self._searching_s, self._num_runs = 0.0, 0

    @property
    def num_batches(self) -> int:
        """Global batches that every run repeats: the warmup sees every one that is timed."""
        return min(self.chosen.warmup_steps, self.chosen.steps)

    def predicted(self, candidate: Candidate) -> dict[str, float | None]:
        """Return step, bound and memory that the planner predicts for a candidate; None without a profile."""
        if self._profile is None:
            return dict.fromkeys(("predicted_ms", "bound_ms", "predicted_gib"))
        config = candidate.config
        found = predict(config, validate(config, self.chosen.gpus), Costs(config, self._profile), self._samples)
        return {"predicted_ms": 1000 * found.step_s, "bound_ms": 1000 * found.bound_s,
                "predicted_gib": found.memory_gib}

    @property
    def work(self) -> dict[str, float]:
        """FLOPs of a step by module, from a run that did not fail. Empty if there is none."""
        return next((outcome.flops for outcome in self.searched.values() if outcome.flops), {})

    @property
    def parts(self) -> Work | None:
        """Relative time of the model's parts, from a run that recomputed nothing or else all layers. None without."""
        provider = registry.model_provider(self.base.model.model_provider)
        candidates = {candidate.name: candidate for found in self.found.values() for candidate in found}
        ended = [(candidates[name].config.model, outcome.hardware_flops) for name, outcome in self.searched.items()
                 if outcome.hardware_flops and candidates[name].config.model.recompute_num_layers is None]
        if not ended or not isinstance(provider, FlopsProvider):
            return None
        model, flops = min(ended, key=lambda each: each[0].recompute != "none")
        row = SequenceSums.of([self.base.train.seq_length])
        language_parts = [each for each in provider.flop_components(self.base.model_family) if each.module == LANGUAGE]
        sizes = {again: sum(forward_flops(each, row).total for each in language_parts if each.recomputed == again)
                 for again in (True, False)}
        # Recomputed layers run their forward pass twice, and a backward pass is two forward passes.
        layers, head = sizes[True] * (4 / 3 if model.recompute == "full" else 1), sizes[False]
        language = flops[LANGUAGE] / (layers + head)
        encoder = flops[self.encoder] * (3 / 4 if model.encoder_recompute == "full" else 1)
        return Work(encoder, language * sizes[True], language * head)

    def run(self) -> None:
        """Search, then let the best layouts of each kind take turns."""
        shared = [kind for kind in self.chosen.kind if kind != DISJOINT]
        self._search([candidate for kind in shared for candidate in self._kept(kind)])
        self._improve(shared)
        if DISJOINT in self.chosen.kind:
            if not self.chosen.disjoint:
                self.found[DISJOINT] = by_split(self.found[DISJOINT], self.encoder, self.work)
            self._search(self._kept(DISJOINT))
            self._improve([DISJOINT])
        best = [candidate for kind in self.chosen.kind if (candidate := self.best(kind)) is not None]
        turns = [(candidate, f"round {number + 1}") for number in range(self.chosen.rounds) for candidate in best]
        outcomes = self._run(turns, self.chosen.steps)
        names = [candidate.name for candidate in best]
        self.rounds = [dict(zip(names, outcomes[start : start + len(names)], strict=True))
                       for start in range(0, len(outcomes), max(len(names), 1))]

    def _kept(self, kind: str) -> list[Candidate]:
        tried = len(vars(self.chosen)[kind]) or self.chosen.candidates
        self.pruned[kind] = max(len(self.found[kind]) - tried, 0)
        self.found[kind] = self.found[kind][:tried]
        return self.found[kind]

    def _improve(self, kinds: Sequence[str]) -> None:
        """Run variants of the layouts that were searched until there are no more."""
        searched = [kind for kind in kinds if self.chosen.variants and not vars(self.chosen)[kind]]
        while True:
            trials = []
            for candidate in (candidate for kind in searched for candidate in self.found[kind]):
                outcome = self.searched.get(candidate.name)
                if outcome is not None and (not outcome.error or outcome.error in FULL):
                    trials.append(Trial(candidate, None if outcome.error else outcome.tokens_per_s,
                                        outcome.error in FULL, outcome.peak_gib))
            found = self._variants.next(trials, self.parts)
            left = self._time_for(len(found))
            for candidate in found[left:]:
                self.pruned[candidate.kind] += 1
            for candidate in found[:left]:
                self.found[candidate.kind].append(candidate)
            if not found[:left]:
                return
            self._search(found[:left])

    def _time_for(self, runs: int) -> int:
        """Say how long further runs will take, and return how many of them --search-minutes allows."""
        each = self._searching_s / max(self._num_runs, 1)
        if runs:
            print(f"search: {self._num_runs} runs took {self._searching_s:.0f} s; the next {runs} will take about "
                  f"{runs * each:.0f} s", file=sys.stderr, flush=True)
        if self.chosen.search_minutes is None or not each:
            return runs
        return min(runs, max(int((60 * self.chosen.search_minutes - self._searching_s) / each), 0))

    def _search(self, candidates: Sequence[Candidate]) -> None:
        started = time.monotonic()
        outcomes = self._run([(candidate, "search") for candidate in candidates], self.chosen.search_steps)
        self._searching_s, self._num_runs = self._searching_s + time.monotonic() - started, (
            self._num_runs + len(candidates))
        self.searched |= dict(zip([candidate.name for candidate in candidates], outcomes, strict=True))

    def _run(self, turns: Sequence[tuple[Candidate, str]], steps: int) -> list[Outcome]:
        iterations = self.chosen.warmup_steps + steps
        configs = []
        for candidate, _ in turns:
            config = quiet(candidate.config)
            configs.append(replace(config, train=replace(config.train, train_iters=iterations)))
        names = [f"{label}: {candidate.name}" for candidate, label in turns]
        return run_all(configs, names, self.folder, self.chosen.gpus, self.chosen.warmup_steps, self.num_batches,
                       self.chosen.memory_limit_gib, fresh=self.chosen.fresh_processes)

    def best(self, kind: str) -> Candidate | None:
        """Return the fastest candidate of a kind in the search, or None if all failed."""
        ended = [(self.searched[candidate.name].tokens_per_s, candidate) for candidate in self.found.get(kind, ())
                 if candidate.name in self.searched and not self.searched[candidate.name].error]
        return max(ended, key=lambda each: each[0])[1] if ended else None

    def row(self, candidate: Candidate) -> dict[str, Any]:
        """Return the figures of a candidate: those of its turns if it had any, else those of the search."""
        turns = [outcomes[candidate.name] for outcomes in self.rounds if candidate.name in outcomes]
        ended = [outcome for outcome in turns or [self.searched[candidate.name]] if not outcome.error]
        errors = [outcome.error for outcome in (*turns, self.searched[candidate.name]) if outcome.error]
        figures: dict[str, float | None] = {}
        for name in ("tokens_per_s", "tflops", "step_ms", "peak_gib", "allocation_retries"):
            known = [vars(outcome)[name] for outcome in ended if vars(outcome)[name] is not None]
            figures[name] = statistics.median(known) if known else None
        reference = self.best(HOMOGENEOUS)
        ratios = [] if reference is None else [
            outcomes[candidate.name].tokens_per_s / outcomes[reference.name].tokens_per_s for outcomes in self.rounds
            if candidate.name in outcomes and not outcomes[candidate.name].error and not outcomes[reference.name].error]
        predicted = self.predicted(candidate)
        bound_ms = predicted["bound_ms"]
        busy = next((outcome.busy_s for outcome in ended if outcome.busy_s), {})
        return {
            "kind": candidate.kind, "layout": candidate.flags, "error": errors[0] if errors else "",
            "rounds": len(turns), **figures, **predicted,
            "bound_reached": bound_ms / figures["step_ms"] if bound_ms and figures["step_ms"] else None,
            "search_tokens_per_s": self.searched[candidate.name].tokens_per_s or None,
            "over_homogeneous": statistics.median(ratios) if ratios else None, "over_homogeneous_all": ratios,
            "interval": interval(ratios),
            "eta_split": eta_split(candidate.config, self.encoder, self.work),
            "eta_split_by_time": eta_split(candidate.config, self.encoder, busy),
            "busy_s": busy, "losses": ended[0].losses if ended else []}

    def worst(self, name: str) -> tuple[float | None, str]:
        """Return the largest difference of a figure in the first iterations, as a share, and its run.

        All runs are compared with the first one of the best homogeneous layout or, if there is none, with the first
        run of all. The difference is None if there are no two runs.

        Args:
            name: `losses` or `grad_norms`.
        """
        runs = [(name, outcome) for outcomes in (self.searched, *self.rounds) for name, outcome in outcomes.items()
                if not outcome.error]
        reference = self.best(HOMOGENEOUS)
        if len(runs) < 2:
            return None, ""
        expected = next((each for name, each in runs if reference is not None and name == reference.name), runs[0][1])
        count = self.chosen.loss_steps
        return max((max(difference(one, two) for one, two in zip(
            vars(each)[name][:count], vars(expected)[name][:count], strict=True)), whose) for whose, each in runs)


# 97.5th percentiles of Student's t distribution, by degrees of freedom.
STUDENT_T = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


def interval(values: Sequence[float]) -> list[float] | None:
    """Return the 95 % interval of the mean of three to ten values; None for another number of them."""
    freedom = len(values) - 1
    if freedom not in STUDENT_T:
        return None
    half = STUDENT_T[freedom] * statistics.stdev(values) / math.sqrt(len(values))
    return [statistics.fmean(values) - half, statistics.fmean(values) + half]


def difference(one: float | None, two: float | None) -> float:
    """Difference of two figures as a share of the second. Infinite if one is None or not finite."""
    if one is None or two is None:
        return 0.0 if one is two else math.inf
    found = abs(float(one) / float(two) - 1)
    return found if math.isfinite(found) else math.inf


COLUMNS = {"layout": "layout", "kind": "kind", "tokens/s per GPU": "tokens_per_s",
           "in the search": "search_tokens_per_s",
           "over homogeneous": "over_homogeneous", "95 %": "interval", "eta split": "eta_split",
           "TFLOP/s per GPU": "tflops", "ms a step": "step_ms", "peak memory, GiB": "peak_gib"}
PREDICTED = {"predicted, ms": "predicted_ms", "bound, ms": "bound_ms", "predicted, GiB": "predicted_gib"}


def report(bench: Bench) -> int:
    """Print all figures and return the exit code: 1 if losses differ or a run failed for another reason than memory."""
    chosen = bench.chosen
    tried = [candidate for found in bench.found.values() for candidate in found if candidate.name in bench.searched]
    rows = [bench.row(candidate) for candidate in tried]
    tolerance = chosen.loss_tolerance or TOLERANCE["bf16" if bench.base.model.bf16 else "fp32"]
    shown = [row | {"interval": "" if row["interval"] is None else "{:.3f} to {:.3f}".format(*row["interval"])}
             for row in rows]
    columns = COLUMNS if chosen.profile is None else COLUMNS | PREDICTED | {"of the bound": "bound_reached"}
    print(table_of(columns, shown, error_cell=2), flush=True)
    total = sum(bench.work.values())
    allowed = {"losses": tolerance, "grad_norms": GRAD_NORM_FACTOR * tolerance}
    worst = {name: bench.worst(name) for name in allowed}
    print(json.dumps({
        "device": chosen.device, "device_name": device_name(chosen.device), "gpus": chosen.gpus,
        "preset": chosen.preset, "model": bench.base.model.model_provider, "seed": bench.base.train.seed,
        "global_batch_size": bench.base.train.global_batch_size, "seq_length": bench.base.train.seq_length,
        "steps": chosen.steps, "warmup_steps": chosen.warmup_steps, "rounds": chosen.rounds,
        "flops_share": {name: value / total for name, value in bench.work.items()},
        "loss_difference": worst["losses"][0], "loss_tolerance": tolerance,
        "grad_norm_difference": worst["grad_norms"][0], "grad_norm_tolerance": allowed["grad_norms"],
        "pruned": bench.pruned, "refused": bench.refused, "layouts": rows}), flush=True)
    apart = {name: found for name, (found, _) in worst.items() if found is not None and not found <= allowed[name]}
    for name, found in apart.items():
        print(f"error: {name.replace('_', ' ')} differ by {found:.2g} (as a share, more than {allowed[name]:g}; "
              f"--loss-tolerance {tolerance}) on {worst[name][1]}", file=sys.stderr, flush=True)
    return int(bool(apart) or any(row["error"] and row["error"] != OUT_OF_MEMORY for row in rows))


def main(arguments: list[str] | None = None) -> int:
    chosen, further = parse_arguments(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # As in train_hetero.py: a provider pkg.module:attr may lie in the current folder.
    sys.path.append(os.getcwd())
    with tempfile.TemporaryDirectory(prefix="layouts-bench-") as temporary:
        try:
            bench = Bench(chosen, [*presets.flags(chosen.device, chosen.preset), *further, "--train-iters", "1"],
                          chosen.out or Path(temporary))
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        if chosen.list:
            listed = [candidate for kind in chosen.kind for candidate in bench.found[kind]]
            if chosen.profile is None:
                print("\n".join(candidate.name for candidate in listed))
            else:
                rows = [{"kind": each.kind, "layout": each.flags, "error": "", **bench.predicted(each)}
                        for each in listed]
                print(table_of({"layout": "layout", "kind": "kind"} | PREDICTED, rows, error_cell=2))
            return 0
        bench.run()
    return report(bench)


if __name__ == "__main__":
    sys.exit(main())
