"""Measure which faults the verification of refits catches, its false alarms and its cost, beside a live engine.

    python scripts/bench/refit_verify.py --device cpu --dtype bfloat16 --model moe
    python scripts/bench/refit_verify.py --device cuda --model moe --engine-quantization fp8_per_block

A run of train_rl.py (one rank, random weights) first trains with `--refit-verify-interval 1`; no refit may fail. Then
each fault goes into one refit. `stale` tensors keep the values that the engine already has. `swapped` ones come under
another name, or with rows or heads in another order. Every fault is in a single layer, and none changes checksums. On
CUDA, the engine shares the trainer's GPU. The last line of output is JSON.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mimo.config.cli import parse_as
from mimo.config.rl_run import DESCRIPTION, RlRunConfig, validate_rl
from mimo.registry import model_provider
from scripts.bench.harness import argument_parser

if TYPE_CHECKING:
    import torch

    from mimo.grid.groups import Grids
    from mimo.platform.base import Platform

FLAGS = """--model-provider causal_lm --transformer-impl local --vocab-size 100 --seq-length 64
--max-completion-tokens 24 --completions-per-prompt 8 --lr-decay-style constant --refit-verify-interval 1"""
SIZES = {
    "tiny": """--num-layers 2 --hidden-size 64 --num-attention-heads 4 --num-query-groups 2 --kv-channels 32
--ffn-hidden-size 128 --global-batch-size 32 --max-tokens-per-microbatch 512 --lr 1e-3""",
    "medium": """--num-layers 4 --hidden-size 1024 --num-attention-heads 16 --num-query-groups 8 --kv-channels 64
--ffn-hidden-size 2048 --global-batch-size 1024 --max-tokens-per-microbatch 8192 --lr 1e-5""",
}
EXPERTS = {"tiny": "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64",
           "medium": "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 1024"}
Tensors = dict[str, "torch.Tensor"]
Fault = Callable[[Tensors], Tensors]
LAYER = "language/decoder.layers."
ERROR = re.compile(r"after a refit of (.+?), .* differ by (\S+) nats on average, and k3 is (\S+); rounding explains "
                   r"(\S+) and (\S+) at most")


def main(arguments: list[str] | None = None) -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--model", choices=("moe", "dense"), default="moe")
    parser.add_argument("--size", choices=SIZES, help="default: medium on CUDA, tiny on the CPU")
    parser.add_argument("--good", type=int, default=20, help="number of refits without a fault")
    parser.add_argument("--engine-quantization", default="none", help="the flag of train_rl.py")
    parser.add_argument("--flags", default="", help="further flags of train_rl.py")
    chosen = parser.parse_args(arguments)
    size = chosen.size or ("medium" if chosen.device == "cuda" else "tiny")
    flags = [*FLAGS.split(), *SIZES[size].split(), "--device", chosen.device, "--train-iters", str(chosen.good),
             "--bf16" if chosen.dtype == "bfloat16" else "--no-bf16", "--engine-quantization",
             chosen.engine_quantization]
    if chosen.model == "moe":
        flags += [*EXPERTS[size].split(), "--qk-layernorm"]
    if chosen.device == "cuda":
        flags += ["--engine-placement", "colocated", "--engine-enforce-eager"]
    from mimo.training.run import launch  # imported late, so that --help is quick

    with tempfile.TemporaryDirectory() as folder:
        config = parse_as(RlRunConfig, [*flags, "--run-dir", folder, *chosen.flags.split()], DESCRIPTION)
        result = {"device": chosen.device, "dtype": chosen.dtype, "model": chosen.model, "size": size,
                  "engine_quantization": chosen.engine_quantization}
        code = launch(config, validate_rl(config, 1), partial(measure, result))
    print(json.dumps(result))
    return code


def measure(result: dict[str, Any], config: RlRunConfig, grids: Grids, platform: Platform) -> None:
    """Train, then try one fault after the other."""
    from mimo.refit.rendezvous import RefitError
    from mimo.rl.loop import RlLoop

    shares: list[dict[str, list[float]]] = []
    verify_s, iteration_s = [], []

    class Measured(RlLoop):
        """A run that verifies a refit before each iteration, and tries faults after the last one."""

        def _iterate(self, logger: Any) -> None:
            started = time.perf_counter()
            self.collector.refit(self.session.progress.iteration)
            verify_s.append(self.collector.verify_s)
            self.collector.verify_s = 0.0
            shares.append(shares_of_limits(self))
            super()._iterate(logger)
            iteration_s.append(time.perf_counter() - started - verify_s[-1])

        def _train(self, logger: Any, at_end: Any) -> str | None:
            alarms = []
            try:
                super()._train(logger, at_end)
            except RefitError as error:
                alarms.append(str(error))
                recover(self)
            result["good"] = {"refits": len(shares) + len(alarms), "false_alarms": alarms}
            if shares:
                result["good"]["largest_share_of_limit"] = {
                    weights: [max(each[weights][place] for each in shares) for place in (0, 1)]
                    for weights in shares[0]}
            if iteration_s:
                verify, iteration = statistics.median(verify_s), statistics.median(iteration_s)
                result["seconds"] = {"verification": round(verify, 3), "iteration": round(iteration, 3),
                                     "share_at_interval_25": round(verify / 25 / iteration, 4)}
            if not alarms:
                result["faults"] = {name: caught(self, fault) for name, fault in faults(self).items()}
                result["missed"] = [name for name, found in result["faults"].items() if not found["caught"]]
            return None

    provider, prompts = model_provider(config.model.model_provider), config.find_dataset(config.data.dataset_provider)
    Measured(config, grids, platform, provider, prompts).run()


def shares_of_limits(loop: Any) -> dict[str, list[float]]:
    """Mean difference and k3 over their limits in the last comparisons that passed."""
    return {weights: [round(report.mean_difference / report.mean_limit, 3), round(report.kl / report.kl_limit, 3)]
            for weights, report in loop.collector.probe.reports.items()}


def caught(loop: Any, fault: Fault) -> dict[str, Any]:
    """Say whether a refit with a fault is refused, and by which comparison."""
    from mimo.refit.rendezvous import RefitError

    weights = loop.collector.sender.weights
    prepare = weights.prepare
    loop.collector._version, loop.collector._num_refits = None, 0
    weights.prepare = lambda: fault(dict(prepare()))
    try:
        loop.collector.refit(loop.session.progress.iteration)
    except RefitError as error:
        figures = ERROR.search(str(error))
        if figures is None:
            return {"caught": True, "error": str(error)[:300]}
        mean, kl, mean_limit, kl_limit = map(float, figures.groups()[1:])
        return {"caught": True, "with": figures[1], "times_limit": [round(mean / mean_limit, 1),
                                                                    round(kl / kl_limit, 1)]}
    else:
        return {"caught": False, "share_of_limit": shares_of_limits(loop)}
    finally:
        weights.prepare = prepare
        recover(loop)


def recover(loop: Any) -> None:
    """Take the devices back from the engine, and reconnect if a refit was aborted."""
    from mimo.refit.sender import connect
    from mimo.rl.launch_engine import refit_options

    loop.collector._finish_rollouts()
    if loop.collector.sender._wire is None:
        client = loop._engine.client
        loop.collector.sender = connect(loop.parts.built, loop.grids, loop.provider, loop.config.model_family, client,
                                        client.num_workers, refit_options(loop.config), loop._engine.address)


def faults(loop: Any) -> dict[str, Fault]:
    """Return faults of one or two tensors by name."""
    names = list(loop.collector.sender.weights.prepare())
    model, last = loop.config.model_family, loop.config.model_family.num_layers - 1
    is_moe = any(".experts." in name for name in names)
    expert = r"0\.mlp\.experts\..*linear_fc1.*" if is_moe else r"0\.mlp\.linear_fc1\.weight"
    found = {
        "stale: final norm": stale(loop, names, r".*final_layernorm\.weight"),
        "stale: attention projection": stale(loop, names, rf".*layers\.{last}\.self_attention\.linear_proj\.weight"),
        "stale: one expert" if is_moe else "stale: one mlp": stale(loop, matching(names, LAYER + expert)[:1], ".*"),
        "swapped: q and k": heads(model, lambda each: [each[-2], *each[1:-2], each[0], each[-1]], last),
        "swapped: k and v": heads(model, lambda each: [*each[:-2], each[-1], each[-2]], last),
        "swapped: order of query heads": heads(model, lambda each: [*each[:-2][::-1], *each[-2:]], last),
        "swapped: gate and up": halves(matching(names, LAYER + expert)[0]),
        "swapped: norms of two layers": exchange(*matching(names, LAYER + r"[01]\.(input_layernorm|self_attention"
                                                                          r"\.linear_qkv\.layer_norm)[._]?weight")),
        "swapped: attention projections of two layers": exchange(
            *matching(names, LAYER + r"[01]\.self_attention\.linear_proj\.weight")),
        "swapped: embedding and output": exchange("language/embedding.word_embeddings.weight",
                                                  "language/output_layer.weight"),
    }
    if is_moe:
        found["swapped: two experts"] = exchange(*matching(names, LAYER + r"0\.mlp\.experts\..*linear_fc2.*")[:2])
        found["swapped: router rows"] = rows_reversed(f"{LAYER}0.mlp.router.weight")
    else:
        found["swapped: mlps of two layers"] = exchange(*matching(names, LAYER + r"[01]\.mlp\.linear_fc1\.weight"))
        found["swapped: rows of the output layer"] = rows_reversed("language/output_layer.weight")
    return found


def matching(names: list[str], pattern: str) -> list[str]:
    """Return the names that a pattern matches in full."""
    found = [name for name in names if re.fullmatch(pattern, name)]
    if not found:
        raise SystemExit(f"no tensor matches {pattern}: there are {names[:40]}")
    return found


def stale(loop: Any, names: list[str], pattern: str) -> Fault:
    """Keep the values that the engine has now, in this refit and those of its verification."""
    live = loop.collector.sender.weights.prepare()
    before = {name: live[name].clone() for name in matching(names, pattern)}
    return lambda tensors: tensors | before


def exchange(first: str, second: str) -> Fault:
    return lambda tensors: tensors | {first: tensors[second], second: tensors[first]}


def rows_reversed(name: str) -> Fault:
    return lambda tensors: tensors | {name: tensors[name].flip(0)}


def halves(name: str) -> Fault:
    def fault(tensors: Tensors) -> Tensors:
        import torch

        return tensors | {name: torch.cat(tensors[name].chunk(2)[::-1])}

    return fault


def heads(model: Any, order: Callable[[list[torch.Tensor]], list[torch.Tensor]], layer: int) -> Fault:
    """Reorder the heads of each group (queries, a key, a value) in a layer's fused projection."""
    def fault(tensors: Tensors) -> Tensors:
        import torch

        name = f"{LAYER}{layer}.self_attention.linear_qkv.weight"
        groups = tensors[name].chunk(model.num_query_groups or model.num_attention_heads)
        each = [group.split(model.kv_channels) for group in groups]
        return tensors | {name: torch.cat([torch.cat(order(list(group))) for group in each])}

    return fault


if __name__ == "__main__":
    sys.exit(main())
