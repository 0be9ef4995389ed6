"""What a model trains at on disjoint, colocated and homogeneous layouts of the same GPUs, from the same weights.

    python scripts/bench/layouts.py --device cuda --gpus 4
    python scripts/bench/layouts.py --device cpu --gpus 2
    python scripts/bench/layouts.py --device cuda --gpus 4 --disjoint "--encoder-dp 1 --llm-dp 3" --rounds 3

`homogeneous`: encoder and language model on the same ranks with the same tensor and data parallel sizes; `colocated`:
on the same ranks with different ones; `disjoint`: on different ranks. First every kind is searched: all its layouts on
--gpus ranks that the trainer's checks take, --candidates of them: those least split (homogeneous, colocated) or whose
shares of GPUs are nearest to the shares of work (disjoint; the work in FLOPs is that of the runs before), each for
--search-steps iterations. Layouts with a tensor-parallel language model come with larger microbatches, too.
--homogeneous, --colocated and --disjoint name layouts in place of a search. Then the best of each kind have --rounds
turns, one after the other, of --warmup-steps and --steps iterations. Flags that are not the benchmark's are
train_hetero.py's, the same for all; they stand behind those of --preset and so overrule them.

All runs have the same global batches and start from the same weights. Timed iterations train on those of the warmup
again, so that no shape of theirs is new (without --encoder-prefetch-depth, which looks ahead). Where the losses of
their first --loss-steps iterations differ from those of the best homogeneous layout by more than --loss-tolerance, as a
share, that is an error.
A layout that runs out of memory is a row that says so.

tokens/s and TFLOP/s are per GPU, of the timed iterations of all rounds: tokens of text and images without padding,
model FLOPs as docs/training.md counts them. `over homogeneous` is the median over rounds of the ratio to the best
homogeneous layout's tokens/s. `eta split` of a disjoint layout is what its whole GPUs allow at best, min over grids of
its share of GPUs over its share of work: by FLOPs, and in JSON also by the GPU-seconds of its passes. The last line of
output is JSON; above it the same as a Markdown table.
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
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mimo import registry
from mimo.config.cli import parse
from scripts.bench import presets
from scripts.bench.layout_search import (
    DISJOINT,
    HOMOGENEOUS,
    KINDS,
    Candidate,
    by_split,
    eta_split,
    given,
    search,
)
from scripts.bench.layouts_runs import OUT_OF_MEMORY, Outcome, median, run_all
from scripts.bench.tables import device_name, markdown
from scripts.training_runs import quiet

# Data are random, and so are weights: the losses of two unrelated models differ by about 2e-3.
TOLERANCE = {"bf16": 5e-4, "fp32": 1e-4}
# Norms see a gradient of the wrong scale or a path that is missing, which random targets hide; they are less exact.
GRAD_NORM_FACTOR = 20


def parse_arguments(arguments: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """The command line, and what of it is for the trainer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--gpus", type=int, required=True, help="ranks of every layout; processes on the CPU")
    parser.add_argument("--preset", choices=presets.PRESETS,
                        help="model, data and batch; left out: h200 on cuda, tiny on cpu")
    parser.add_argument("--kind", action="append", choices=KINDS, help="kinds that are compared; left out: all three")
    for kind in KINDS:
        parser.add_argument(f"--{kind}", action="append", default=[], metavar="FLAGS",
                            help=f"a {kind} layout in place of the search; may be given several times")
    parser.add_argument("--candidates", type=int, default=3, help="layouts of a kind that are tried (3)")
    parser.add_argument("--search-steps", type=int, default=2, help="timed iterations of each (2)")
    parser.add_argument("--rounds", type=int, default=2, help="turns of the best of each kind (2)")
    parser.add_argument("--steps", type=int, default=5, help="timed iterations of a turn (5)")
    parser.add_argument("--warmup-steps", type=int, default=3, help="iterations of every run before those (3)")
    parser.add_argument("--loss-steps", type=int, default=3, help="first iterations whose losses have to be equal (3)")
    parser.add_argument("--loss-tolerance", type=float, help="largest difference, as a share; left out: "
                        f"{TOLERANCE['bf16']} in bf16, {TOLERANCE['fp32']} in fp32")
    parser.add_argument("--memory-limit-gib", type=float, help="what a rank may use, GiB; left out: all there is")
    parser.add_argument("--fresh-processes", action="store_true",
                        help="start processes for every run; else those of a phase share them")
    parser.add_argument("--out", type=Path, help="folder of the runs; left out: a temporary one, deleted at the end")
    chosen, further = parser.parse_known_args(arguments)
    for name, least in (("gpus", 2), ("candidates", 1), ("search_steps", 1), ("rounds", 1), ("steps", 1),
                        ("warmup_steps", 1), ("loss_steps", 1)):
        if vars(chosen)[name] < least:
            parser.error(f"--{name.replace('_', '-')} {vars(chosen)[name]} is below {least}")
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
        flags: the trainer's.
        folder: of all runs.
    """

    def __init__(self, chosen: argparse.Namespace, flags: list[str], folder: Path) -> None:
        self.chosen, self.folder = chosen, folder
        presets.check_gpus(chosen.device, chosen.gpus)
        self.base = quiet(parse(flags))
        encoders = registry.model_provider(self.base.model.model_provider).encoders(self.base.model_family)
        if len(encoders) != 1 or self.base.layout.llm_only:
            raise ValueError(f"--model-provider {self.base.model.model_provider} has {len(encoders)} encoders here: "
                             "layouts are compared for a model with one")
        (self.encoder,) = encoders
        self.refused: dict[str, list[tuple[str, str]]] = {}
        self.found: dict[str, list[Candidate]] = {}
        for kind in chosen.kind:
            named = vars(chosen)[kind]
            self.found[kind], self.refused[kind] = (
                (given(flags, kind, named, chosen.gpus), []) if named else search(self.base, kind, chosen.gpus))
        if not any(self.found.values()):
            words, reason = self.refused[chosen.kind[0]][0]
            raise ValueError(f"no layout of {chosen.gpus} ranks works; {words}: {reason}")
        self.searched: dict[str, Outcome] = {}
        self.rounds: list[dict[str, Outcome]] = []
        self.pruned = dict.fromkeys(chosen.kind, 0)

    @property
    def work(self) -> dict[str, float]:
        """FLOPs of a step by module, from a run that came to its end; empty where none has."""
        return next((outcome.flops for outcome in self.searched.values() if outcome.flops), {})

    def run(self) -> None:
        """Search, then let the best of each kind take turns."""
        self._search([candidate for kind in self.chosen.kind if kind != DISJOINT for candidate in self._kept(kind)])
        if DISJOINT in self.chosen.kind:
            if not self.chosen.disjoint:
                self.found[DISJOINT] = by_split(self.found[DISJOINT], self.encoder, self.work)
            self._search(self._kept(DISJOINT))
        best = [candidate for kind in self.chosen.kind if (candidate := self.best(kind)) is not None]
        turns = [(candidate, f"round {number + 1}") for number in range(self.chosen.rounds) for candidate in best]
        outcomes = self._run(turns, self.chosen.steps)
        names = [candidate.name for candidate in best]
        self.rounds = [dict(zip(names, outcomes[start : start + len(names)], strict=True))
                       for start in range(0, len(outcomes), max(len(names), 1))]

    def _kept(self, kind: str) -> list[Candidate]:
        """The candidates of a kind that are tried."""
        tried = len(vars(self.chosen)[kind]) or self.chosen.candidates
        self.pruned[kind] = max(len(self.found[kind]) - tried, 0)
        return self.found[kind][:tried]

    def _search(self, candidates: Sequence[Candidate]) -> None:
        outcomes = self._run([(candidate, "search") for candidate in candidates], self.chosen.search_steps)
        self.searched |= dict(zip([candidate.name for candidate in candidates], outcomes, strict=True))

    def _run(self, turns: Sequence[tuple[Candidate, str]], steps: int) -> list[Outcome]:
        iterations = self.chosen.warmup_steps + steps
        configs = []
        for candidate, _ in turns:
            config = quiet(candidate.config)
            configs.append(replace(config, train=replace(config.train, train_iters=iterations)))
        names = [f"{label}: {candidate.name}" for candidate, label in turns]
        # Warmup sees every global batch that is timed; the same ones in all runs, whose losses are compared.
        num_batches = min(self.chosen.warmup_steps, self.chosen.steps)
        return run_all(configs, names, self.folder, self.chosen.gpus, self.chosen.warmup_steps, num_batches,
                       self.chosen.memory_limit_gib, fresh=self.chosen.fresh_processes)

    def best(self, kind: str) -> Candidate | None:
        """The fastest candidate of a kind in the search; None where none came to its end."""
        ended = [(self.searched[candidate.name].tokens_per_s, candidate) for candidate in self.found.get(kind, ())
                 if candidate.name in self.searched and not self.searched[candidate.name].error]
        return max(ended, key=lambda each: each[0])[1] if ended else None

    def row(self, candidate: Candidate) -> dict[str, Any]:
        """Figures of a candidate: of its turns where it had any, else of the search."""
        turns = [outcomes[candidate.name] for outcomes in self.rounds if candidate.name in outcomes]
        ended = [outcome for outcome in turns or [self.searched[candidate.name]] if not outcome.error]
        errors = [outcome.error for outcome in (*turns, self.searched[candidate.name]) if outcome.error]
        figures = {name: median(ended, name) for name in ("tokens_per_s", "tflops", "step_ms", "peak_gib")}
        reference = self.best(HOMOGENEOUS)
        ratios = [] if reference is None else [
            outcomes[candidate.name].tokens_per_s / outcomes[reference.name].tokens_per_s for outcomes in self.rounds
            if candidate.name in outcomes and not outcomes[candidate.name].error and not outcomes[reference.name].error]
        busy = next((outcome.busy_s for outcome in ended if outcome.busy_s), {})
        return {
            "kind": candidate.kind, "layout": candidate.flags, "error": errors[0] if errors else "",
            "rounds": len(turns), **figures,
            "over_homogeneous": statistics.median(ratios) if ratios else None, "over_homogeneous_all": ratios,
            "eta_split": eta_split(candidate.config, self.encoder, self.work),
            "eta_split_by_time": eta_split(candidate.config, self.encoder, busy),
            "losses": ended[0].losses if ended else []}

    def worst(self, name: str) -> tuple[float | None, str]:
        """Largest difference of a figure of the first iterations, as a share, and whose it is; None: no two runs.

        Over all runs, against the first one of the best homogeneous layout, or of any where that has none.

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


def difference(one: float | None, two: float | None) -> float:
    """Of two figures, as a share of the second; infinite where one is none or not finite."""
    if one is None or two is None:
        return 0.0 if one is two else math.inf
    found = abs(float(one) / float(two) - 1)
    return found if math.isfinite(found) else math.inf


COLUMNS = {"layout": "layout", "kind": "kind", "tokens/s per GPU": "tokens_per_s",
           "over homogeneous": "over_homogeneous", "eta split": "eta_split", "TFLOP/s per GPU": "tflops",
           "ms a step": "step_ms", "peak memory, GiB": "peak_gib"}


def report(bench: Bench) -> int:
    """Print everything; gives the exit code: 1 where a run failed for another reason than memory, or losses differ."""
    chosen = bench.chosen
    tried = [candidate for found in bench.found.values() for candidate in found if candidate.name in bench.searched]
    rows = [bench.row(candidate) for candidate in tried]
    tolerance = chosen.loss_tolerance or TOLERANCE["bf16" if bench.base.model.bf16 else "fp32"]
    print(markdown(COLUMNS, rows, error_cell=2), flush=True)
    allowed = {"losses": tolerance, "grad_norms": GRAD_NORM_FACTOR * tolerance}
    worst = {name: bench.worst(name) for name in allowed}
    print(json.dumps({
        "device": chosen.device, "device_name": device_name(chosen.device), "gpus": chosen.gpus,
        "preset": chosen.preset, "model": bench.base.model.model_provider, "seed": bench.base.train.seed,
        "global_batch_size": bench.base.train.global_batch_size, "seq_length": bench.base.train.seq_length,
        "steps": chosen.steps, "warmup_steps": chosen.warmup_steps, "rounds": chosen.rounds,
        "flops_share": shares(bench.work), "loss_difference": worst["losses"][0], "loss_tolerance": tolerance,
        "grad_norm_difference": worst["grad_norms"][0], "grad_norm_tolerance": allowed["grad_norms"],
        "pruned": bench.pruned, "refused": bench.refused, "layouts": rows}), flush=True)
    apart = {name: found for name, (found, _) in worst.items() if found is not None and not found <= allowed[name]}
    for name, found in apart.items():
        print(f"error: {name.replace('_', ' ')} differ by {found:.2g} (as a share, more than {allowed[name]:g}; "
              f"--loss-tolerance {tolerance}) on {worst[name][1]}", file=sys.stderr, flush=True)
    return int(bool(apart) or any(row["error"] and row["error"] != OUT_OF_MEMORY for row in rows))


def shares(work: dict[str, float]) -> dict[str, float]:
    """Each module's share of all work."""
    return {name: value / sum(work.values()) for name, value in work.items()}


def main(arguments: list[str] | None = None) -> int:
    """Run all, print, and give the exit code."""
    chosen, further = parse_arguments(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # As in train_hetero.py: a provider named pkg.module:attr may lie in the folder the command was typed in.
    sys.path.append(os.getcwd())
    with tempfile.TemporaryDirectory(prefix="layouts-bench-") as temporary:
        try:
            bench = Bench(chosen, [*presets.flags(chosen.device, chosen.preset), *further, "--train-iters", "1"],
                          chosen.out or Path(temporary))
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        bench.run()
    return report(bench)


if __name__ == "__main__":
    sys.exit(main())
