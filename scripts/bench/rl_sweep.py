"""Measure what a policy update costs over layouts and token budgets, and the memory that it needs.

    python scripts/bench/rl_sweep.py --device cpu --layout "" --layout "--llm-dp 2 --llm-ep 2" --tokens 512 \
        --tokens 1024 --prompt-length 16 --completion-length 64
    python scripts/bench/rl_sweep.py --device cuda --model qwen3-30b-a3b --layout "--llm-dp 8 --llm-ep 8" \
        --layout "--llm-tp 2 --sequence-parallel --llm-dp 4 --llm-ep 8" --tokens 8192 --tokens 16384 \
        --prompt-length 512 --completion-length 2048:0.7 -- --global-batch-size 128 --recompute selective

    sbatch --nodes=8 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --wrap "python scripts/bench/rl_sweep.py \
        --slurm --out runs/sweep --layout '--llm-tp 8 --sequence-parallel --llm-pp 4 --llm-dp 2 --llm-ep 16' \
        --tokens 65536 -- --config scripts/configs/rl_nemotron_ultra.toml"

Each --layout with each --tokens (--max-tokens-per-microbatch) is an arm. torchrun starts its ranks on this host or,
with --slurm, on the first nodes of the job, --gpus-per-node on each; --out is then a folder that all nodes see. They
build model and optimizer as train_rl.py does, and update the policy on fabricated rollouts: random tokens, with
completions whose length is log-normal, with the mean and the spread (the standard deviation of the logarithm) of
--completion-length. A prompt and its completion have at most --seq-length tokens. All arms get the same rollouts. There
is no engine and no reward. Flags after `--` are those of train_rl.py. If --model-provider is among them, they name the
model; otherwise it is --model with random weights.

The arms take --rounds turns, each time in new processes. The first update of a turn counts for memory, but not for
times. The row of an arm that runs out of memory says so. With --memory-limit-gib, a rank runs out earlier than its
machine does, which shows whether there is room on a smaller one.

The last line of output is JSON; above it, a Markdown table shows the same. Seconds are medians over updates of the
slowest rank: log-probs (before the update, including those of the reference policy) and the update itself. Tokens are
those of prompts and completions. Padding is the share of positions without a token, and full is the share of the budget
that tokens fill. Memory is the high-water mark of the rank that needs most: tensors of torch's allocator and what it
reserved or, on the CPU, the resident set.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from mimo import registry
from mimo.config.cli import parse_as
from mimo.config.rl_run import RlRunConfig, validate_rl
from mimo.config.validate import run_world_size
from scripts.bench.harness import (
    GIB,
    argument_parser,
    check_gpus,
    check_least,
    device_name,
    exit_when_out_of_memory,
    limit_memory,
    table_of,
)
from scripts.bench.presets import MODELS
from scripts.training_runs import ROOT, SHOWN, num_ranks, torchrun

if TYPE_CHECKING:
    from mimo.grid.groups import Grids
    from mimo.platform.base import Platform
    from mimo.rl.policy import PolicyTrainer
    from mimo.rl.rollouts import Completion

COLUMNS = {"layout": "layout", "tokens": "max_tokens", "ranks": "ranks", "TP/PP/EP/DP": "sizes",
           "microbatches": "microbatches", "log-probs, s": "log_probs_s", "update, s": "update_s",
           "tokens/s": "tokens_per_s", "tokens/s/rank": "tokens_per_s_per_rank",
           "padding": "padding_share", "full": "budget_share", "peak memory, GiB": "peak_gib",
           "reserved, GiB": "reserved_gib"}


@dataclass
class Arm:
    """A layout with a token budget.

    Attributes:
        layout: flags of the layout as given.
        max_tokens: `--max-tokens-per-microbatch`.
        flags: all flags of the trainer.
        ranks: number of ranks of its grids.
        sizes: its tensor, pipeline, expert and data parallel sizes.
        updates: measurements of each rank in each update after the first, in all rounds.
        peaks: high-water marks of each rank in each round.
        error: why the arm stopped; empty if all went well.
    """

    layout: str
    max_tokens: int
    flags: list[str]
    ranks: int
    sizes: str = ""
    updates: list[list[dict[str, float]]] = field(default_factory=list)
    peaks: list[dict[str, float]] = field(default_factory=list)
    error: str = ""

    @property
    def name(self) -> str:
        return f"{self.layout or 'one rank'}, {self.max_tokens} tokens"


def parse_arguments(arguments: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Return the benchmark's own flags, and those that it passes to the trainer."""
    parser = argument_parser(__doc__, usage="%(prog)s [options] -- FLAGS OF train_rl.py")
    parser.add_argument("--layout", action="append", required=True, metavar="FLAGS",
                        help="the trainer's grid, such as '--llm-tp 2'; '' for one rank; may be given several times")
    parser.add_argument("--tokens", action="append", type=int, required=True, metavar="TOKENS",
                        help="--max-tokens-per-microbatch; may be given several times")
    parser.add_argument("--prompt-length", type=int, default=512, metavar="TOKENS", help="length of every prompt (512)")
    parser.add_argument("--completion-length", type=mean_and_spread, default="1024:0.5", metavar="MEAN[:SPREAD]",
                        help="tokens of a completion: mean, and standard deviation of the logarithm (1024:0.5)")
    parser.add_argument("--model", choices=MODELS, default="tiny", help="shape of a model with random weights (tiny)")
    parser.add_argument("--repeats", type=int, default=3, help="updates of an arm in each round (3)")
    parser.add_argument("--rounds", type=int, default=1, help="turns of each arm (1)")
    parser.add_argument("--memory-limit-gib", type=float, help="GiB that a rank may use (default: all there is)")
    parser.add_argument("--slurm", action="store_true", help="run the arms on the nodes of this Slurm job")
    parser.add_argument("--gpus-per-node", type=int, default=8, help="ranks of an arm on each node of the job (8)")
    parser.add_argument("--out", help="folder for the output of the ranks; with --slurm one that all nodes see")
    given = sys.argv[1:] if arguments is None else arguments
    place = given.index("--") if "--" in given else len(given)
    chosen, further = parser.parse_args(given[:place]), given[place + 1 :]
    check_least(parser, chosen, prompt_length=1, repeats=1, rounds=1, memory_limit_gib=0.1, gpus_per_node=1)
    if chosen.slurm and not chosen.out:
        parser.error("--slurm needs --out, a folder that all nodes see")
    return chosen, further


def mean_and_spread(text: str) -> tuple[float, float]:
    """Parse `1024` or `1024:0.7`."""
    mean, _, spread = text.partition(":")
    found = float(mean), float(spread or 0.5)
    if not (found[0] >= 1 and 0 <= found[1] < 5):
        raise argparse.ArgumentTypeError(f"{text}: MEAN is at least 1, SPREAD from 0 to 5")
    return found


def plan(chosen: argparse.Namespace, further: list[str], folder: Path) -> list[Arm]:
    """Return all arms, checked. Raises ValueError, which names the flags, for one that cannot work."""
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
                                 f"--seq-length {config.train.seq_length} (default: the least of --tokens)")
            flags += ["--max-completion-tokens", str(room)]
            config = parse_as(RlRunConfig, flags, "")
            encoders = registry.model_provider(config.model.model_provider).encoders(config.model_family)
            if encoders:
                raise ValueError(f"--model-provider {config.model.model_provider} has the encoder "
                                 f"{', '.join(encoders)}: fabricated rollouts have no images")
            grid, ranks = validate_rl(config, num_ranks(config)).language, num_ranks(config)
            if chosen.slurm:
                nodes_of(ranks, chosen.gpus_per_node)
            else:
                check_gpus(chosen.device, ranks, f"--layout {layout!r} has")
            arms.append(Arm(layout, tokens, flags, ranks, f"{grid.tp}/{grid.pp}/{grid.ep}/{grid.dp}"))
    return arms


def nodes_of(ranks: int, gpus_per_node: int) -> list[str]:
    """Return the nodes of the Slurm job that an arm runs on.

    Raises:
        ValueError: this is no Slurm job, it has too few nodes, or the ranks do not fill nodes.
    """
    if ranks > gpus_per_node and ranks % gpus_per_node:
        raise ValueError(f"--slurm: {ranks} ranks of a layout are no multiple of --gpus-per-node {gpus_per_node}")
    listed = os.environ.get("SLURM_JOB_NODELIST")
    if listed is None:
        raise ValueError("--slurm: this is no Slurm job (SLURM_JOB_NODELIST is not set); use sbatch or salloc")
    hosts = subprocess.run(["scontrol", "show", "hostnames", listed], check=True, capture_output=True,
                           text=True).stdout.split()
    count = -(-ranks // gpus_per_node)
    if count > len(hosts):
        raise ValueError(f"--slurm: a layout of {ranks} ranks needs {count} nodes of --gpus-per-node {gpus_per_node}, "
                         f"and the job has {len(hosts)}")
    return hosts[:count]


def run_on_nodes(arm: Arm, gpus_per_node: int, arguments: list[str], output: Path) -> int:
    """Run this program in a process for each rank on nodes of the Slurm job. Return the exit code of srun."""
    hosts = nodes_of(arm.ranks, gpus_per_node)
    count = str(len(hosts))
    command = ["srun", "--overlap", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1",
               f"--nodelist={','.join(hosts)}", "--kill-on-bad-exit=1", str(ROOT / "scripts" / "sbatch" / "node.sh"),
               str(output.with_name("stopped")), sys.executable, "-m", "torch.distributed.run", "--nnodes", count,
               "--nproc-per-node", str(arm.ranks // len(hosts)), "--master-addr", hosts[0], "--master-port",
               str(20000 + int(os.environ["SLURM_JOB_ID"]) % 10000), __file__, *arguments]
    with output.open("w", encoding="utf-8") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT)
        try:
            return process.wait()
        finally:
            process.terminate()
            process.wait()


def run(arm: Arm, chosen: argparse.Namespace, folder: Path) -> None:
    """Run one round of an arm. Its figures or its error go into `arm`."""
    folder.mkdir(parents=True)
    settings = {"out": str(folder), "prompt_length": chosen.prompt_length, "repeats": chosen.repeats,
                "completion_length": chosen.completion_length, "memory_limit_gib": chosen.memory_limit_gib}
    output = folder / "output.txt"
    arguments = [json.dumps(settings), *arm.flags, "--run-dir", str(folder)]
    if chosen.slurm:
        code = run_on_nodes(arm, chosen.gpus_per_node, arguments, output)
    else:
        code = torchrun(__file__, arm.ranks, arguments, output=output)
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


def figures(arm: Arm) -> dict[str, Any]:
    """Return an arm's row. A figure that could not be measured is None."""
    row: dict[str, Any] = {"layout": arm.layout, "max_tokens": arm.max_tokens, "ranks": arm.ranks,
                           "sizes": arm.sizes} | dict.fromkeys(list(COLUMNS.values())[4:])
    row["error"] = arm.error
    for key, name in (("peak_gib", "allocated"), ("reserved_gib", "reserved")):
        known = [peaks[name] / GIB for peaks in arm.peaks if name in peaks]
        row[key] = max(known) if known else None
    if arm.error or not arm.updates:
        return row

    def slowest(name: str) -> list[float]:
        return [max(rank[name] for rank in update) for update in arm.updates]

    totals = [update[0]["tokens"] for update in arm.updates]
    # Ranks of one lane have the same microbatches, so one rank of each lane counts.
    lanes = [list({rank["lane"]: rank for rank in update}.values()) for update in arm.updates]
    positions = sum(rank["positions"] for update in lanes for rank in update)
    budget = sum(rank["microbatches"] * arm.max_tokens for update in lanes for rank in update)
    log_probs, update = slowest("log_probs_s"), slowest("update_s")
    return row | {
        "microbatches": statistics.mean(update[0]["microbatches"] for update in arm.updates),
        "log_probs_s": statistics.median(log_probs), "update_s": statistics.median(update),
        "log_probs_all_s": log_probs, "update_all_s": update,
        "tokens_per_s": (speed := sum(totals) / sum(map(sum, zip(log_probs, update, strict=True)))),
        "tokens_per_s_per_rank": speed / arm.ranks,
        "tokens_per_update": statistics.mean(totals), "padding_share": 1 - sum(totals) / positions,
        "budget_share": sum(totals) / budget,
    }


def rollouts(settings: dict[str, Any], config: RlRunConfig, vocab_size: int, step: int) -> list[Completion]:
    """Fabricate the completions of a global batch, the same on every rank and for every layout and budget.

    Lengths are log-normal. If the logarithm has the standard deviation s, its mean is ln(mean) - s^2 / 2.
    """
    from mimo.rl.rollouts import Completion

    mean, spread = settings["completion_length"]
    prompt_length, longest = settings["prompt_length"], config.rollout.max_completion_tokens
    rng = np.random.default_rng([config.train.seed, step])
    drawn = rng.lognormal(math.log(mean) - spread**2 / 2, spread, config.train.global_batch_size)
    found = []
    for number, length in enumerate(np.clip(np.rint(drawn), 1, longest).astype(int)):
        prompt, place = divmod(number, config.rl.completions_per_prompt)
        ids = rng.integers(0, vocab_size, prompt_length + length).tolist()
        # Close to those of an untrained model, so that not all importance weights are clipped.
        log_probs = (-math.log(vocab_size) - 0.1 * rng.random(length)).tolist()
        found.append(Completion(
            f"prompt {prompt}#{place}", prompt, tuple(ids[:prompt_length]), tuple(ids[prompt_length:]),
            tuple(log_probs), "length" if length == longest else "stop", float(rng.random())))
    return found


def run_rank(settings: dict[str, Any], flags: list[str]) -> int:
    """Run one rank of an arm, which writes its measurements, and return the exit code.

    Args:
        settings: what `run` passes to every rank.
        flags: all flags of the trainer.
    """
    from mimo.training.run import launch

    config = parse_as(RlRunConfig, flags, "")
    # With its own rank, the first process would open the prompts. `plan` has checked them already.
    layout = validate_rl(config, run_world_size(config, os.environ), rank=-1)
    return launch(config, layout, partial(measure, settings))


def measure(settings: dict[str, Any], config: RlRunConfig, grids: Grids, platform: Platform) -> None:
    """Set up, update, and write the measurements. A rank that runs out of memory writes what it has and exits."""
    import torch
    import torch.distributed as dist

    provider = registry.model_provider(config.model.model_provider)
    vocab_size = provider.token_spec(config.model_family).vocab_size
    updates: list[dict[str, float]] = []

    def write(out_of_memory: str) -> None:
        peaks = {"allocated": platform.peak_memory_bytes()}
        if platform.name != "cpu":
            peaks["reserved"] = torch.cuda.max_memory_reserved()
        record = {"rank": grids.rank, "out_of_memory": out_of_memory, "peaks": peaks, "updates": updates[1:]}
        (Path(settings["out"]) / f"rank{grids.rank}.json").write_text(json.dumps(record), encoding="utf-8")

    with exit_when_out_of_memory(write):
        limit_memory(settings["memory_limit_gib"], platform)
        trainer = policy_trainer(config, grids, platform, provider, vocab_size)
        platform.reset_peak_memory()
        for step in range(settings["repeats"] + 1):
            completions = rollouts(settings, config, vocab_size, step)
            own = [each.batch.text for each in trainer.microbatches(completions)]
            platform.synchronize()
            dist.barrier(group=grids.host)
            began = time.perf_counter()
            result = trainer.update(completions)
            platform.synchronize()
            seconds, log_probs_s = time.perf_counter() - began, result.log_probs_s + result.reference_s
            updates.append({
                "log_probs_s": log_probs_s, "update_s": seconds - log_probs_s, "tokens": result.num_tokens,
                "microbatches": result.num_microbatches,
                "lane": grids.layout.language.coordinates(grids.rank)["dp"],
                "positions": sum(text.input_ids.shape[1] for text in own if text is not None)})
        trainer.parts.watchdog.close()
    write("")


def policy_trainer(config: RlRunConfig, grids: Grids, platform: Platform, provider: Any,
                   vocab_size: int) -> PolicyTrainer:
    """Set up the trainer as `mimo.rl.loop.RlLoop` does, without an engine."""
    from mimo.checkpoint.state import RunState
    from mimo.rl.policy import PolicyTrainer
    from mimo.rl.reference import reference_policy
    from mimo.training.setup import setup_trainer, start
    from mimo.watchdog.watchdog import Watchdog

    watchdog = Watchdog(config.train.watchdog_timeout_s, grids.describe())
    # A sequence of the schedule is a packed microbatch.
    train = replace(config.train, seq_length=config.rl.max_tokens_per_microbatch)
    parts = setup_trainer(replace(config, train=train), provider, grids, platform, watchdog)
    state = RunState(config, grids, platform, parts.built, parts.optimizer, parts.scheduler)
    start(state, provider, None, watchdog)
    reference, _ = reference_policy(state, provider, config.rl, watchdog, resumed=False)
    return PolicyTrainer(parts, config.rl, vocab_size, 0, reference=reference)


def main(arguments: list[str] | None = None) -> int:
    """Run all and print. Returns the exit code: 1 if an arm failed for another reason than memory, 2 for bad flags."""
    # As in train_rl.py: a provider pkg.module:attr may lie in the current folder.
    sys.path.append(os.getcwd())
    if "RANK" in os.environ:
        return run_rank(json.loads(sys.argv[1]), sys.argv[2:])
    chosen, further = parse_arguments(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with contextlib.ExitStack() as at_end:
        temporary = chosen.out or at_end.enter_context(tempfile.TemporaryDirectory(prefix="rl-sweep-"))
        Path(temporary).mkdir(parents=True, exist_ok=True)
        try:
            arms = plan(chosen, further, Path(temporary))
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        for turn in range(chosen.rounds):
            for number, arm in enumerate(arms):
                if not arm.error:
                    print(f"round {turn + 1} of {chosen.rounds}: {arm.name}", file=sys.stderr, flush=True)
                    run(arm, chosen, Path(temporary).resolve() / f"{turn}-{number}")
    results = [figures(arm) for arm in arms]
    print(table_of(COLUMNS, results, error_cell=4))
    done = [row for row in results if row["tokens_per_s"]]
    if len(done) > 1:
        best = max(done, key=lambda row: row["tokens_per_s"])
        print(f"fastest: {best['layout'] or 'one rank'} with {best['max_tokens']} tokens")
    print(json.dumps({"device": chosen.device, "device_name": device_name(chosen.device), "model": chosen.model,
                      "prompt_length": chosen.prompt_length, "completion_length": chosen.completion_length,
                      "repeats": chosen.repeats, "rounds": chosen.rounds, "memory_limit_gib": chosen.memory_limit_gib,
                      "flags": further, "arms": results}))
    return int(any(arm.error and "memory" not in arm.error for arm in arms))


if __name__ == "__main__":
    sys.exit(main())
