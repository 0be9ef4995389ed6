"""The llava and mock models against themselves split over ranks, and against their plans."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import pytest

from mimo.grid.spec import GridSpec
from mimo.protocols import LANGUAGE
from providers import llava, mock
from providers.common.vision_language import VISION
from tests.support.spawn import WorkerPool

pytestmark = pytest.mark.slow

SEQ_LENGTH = 12
SMALL = mock.Config(
    vision_image_size=16, vision_patch_size=8, vision_hidden_size=32, vision_num_attention_heads=4,
    vision_ffn_hidden_size=48, num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2,
    ffn_hidden_size=48, vocab_size=64, make_vocab_size_divisible_by=2, moe_ffn_hidden_size=24, image_token_id=63,
    moe_aux_loss_coeff=0.0)
MOE = dataclasses.replace(SMALL, num_experts=4)


# Split over two ranks

SPLITS: dict[str, tuple[llava.Config, GridSpec]] = {
    "dense": (dataclasses.replace(SMALL, qk_layernorm=True, add_qkv_bias=True), GridSpec(LANGUAGE, tp=2)),
    "one-query-group": (dataclasses.replace(SMALL, num_query_groups=1), GridSpec(LANGUAGE, tp=2)),
    "moe-ep": (MOE, GridSpec(LANGUAGE, tp=2, ep=2)),
    "moe-expert-tp": (MOE, GridSpec(LANGUAGE, tp=2, expt_tp=2)),
    "moe-expert-dp": (MOE, GridSpec(LANGUAGE, tp=2)),
}


def copy_shards(whole: Any, split: Any, groups: Any, num_experts: int) -> dict[str, str]:
    """Give `split` its part of every parameter of `whole`; returns the unsplit name of each split parameter."""
    import torch

    from tests.support import provider_cases as cases

    full, names = dict(whole.named_parameters()), {}
    local_experts = num_experts // groups.ep.size()
    with torch.no_grad():
        for name, part in split.named_parameters():
            names[name] = name
            group = groups.tp
            if ".local_experts." in name:
                group, pieces = groups.expt_tp, name.split(".")
                position = pieces.index("local_experts") + 1
                pieces[position] = str(int(pieces[position]) + groups.ep.rank() * local_experts)
                names[name] = ".".join(pieces)
            source = full[names[name]]
            part.copy_(cases.shard_of(name, source, part, vars(part).get("partition_stride", 1), group.rank()))
    return names


def gradient_errors(whole: Any, split: Any, groups: Any, names: dict[str, str], expert_dp: int = 1) -> dict[str, float]:
    """Error of each parameter's gradient, after the sums that Megatron's `finalize_model_grads` makes over tp."""
    import torch.distributed as dist

    from tests.support import provider_cases as cases

    full, errors = dict(whole.named_parameters()), {}
    for name, part in split.named_parameters():
        expected = full[names[name]].grad
        if expected is None:
            assert part.grad is None, name
            continue
        found, expert = part.grad, ".local_experts." in name
        if vars(part).get("sequence_parallel", False) or "_layernorm" in name and "self_attention" in name:
            dist.all_reduce(found, group=groups.tp)
        if expert and expert_dp > 1:
            dist.all_reduce(found, group=groups.expt_dp)
        rank = (groups.expt_tp if expert else groups.tp).rank()
        expected = cases.shard_of(name, expected, found, vars(part).get("partition_stride", 1), rank)
        errors[name] = cases.relative_error(found, expected)
    return errors


def compare_language_split(rank: int, config: llava.Config, spec: GridSpec) -> dict[str, float]:
    from tests.support import provider_cases as cases

    embeddings = cases.draw(SEQ_LENGTH, 2, config.hidden_size)
    with cases.grids_of(GridSpec(VISION, dp=2), GridSpec(LANGUAGE, dp=2)) as grids:
        whole = cases.build_module_of(grids, config, LANGUAGE, SEQ_LENGTH)
        expected = cases.run_language(whole, embeddings, grids)
    with cases.grids_of(GridSpec(VISION, dp=2), spec) as grids:
        split = cases.build_module_of(grids, config, LANGUAGE, SEQ_LENGTH)
        groups = grids.collections[LANGUAGE]
        names = copy_shards(whole, split, groups, config.num_experts)
        found = cases.run_language(split, embeddings, grids)
        errors = gradient_errors(whole, split, groups, names, spec.expt_dp)
    return errors | {key: cases.relative_error(found[key], expected[key]) for key in expected}


@pytest.mark.parametrize("name", SPLITS)
def test_language_split_over_tensor_ranks_equals_whole(pool: WorkerPool, name: str) -> None:
    for errors in pool.run(compare_language_split, *SPLITS[name], world_size=2):
        assert {key: error for key, error in errors.items() if error > 1e-5} == {}
        assert {"logits", "embeddings", "decoder.layers.0.self_attention.linear_qkv.weight"} <= set(errors)


def compare_vision_split(rank: int, config: llava.Config) -> dict[str, float]:
    from tests.support import provider_cases as cases

    pixels = cases.draw(3, 3, config.vision_image_size, config.vision_image_size)
    with cases.grids_of(GridSpec(VISION, dp=2), GridSpec(LANGUAGE, dp=2)) as grids:
        whole = cases.build_module_of(grids, config, VISION, SEQ_LENGTH)
        expected = cases.run_vision(whole, pixels)
    with cases.grids_of(GridSpec(VISION, tp=2), GridSpec(LANGUAGE, dp=2)) as grids:
        split = cases.build_module_of(grids, config, VISION, SEQ_LENGTH)
        groups = grids.collections[VISION]
        names = copy_shards(whole, split, groups, 0)
        found = cases.run_vision(split, pixels)
        errors = gradient_errors(whole, split, groups, names)
    return errors | {key: cases.relative_error(found[key], expected[key]) for key in expected}


@pytest.mark.parametrize("act", ["quick_gelu", "gelu", "gelu_tanh"])
def test_vision_split_over_tensor_ranks_equals_whole(pool: WorkerPool, act: Any) -> None:
    config = dataclasses.replace(SMALL, vision_hidden_act=act, vision_final_layernorm=True, vision_patch_bias=True)
    for errors in pool.run(compare_vision_split, config, world_size=2):
        assert {key: error for key, error in errors.items() if error > 1e-5} == {}
        # Results; patch embedding, class token, positions; outer norms; layers; projector.
        assert len(errors) == 2 + (2 + 1 + 1) + 2 * 2 + 2 * 12 + 4


# A vision module on two pipeline stages

def run_two_stages(rank: int, config: llava.Config, num_images: int, frozen: bool) -> dict[str, Any]:
    """Stages on two ranks, joined by hand; compared with the unsplit module on rank 1."""
    import torch
    import torch.distributed as dist

    from tests.support import provider_cases as cases

    pixels = cases.draw(num_images, 3, config.vision_image_size, config.vision_image_size)
    with cases.grids_of(GridSpec(VISION, dp=2), GridSpec(LANGUAGE, dp=2)) as grids:
        whole = cases.build_module_of(grids, config, VISION, SEQ_LENGTH)
    with cases.grids_of(GridSpec(VISION, pp=2), GridSpec(LANGUAGE, dp=2)) as grids:
        stage = cases.build_module_of(grids, config, VISION, SEQ_LENGTH)
        offset = rank * config.vision_num_layers // 2
        full = dict(whole.named_parameters())
        for name, parameter in stage.named_parameters():
            source = re.sub(r"\.layers\.(\d+)\.", lambda found: f".layers.{int(found[1]) + offset}.", name)
            parameter.data.copy_(full[source].data)
        if frozen:
            whole.encoders.requires_grad_(False)
            stage.encoders.requires_grad_(False)
        shape = (config.num_patches + 1, num_images, config.vision_hidden_size)
        if rank == 0:
            hidden = stage({"pixel_values": pixels} if num_images else None)
            grad = torch.empty(shape)
            if num_images:
                dist.send(hidden.detach(), 1)
                dist.recv(grad, 1)
            if hidden.requires_grad:
                torch.autograd.backward(hidden, grad)
            conv = stage.encoder.conv1.weight.grad
            return {"shape": tuple(hidden.shape), "requires_grad": hidden.requires_grad, "conv": conv}
        received = torch.zeros(shape)
        if num_images:
            dist.recv(received, 0)
        received.requires_grad_(True)
        features = stage({"pixel_values": pixels}, hidden_states=received)
        (features * cases.draw(*features.shape, seed=5)).sum().backward()
        assert received.grad is not None
        if num_images:
            dist.send(received.grad, 0)
        expected = whole({"pixel_values": pixels})
        (expected * cases.draw(*expected.shape, seed=5)).sum().backward()
        return {"shape": tuple(features.shape), "error": cases.relative_error(features, expected),
                "received": float(received.grad.norm()), "conv": full["encoders.vit.conv1.weight"].grad,
                "projector": None if stage.input_projections[0].linear_fc1.weight.grad is None else
                float(stage.input_projections[0].linear_fc1.weight.grad.norm()), "training": stage.encoder.training}


def test_vision_on_two_stages_equals_whole(pool: WorkerPool) -> None:
    first, last = pool.run(run_two_stages, SMALL, 3, False, world_size=2)
    assert first["shape"] == (5, 3, 32) and last["shape"] == (12, 32)
    assert last["error"] < 1e-5
    assert float((first["conv"] - last["conv"]).norm() / last["conv"].norm()) < 1e-5


def test_two_stages_without_images(pool: WorkerPool) -> None:
    first, last = pool.run(run_two_stages, SMALL, 0, False, world_size=2)
    assert first["shape"] == (5, 0, 32) and first["requires_grad"] and first["conv"] is None
    assert last["shape"] == (0, 32) and last["projector"] is None


def test_two_stages_with_frozen_encoder_train_the_projector(pool: WorkerPool) -> None:
    first, last = pool.run(run_two_stages, SMALL, 3, True, world_size=2)
    assert not first["requires_grad"] and first["conv"] is None
    assert last["error"] < 1e-5 and last["projector"] > 0 and not last["training"]
    assert last["received"] == 0  # the stage before waits for a gradient


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
        for name, call in {
            "size": lambda: vision({"pixel_values": torch.zeros(1, 3, 24, 16)}),
            "hidden on first": lambda: vision(None, hidden_states=torch.zeros(5, 1, 32)),
        }.items():
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
