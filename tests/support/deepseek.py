"""A small DeepSeek-V3: saved by transformers, loaded by the trainer, run on any layout; inside worker processes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mimo.config.validate import validate
from mimo.data.batch import Microbatch, TextBatch
from mimo.protocols import LANGUAGE
from tests.support import equality
from tests.support.provider_cases import randomize

VOCAB_SIZE = 90
SEQ_LENGTH = 24
BASE = f"""--model-provider deepseek_v3 --dataset-provider mock --device cpu --no-bf16 --transformer-impl local
--seq-length {SEQ_LENGTH} --global-batch-size 4 --micro-batch-size 1 --train-iters 3 --lr-decay-style constant
--lr 2e-3 --weight-decay 0.1 --adam-eps 1e-5 --clip-grad 0.5 --mock-min-length 5 --mock-max-length 20
--num-generations 0 --watchdog-timeout-s 60 --moe-aux-loss-coeff 0.01""".split()
YARN = {"type": "yarn", "factor": 4.0, "beta_fast": 32, "beta_slow": 1, "mscale": 0.7, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 16}
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "n_shared_experts": 2,
    "n_routed_experts": 8, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "qk_nope_head_dim": 16, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-3,
}
# Two layers, so that on two pipeline stages one has the dense layer and the other the MoE layer.
VARIANTS: dict[str, dict[str, Any]] = {
    "yarn": {**SIZES, "rope_scaling": YARN},
    "uncompressed-queries": {**SIZES, "q_lora_rank": None, "n_group": 1, "num_experts_per_tok": 3},
    "four-moe-layers": {**SIZES, "num_hidden_layers": 4, "first_k_dense_replace": 0, "tie_word_embeddings": True,
                        "rope_scaling": {**YARN, "mscale": None, "mscale_all_dim": None}},
}


def token_ids() -> torch.Tensor:
    """int64 `[2, SEQ_LENGTH]`."""
    return torch.arange(2 * SEQ_LENGTH).view(2, SEQ_LENGTH) * 7 % VOCAB_SIZE


def save_hf_model(rank: int, variant: str, folder: str) -> dict[str, Any]:
    """Save a random model; gives its logits of `token_ids` and the gradients of a random linear loss by name."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(**VARIANTS[variant])
    config._attn_implementation = "eager"
    model = DeepseekV3ForCausalLM(config).eval()
    randomize(model)
    for name, bias in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.copy_(torch.randn(bias.shape, generator=torch.Generator().manual_seed(5)) * 0.3)
    model.save_pretrained(folder)
    logits = model(input_ids=token_ids()).logits
    (logits * output_weights(logits.shape[-1])).sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"logits": logits.detach(), "gradients": split_experts(gradients)}


@torch.no_grad()
def hf_logits_of(rank: int, folder: str) -> torch.Tensor:
    """transformers' logits of `token_ids` for a folder."""
    from transformers import DeepseekV3ForCausalLM

    model = DeepseekV3ForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    logits: torch.Tensor = model.eval()(input_ids=token_ids()).logits
    return logits


def output_weights(columns: int) -> torch.Tensor:
    """Coefficients of a linear loss of logits `[2, SEQ_LENGTH, columns]`."""
    return torch.randn(2, SEQ_LENGTH, columns, generator=torch.Generator().manual_seed(9))


def split_experts(tensors: dict[str, Any]) -> dict[str, Any]:
    """Stacked experts, as transformers has them in memory, under the names that it saves."""
    found = {}
    for name, tensor in tensors.items():
        prefix, _, kind = name.rpartition("experts.")
        if kind == "gate_up_proj":
            for expert, gate_up in enumerate(tensor):
                for part, half in zip(("gate", "up"), gate_up.chunk(2), strict=True):
                    found[f"{prefix}experts.{expert}.{part}_proj.weight"] = half
        elif kind == "down_proj":
            found |= {f"{prefix}experts.{expert}.down_proj.weight": down for expert, down in enumerate(tensor)}
        else:
            found[name] = tensor
    return found


def parse_config(*flags: str) -> Any:
    """Flags over the tests' run."""
    return equality.parse([*BASE, *flags])


def build(flags: tuple[str, ...], world_size: int) -> Any:
    """Return the trainer of this rank, its model loaded from the folder that --hf-config names."""
    from mimo.registry import model_provider
    from mimo.weights.load import HfPaths, load_hf

    config = parse_config(*flags)
    parts = equality.make_trainer(config, validate(config, world_size))
    load_hf(parts.built, parts.grids, model_provider("deepseek_v3"), config.model_family,
            HfPaths(model=config.model_family.hf_config))
    return parts


def close(parts: Any) -> None:
    """Let go of the trainer."""
    parts.watchdog.close()
    parts.grids.destroy()


def batch() -> Microbatch:
    """`token_ids` as a language rank holds them."""
    ids = token_ids()
    return Microbatch(TextBatch(
        keys=("a", "b"), token_counts={}, input_ids=ids, labels=ids, loss_mask=torch.ones(ids.shape),
        position_ids=torch.arange(SEQ_LENGTH).expand(ids.shape).contiguous(), placeholders={}, num_tokens=ids.numel()),
        {})


def logits_of(rank: int, flags: tuple[str, ...], world_size: int, out: str) -> torch.Tensor | None:
    """Logits of `token_ids` with the vocabulary's padding cut off; None before the last stage. Exports to `out`."""
    from mimo.model.build import set_training
    from mimo.registry import model_provider
    from mimo.training.evaluate import forward_values
    from mimo.training.step import run_schedule
    from tests.support.export_live import export_model

    parts = build((*flags, "--micro-batch-size", "2"), world_size)
    set_training(parts.built.model, False)
    found: list[torch.Tensor] = []

    def collect(microbatch: Microbatch, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        group = parts.grids.collections[LANGUAGE].tp
        shards = [torch.empty_like(logits) for _ in range(group.size())]
        dist.all_gather(shards, logits.contiguous(), group=group)
        found.append(torch.cat(shards, dim=-1)[..., :VOCAB_SIZE])
        zero = torch.zeros((), device=logits.device)
        return zero, zero.int(), zero

    with torch.no_grad():
        run_schedule(parts, [batch()], partial(forward_values, function=None, consume=collect), forward_only=True)
    export_model(parts.built, parts.grids, model_provider("deepseek_v3"), parts.config.model_family, out)
    close(parts)
    return found[0] if found else None


def gradients_of(rank: int, flags: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Compute gradients of the linear loss on one process, by Hugging Face name through the weight map."""
    from megatron.core.utils import unwrap_model

    from mimo.registry import model_provider
    from mimo.weights.match import module_pieces

    provider = model_provider("deepseek_v3")
    parts = build((*flags, "--micro-batch-size", "2"), 1)
    module = unwrap_model(parts.built.model.language_model)
    module.eval()  # without the load-balancing loss
    ids = token_ids()
    logits = module(input_ids=ids, position_ids=None, attention_mask=None, decoder_input=None)
    (logits[..., :VOCAB_SIZE] * output_weights(VOCAB_SIZE)).sum().backward()
    for parameter in module.parameters():
        parameter.data = parameter.main_grad
    whole: dict[str, torch.Tensor] = {}
    for piece in module_pieces(module, parts.grids.collections[LANGUAGE]):
        whole.setdefault(piece.name, torch.zeros(piece.shape))[piece.box.slices] = piece.tensor
    found = {}
    for rule in provider.weight_map(parts.config.model_family, LANGUAGE).rules:
        if not rule.keep_fp32:
            found |= dict(zip(rule.hf, rule.convert.to_hf(whole[rule.megatron]), strict=True))
    close(parts)
    return {name: gradient.clone() for name, gradient in found.items()}


def train(rank: int, flags: tuple[str, ...], world_size: int) -> Any:
    """`equality.run_layout` of this model, its parameters a function of their names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(equality, "parse_config", parse_config)
        return equality.run_layout(rank, flags, world_size)


def watch_expert_bias(rank: int, flags: tuple[str, ...], world_size: int, num_steps: int) -> list[dict[str, Any]]:
    """Train; for each step: this rank's tokens per expert, and the bias before and after, by global layer number.

    Between the steps the model is evaluated, which must not count.
    """
    from megatron.core.transformer.moe.router import TopKRouter

    from mimo.training.evaluate import evaluate
    from mimo.training.step import train_step

    parts = build(flags, world_size)
    loader = equality.make_loader(parts.config, parts.grids.layout, rank)
    routers = {part.layer_number: part for part in parts.built.model.modules() if isinstance(part, TopKRouter)}
    steps = []
    for _ in range(num_steps):
        routing: list[tuple[int, Any]] = []
        before = {layer: router.expert_bias.clone() for layer, router in routers.items()}
        hooks = equality.watch_routing(parts.built.model, routing)
        train_step(parts, loader.next_step())
        for hook in hooks:
            hook.remove()
        counts = {layer: sum(torch.from_numpy(choice).sum(dim=0) for at, choice in routing if at == layer)
                  for layer in routers}
        after = {layer: router.expert_bias.clone() for layer, router in routers.items()}
        steps.append({"counts": counts, "before": before, "after": after})
        evaluate(parts, [loader.next_step()], None)
        assert not any(router.local_tokens_per_expert.any() for router in routers.values())
    loader.close()
    close(parts)
    return steps


def inspect_language(rank: int, flags: tuple[str, ...], world_size: int) -> dict[str, Any]:
    """Return the tensors of this rank's language module after the load."""
    from megatron.core import parallel_state
    from megatron.core.utils import unwrap_model

    parts = build(flags, world_size)
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
    close(parts)
    return found
