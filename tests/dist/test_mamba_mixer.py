"""Megatron Core's Mamba-2 layer without its kernels: against Hugging Face, over ranks, packed, in checkpoints."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from tests.support.global_state import sharded_tensors
from tests.support.spawn import WorkerPool

HIDDEN, HEADS, HEAD_DIM, GROUPS, STATE = 16, 8, 4, 2, 6
INNER, WRITTEN = HEADS * HEAD_DIM, GROUPS * STATE
LENGTHS = (5, 9, 1, 7)  # of packed sequences; together a multiple of every tensor-parallel size here
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
# Parameter -> axis, and the sizes of parts that are spread over ranks each by itself.
SPREAD: dict[str, tuple[int, list[int]]] = {"mixer.in_proj.weight": (0, [INNER, INNER, WRITTEN, WRITTEN, HEADS]),
                                            "mixer.conv1d_weight": (0, [INNER, WRITTEN, WRITTEN]),
                                            "mixer.conv1d_bias": (0, [INNER, WRITTEN, WRITTEN]),
                                            "mixer.dt_bias": (0, [HEADS]), "mixer.A_log": (0, [HEADS]),
                                            "mixer.D": (0, [HEADS]), "mixer.norm.weight": (0, [INNER]),
                                            "mixer.out_proj.weight": (1, [INNER])}
SHAPES = {"norm.weight": (HIDDEN,), "mixer.in_proj.weight": (2 * INNER + 2 * WRITTEN + HEADS, HIDDEN),
          "mixer.conv1d_weight": (INNER + 2 * WRITTEN, 1, 4), "mixer.conv1d_bias": (INNER + 2 * WRITTEN,),
          "mixer.dt_bias": (HEADS,), "mixer.A_log": (HEADS,), "mixer.D": (HEADS,), "mixer.norm.weight": (INNER,),
          "mixer.out_proj.weight": (HIDDEN, INNER)}


def whole_parameters() -> dict[str, torch.Tensor]:
    """The same on every process."""
    generator = torch.Generator().manual_seed(5)
    return {name: 0.5 * torch.randn(shape, generator=generator) + (1 if name.endswith("norm.weight") else 0)
            for name, shape in SHAPES.items()}


def local_part(name: str, whole: torch.Tensor, tp_rank: int, tp: int) -> torch.Tensor:
    """Return what a tensor-parallel rank holds."""
    if name not in SPREAD:
        return whole
    axis, sizes = SPREAD[name]
    return torch.cat([part.chunk(tp, axis)[tp_rank] for part in whole.split(sizes, axis)], axis)


def build_layer(collection: Any, tp: int, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A Mamba layer of local parts with the parameters of `whole_parameters`."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.spec_utils import ModuleSpec

    from mimo.model.torch_layers.mamba import use_torch_mamba
    from mimo.model.torch_layers.norms import Norm
    from mimo.platform import current_platform

    use_torch_mamba()
    tp_rank = collection.tp.rank()
    current_platform().seed(3, tp_rank=tp_rank, ep_rank=0, expt_tp_rank=0)
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=2, normalization="RMSNorm", add_bias_linear=False,
        hidden_dropout=0.0, bias_dropout_fusion=False, params_dtype=dtype, tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1, mamba_num_heads=HEADS, mamba_head_dim=HEAD_DIM, mamba_num_groups=GROUPS,
        mamba_state_dim=STATE, **changes)
    mixer = ModuleSpec(module=MambaMixer, submodules=MambaMixerSubmodules(
        in_proj=ColumnParallelLinear, out_proj=RowParallelLinear))
    layer = MambaLayer(config, MambaLayerSubmodules(norm=Norm, mixer=mixer, mamba_bda=get_bias_dropout_add),
                       pg_collection=collection)
    layer.mixer.chunk_size = 8  # so that states pass between chunks
    whole = whole_parameters()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(local_part(name, whole.pop(name), tp_rank, tp))
    assert not whole
    return layer


def language_grids(tp: int, dp: int = 1) -> Any:
    """Groups of one language model on all processes of the call."""
    from mimo.grid.groups import Grids
    from mimo.grid.spec import GridSpec, Layout

    return Grids(Layout("disjoint", tp * dp, (), GridSpec("language", tp=tp, dp=dp)), "gloo")


# Against Hugging Face

def as_in_hugging_face(rank: int) -> None:
    from transformers.models.nemotron_h.configuration_nemotron_h import NemotronHConfig
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

    theirs = NemotronHMamba2Mixer(NemotronHConfig(
        hidden_size=HIDDEN, mamba_num_heads=HEADS, mamba_head_dim=HEAD_DIM, n_groups=GROUPS, ssm_state_size=STATE,
        use_mamba_kernels=False,
        chunk_size=32,  # one chunk: over several, transformers 5.12 sums the states over the wrong dimension
        time_step_min=0.0,  # it never steps less than this, unlike the kernels
    ), layer_idx=0)
    names = {name.replace("conv1d_", "conv1d.").removeprefix("mixer."): name for name in SPREAD}
    whole = whole_parameters()
    theirs.load_state_dict({name: whole[ours] for name, ours in names.items()})
    torch.manual_seed(7)
    x, gradient = torch.randn(2, 21, HIDDEN), torch.randn(2, 21, HIDDEN)
    expected = theirs(x)
    expected.backward(gradient)
    with language_grids(1) as grids:
        layer = build_layer(grids.collections["language"], 1)
        for mem_eff in (True, False):  # gate inside the scan, or inside the norm behind it
            layer.zero_grad()
            layer.mixer.use_mem_eff_path = mem_eff
            out, bias = layer.mixer(x.transpose(0, 1))
            assert bias is None
            torch.testing.assert_close(out.transpose(0, 1), expected, **CLOSE)
            out.backward(gradient.transpose(0, 1))
            for name, ours in names.items():
                reference = theirs.get_parameter(name).grad
                # Sums in which large terms cancel out: small elements are as inexact as the large ones.
                torch.testing.assert_close(
                    layer.get_parameter(ours).grad, reference, rtol=0, atol=1e-5 * float(reference.abs().max()),
                    msg=lambda text, name=name: f"gradient of {name}: {text}")


def test_mixer_equals_hugging_faces(pool: WorkerPool) -> None:
    pool.run(as_in_hugging_face, world_size=1)


# Over tensor-parallel ranks, packed or not

def forward_backward(rank: int, tp: int, packed: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Output of a layer for this rank's part of the row, and gradients after Megatron's own reduction.

    With `packed` the row is sequences one behind the other on several ranks; one process takes them one by one.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    from mimo.data.batch import PackedSequences
    from mimo.model.attention import packed_seq_params

    generator = torch.Generator().manual_seed(2)
    x, gradient = (torch.randn(sum(LENGTHS), 1, HIDDEN, generator=generator) for _ in range(2))
    sequences = None
    if packed and tp > 1:
        lengths = torch.tensor(LENGTHS)
        sequences = PackedSequences(
            torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int(), int(lengths.max()),
            torch.repeat_interleave(torch.arange(len(LENGTHS), dtype=torch.int32), lengths)[None])
    with language_grids(tp) as grids:
        collection = grids.collections["language"]
        layer = build_layer(collection, tp)
        ddp = DistributedDataParallel(
            layer.config, DistributedDataParallelConfig(use_distributed_optimizer=True), layer,
            pg_collection=collection)
        ddp.zero_grad_buffer()
        if packed and tp == 1:
            out = torch.cat([ddp(part) for part in x.split(LENGTHS)])
        else:
            out = ddp(x.chunk(tp)[rank], packed_seq_params=packed_seq_params(sequences))
        out.backward(gradient.chunk(tp)[rank])
        finalize_model_grads([ddp], None, pg_collection=collection)
        return out.detach(), {name: parameter.main_grad.clone() for name, parameter in layer.named_parameters()}


@pytest.mark.parametrize("packed", [False, True])
def test_tensor_and_sequence_parallel_ranks_equal_one_process(pool: WorkerPool, packed: bool) -> None:
    ((expected, gradients),) = pool.run(forward_backward, 1, packed, world_size=1)
    ranks = pool.run(forward_backward, 2, packed, world_size=2)
    torch.testing.assert_close(torch.cat([out for out, _ in ranks]), expected, **CLOSE)
    for rank, (_, ours) in enumerate(ranks):
        assert ours.keys() == gradients.keys() == SHAPES.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(ours[name], local_part(name, gradient, rank, 2), rtol=1e-5, atol=5e-5,
                                       msg=lambda text, name=name: f"gradient of {name}: {text}")


# In half precision

def in_half_precision(rank: int) -> float:
    x = torch.randn(sum(LENGTHS), 1, HIDDEN)
    with language_grids(1) as grids:
        collection = grids.collections["language"]
        expected = build_layer(collection, 1)(x)
        half = build_layer(collection, 1, torch.bfloat16)
        assert half.mixer.A_log.dtype == half.mixer.D.dtype == torch.float32
        out = half(x.bfloat16())
        out.float().square().sum().backward()
    assert out.dtype == torch.bfloat16
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in half.parameters())
    return ((out.float() - expected).norm() / expected.norm()).item()


def test_half_precision(pool: WorkerPool) -> None:
    (error,) = pool.run(in_half_precision, world_size=1)
    assert 0 < error < 0.02


# In checkpoints; bug 1: tensors of a mixer asked the uninitialised parallel_state for their groups

def saved_tensors(rank: int) -> list[tuple[str, tuple[int, ...], tuple[int, ...], Any, torch.Tensor]]:
    """Key, global shape, offset, replica and data of each tensor that this rank's layer puts into a checkpoint."""
    from megatron.core import parallel_state

    with language_grids(2, dp=2) as grids:
        assert not parallel_state.is_initialized()
        collection = grids.collections["language"]
        tensors = sharded_tensors(build_layer(collection, 2), "layers.0.", (), {"dp_cp_group": collection.dp_cp})
        return [(tensor.key, tuple(tensor.global_shape), tuple(tensor.global_offset), tensor.replica_id,
                 tensor.data.detach().clone()) for tensor in tensors]


def test_bug_1_a_checkpoint_has_every_part_of_a_mixer_by_itself(pool: WorkerPool) -> None:
    whole = {f"layers.0.{name}": value for name, value in whole_parameters().items()}
    expected = {}
    for name, value in whole.items():
        parts = SPREAD.get(name.removeprefix("layers.0."), (0, []))[1]
        name = name.replace("conv1d_", "conv1d.")
        if len(parts) > 1:
            letters = "z x B C dt" if "in_proj" in name else "x B C"
            expected |= {f"{name}.{letter}": part for letter, part in zip(letters.split(), value.split(parts),
                                                                          strict=True)}
        else:
            expected[name] = value
    written = {key: torch.full(value.shape, torch.nan) for key, value in expected.items()}
    owners: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for tensors in pool.run(saved_tensors):
        for key, shape, offset, replica, data in tensors:
            assert written[key].shape == shape
            if not any(replica):
                written[key][tuple(slice(start, start + size) for start, size in zip(offset, data.shape, strict=True))
                             ] = data
                owners[key, offset] += 1
    torch.testing.assert_close(written, expected, rtol=0, atol=0)
    assert set(owners.values()) == {1}
