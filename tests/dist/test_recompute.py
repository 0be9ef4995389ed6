"""Selective recomputation: parts of layers are computed again, and losses, gradients and parameters stay the same."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import deepseek, equality
from tests.support.marks import fast_only
from tests.support.spawn import WorkerPool

QWEN = """--model-provider qwen3_vl --mrope-section 4 2 2 --num-query-groups 2 --kv-channels 16 --vision-patch-size 4
--vision-hidden-size 16 --vision-num-layers 2 --vision-num-attention-heads 2 --vision-ffn-hidden-size 20
--vision-num-position-embeddings 25 --vision-deepstack-layers 0 --image-token-id 95 --hidden-size 32
--num-attention-heads 4 --ffn-hidden-size 64 --num-layers 2 --vocab-size 96 --max-position-embeddings 4096
--rotary-base 100 --mock-image-size 16 --mock-image-size-cv 0.6 --seq-length 96 --layout colocated"""
NEMOTRON = """--model-provider nemotron-moe-vlm-tiny --hybrid-layer-pattern ME*-M --image-token-id 95
--vision-num-layers 1"""
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
ENCODER = "--encoder-recompute selective --encoder-recompute-modules"
# name -> (ranks, flags of the model, flags of recomputation, module classes that run more often)
CASES = {
    "all-of-a-dense-model": (1, f"--layout colocated {DROPOUT}", "core_attn,mlp", {"MLP"}),
    "norms": (1, f"--layout colocated {DROPOUT}", "layernorm,mlp", {"MLP", "RMSNorm"}),
    "tp2": (2, "--layout colocated --encoder-tp 2 --llm-tp 2 --sequence-parallel", "mlp,layernorm", {"MLP", "RMSNorm"}),
    "experts": (2, f"--layout colocated --encoder-dp 2 --llm-dp 2 --llm-ep 2 {DROPOUT} {' '.join(equality.MOE)}",
                "moe", {"SequentialMLP"}),
    "latent-attention": (1, "", "mla_up_proj,shared_experts",
                         {"ColumnParallelLinear", "SharedExpertMLP"}),
    "latent-attention-tp2": (2, "--llm-tp 2 --sequence-parallel", "mla_up_proj", {"ColumnParallelLinear"}),
    "hybrid": (1, f"{NEMOTRON} --layout colocated", "mlp,shared_experts,layernorm,core_attn",
               {"MLP", "SharedExpertMLP", "RMSNorm"}),
    "hybrid-moe": (2, f"{NEMOTRON} --layout colocated --encoder-dp 2 --llm-dp 2 --llm-ep 2 --moe-latent-size 32",
                   "moe", {"SequentialMLP", "SharedExpertMLP"}),
    "encoder": (1, f"{QWEN} {ENCODER} core_attn,mlp,layernorm", "core_attn", {"MLP", "LayerNorm"}),
    "encoder-windows": (2, "--layout colocated --encoder-dp 2 --llm-tp 2 --sequence-parallel --encoder-window 2 "
                           f"{ENCODER} mlp,layernorm", "mlp", {"MLP"}),
}
FAST = ["experts", "latent-attention", "encoder"]


def counted(rank: int, flags: tuple[str, ...], world_size: int) -> tuple[equality.Outcome, Counter[str]]:
    """Train and count the calls of modules by class."""
    from torch.nn.modules.module import register_module_forward_pre_hook

    calls: Counter[str] = Counter()
    hook = register_module_forward_pre_hook(lambda module, inputs: calls.update([type(module).__name__]))
    train = deepseek.train if "--hf-config" in flags else equality.run_layout
    try:
        return train(rank, flags, world_size), calls
    finally:
        hook.remove()


def bits(outcome: equality.Outcome) -> list[Any]:
    """Losses, norms, gradients and parameters as arrays."""
    parts = [piece.value for piece in (*outcome.gradients, *outcome.parameters)]
    return [np.asarray(outcome.losses), np.asarray(outcome.grad_norms), *parts]


@pytest.mark.parametrize("case", fast_only(FAST, CASES))
def test_recomputed_parts_change_no_result(pool: WorkerPool, tmp_path: Path, case: str) -> None:
    ranks, words, parts, again = CASES[case]
    if case.startswith("latent"):
        sizes = {**deepseek.SIZES, "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
        (tmp_path / "config.json").write_text(json.dumps(sizes), encoding="utf-8")
        words += f" --hf-config {tmp_path}"
    model, *rest = words.split(ENCODER)
    plain = pool.run(counted, tuple(model.split()), ranks, world_size=ranks)
    encoder = (*ENCODER.split(), *rest[0].split()) if rest else ()
    flags = (*model.split(), *encoder, "--recompute", "selective", "--recompute-modules", parts)
    for (expected, calls), (found, more) in zip(plain, pool.run(counted, flags, ranks, world_size=ranks), strict=True):
        assert not {name for name in again if more[name] <= calls[name]}, (calls, more)
        assert len(bits(expected)) == len(bits(found)) > 10
        # A norm in plain PyTorch uses its input twice, so recomputed ones add three gradients in another order.
        tolerance = 1e-5 if "layernorm" in parts else 0.0
        for value, other in zip(bits(expected), bits(found), strict=True):
            assert np.linalg.norm(other - value) <= tolerance * np.linalg.norm(value)


# Flags of models whose language model is frozen, those of recomputation, and the class that runs twice as often.
FROZEN = {
    "dense": (f"--layout colocated {DROPOUT}", "--recompute full", "TransformerLayer"),
    "experts": (f"--layout colocated {DROPOUT} {' '.join(equality.MOE)}",
                "--recompute selective --recompute-modules moe", "SequentialMLP"),
    "hybrid": (f"{NEMOTRON} --layout colocated", "--recompute full", "MambaLayer"),
}


@pytest.mark.parametrize("case", fast_only(["dense"], FROZEN))
def test_a_frozen_language_model_is_recomputed_for_its_projector(pool: WorkerPool, case: str) -> None:
    model, flags, again = FROZEN[case]
    words = (*model.split(), "--freeze", "vision,language")
    ((expected, calls),) = pool.run(counted, words, 1, world_size=1)
    ((found, more),) = pool.run(counted, (*words, *flags.split()), 1, world_size=1)
    assert more[again] > calls[again] and len(bits(expected)) == len(bits(found)) > 4
    assert all(np.array_equal(value, other) for value, other in zip(bits(expected), bits(found), strict=True))


@pytest.mark.parametrize(("flags", "message"), [
    ("--recompute-modules shared_experts", "no layer of language has shared_experts as a part of its own"),
    ("--recompute-modules moe_act", "local layers compute experts one by one"),
    ("--recompute-modules mla_up_proj", "the model has no latent attention"),
])
def test_parts_that_no_layer_has_are_refused(pool: WorkerPool, flags: str, message: str) -> None:
    words = ("--layout", "colocated", *equality.MOE, "--recompute", "selective", *flags.split())
    with pytest.raises(Exception, match=message):
        pool.run(equality.run_layout, words, 1, world_size=1)
