"""Modules of the llava and mock models on one process, against their plans.

That modules split over ranks give the same gradients is tested in test_equality.py and test_more_layouts.py.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from mimo.grid.spec import GridSpec
from mimo.protocols import LANGUAGE
from providers import llava, mock
from providers.common.family import VISION
from tests.support.spawn import WorkerPool

pytestmark = pytest.mark.slow

SEQ_LENGTH = 12
SMALL = mock.Config(
    vision_image_size=16, vision_patch_size=8, vision_hidden_size=32, vision_num_attention_heads=4,
    vision_ffn_hidden_size=48, num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2,
    ffn_hidden_size=48, vocab_size=64, make_vocab_size_divisible_by=2, moe_ffn_hidden_size=24, image_token_id=63,
    moe_aux_loss_coeff=0.0)
MOE = dataclasses.replace(SMALL, num_experts=4)


# One process

def inspect_modules(rank: int, config: llava.Config) -> dict[str, Any]:
    from megatron.core import parallel_state

    from tests.support import provider_cases as cases

    found: dict[str, Any] = {}
    with cases.grids_of(GridSpec(VISION), GridSpec(LANGUAGE)) as grids:
        for module in (VISION, LANGUAGE):
            built = cases.build_module_of(grids, config, module, SEQ_LENGTH)
            state = built.sharded_state_dict(metadata={"dp_cp_group": grids.collections[module].dp_cp})
            found[module] = {"parameters": sum(parameter.numel() for parameter in built.parameters()),
                             "missing": [name for name, _ in built.named_parameters() if name not in state],
                             "keys": sorted({part.key for part in state.values()})}
    found["initialized"] = parallel_state.model_parallel_is_initialized()
    return found


COUNTS = {
    "dense-class-token": SMALL,
    "tied-no-class-token": dataclasses.replace(SMALL, vision_class_token=False, vision_pre_layernorm=False,
                                               untie_embeddings_and_output_weights=False),
    "moe-qk-norm": dataclasses.replace(MOE, qk_layernorm=True, num_query_groups=1),
    "biases": dataclasses.replace(SMALL, add_qkv_bias=True, vision_patch_bias=True, vision_final_layernorm=True,
                                  projector_hidden_size=40, kv_channels=16),
}


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_shapes_and_checkpoint_names(pool: WorkerPool, name: str) -> None:
    config = COUNTS[name]
    (found,) = pool.run(inspect_modules, config, world_size=1)
    assert not found["initialized"]
    for module in (VISION, LANGUAGE):
        shapes = mock.provider.parameter_shapes(config, module)
        assert found[module]["parameters"] == sum(math.prod(shape.shape) * shape.count for shape in shapes)
        assert found[module]["missing"] == []
    # Transformer Engine layers hold the norm before attention inside the fused projection.
    assert any("self_attention.linear_qkv.layer_norm_weight" in key for key in found[VISION]["keys"])
    moe_norm = any(".pre_mlp_layernorm.weight" in key for key in found[LANGUAGE]["keys"])
    assert moe_norm == bool(config.num_experts)


def probe_submodule(rank: int, config: llava.Config) -> dict[str, Any]:
    import torch

    from tests.support import provider_cases as cases

    found: dict[str, Any] = {}
    with cases.grids_of(GridSpec(VISION), GridSpec(LANGUAGE)) as grids:
        vision = cases.build_module_of(grids, config, VISION, SEQ_LENGTH)
        empty = vision({})
        found["empty"] = (tuple(empty.shape), empty.requires_grad, vision(None).requires_grad)
        for name, call in {"size": lambda: vision({"pixel_values": torch.zeros(1, 3, 24, 16)}),
                           "hidden on first": lambda: vision(None, hidden_states=torch.zeros(5, 1, 32))}.items():
            try:
                call()
            except ValueError as error:
                found[name] = str(error)
        with torch.no_grad():
            found["grad off"] = vision({}).requires_grad
        vision.requires_grad_(False)
        frozen = vision({"pixel_values": cases.draw(2, 3, 16, 16)})
        found["frozen"] = (frozen.requires_grad, vision({}).requires_grad)
        spec = llava.provider.language_spec(config, None)
        found["width"] = spec.params["config"].hidden_size
        context = cases.context_of(grids, LANGUAGE, SEQ_LENGTH)
        context = dataclasses.replace(context, grid=GridSpec(LANGUAGE, tp=2), sequence_parallel=False)
        try:
            llava.provider.language_spec(dataclasses.replace(config, num_experts=4), context)
        except ValueError as error:
            found["moe without sequence parallelism"] = str(error)
    return found


def test_vision_module_edge_cases(pool: WorkerPool) -> None:
    (found,) = pool.run(probe_submodule, SMALL, world_size=1)
    assert found["empty"] == ((0, 32), True, True)
    assert found["grad off"] is False and found["frozen"] == (False, False)
    assert "[1, 3, 24, 16]" in found["size"] and "3, 16, 16" in found["size"]
    assert "the first" in found["hidden on first"]
    assert found["width"] == 32
    assert "--sequence-parallel" in found["moe without sequence parallelism"]
