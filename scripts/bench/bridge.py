"""Compare the bridge between encoder and language model with bare P2P and with Megatron Core's own bridge, in one run.

    python scripts/bench/bridge.py --device cuda --size-mb 1 --size-mb 44 --size-mb 256
    python scripts/bench/bridge.py --device cpu --case "1->1" --case "1tp2->1tp2" --size-mb 1

A case names encoder replicas -> language replicas, each with its tensor-parallel size: `2->1`, `1tp2->1tp2`. Without
--case, the benchmark runs every case that needs no more than --world-size ranks. Each case runs under torchrun with one
process for each rank of its grids. It moves --microbatches microbatches forward and their gradients back in the order
of the 1F1B schedule: the next microbatch is sent while the gradient of the last one returns. For each microbatch, a
lane gets --size-mb (10^6 bytes) of rows each way. With --uneven, samples have 50 % more and 50 % fewer rows in turn.

The bridge runs in up to four ways, called arms:

    ours      mimo.bridge.disjoint.Bridge as the trainer makes it, with its timeline
    sliced    in cases with tensor parallelism: the same bridge as it works between hosts, where it always sends slices
              and gathers them
    raw       torch's batched P2P, from a rank that has the rows to each rank that needs them
    upstream  Megatron Core's BridgeCommunicator

The arms take turns, in one order and then in the other. This is repeated --blocks times, after --warmup-blocks times
that do not count. Before and after the timed blocks, every rank compares what it receives with what was sent.

Seconds are for one microbatch forward and back. They are the median over blocks of the slowest rank's time on the
host's clock, and the device is drained at both ends of a block. GB/s count every row once in each direction. raw/ours
is the time of raw divided by ours: near 1 is good, and it is above 1 if the direct sends of raw share a link.
upstream/ours is the time of Megatron Core's bridge divided by ours: above 1 is good. Messages are P2P messages, and
collectives are the broadcasts and all-gathers inside tensor-parallel groups. Both, and their bytes, are counted for one
microbatch forward and back and summed over ranks. Syncs count how often the host waits for the device, on the rank that
waits most often. On CUDA, torch.cuda.set_sync_debug_mode finds them. A CPU has no device to wait for, so the benchmark
counts how often Python reads the values of a tensor. The last line of output is JSON; above it, a Markdown table shows
the same.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.harness import argument_parser, check_least, table
from scripts.training_runs import SHOWN, torchrun

RANK_SCRIPT = Path(__file__).with_name("bridge_rank.py")
CASES = ("1->1", "1->2", "2->1", "1->1tp2", "1tp2->1", "2->2", "1tp2->1tp2", "1->2tp2", "2tp2->1", "2tp2->2tp2")
SIZES_MB = {"cpu": (1.0, 4.0), "cuda": (1.0, 4.0, 16.0, 44.0, 128.0, 256.0)}
DTYPES = {"cpu": "float32", "cuda": "bfloat16"}
# Width of the language model of nemotron-moe-vlm-54l.
HIDDEN_SIZE = 2688
ARMS = ("ours", "sliced", "raw", "upstream")
DEFINITIONS = {
    "seconds": "one microbatch forward and back: median over blocks, slowest rank",
    "gb_per_s": "every row once, both ways, over seconds",
    "raw_over_ours": "seconds of raw over those of ours",
    "raw_over_sliced": "seconds of raw over those of sliced",
    "upstream_over_ours": "seconds of upstream over those of ours",
}


@dataclass(frozen=True)
class Case:
    """Data-parallel and tensor-parallel sizes of the two grids."""

    name: str
    encoder_dp: int
    encoder_tp: int
    language_dp: int
    language_tp: int

    @property
    def ranks(self) -> int:
        return self.encoder_dp * self.encoder_tp + self.language_dp * self.language_tp


def parse_case(text: str) -> Case:
    """Return the case of a name. Raises ArgumentTypeError for a bad name or a case that no bridge can serve."""
    found = re.fullmatch(r"([1-9]\d*)(?:tp([1-9]\d*))?->([1-9]\d*)(?:tp([1-9]\d*))?", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a case such as '1->2' or '1tp2->1tp2'")
    encoder_dp, encoder_tp, language_dp, language_tp = (int(group or 1) for group in found.groups())
    if encoder_dp % language_dp and language_dp % encoder_dp:
        raise argparse.ArgumentTypeError(f"{text}: one number of replicas must be a multiple of the other")
    return Case(text, encoder_dp, encoder_tp, language_dp, language_tp)


def unsupported(case: Case, *, uneven: bool) -> str:
    """Say why Megatron Core's bridge cannot serve a case; empty if it can."""
    if uneven and case.encoder_dp > case.language_dp:
        return "it cuts the gradient of a lane into even parts, whatever rows each encoder replica has sent"
    return ""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--world-size", type=int, help="most ranks of a case (4; on CUDA, the number of GPUs)")
    parser.add_argument("--case", action="append", type=parse_case, metavar="CASE",
                        help=f"may be given several times (default: what fits of {' '.join(CASES)})")
    parser.add_argument("--size-mb", action="append", type=float, metavar="MB",
                        help="a lane's microbatch, one way; may be given several times (1 and 4; on CUDA, 1 to 256)")
    parser.add_argument("--hidden-size", type=int, default=HIDDEN_SIZE, help=f"columns of a row ({HIDDEN_SIZE})")
    parser.add_argument("--microbatches", type=int, default=8, help="microbatches of a block (8)")
    parser.add_argument("--blocks", type=int, default=7, help="timed blocks of each arm (7)")
    parser.add_argument("--warmup-blocks", type=int, default=3, help="first blocks, which do not count (3)")
    parser.add_argument("--uneven", action="store_true", help="samples have different numbers of rows")
    parser.add_argument("--timeout-s", type=float, default=300, help="seconds without progress that end a case (300)")
    chosen = parser.parse_args(arguments)
    check_least(parser, chosen, world_size=2, hidden_size=1, microbatches=1, blocks=1, warmup_blocks=0)
    chosen.sizes_mb = chosen.size_mb or SIZES_MB[chosen.device]
    if min(chosen.sizes_mb) <= 0 or chosen.timeout_s <= 0:
        parser.error(f"--size-mb {min(chosen.sizes_mb):g} --timeout-s {chosen.timeout_s:g}: both must be above 0")
    return chosen


def cases_of(chosen: argparse.Namespace, gpus: int) -> list[Case]:
    """Return the cases to run.

    Raises:
        ValueError: there are fewer GPUs than --world-size, or a case needs more ranks than --world-size allows.
    """
    if chosen.device == "cuda" and max(chosen.world_size or 2, 2) > gpus:
        raise ValueError(f"--device cuda --world-size {chosen.world_size or 2}: torch finds {gpus} GPUs here")
    most = chosen.world_size or (gpus if chosen.device == "cuda" else 4)
    if chosen.case is None:
        cases = [parse_case(name) for name in CASES]
        return [case for case in cases if case.ranks <= most]
    for case in chosen.case:
        if case.ranks > most:
            raise ValueError(f"--case '{case.name}' needs {case.ranks} ranks, --world-size allows {most}")
    return list(chosen.case)


def run_case(chosen: argparse.Namespace, case: Case, folder: Path) -> dict[str, Any]:
    """Return what a case's ranks measured. Raises RuntimeError with the end of their output if they fail."""
    reason = unsupported(case, uneven=chosen.uneven)
    parallel = max(case.encoder_tp, case.language_tp) > 1
    arms = [name for name in ARMS if (name != "sliced" or parallel) and (name != "upstream" or not reason)]
    out = folder / "result.json"
    settings = {"device": chosen.device, "case": asdict(case), "sizes_mb": list(chosen.sizes_mb),
                "hidden_size": chosen.hidden_size, "dtype": DTYPES[chosen.device], "uneven": chosen.uneven,
                "microbatches": chosen.microbatches, "blocks": chosen.blocks, "warmup_blocks": chosen.warmup_blocks,
                "timeout_s": chosen.timeout_s, "arms": arms, "out": str(out)}
    output = folder / "output.txt"
    code = torchrun(RANK_SCRIPT, case.ranks, [json.dumps(settings)], output=output)
    if code:
        raise RuntimeError(f"its ranks ended with code {code}:\n{output.read_text(encoding='utf-8')[-SHOWN:]}")
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    found |= {"case": case.name, "ranks": case.ranks, "encoder": {"dp": case.encoder_dp, "tp": case.encoder_tp},
              "language": {"dp": case.language_dp, "tp": case.language_tp},
              "sizes": [with_ratios(size) for size in found["sizes"]]}
    return found | ({"upstream": f"not run: {reason}"} if reason else {})


def with_ratios(size: dict[str, Any]) -> dict[str, Any]:
    """Add GB/s and the ratios between arms to the figures of one size."""
    arms = {name: arm | {"gb_per_s": size["bytes"] / arm["seconds"] / 1e9} for name, arm in size["arms"].items()}
    pairs = (("raw", "ours"), ("raw", "sliced"), ("upstream", "ours"))
    ratios = {f"{one}_over_{other}": arms[one]["seconds"] / arms[other]["seconds"]
              for one, other in pairs if {one, other} <= arms.keys()}
    return size | {"arms": arms} | ratios


def markdown(results: list[dict[str, Any]]) -> str:
    header = ["case", "ranks", "MB", "arm", "ms", "GB/s", "raw/arm", "upstream/arm", "messages", "MB sent",
              "collectives", "MB in collectives", "syncs"]
    rows = [header]
    for result in results:
        for size in result.get("sizes", ()):
            for name, arm in size["arms"].items():
                ratios = [f"{size[key]:.2f}" if key in size else ""
                          for key in (f"raw_over_{name}", f"upstream_over_{name}")]
                rows.append([result["case"], str(result["ranks"]), f"{size['size_mb']:g}", name,
                             f"{1000 * arm['seconds']:.3f}", f"{arm['gb_per_s']:.2f}", *ratios,
                             f"{arm['messages']:g}", f"{arm['p2p_bytes'] / 1e6:.1f}", f"{arm['collectives']:g}",
                             f"{arm['collective_bytes'] / 1e6:.1f}", f"{arm['host_syncs']:g}"])
    return table(rows)


def main(arguments: list[str] | None = None) -> int:
    """Run all cases and print. Returns the exit code: 1 if a case failed, 2 if nothing can run."""
    chosen = parse_arguments(arguments)
    import torch  # imported late, so that --help is quick

    try:
        cases = cases_of(chosen, torch.cuda.device_count())
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    results: list[dict[str, Any]] = []
    for case in cases:
        with tempfile.TemporaryDirectory(prefix="bridge-bench-") as folder:
            try:
                results.append(run_case(chosen, case, Path(folder)))
                for size in results[-1]["sizes"]:
                    arms = ", ".join(f"{name} {1000 * arm['seconds']:.3f}" for name, arm in size["arms"].items())
                    print(f"case {case.name}, {size['size_mb']:g} MB, ms: {arms}", file=sys.stderr, flush=True)
            except RuntimeError as error:
                print(f"case {case.name}: {error}", file=sys.stderr, flush=True)
                results.append({"case": case.name, "ranks": case.ranks, "error": str(error).splitlines()[0]})
        if "upstream" in results[-1]:
            print(f"case {case.name}: upstream {results[-1]['upstream']}", file=sys.stderr, flush=True)
    names = {result.pop("device_name") for result in results if "device_name" in result}
    print(markdown(results))
    print(json.dumps({"device": chosen.device, "device_name": ", ".join(sorted(names)),
                      "gpus": max(case.ranks for case in cases) if chosen.device == "cuda" else 0,
                      "ranks": max(case.ranks for case in cases), "hidden_size": chosen.hidden_size,
                      "dtype": DTYPES[chosen.device], "microbatches": chosen.microbatches, "blocks": chosen.blocks,
                      "warmup_blocks": chosen.warmup_blocks, "uneven": chosen.uneven, "definitions": DEFINITIONS,
                      "cases": results}))
    return int(any("error" in result for result in results))


if __name__ == "__main__":
    sys.exit(main())
