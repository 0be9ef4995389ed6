"""One rank of the family test: `torchrun families_worker.py FOLDER IMPL [DEVICE]`, all layouts of its number of ranks.

Prints one line of JSON on rank 0: for each family and layout the largest difference from Hugging Face's logits, and the
names whose exported tensors are not the source's.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TEXT = {1: ["--llm-dp 1"], 2: ["--llm-tp 2", "--llm-pp 2"]}
MOE = {1: ["--llm-dp 1"], 2: ["--llm-tp 2 --sequence-parallel --llm-ep 2", "--llm-pp 2", "--llm-dp 2 --llm-ep 2"]}
LLAVA = {1: ["--layout colocated"], 2: ["--encoder-dp 1"]}


def main(folder: str, impl: str, device_type: str = "cuda") -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    from mimo.platform import get_platform

    platform = get_platform(device_type)
    platform.set_device(int(os.environ["LOCAL_RANK"]))
    platform.init_process_group(rank, world_size, 120)
    without_mamba_kernels()
    from tests.support import hf_families

    found: dict[str, Any] = {}
    device = ["--device", device_type, "--transformer-impl", impl, "--watchdog-timeout-s", "200"]
    for name in hf_families.MODELS:
        source = Path(folder) / name
        expected = share(hf_families.save_hf(rank, name, str(source)) if rank == 0 else None)
        for number, flags in enumerate(layouts_of(name)[world_size]):
            out = Path(folder) / f"{name}-{world_size}-{number}"
            ours = hf_families.logits_of(rank, name, str(source), (*flags.split(), *device), world_size, str(out))
            errors = [float((logits.cpu()[:, : hf_families.VOCAB_SIZE] - expected[key]).abs().max())
                      for key, logits in ours.items()]
            found[f"{name} {flags}"] = summary(errors, source, out)
    if rank == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


def layouts_of(name: str) -> dict[int, list[str]]:
    """Flags of the layouts of a model, by number of processes."""
    from tests.support.hf_families import DEEPSEEK_MODELS, NEMOTRON_MODELS, VISION_LANGUAGE

    if name in VISION_LANGUAGE:
        return LLAVA
    return MOE if name in ("qwen3-moe", "mixtral", *NEMOTRON_MODELS, *DEEPSEEK_MODELS) else TEXT


def without_mamba_kernels() -> None:
    """Keep mamba_ssm, where it is installed, from transformers: the reference is on the CPU, the kernels are not."""
    absent: Any = None  # in sys.modules: an import raises
    names = ("mamba_ssm", "causal_conv1d")
    sys.modules.update(dict.fromkeys(names, absent))
    importlib.import_module("transformers.models.nemotron_h.modeling_nemotron_h")
    for name in names:
        del sys.modules[name]


def share(value: Any) -> Any:
    """Return the first rank's value."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def summary(errors: list[float], source: Path, out: Path) -> dict[str, Any]:
    """Return the largest error of all ranks, and what was not exported as it came."""
    from tests.support.stored import safetensors_of

    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, errors)
    ours, theirs = safetensors_of(out), safetensors_of(source)
    wrong = sorted(ours.keys() ^ theirs.keys())
    wrong += [name for name in ours.keys() & theirs.keys() if not torch.equal(ours[name], theirs[name])]
    return {"error": max(error for of_rank in gathered for error in of_rank), "not exported": wrong}


if __name__ == "__main__":
    main(*sys.argv[1:])
