"""A small DeepSeek-V3 that `hf_families` has saved, trained on any layout; inside worker processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mimo.config.validate import validate
from mimo.protocols import LANGUAGE
from tests.support import equality

VOCAB_SIZE = 90
SEQ_LENGTH = 24
BASE = f"""--model-provider deepseek_v3 --dataset-provider mock --device cpu --no-bf16 --transformer-impl local
--seq-length {SEQ_LENGTH} --global-batch-size 4 --micro-batch-size 1 --train-iters 3 --lr-decay-style constant
--lr 2e-3 --weight-decay 0.1 --adam-eps 1e-5 --clip-grad 0.5 --mock-min-length 5 --mock-max-length 20
--num-generations 0 --watchdog-timeout-s 60 --moe-aux-loss-coeff 0.01""".split()
YARN = {"type": "yarn", "factor": 4.0, "beta_fast": 32, "beta_slow": 1, "mscale": 0.7, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 16}
SIZES: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48,
                         "moe_intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
                         "num_key_value_heads": 4, "n_shared_experts": 2, "n_routed_experts": 8, "kv_lora_rank": 16,
                         "q_lora_rank": 24, "qk_rope_head_dim": 8, "v_head_dim": 12, "qk_nope_head_dim": 16,
                         "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
                         "max_position_embeddings": 64, "rms_norm_eps": 1e-3}
# Two layers, so that on two pipeline stages one has the dense layer and the other the MoE layer.
VARIANTS: dict[str, dict[str, Any]] = {
    "yarn": {**SIZES, "rope_scaling": YARN},
    "uncompressed-queries": {**SIZES, "q_lora_rank": None, "n_group": 1, "num_experts_per_tok": 3},
    "four-moe-layers": {**SIZES, "num_hidden_layers": 4, "first_k_dense_replace": 0, "tie_word_embeddings": True,
                        "rope_scaling": {**YARN, "mscale": None, "mscale_all_dim": None}},
}


def parse_config(*flags: str) -> Any:
    """Flags over the tests' run."""
    return equality.parse([*BASE, *flags])


@contextlib.contextmanager
def open_loaded(rank: int, flags: tuple[str, ...], world_size: int) -> Iterator[tuple[Any, Any]]:
    """Open the trainer of this rank, its model loaded from the folder that --hf-config names, and its loader."""
    from mimo.registry import model_provider
    from mimo.weights.load import HfPaths, load_hf

    config = parse_config(*flags)
    with equality.open_training(config, validate(config, world_size), rank) as (parts, loader):
        load_hf(parts.built, parts.grids, model_provider("deepseek_v3"), config.model_family,
                HfPaths(model=config.model_family.hf_config))
        yield parts, loader


def train(rank: int, flags: tuple[str, ...], world_size: int) -> Any:
    """`equality.run_layout` of this model, its parameters a function of their names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(equality, "parse_config", parse_config)
        return equality.run_layout(rank, flags, world_size)


def watch_expert_bias(rank: int, flags: tuple[str, ...], world_size: int, num_steps: int) -> list[dict[str, Any]]:
    """Train; for each step: this rank's tokens, those of each expert, and the bias before and after.

    Experts and biases are by global layer number, and padding does not count. Between the steps the model is evaluated,
    which must not count, either.
    """
    from megatron.core.transformer.moe.router import TopKRouter

    from mimo.training.evaluate import evaluate
    from mimo.training.step import train_step

    with open_loaded(rank, flags, world_size) as (parts, loader):
        routers = {part.layer_number: part for part in parts.built.model.modules() if isinstance(part, TopKRouter)}
        steps = []
        for _ in range(num_steps):
            counts = {layer: torch.zeros(router.config.num_moe_experts, dtype=torch.int64)
                      for layer, router in routers.items()}
            tokens = 0

            def count(router: Any, inputs: Any, outputs: Any, counts: dict[int, torch.Tensor] = counts) -> None:
                nonlocal tokens
                if torch.is_grad_enabled():  # a forward pass that will be recomputed has no graph
                    _, padding = inputs
                    counts[router.layer_number] += outputs[1][~padding.flatten()].sum(dim=0)
                    tokens += int((~padding).sum())

            before = {layer: router.expert_bias.clone() for layer, router in routers.items()}
            hooks = [router.register_forward_hook(count) for router in routers.values()]
            train_step(parts, loader.next_step())
            for hook in hooks:
                hook.remove()
            after = {layer: router.expert_bias.clone() for layer, router in routers.items()}
            steps.append({"tokens": tokens, "counts": counts, "before": before, "after": after})
            evaluate(parts, [loader.next_step()], None)
            assert not any(router.local_tokens_per_expert.any() for router in routers.values())
    return steps


def inspect_language(rank: int, flags: tuple[str, ...], world_size: int) -> dict[str, Any]:
    """Return the tensors of this rank's language module after the load."""
    from megatron.core import parallel_state
    from megatron.core.utils import unwrap_model

    with open_loaded(rank, flags, world_size) as (parts, _):
        module = unwrap_model(parts.built.model.language_model)
        state = module.sharded_state_dict(metadata={"dp_cp_group": parts.grids.collections[LANGUAGE].dp_cp})
        found = {
            "parameters": sum(parameter.numel() for parameter in module.parameters()),
            "dtypes": {parameter.dtype for parameter in module.parameters()},
            "missing": [name for name, _ in module.named_parameters() if name not in state],
            "keys": {part.key for part in state.values()},
            "biases": {name: bias.clone() for name, bias in module.named_buffers() if name.endswith("expert_bias")},
            "initialized": parallel_state.model_parallel_is_initialized(),
        }
    return found
