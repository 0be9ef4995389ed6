"""Runs of scripts/bench/layouts.py: started together as often as possible, read from what they leave."""

from __future__ import annotations

import json
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mimo.config.cli import to_toml
from mimo.config.trainer import RunConfig
from scripts.training_runs import ROOT, SHOWN

OUT_OF_MEMORY = "out of memory"
DONE, OUT_OF_MEMORY_FILES = "done", "out-of-memory-rank*"


@dataclass
class Outcome:
    """What a run came to; figures are of its timed iterations, tokens/s and TFLOP/s per GPU.

    Attributes:
        error: why it has no figures; empty where it has.
        tokens_per_s: of text and images, without padding.
        tflops: of the model; None where its provider does not know its FLOPs.
        step_ms: median.
        peak_gib: high-water mark of the module and rank that needs most.
        losses: of all its iterations.
        flops: of a step, by module.
        busy_s: GPU-seconds of the passes of a step, by module.
        grad_norms: of all its iterations; None for one that was skipped.
    """

    error: str = ""
    tokens_per_s: float = 0.0
    tflops: float | None = None
    step_ms: float = 0.0
    peak_gib: float = 0.0
    losses: list[float] = field(default_factory=list)
    flops: dict[str, float] = field(default_factory=dict)
    busy_s: dict[str, float] = field(default_factory=dict)
    grad_norms: list[float | None] = field(default_factory=list)


def median(outcomes: Sequence[Outcome], name: str) -> float | None:
    """Of a figure over several runs; None where none has it."""
    known = [vars(outcome)[name] for outcome in outcomes if vars(outcome)[name] is not None]
    return statistics.median(known) if known else None


def outcome_of(config: RunConfig, records: Sequence[dict[str, Any]], warmup: int, ranks: int) -> Outcome:
    """From the lines of a run's metrics.jsonl."""
    timed = records[warmup:]
    seconds = sum(record["iteration-time"] for record in timed)
    tokens = sum(record["image-tokens"] + record["text-tokens"] for record in timed)
    flops = {name.partition("/")[2]: statistics.fmean(record[name] for record in timed)
             for name in timed[0] if name.startswith("flops/")}
    layout = config.layout
    sizes = {"language": layout.llm_tp * layout.llm_dp * layout.llm_pp}
    busy = {}
    for name in flops:
        size = sizes.get(name, layout.encoder_tp * layout.encoder_dp * layout.encoder_pp)
        parts = [f"timeline/{name}/{part}-s" for part in ("forward", "backward")]
        if all(part in timed[0] for part in parts):
            busy[name] = size * statistics.fmean(sum(record[part] for part in parts) for record in timed)
    return Outcome(
        tokens_per_s=tokens / seconds / ranks, flops=flops, busy_s=busy,
        tflops=sum(flops.values()) * len(timed) / seconds / ranks / 1e12 if flops else None,
        step_ms=1000 * statistics.median(record["iteration-time"] for record in timed),
        peak_gib=max(record[name] for record in records for name in record if name.startswith("peak-memory-bytes/"))
        / 2**30, losses=[record["lm loss"] for record in records],
        grad_norms=[record["grad-norm"] for record in records])


def run_all(configs: Sequence[RunConfig], names: Sequence[str], folder: Path, ranks: int, warmup: int,
            num_batches: int, memory_limit_gib: float | None, *, fresh: bool = False) -> list[Outcome]:
    """Run all, in order.

    One launch runs them one after the other in the same processes, up to one that fails: the next launch goes on behind
    that. So a start is paid for once, unless there is not enough memory.

    Args:
        configs: the runs.
        names: of each, for messages.
        folder: gets a folder for each run.
        ranks: processes.
        warmup: iterations of each run that are not in its figures.
        num_batches: the runs' first global batches, which they repeat.
        memory_limit_gib: what a rank may use; None for all there is.
        fresh: a launch for every run.
    """
    folders, runs = [], []
    for config, name in zip(configs, names, strict=True):
        place = folder / "".join(letter if letter.isalnum() else "-" for letter in name)
        if place.exists():  # of an earlier invocation
            shutil.rmtree(place)
        place.mkdir(parents=True)
        flags = place / "flags.toml"
        flags.write_text(to_toml(replace(config, observe=replace(config.observe, run_dir=str(place)))),
                         encoding="utf-8")
        folders.append(place)
        runs.append({"flags": str(flags), "folder": str(place), "num_batches": num_batches})
    outcomes: list[Outcome] = []
    while len(outcomes) < len(runs):
        first, last = len(outcomes), len(outcomes) + 1 if fresh else len(runs)
        more = f" and {last - first - 1} more" if last - first > 1 else ""
        print(f"{names[first]}{more}", file=sys.stderr, flush=True)
        output = launch(runs[first:last], folders[first], ranks, memory_limit_gib)
        for index in range(first, last):
            if not (folders[index] / DONE).exists():
                outcomes.append(Outcome(error=failure(folders[index], names[index], output)))
                break
            outcomes.append(outcome_of(configs[index], read(folders[index]), warmup, ranks))
    return outcomes


def launch(runs: Sequence[dict[str, Any]], folder: Path, ranks: int, memory_limit_gib: float | None) -> Path:
    """Start torchrun and wait for it; gives the file with its output."""
    settings, output = folder / "runs.json", folder / "output.txt"
    settings.write_text(json.dumps({"runs": runs, "memory_limit_gib": memory_limit_gib}), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
               str(ROOT / "scripts" / "bench" / "layouts_rank.py"), str(settings)]
    with output.open("w", encoding="utf-8") as stream:
        torchrun = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT)
        try:
            torchrun.wait()
        finally:
            # Where this process is told to end, torchrun is, too, and ends its ranks.
            torchrun.terminate()
            torchrun.wait()
    return output


def failure(folder: Path, name: str, output: Path) -> str:
    """Why a run did not come to its end; what it said goes to standard error."""
    said = output.read_text(encoding="utf-8", errors="replace")
    full = sorted(folder.glob(OUT_OF_MEMORY_FILES))
    if full:
        print(f"{name}: {full[0].name}: {full[0].read_text(encoding='utf-8')}", file=sys.stderr, flush=True)
        return OUT_OF_MEMORY
    print(f"{name}:\n{said[-SHOWN:]}", file=sys.stderr, flush=True)
    killed = f"Signal {signal.SIGKILL.value} (SIGKILL)" in said
    return "killed: out of memory?" if killed else "the run failed"


def read(folder: Path) -> list[dict[str, Any]]:
    """The iterations of a run's metrics.jsonl, in order."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if "iteration-time" in record]
