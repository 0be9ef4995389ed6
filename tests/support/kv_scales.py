"""Largest keys, values and queries of a trainer and of Hugging Face's model, and engines that get scales.

All of it runs in worker processes. The model's prompts are `SEQUENCES`. Padding is a token whose values are larger than
those of all others.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

from mimo.config.rl import RlConfig
from mimo.rl.kv_scales import KvRanges, KvScales
from mimo.rl.policy import PolicyTrainer
from mimo.rl.rollouts import Completion
from tests.support import hf_families, refit

# Layer -> largest key, value and query.
Largest = dict[int, tuple[float, float, float]]
PAD = 0
# A microbatch has whole sequences. Pipeline stages pad it to its full length.
BUDGET = 20
SEQUENCES = [[5 + (7 * start + 3 * step * step) % 90 for step in range(length)]
             for start, length in enumerate((9, 12, 5, 14))]
# Attention on the first and on the second pipeline stage, at other numbers on each.
HYBRID = hf_families.NEMOTRON | {
    "head_dim": 32, "ssm_state_size": 8,
    "layers_block_type": ["mamba", "attention", "mlp", "mamba", "mlp", "attention", "attention", "mamba"]}


def register() -> None:
    """Make the models known in this process."""
    refit.register()
    hf_families.NEMOTRON_MODELS["kv-hybrid"] = hf_families.MODELS["kv-hybrid"] = HYBRID


def save(rank: int, name: str, folder: str) -> Largest:
    """Save a model with large keys, values and queries; gives the `largest` of each layer."""
    register()
    model = hf_families.build_hf(name)
    with torch.no_grad():
        for path, tensor in model.named_parameters():
            if path.endswith("k_norm.weight"):
                tensor[3] *= 300.0
            elif path.endswith("q_norm.weight"):
                tensor[7] *= 400.0
            elif path.endswith("v_proj.weight") or (path.endswith("k_proj.weight") and name == "kv-hybrid"):
                tensor[5] *= 500.0
        if name == "refit-qwen3":
            model.model.embed_tokens.weight[PAD] = model.model.layers[0].self_attn.v_proj.weight[5]
    hf_families.save_published(model, folder)
    return largest(model)


@torch.no_grad()
def largest(model: Any) -> Largest:
    """Largest key, value and query of `SEQUENCES` for each layer, as attention gets them."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    found: Largest = {}

    def record(module: Any, query: Any, key: Any, value: Any, *args: Any, **options: Any) -> Any:
        keys, values, queries = found.get(module.layer_idx, (0.0, 0.0, 0.0))
        found[module.layer_idx] = (max(keys, float(key.abs().max())), max(values, float(value.abs().max())),
                                   max(queries, float(query.abs().max())))
        return sdpa_attention_forward(module, query, key, value, *args, **options)

    AttentionInterface.register("recording", record)
    model.set_attn_implementation("recording")
    for tokens in SEQUENCES:
        model(torch.tensor([tokens]), use_cache=False)
    return found


def completions() -> list[Completion]:
    return [Completion(f"p{number}", number, tuple(tokens[:3]), tuple(tokens[3:]), (0.0,) * (len(tokens) - 3),
                       "length", 0.0) for number, tokens in enumerate(SEQUENCES)]


def measured(rank: int, name: str, folder: str, layouts: tuple[tuple[str, ...], ...], world_size: int
             ) -> list[KvScales]:
    """Scales of `SEQUENCES` for each layout of a saved model, all of them on this rank."""
    register()
    found = []
    for layout in layouts:
        flags = hf_families.flags_of(name, folder, ("--seq-length", str(BUDGET), "--row-lengths", "1", *layout))
        with hf_families.trainer_of(flags, world_size) as parts:
            hf_families.load(parts, model=folder)
            found.append(scales_of(parts))
    return found


def scales_of(parts: Any) -> KvScales:
    """Scales of `SEQUENCES` with a trainer's present weights."""
    ranges = KvRanges(parts.built, parts.grids, parts.platform.device)
    policy = PolicyTrainer(parts, RlConfig(max_tokens_per_microbatch=BUDGET), hf_families.VOCAB_SIZE, PAD,
                           kv_ranges=ranges)
    microbatches = policy.microbatches(completions())
    # Passes of other rows, and of a policy that is not measured, leave no trace.
    policy.measured_log_probs(policy.microbatches(loudest()))
    _, scales = policy.measured_log_probs(microbatches)
    policy.old_log_probs(policy.microbatches(loudest()))
    assert ranges.scales() == scales
    return scales


def loudest() -> list[Completion]:
    """Completions of tokens that `SEQUENCES` does not have."""
    return [Completion(f"p{number}", number, (PAD, 1), (2, 3, 4), (0.0,) * 3, "length", 0.0) for number in range(4)]


def engine_logprobs(rank: int, name: str, folder: str, layout: tuple[str, ...], world_size: int, handle: Any
                    ) -> tuple[KvScales, list[Any], str]:
    """Give a saved model to an engine with scales of 1, with measured ones, and with those of a layer it lacks.

    Returns:
        The measured scales; on the first rank, the engine's log-probs of `SEQUENCES` with either; and the error.
    """
    from mimo.refit.options import RefitOptions
    from mimo.refit.rendezvous import RefitError
    from mimo.refit.sender import connect
    from mimo.registry import model_provider

    register()
    flags = hf_families.flags_of(name, folder, ("--seq-length", str(BUDGET), "--row-lengths", "1", *layout))
    with hf_families.trainer_of(flags, world_size) as parts:
        hf_families.load(parts, model=folder)
        scales = scales_of(parts)
        sender = connect(parts.built, parts.grids, model_provider(parts.config.model.model_provider),
                         parts.config.model_family, handle, handle.num_workers,
                         RefitOptions(backend="gloo", dtype="float32", timeout_s=120), address="127.0.0.1")
        answers: list[Any] = []
        for sent in ({}, scales, {}, scales):
            sender.kv_scales = sent
            sender.send("one" if not sent else "calibrated")
            if rank == 0:
                answers.append(handle.prompt_logprobs([{"prompt_token_ids": tokens} for tokens in SEQUENCES]))
        sender.kv_scales, error = scales | {99: (1.0, 1.0, 1.0)}, ""
        try:
            sender.send("of another model")
        except RefitError as problem:
            error = str(problem)
        sender.close()
    return scales, answers, error


def save_with_scales(folder: Path, out: Path, scales: KvScales) -> None:
    """Copy a saved model as llm-compressor would have published it with an FP8 cache."""
    from safetensors.torch import load_file, save_file

    out.mkdir()
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "ignore": [],
        "quantization_status": "compressed", "kv_cache_scheme": {
            "num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}}
    (out / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    names = [path.removesuffix("k_proj.weight") for path in tensors if path.endswith("k_proj.weight")]
    assert len(names) == len(scales)
    for attention in names:
        layer = next(int(part) for part in attention.split(".") if part.isdigit())
        for kind, scale in zip("kvq", scales[layer], strict=True):
            tensors[f"{attention}{kind}_scale"] = torch.tensor([scale], dtype=torch.float32)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})


def expected(largest_of: Largest) -> KvScales:
    """Scales of a model's largest keys, values and queries."""
    assert all(math.isfinite(each) for found in largest_of.values() for each in found)
    return {layer: (key / 448.0, value / 448.0, query / 448.0) for layer, (key, value, query) in largest_of.items()}
