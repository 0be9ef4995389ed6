"""Megatron's own decoder, DDP, optimizer and checkpoint code on gloo: MoE on two tensor-parallel ranks."""

import pytest
import torch


def build(collection, dtype, **changes):
    """Return a two-layer MoE decoder in Megatron's DDP with its distributed optimizer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    from mimo.model.layer_specs import decoder_layer_spec
    from mimo.platform import current_platform

    current_platform().seed(1, tp_rank=collection.tp.rank(), ep_rank=collection.ep.rank(), expt_tp_rank=0)
    bf16 = dtype == torch.bfloat16
    settings = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2,
                "ffn_hidden_size": 64, "num_moe_experts": 4, "moe_router_topk": 2, "moe_aux_loss_coeff": 0.01,
                "moe_token_dispatcher_type": "alltoall", "normalization": "RMSNorm", "qk_layernorm": True,
                "gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "add_bias_linear": False,
                "hidden_dropout": 0.0, "attention_dropout": 0.0, "params_dtype": dtype, "bf16": bf16,
                "tensor_model_parallel_size": collection.tp.size(), "expert_model_parallel_size": collection.ep.size(),
                "expert_tensor_parallel_size": 1, "sequence_parallel": collection.tp.size() > 1,
                "calculate_per_token_loss": True}
    config = TransformerConfig(**{**settings, **changes})
    model = GPTModel(config, decoder_layer_spec(config, "local"), vocab_size=64, max_sequence_length=16,
                     position_embedding_type="rope", pg_collection=collection)
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, grad_reduce_in_fp32=True
    )
    ddp = DistributedDataParallel(config, ddp_config, model, pg_collection=collection)
    optimizer_config = OptimizerConfig(
        optimizer="adam", lr=1e-2, bf16=bf16, params_dtype=dtype, use_distributed_optimizer=True, clip_grad=1.0
    )
    optimizer = get_megatron_optimizer(optimizer_config, [ddp], use_gloo_process_groups=False, pg_collection=collection)
    return ddp, optimizer


def train(ddp, optimizer, collection, steps):
    """Losses of a few steps on one batch, per token."""
    from megatron.core.distributed import finalize_model_grads

    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(3)).cuda()
    positions = torch.arange(16, device="cuda").expand(2, -1)
    losses = []
    for _ in range(steps):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        loss = ddp(tokens, positions, None, labels=tokens.roll(-1, dims=1)).float()
        loss.sum().backward()
        finalize_model_grads([ddp], torch.tensor(loss.numel(), device="cuda"), pg_collection=collection)
        success, norm, _ = optimizer.step()
        assert success and norm > 0
        losses.append(loss.mean().item())
    return losses


def layout(tp, ep):
    from mimo.grid.spec import GridSpec, Layout

    return Layout("disjoint", tp, (), GridSpec("language", tp=tp, ep=ep))


def losses_of(rank, tp, ep, half=False, **changes):
    from mimo.grid.groups import Grids

    with Grids(layout(tp, ep), "gloo") as grids:
        collection = grids.collections["language"]
        ddp, optimizer = build(collection, torch.bfloat16 if half else torch.float32, **changes)
        return train(ddp, optimizer, collection, 4)


@pytest.mark.slow
@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
def test_moe_trains_under_tensor_expert_and_sequence_parallelism(pool, half):
    ours, again = pool.run(losses_of, 2, 2, half)
    assert ours == again
    assert ours[0] > ours[-1] + 0.3


def recompute_losses(rank):
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    selective = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe"]}
    return [losses_of(rank, 2, 2, **changes) for changes in ({}, full, selective)]


def test_recomputation_changes_nothing(pool):
    for plain, full, selective in pool.run(recompute_losses):
        assert plain == full == selective


def norm_entries(rank):
    """Checkpoint entries of the norm weights: global shape and replica number of each."""
    from mimo.grid.groups import Grids

    with Grids(layout(2, 2), "gloo") as grids:
        collection = grids.collections["language"]
        ddp, _ = build(collection, torch.float32)
        entries = ddp.module.sharded_state_dict(metadata={"dp_cp_group": collection.dp_cp})
        return {
            entry.key: (entry.global_shape, entry.replica_id) for name, entry in entries.items() if "layernorm" in name
        }


def test_norms_are_replicated_in_a_distributed_checkpoint(pool):
    for rank, entries in enumerate(pool.run(norm_entries)):
        replica = (0, rank, 0)  # pipeline, tensor and data rank: tensor rank 0 writes
        assert entries["decoder.final_layernorm.weight"] == ((32,), replica)
        assert entries["decoder.layers.self_attention.q_layernorm.weight"] == ((2, 8), replica)
        assert entries["decoder.layers.pre_mlp_layernorm.weight"] == ((2, 32), replica)
