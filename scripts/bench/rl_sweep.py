"""What a policy update costs over layouts and token budgets, with memory: before a cluster is spent on finding out.

    python scripts/bench/rl_sweep.py --device cpu --layout "" --layout "--llm-dp 2 --llm-ep 2" --tokens 512 \
        --tokens 1024 --prompt-length 16 --completion-length 64
    python scripts/bench/rl_sweep.py --device cuda --model qwen3-30b-a3b --layout "--llm-dp 8 --llm-ep 8" \
        --layout "--llm-tp 2 --sequence-parallel --llm-dp 4 --llm-ep 8" --tokens 8192 --tokens 16384 \
        --prompt-length 512 --completion-length 2048:0.7 -- --global-batch-size 128 --recompute selective

Each --layout with each --tokens (--max-tokens-per-microbatch) is an arm. Its ranks, started by torchrun on this host,
build model and optimizer as train_rl.py does and update the policy on fabricated rollouts: random tokens, completions
whose lengths are log-normal with a mean and a spread (the standard deviation of the logarithm), at most --seq-length
with the prompt. All arms get the same rollouts. There is no engine and no reward. Flags behind `--` are those of
train_rl.py; with --model-provider among them the model is theirs, else it is --model with random weights.

Arms take turns, --rounds times, each time in fresh processes; the first update of each is left out of the times, not
of the memory. An arm that runs out of memory is a row that says so. --memory-limit-gib makes a rank run out earlier
than its machine does: is there room on a smaller one?

The last line of output is JSON; above it the same as a Markdown table. Seconds are medians over updates of the slowest
rank: log-probs (before the update, of the reference policy, too) and the update itself. Tokens are those of prompts and
completions; padding is the share of positions that are none; full is the share of the budget that tokens fill. Memory
is the high-water mark of the rank that needs most: what torch's allocator held in tensors and reserved, or on the CPU
the resident set.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mimo import registry
from mimo.config.cli import parse_as
from mimo.config.rl_run import RlRunConfig, validate_rl
from scripts.bench.models import MODELS
from scripts.bench.tables import device_name, markdown
from scripts.training_runs import ROOT, SHOWN, num_ranks

COLUMNS = {"layout": "layout", "tokens": "max_tokens", "ranks": "ranks", "microbatches": "microbatches",
           "log-probs, s": "log_probs_s", "update, s": "update_s", "tokens/s": "tokens_per_s",
           "padding": "padding_share", "full": "budget_share", "peak memory, GiB": "peak_gib",
           "reserved, GiB": "reserved_gib"}
GIB = 2**30


@dataclass
class Arm:
    """A layout with a budget.

    Attributes:
        layout: flags of the layout, as given.
        max_tokens: `--max-tokens-per-microbatch`.
        flags: all of the trainer's.
        ranks: of its grids.
        updates: what each rank measured of each update after the first, of all rounds.
        peaks: high-water marks, of each rank of each round.
        error: why there is no more; empty where all went well.
    """

    layout: str
    max_tokens: int
    flags: list[str]
    ranks: int
    updates: list[list[dict[str, float]]] = field(default_factory=list)
    peaks: list[dict[str, float]] = field(default_factory=list)
    error: str = ""

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.layout or 'one rank'}, {self.max_tokens} tokens"


def parse_arguments(arguments: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """The command line, and what of it is for the trainer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     usage="%(prog)s [options] -- FLAGS OF train_rl.py", allow_abbrev=False)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--layout", action="append", required=True, metavar="FLAGS",
                        help="the trainer's grid, such as '--llm-tp 2'; '' for one rank; may be given several times")
    parser.add_argument("--tokens", action="append", type=int, required=True, metavar="TOKENS",
                        help="--max-tokens-per-microbatch; may be given several times")
    parser.add_argument("--prompt-length", type=int, default=512, metavar="TOKENS", help="of every prompt (512)")
    parser.add_argument("--completion-length", type=mean_and_spread, default="1024:0.5", metavar="MEAN[:SPREAD]",
                        help="tokens of completions: mean, and standard deviation of the logarithm (1024:0.5)")
    parser.add_argument("--model", choices=MODELS, default="tiny", help="shape of a model with random weights (tiny)")
    parser.add_argument("--repeats", type=int, default=3, help="updates of an arm in each round (3)")
    parser.add_argument("--rounds", type=int, default=1, help="how often each arm gets its turn (1)")
    parser.add_argument("--memory-limit-gib", type=float, help="what a rank may use, GiB; left out: all there is")
    given = sys.argv[1:] if arguments is None else arguments
    place = given.index("--") if "--" in given else len(given)
    chosen, further = parser.parse_args(given[:place]), given[place + 1 :]
    for name, least in (("prompt_length", 1), ("repeats", 1), ("rounds", 1), ("memory_limit_gib", 0.1)):
        value = vars(chosen)[name]
        if value is not None and not value >= least:
            parser.error(f"--{name.replace('_', '-')} {value} is below {least}")
    return chosen, further


def mean_and_spread(text: str) -> tuple[float, float]:
    """`1024` or `1024:0.7`."""
    mean, _, spread = text.partition(":")
    found = float(mean), float(spread or 0.5)
    if not (found[0] >= 1 and 0 <= found[1] < 5):
        raise argparse.ArgumentTypeError(f"{text}: MEAN from 1 on, SPREAD from 0 to 5")
    return found


def plan(chosen: argparse.Namespace, further: list[str], folder: Path) -> list[Arm]:
    """All arms, checked. Raises ValueError for what cannot work, naming flags."""
    defaults = ["--global-batch-size", "32", "--lr", "1e-6", "--lr-decay-style", "constant", "--num-generations", "0",
                "--seq-length", str(min(chosen.tokens))]
    if chosen.device == "cpu":
        defaults += ["--no-bf16", "--transformer-impl", "local"]
    if not any(flag.partition("=")[0] == "--model-provider" for flag in further):
        (folder / "config.json").write_text(json.dumps(MODELS[chosen.model]), encoding="utf-8")
        defaults += ["--model-provider", "causal_lm", "--hf-config", str(folder)]
    arms = []
    for layout in chosen.layout:
        for tokens in chosen.tokens:
            flags = [*defaults, *further, *shlex.split(layout), "--device", chosen.device,
                     "--max-tokens-per-microbatch", str(tokens), "--train-iters", str(chosen.repeats + 1)]
            config = parse_as(RlRunConfig, flags, "")
            room = config.train.seq_length - chosen.prompt_length
            if room < 1:
                raise ValueError(f"--prompt-length {chosen.prompt_length} leaves no room for a completion in "
                                 f"--seq-length {config.train.seq_length} (left out: the least of --tokens)")
            flags += ["--max-completion-tokens", str(room)]
            config = parse_as(RlRunConfig, flags, "")
            check(config)
            arms.append(Arm(layout, tokens, flags, num_ranks(config)))
    check_gpus(chosen.device, arms)
    return arms


def check(config: RlRunConfig) -> None:
    """Raise ValueError for a run that cannot work, or whose model needs more than tokens."""
    encoders = registry.model_provider(config.model.model_provider).encoders(config.model_family)
    if encoders:
        raise ValueError(f"--model-provider {config.model.model_provider} has the encoder {', '.join(encoders)}: "
                         "fabricated rollouts have no images")
    validate_rl(config, num_ranks(config))


def check_gpus(device: str, arms: Sequence[Arm]) -> None:
    """Raise ValueError where an arm has more ranks than this host has GPUs."""
    if device == "cpu":
        return
    import torch  # for this alone

    there = torch.cuda.device_count()
    for arm in arms:
        if arm.ranks > there:
            raise ValueError(f"--layout {arm.layout!r} has {arm.ranks} ranks; this host has {there} GPUs")


def run(arm: Arm, chosen: argparse.Namespace, folder: Path) -> None:
    """One round of an arm; its figures or its error go into `arm`."""
    folder.mkdir(parents=True)
    settings = {"out": str(folder), "prompt_length": chosen.prompt_length, "repeats": chosen.repeats,
                "completion_length": chosen.completion_length, "memory_limit_gib": chosen.memory_limit_gib}
    output = folder / "output.txt"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(arm.ranks),
               str(ROOT / "scripts" / "bench" / "rl_sweep_rank.py"), json.dumps(settings), *arm.flags,
               "--run-dir", str(folder)]
    with output.open("w", encoding="utf-8") as stream:
        code = wait(subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT))
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("rank*.json"))]
    arm.peaks += [each["peaks"] for each in found]
    full = [each for each in found if each["out_of_memory"]]
    said = output.read_text(encoding="utf-8", errors="replace")
    if full:
        arm.error = "out of memory"
        print(f"{arm.name}: rank {full[0]['rank']}: {full[0]['out_of_memory']}", file=sys.stderr, flush=True)
    elif f"Signal {signal.SIGKILL.value} (SIGKILL)" in said:
        arm.error = "killed: out of memory?"
    elif code or len(found) < arm.ranks:
        arm.error = f"ended with code {code}"
        print(f"{arm.name}: {arm.error}:\n{said[-SHOWN:]}", file=sys.stderr, flush=True)
    else:
        arm.updates += [list(ranks) for ranks in zip(*(each["updates"] for each in found), strict=True)]


def wait(torchrun: subprocess.Popen[bytes]) -> int:
    """Its exit code. Where this process is told to end, torchrun is, too, and ends its ranks."""
    try:
        return torchrun.wait()
    finally:
        torchrun.terminate()
        torchrun.wait()


def figures(arm: Arm) -> dict[str, Any]:
    """An arm's row; what could not be measured is None."""
    row: dict[str, Any] = {"layout": arm.layout, "max_tokens": arm.max_tokens, "ranks": arm.ranks} | dict.fromkeys(
        list(COLUMNS.values())[3:])
    row["error"] = arm.error
    for key, name in (("peak_gib", "allocated"), ("reserved_gib", "reserved")):
        known = [peaks[name] / GIB for peaks in arm.peaks if name in peaks]
        row[key] = max(known) if known else None
    if arm.error or not arm.updates:
        return row

    def slowest(name: str) -> list[float]:
        return [max(rank[name] for rank in update) for update in arm.updates]

    totals = [update[0]["tokens"] for update in arm.updates]
    # Ranks of one lane have the same microbatches.
    lanes = [list({rank["lane"]: rank for rank in update}.values()) for update in arm.updates]
    positions = sum(rank["positions"] for update in lanes for rank in update)
    budget = sum(rank["microbatches"] * arm.max_tokens for update in lanes for rank in update)
    log_probs, update = slowest("log_probs_s"), slowest("update_s")
    return row | {
        "microbatches": statistics.mean(update[0]["microbatches"] for update in arm.updates),
        "log_probs_s": statistics.median(log_probs), "update_s": statistics.median(update),
        "log_probs_all_s": log_probs, "update_all_s": update,
        "tokens_per_s": sum(totals) / sum(map(sum, zip(log_probs, update, strict=True))),
        "tokens_per_update": statistics.mean(totals), "padding_share": 1 - sum(totals) / positions,
        "budget_share": sum(totals) / budget,
    }


def main(arguments: list[str] | None = None) -> int:
    """Run all, print, and give the exit code: 1 where an arm failed for another reason than memory, 2 for flags."""
    chosen, further = parse_arguments(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # As in train_rl.py: a provider named pkg.module:attr may lie in the folder the command was typed in.
    sys.path.append(os.getcwd())
    with tempfile.TemporaryDirectory(prefix="rl-sweep-") as temporary:
        try:
            arms = plan(chosen, further, Path(temporary))
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        for turn in range(chosen.rounds):
            for number, arm in enumerate(arms):
                if not arm.error:
                    print(f"round {turn + 1} of {chosen.rounds}: {arm.name}", file=sys.stderr, flush=True)
                    run(arm, chosen, Path(temporary) / f"{turn}-{number}")
    results = [figures(arm) for arm in arms]
    print(markdown(COLUMNS, results, error_cell=3))
    print(json.dumps({"device": chosen.device, "device_name": device_name(chosen.device), "model": chosen.model,
                      "prompt_length": chosen.prompt_length, "completion_length": chosen.completion_length,
                      "repeats": chosen.repeats, "rounds": chosen.rounds, "memory_limit_gib": chosen.memory_limit_gib,
                      "flags": further, "arms": results}))
    return int(any(arm.error and "memory" not in arm.error for arm in arms))


if __name__ == "__main__":
    sys.exit(main())
