"""Print flags of train_rl.py for a Hugging Face model, one a line: provider, weights, tokenizer, layout, engine.

    python scripts/rl/hf_model.py MODEL --ranks 8 --engine-gpus 8
    python scripts/rl/hf_model.py MODEL --ranks 64 --tp 8 --pp 2 --engine-gpus 32 --engine-tp 8 --engine-pp 4

MODEL is the folder, or the id on the hub, of a model that a built-in provider knows, such as Qwen3 or Nemotron-H. The
trainer is data-parallel over all ranks that --tp and --pp leave. The experts of a mixture are divided among as many
ranks of a stage as divide both, or among --ep. A dense model has an engine replica on each GPU; a mixture of experts,
whose weights need more memory, has one on up to four GPUs of a node. --engine-tp and --engine-pp choose other replicas;
one of more GPUs than a node has spreads over several nodes.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass, fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mimo import registry
from mimo.commands.flags import provider_name, takes_hf_config
from mimo.config.cli import parse_as
from mimo.config.rl_run import RlRunConfig
from mimo.weights import hub

MAX_ENGINE_TP = 4


@dataclass(frozen=True)
class Sizes:
    """Sizes of the trainer's grid and of an engine replica; 0 lets the model decide.

    Attributes:
        tp, pp, ep: parallel sizes of the trainer.
        engine_tp, engine_pp: those of a replica.
        gpus_per_node: GPUs of a node, beyond which a replica spreads over several.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 0
    engine_tp: int = 0
    engine_pp: int = 1
    gpus_per_node: int = 8


ONE_RANK = Sizes()


def flags_of(model: str, ranks: int, engine_gpus: int, sizes: Sizes = ONE_RANK) -> list[str]:
    """Return the flags.

    Raises:
        ValueError: the folder has no model that a built-in provider knows, or the sizes do not divide the GPUs.
    """
    folder = Path(hub.local_folder("MODEL", model))
    hub.check_folder("MODEL", folder)
    name = provider_name(None, folder)
    provider = registry.model_provider(name)
    if not takes_hf_config(provider):
        raise ValueError(f"{model}: --model-provider {name} takes its sizes from flags, not from config.json; start "
                         "train_rl.py yourself")
    if ranks % (sizes.tp * sizes.pp):
        raise ValueError(f"--ranks {ranks} is not divisible by --tp {sizes.tp} * --pp {sizes.pp}")
    flags = ["--model-provider", name, "--hf-config", model, "--load-hf", model, "--tokenizer", model,
             "--llm-dp", str(ranks // (sizes.tp * sizes.pp))]
    if sizes.tp > 1:
        flags += ["--llm-tp", str(sizes.tp), "--sequence-parallel"]
    if sizes.pp > 1:
        flags += ["--llm-pp", str(sizes.pp)]
    experts = provider.num_experts(parse_as(RlRunConfig, ["--dataset-provider", "gsm8k", *flags], "").model_family)
    node_gpus = min(sizes.gpus_per_node, engine_gpus)
    tp = sizes.engine_tp or (math.gcd(MAX_ENGINE_TP, engine_gpus, node_gpus) if experts else 1)
    if experts:
        flags += ["--llm-ep", str(sizes.ep or math.gcd(experts, ranks // sizes.pp))]
    elif (sizes.ep or 1) > 1:
        raise ValueError(f"--ep {sizes.ep}: {model} has no experts")
    workers = tp * sizes.engine_pp
    if engine_gpus % workers:
        raise ValueError(f"--engine-gpus {engine_gpus} is not divisible by --engine-tp {tp} * --engine-pp "
                         f"{sizes.engine_pp}")
    if workers < node_gpus and node_gpus % workers:
        raise ValueError(f"--engine-tp {tp} * --engine-pp {sizes.engine_pp} is {workers} GPUs of a replica, no divisor "
                         f"of the {node_gpus} of a node: {engine_gpus // workers} replicas do not fit whole nodes")
    flags += ["--engine-tp", str(tp)] + (["--engine-pp", str(sizes.engine_pp)] if sizes.engine_pp > 1 else [])
    if workers > sizes.gpus_per_node:
        if workers % sizes.gpus_per_node:
            raise ValueError(f"--engine-tp {tp} * --engine-pp {sizes.engine_pp} is {workers} GPUs of a replica, no "
                             f"multiple of --gpus-per-node {sizes.gpus_per_node}")
        flags += ["--engine-nodes", str(workers // sizes.gpus_per_node)]
    return [*flags, "--engine-dp", str(engine_gpus // workers)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder or hub id of a Hugging Face model")
    parser.add_argument("--ranks", type=int, required=True, help="ranks of the trainer")
    parser.add_argument("--engine-gpus", type=int, required=True, help="GPUs of all engine replicas")
    for each in fields(Sizes):
        parser.add_argument(f"--{each.name.replace('_', '-')}", type=int, default=each.default, metavar="N",
                            help=f"see above (default: {each.default or 'by the model'})")
    given = parser.parse_args()
    if min(given.ranks, given.engine_gpus) < 1:
        parser.error(f"--ranks {given.ranks} --engine-gpus {given.engine_gpus}: both at least 1")
    wrong = [f"--{each.name.replace('_', '-')} {vars(given)[each.name]}" for each in fields(Sizes)
             if vars(given)[each.name] < min(each.default, 1)]
    if wrong:
        parser.error(f"{', '.join(wrong)}: at least 1, or left out")
    sizes = Sizes(**{each.name: vars(given)[each.name] for each in fields(Sizes)})
    try:
        print("\n".join(flags_of(given.model, given.ranks, given.engine_gpus, sizes)))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
