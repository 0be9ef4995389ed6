"""LayerNorm and RMSNorm against their formulas, inside Megatron and under sequence parallelism."""

import pytest
import torch


def transformer_config(normalization, dtype, **changes):
    from megatron.core.transformer import TransformerConfig

    sizes = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
    return TransformerConfig(**sizes, normalization=normalization, params_dtype=dtype, **changes)


def formula(kind, x, weight, bias, eps):
    """The published formula, term by term."""
    if kind == "RMSNorm":
        return x / (x.pow(2).sum(-1, keepdim=True) / x.shape[-1] + eps).sqrt() * weight
    mean = x.sum(-1, keepdim=True) / x.shape[-1]
    variance = (x - mean).pow(2).sum(-1, keepdim=True) / x.shape[-1]
    return (x - mean) / (variance + eps).sqrt() * weight + bias


def against_formula(rank, kind, zero_centered):
    from mimo.model.torch_layers.norms import LayerNorm, Norm, RMSNorm

    torch.manual_seed(0)
    config = transformer_config(kind, torch.float64, layernorm_zero_centered_gamma=zero_centered)
    eps = 0.1  # large enough that a misplaced one shows
    norm = Norm(config=config, hidden_size=16, eps=eps)
    assert type(norm) is {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}[kind]
    assert [name for name, _ in norm.named_parameters()] == (["weight", "bias"] if kind == "LayerNorm" else ["weight"])
    x = torch.randn(3, 2, 16, dtype=torch.float64, requires_grad=True)
    assert torch.equal(norm.weight, torch.full((16,), 0.0 if zero_centered else 1.0, dtype=torch.float64))
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(torch.randn(16, dtype=torch.float64))
    out_gradient = torch.randn(3, 2, 16, dtype=torch.float64)
    ours = torch.autograd.grad(norm(x), [x, *norm.parameters()], out_gradient)
    scale = norm.weight + (1 if zero_centered else 0)
    expected = formula(kind, x, scale, norm.bias, eps)
    theirs = torch.autograd.grad(expected, [x, *norm.parameters()], out_gradient)
    torch.testing.assert_close(norm(x), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def against_every_formula(rank):
    for kind in ("LayerNorm", "RMSNorm"):
        for zero_centered in (False, True):
            against_formula(rank, kind, zero_centered)


def test_values_and_gradients_in_float64(pool):
    pool.run(against_every_formula, world_size=1)


def half_precision(rank, kind):
    from mimo.model.torch_layers.norms import Norm

    torch.manual_seed(0)
    norm = Norm(transformer_config(kind, torch.bfloat16, layernorm_zero_centered_gamma=True), 16)
    with torch.no_grad():
        norm.weight.copy_(torch.full((16,), 2.0**-9))  # 1 + 2^-9 does not exist in bfloat16
    x = torch.randn(64, 16).bfloat16()
    out = norm(x)
    assert norm.weight.dtype == out.dtype == torch.bfloat16
    bias = torch.zeros(16) if kind == "LayerNorm" else None
    expected = formula(kind, x.float(), norm.weight.float() + 1, bias, 1e-5).bfloat16()
    torch.testing.assert_close(out, expected, rtol=2**-7, atol=1e-5)  # one bfloat16 step
    return (out == expected).float().mean().item()


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_bfloat16_is_computed_in_float32(pool, kind):
    (equal,) = pool.run(half_precision, kind, world_size=1)
    assert equal > 0.99  # all but the ties of rounding


def wrong_arguments(rank):
    from mimo.model.torch_layers.norms import Norm, RMSNorm

    config = transformer_config("RMSNorm", torch.float32)
    Norm(config, 16, persist_layer_norm=True, normalization="RMSNorm", has_residual=True)
    assert RMSNorm(config, 16, zero_centered_gamma=True).weight.sum() == 0
    config.fused_residual_rmsnorm = True
    with pytest.raises(ValueError, match="fused_residual_rmsnorm needs Transformer Engine"):
        Norm(config, 16, has_residual=True)
    config.normalization = "BatchNorm"
    with pytest.raises(ValueError, match="normalization 'BatchNorm' is not one of LayerNorm, RMSNorm"):
        Norm(config, 16)
    with pytest.raises(TypeError, match="epsilon"):
        RMSNorm(config, 16, epsilon=1e-5)


def test_extras_and_errors(pool):
    pool.run(wrong_arguments, world_size=1)


def reduced_gradients(rank, kind, marked):
    """Weight gradients after Megatron's own reduction, each rank holding half of the sequence, and the whole ones."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    from mimo.grid.groups import Grids
    from mimo.grid.spec import GridSpec, Layout
    from mimo.model.torch_layers.norms import Norm

    torch.manual_seed(0)
    x = torch.randn(6, 2, 16, dtype=torch.float64)
    out_gradient = torch.randn(6, 2, 16, dtype=torch.float64)
    whole = Norm(transformer_config(kind, torch.float64), 16)
    whole(x).backward(out_gradient)
    config = transformer_config(
        kind, torch.float64, tensor_model_parallel_size=2, sequence_parallel=True, num_moe_experts=None
    )
    layout = Layout("disjoint", 2, (), GridSpec("language", tp=2))
    with Grids(layout, "gloo") as grids:
        collection = grids.collections["language"]
        norm = Norm(config, 16)
        assert all(parameter.sequence_parallel for parameter in norm.parameters())
        for parameter in norm.parameters():
            parameter.sequence_parallel = marked
        ddp = DistributedDataParallel(
            config, DistributedDataParallelConfig(use_distributed_optimizer=True), norm, pg_collection=collection
        )
        ddp.zero_grad_buffer()
        ddp(x.chunk(2)[rank]).backward(out_gradient.chunk(2)[rank])
        finalize_model_grads([ddp], None, pg_collection=collection)
        ours = [parameter.main_grad.clone() for parameter in norm.parameters()]
    return ours, [parameter.grad for parameter in whole.parameters()]


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_gradients_under_sequence_parallelism(pool, kind):
    for ours, expected in pool.run(reduced_gradients, kind, True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    for ours, expected in pool.run(reduced_gradients, kind, False):  # without the mark each rank keeps its half
        assert not torch.allclose(ours[0], expected[0], rtol=1e-3)
