"""Measure what planning a refit of a large model costs each rank: 512 ranks of a trainer, 512 workers of an engine.

    python scripts/bench/refit_plan.py
    python scripts/bench/refit_plan.py --model deepseek-v3 --planned 512
    python scripts/bench/refit_plan.py --model qwen3-235b-a22b --engine tp=16,replicas=32
    python scripts/bench/refit_plan.py --model nemotron-ultra-550b --prove
    python scripts/bench/refit_plan.py --model deepseek-v3 --engine tp=32,replicas=8 --prove

Every rank plans its own share from three tables that are exchanged once: the entries of the chunk plan, the ranks of
the trainer that hold each box, and the needs of each kind of worker. Shapes are those of the published models without
multi-token prediction; no tensor is made. --trainer is a Megatron grid of tp * pp * dp ranks, of which the experts use
etp * ep * pp times the rest. --engine stands for `replicas` engines of vLLM with dp * pp * tp workers each. With ep=1,
each worker of a stage has whole experts; with ep=0, slices of all.

The benchmark plans --planned evenly spaced ranks of each side; totals for all ranks follow from their mean. Seconds are
those of one core. For a rank of the trainer, they include `read_s`, the time to read the tables of the workers' needs.
`check_s` is the time to prove that a worker gets all that it needs and nothing else. `table_bytes` are the exchanged
bytes of all tables of needs and of holders. The last line of output is JSON.

With --prove, all ranks of both sides are planned as well. Workers of equal needs get the same boxes at the same
addresses, so this plan is checked once for each kind of worker: it brings every element that the worker needs once.
Then the sender of each box is chosen for every worker, every rank of the trainer plans what it sends, and the boxes of
every pair of rank and worker have to be the same on both sides, in the same order. As no rank sends anything else,
every element arrives once. `proof_s` is the time of all this on one core.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from dataclasses import asdict

from mimo.boxes import Box
from mimo.refit.plan import (
    Piece,
    Share,
    assigned,
    bytes_moved,
    bytes_needed,
    check_holders,
    check_plan,
    check_recv_spec,
    needed_pieces,
    receive_plan,
    send_plan,
    senders,
    shares,
)
from mimo.refit.tensor_slices import (
    Holders,
    RecvSpec,
    TensorMeta,
    TensorSlice,
    holders_table,
    recv_spec_from_table,
    recv_spec_table,
)
from scripts.bench.harness import argument_parser, check_least, table
from scripts.bench.refit_shapes import (
    CASES,
    MODELS,
    EngineLayout,
    Model,
    TrainerLayout,
    all_specs,
    trainer_holders,
    trainer_slices,
)

COLUMNS = ("model", "trainer", "engine", "tensors", "kinds of workers", "MB of tables", "ops of a worker",
           "of a trainer rank", "GB a worker receives", "s a worker: mean, max, check", "s a trainer rank: mean, max")


def timed[Result](function: Callable[[], Result]) -> tuple[Result, float]:
    """Return a function's result and the seconds that a core worked on it."""
    started = time.process_time()
    result = function()
    return result, time.process_time() - started


@contextmanager
def uncollected() -> Iterator[None]:
    """Context without the collector of cycles, which would look through millions of boxes again and again."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def spread(count: int, planned: int) -> list[int]:
    """Choose evenly spaced ranks out of `count`, each at another position in its group."""
    planned = min(planned, count)
    return sorted({(number * count // planned + number * (planned < count)) % count for number in range(planned)})


def case(name: str, model: Model, trainer: TrainerLayout, engine: EngineLayout, planned: int,
         proves: bool) -> dict[str, Any]:
    """Plan one model from one layout to another and return the costs. With `proves`, plan all and compare both sides.

    Raises:
        RuntimeError: a rank does not send a worker what the worker expects of it.
    """
    entries = model.entries
    holders, specs = trainer_holders(model, trainer), all_specs(model, engine)
    _, check_holders_s = timed(lambda: check_holders(entries, holders))
    takers = {worker: id(each) for worker, each in specs.items()}
    kinds = {id(each): each for each in specs.values()}
    tables = {kind: json.dumps(recv_spec_table(each)) for kind, each in kinds.items()}
    table_bytes = sum(map(len, tables.values())) + len(json.dumps(holders_table(holders)))
    received = [receive_figures(entries, holders, specs[worker], worker) for worker in spread(engine.workers, planned)]
    sent = [send_figures(entries, holders, trainer_slices(model, trainer, rank), tables, takers, rank)
            for rank in spread(trainer.ranks, planned)]
    held = {rank: trainer_slices(model, trainer, rank) for rank in range(trainer.ranks)} if proves else {}
    pairs, proof_s = timed(lambda: prove(entries, holders, specs, held, tables)) if proves else (0, 0.0)
    return {"model": name, "trainer": asdict(trainer), "engine": asdict(engine), "tensors": len(entries),
            "proved_pairs": pairs, "proof_s": proof_s, "kinds_of_workers": len(kinds), "table_bytes": table_bytes,
            "check_holders_s": check_holders_s, "workers": side(received, engine.workers),
            "trainer_ranks": side(sent, trainer.ranks)}


def prove(entries: Sequence[TensorMeta], holders: Holders, specs: dict[int, RecvSpec],
          held: dict[int, list[TensorSlice]], tables: dict[int, str]) -> int:
    """Prove that every worker gets each element that it needs once, and nothing else. `holders` have been checked.

    Args:
        entries: the chunk plan's.
        holders: what the ranks of the trainer hold.
        specs: what each worker needs, by index; workers of equal needs share an object.
        held: slices of each rank of the trainer.
        tables: id of each of these objects -> its table, as workers publish it.

    Returns:
        Number of pairs of trainer rank and worker between which something is sent.

    Raises:
        ValueError: the plan of a kind of worker is not complete.
        RuntimeError: a rank does not send a worker what the worker expects of it.
    """
    # Operations between a rank and a worker are lists of numbers, one for each entry and box.
    boxes: dict[Box, int] = {}

    def code(each: Piece | Share) -> int:
        return each.entry << 32 | boxes.setdefault(each.box, len(boxes))

    expected: dict[tuple[int, int], array[int]] = {}
    workers: dict[int, list[int]] = {}
    for worker, spec in specs.items():
        workers.setdefault(id(spec), []).append(worker)
    for alike in workers.values():
        spec = specs[alike[0]]
        pieces = needed_pieces(entries, holders, spec, alike[0])
        check_recv_spec(entries, spec)
        check_plan(entries, holders, spec, assigned(pieces, alike[0]))
        codes = list(map(code, pieces))
        for worker in alike:
            by_sender: defaultdict[int, list[int]] = defaultdict(list)
            for sender, number in zip(senders(pieces, worker), codes, strict=True):
                by_sender[sender].append(number)
            expected |= {(sender, worker): array("q", own) for sender, own in by_sender.items()}
    pairs, wrong = len(expected), []
    parsed = {kind: json.loads(text) for kind, text in tables.items()}
    by_names: dict[frozenset[str], list[int]] = {}
    for rank, slices in held.items():
        by_names.setdefault(frozenset(part.name for part in slices), []).append(rank)
    for names, ranks in by_names.items():
        kinds = {kind: recv_spec_from_table(table, names) for kind, table in parsed.items()}
        needs = {worker: kinds[id(spec)] for worker, spec in specs.items()}
        for rank in ranks:
            promised: defaultdict[int, list[int]] = defaultdict(list)
            for share in shares(entries, holders, held[rank], needs, rank):
                number = code(share)
                for worker in share.receivers:
                    promised[worker].append(number)
            wrong += [(rank, worker) for worker, own in promised.items()
                      if expected.pop((rank, worker), None) != array("q", own)]
    wrong += expected  # nobody sends these
    if wrong:
        raise RuntimeError(f"{len(wrong)} pairs of trainer rank and worker disagree, such as {min(wrong)}")
    return pairs


def receive_figures(entries: Sequence[TensorMeta], holders: Holders, spec: RecvSpec, worker: int) -> dict[str, float]:
    """Plan one worker's share and check that it is complete."""
    operations, seconds = timed(lambda: receive_plan(entries, holders, spec, worker))

    def check() -> None:
        check_recv_spec(entries, spec)
        check_plan(entries, holders, spec, operations)

    _, check_s = timed(check)
    num_bytes = bytes_moved(operations, entries)
    assert num_bytes == bytes_needed(spec, entries), f"worker {worker} receives {num_bytes} bytes"
    return {"seconds": seconds, "ops": len(operations), "bytes": num_bytes, "check_s": check_s}


def send_figures(entries: Sequence[TensorMeta], holders: Holders, slices: Sequence[TensorSlice], tables: dict[int, str],
                 takers: dict[int, int], rank: int) -> dict[str, float]:
    """Read what the workers need of one rank's tensors, and plan its share."""
    names = {part.name for part in slices}
    kinds, read_s = timed(lambda: {kind: recv_spec_from_table(json.loads(text), names)
                                   for kind, text in tables.items()})
    specs = {worker: kinds[kind] for worker, kind in takers.items()}
    operations, seconds = timed(lambda: send_plan(entries, holders, slices, specs, rank))
    return {"seconds": read_s + seconds, "ops": len(operations), "bytes": bytes_moved(operations, entries),
            "read_s": read_s}


def side(planned: Sequence[dict[str, float]], ranks: int) -> dict[str, Any]:
    """Figures of one side: means and maxima of the planned ranks, totals of all ranks."""
    def of(key: str) -> list[float]:
        return [each[key] for each in planned]

    figures = {"ranks": ranks, "planned": len(planned)}
    for key in planned[0]:
        figures |= {f"{key}_mean": statistics.mean(of(key)), f"{key}_max": max(of(key)),
                    f"{key}_total": statistics.mean(of(key)) * ranks}
    return figures


def markdown(results: Sequence[dict[str, Any]]) -> str:
    def layout(sizes: dict[str, int]) -> str:
        return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1 or name == "tp")

    rows = [list(COLUMNS)]
    for result in results:
        workers, ranks = result["workers"], result["trainer_ranks"]
        rows.append([
            result["model"], layout(result["trainer"]), layout(result["engine"]), f"{result['tensors']:,}",
            str(result["kinds_of_workers"]), f"{result['table_bytes'] / 1e6:.2f}", f"{workers['ops_mean']:,.0f}",
            f"{ranks['ops_mean']:,.0f}", f"{workers['bytes_mean'] / 1e9:.1f}",
            f"{workers['seconds_mean']:.2f}, {workers['seconds_max']:.2f}, {workers['check_s_mean']:.2f}",
            f"{ranks['seconds_mean']:.2f}, {ranks['seconds_max']:.2f}"])
    return table(rows)


def grid[Grid: (TrainerLayout, EngineLayout)](kind: type[Grid], text: str) -> Grid:
    """Parse a layout such as `tp=8,pp=2`."""
    try:
        return kind(**{name: int(size) for name, size in (part.split("=") for part in text.split(","))})
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error


def main(arguments: list[str] | None = None) -> int:
    parser = argument_parser(__doc__, device=False)
    parser.add_argument("--model", choices=MODELS, action="append", help="may be given several times (default: all)")
    parser.add_argument("--trainer", type=partial(grid, TrainerLayout),
                        help="a Megatron grid, such as tp=8,pp=8,dp=8,ep=32")
    parser.add_argument("--engine", type=partial(grid, EngineLayout), action="append",
                        help="engines of vLLM, such as tp=4,dp=8,ep=1,replicas=16; may be given several times")
    parser.add_argument("--planned", type=int, default=4, help="number of ranks to plan on each side")
    parser.add_argument("--prove", action="store_true", help="plan all ranks and prove that every element arrives once")
    chosen = parser.parse_args(arguments)
    check_least(parser, chosen, planned=1)
    results = []
    for name in chosen.model or MODELS:
        model, (trainer, engines) = MODELS[name](), CASES[name]
        trainer = chosen.trainer or trainer
        if trainer.tp * trainer.dp % (trainer.ep * trainer.etp) or model.experts % trainer.ep:
            parser.error(f"--trainer {trainer}: ep * etp must divide tp * dp, and ep the {model.experts} experts")
        with uncollected() if chosen.prove else nullcontext():
            results += [case(name, model, trainer, engine, chosen.planned, chosen.prove)
                        for engine in chosen.engine or engines]
    print(markdown(results))
    for result in results if chosen.prove else ():
        workers, ranks = result["workers"]["ranks"], result["trainer_ranks"]["ranks"]
        print(f"{result['model']}: every element arrives once: {workers} workers' plans are complete, and {ranks} "
              f"ranks' plans agree with them in all {result['proved_pairs']} pairs ({result['proof_s']:.0f} s)")
    print(json.dumps({"cases": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
