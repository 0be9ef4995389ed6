"""Print flags of train_rl.py for a Hugging Face model, one a line: provider, weights, tokenizer, layout, engine.

    python scripts/rl/hf_model.py MODEL --ranks 8 --engine-gpus 8

MODEL is the folder, or the id on the hub, of a model that a built-in provider knows, such as Qwen3 or Nemotron-H. The
trainer is data-parallel over all ranks. The experts of a mixture are divided among as many ranks as divide both. A
dense model has an engine replica on each GPU; a mixture of experts, whose weights need more memory, has one on up to
four GPUs.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mimo import registry
from mimo.commands.flags import provider_name, takes_hf_config
from mimo.config.cli import parse_as
from mimo.config.rl_run import RlRunConfig
from mimo.weights import hub

MAX_ENGINE_TP = 4


def flags_of(model: str, ranks: int, engine_gpus: int) -> list[str]:
    """Return the flags. Raises ValueError if the folder has no model that a built-in provider knows."""
    folder = Path(hub.local_folder("MODEL", model))
    hub.check_folder("MODEL", folder)
    name = provider_name(None, folder)
    provider = registry.model_provider(name)
    if not takes_hf_config(provider):
        raise ValueError(f"{model}: --model-provider {name} takes its sizes from flags, not from config.json; start "
                         "train_rl.py yourself")
    flags = ["--model-provider", name, "--hf-config", model, "--load-hf", model, "--tokenizer", model,
             "--llm-dp", str(ranks)]
    experts = provider.num_experts(parse_as(RlRunConfig, ["--dataset-provider", "gsm8k", *flags], "").model_family)
    tp = math.gcd(MAX_ENGINE_TP, engine_gpus) if experts else 1
    if experts:
        flags += ["--llm-ep", str(math.gcd(experts, ranks))]
    return [*flags, "--engine-tp", str(tp), "--engine-dp", str(engine_gpus // tp)]


def main() -> int:
    """Print the flags and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder or hub id of a Hugging Face model")
    parser.add_argument("--ranks", type=int, required=True, help="ranks of the trainer")
    parser.add_argument("--engine-gpus", type=int, required=True, help="GPUs of all engine replicas")
    given = parser.parse_args()
    if min(given.ranks, given.engine_gpus) < 1:
        parser.error(f"--ranks {given.ranks} --engine-gpus {given.engine_gpus}: both at least 1")
    try:
        print("\n".join(flags_of(given.model, given.ranks, given.engine_gpus)))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
