"""Placement of the engine: GPUs beside the trainer's, refusals before anything starts, its environment."""

from __future__ import annotations

import os
import re
import sys
from collections import namedtuple
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mimo import registry
from mimo.config.cli import parse_as
from mimo.config.rl import RolloutConfig
from mimo.config.rl_run import DESCRIPTION, RlRunConfig, validate_rl
from mimo.protocols import ParameterShape
from mimo.rl import launch_engine, placement
from mimo.rl.launch_engine import engine_options, refit_options
from mimo.rl.placement import (
    check_placement,
    choose_gpus,
    colocated_places,
    forwarded,
    replica_gpus,
    visible_gpus,
)

FLAGS = """--model-provider causal_lm --num-layers 2 --hidden-size 64 --num-attention-heads 2 --ffn-hidden-size 64
--vocab-size 100 --no-bf16 --transformer-impl local --seq-length 64 --max-completion-tokens 16
--max-tokens-per-microbatch 128 --global-batch-size 16 --completions-per-prompt 4 --train-iters 3""".split()


def parsed(*flags: str, device: str = "cuda") -> RlRunConfig:
    return parse_as(RlRunConfig, [*FLAGS, "--device", device, *flags], DESCRIPTION)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A host with eight GPUs and two trainer ranks."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    return monkeypatch


def test_engines_get_the_gpus_behind_the_trainers(host: pytest.MonkeyPatch) -> None:
    config = parsed("--engine-dp", "3", "--engine-tp", "2")
    assert replica_gpus(config) == [["2", "3"], ["4", "5"], ["6", "7"]]
    assert replica_gpus(parsed("--engine-gpus", "7, 4", "--engine-dp", "2")) == [["7"], ["4"]]
    assert replica_gpus(parsed("--engine-placement", "colocated", "--engine-tp", "2")) == [["0", "1"]]


def test_gpus_are_those_that_this_process_sees(host: pytest.MonkeyPatch) -> None:
    host.setenv("CUDA_VISIBLE_DEVICES", "6,4,GPU-3f, 1")
    host.setattr("torch.cuda.device_count", lambda: 4)
    assert replica_gpus(parsed("--engine-tp", "2")) == [["GPU-3f", "1"]]
    assert replica_gpus(parsed("--engine-gpus", "3")) == [["1"]]
    assert visible_gpus(1, "2,99,3") == ["2"], "CUDA stops at a number that there is not"
    assert visible_gpus(0, "") == []


@pytest.mark.parametrize(("flags", "expected"), [
    ("--engine-dp 2 --engine-tp 2 --engine-pp 2",
     "separate: the first host has 8 GPUs; its 2 trainer ranks and the engine's 8 workers "
     "(--engine-dp 2 --engine-tp 2 --engine-pp 2) need 10"),
    ("--engine-placement ray --engine-dp 7", "ray: the first host has 8 GPUs; its 2 trainer ranks and the engine's 7"),
    ("--engine-gpus 8", "--engine-gpus 8: the first rank sees 8 GPUs, numbered from 0; there is no 8"),
    ("--engine-gpus 1,2 --engine-tp 2", "--engine-gpus 1,2: the 2 trainer ranks of the first host have GPUs 0 to 1"),
    ("--engine-placement colocated --engine-tp 4", "need 4 GPUs that trainer ranks have, and the first host has 2"),
])
def test_too_few_gpus_are_refused_with_the_numbers(host: pytest.MonkeyPatch, flags: str, expected: str) -> None:
    with pytest.raises(ValueError) as refused:
        check_placement(parsed(*flags.split()), 0)
    assert expected in str(refused.value)
    check_placement(parsed(*flags.split()), 1)  # of another host, perhaps


@pytest.mark.parametrize(("flags", "num_ranks", "places"), [
    ("--engine-dp 2 --engine-tp 4", [8], [[(0, 0)], [(0, 4)]]),
    ("--engine-dp 3 --engine-tp 2 --engine-pp 2", [4, 8], [[(0, 0)], [(1, 0)], [(1, 4)]]),
    ("--engine-dp 3 --engine-tp 3", [8, 8], [[(0, 0)], [(0, 3)], [(1, 0)]]),
    ("--engine-dp 2 --engine-tp 8 --engine-pp 2 --engine-nodes 2", [8] * 5, [[(0, 0), (1, 0)], [(2, 0), (3, 0)]]),
    ("--engine-dp 2 --engine-tp 4 --engine-nodes 2", [4, 4], [[(0, 0), (1, 0)], [(0, 2), (1, 2)]]),
    ("--engine-dp 3 --engine-tp 4", [4, 4], "--engine-dp 3 --engine-tp 4 --engine-pp 1 --engine-nodes 1 make 3 "
     "replicas, each of which needs 4 trainer ranks on one host; there is room for 2 on 2 hosts with 4 ranks each"),
    ("--engine-dp 1 --engine-tp 16 --engine-nodes 2", [8, 4],
     "needs 8 trainer ranks on each of 2 hosts; there is room for 0 on 2 hosts with 4, 8 ranks each"),
])
def test_colocated_replicas_fill_one_host_after_the_other(flags, num_ranks, places):
    config = parsed("--engine-placement", "colocated", "--ray-address", "auto", *flags.split())
    if isinstance(places, str):
        with pytest.raises(ValueError, match=places):
            colocated_places(config.rollout, num_ranks)
    else:
        assert colocated_places(config.rollout, num_ranks) == places


def test_colocated_replicas_that_do_not_fit_are_refused_before_the_start(host: pytest.MonkeyPatch) -> None:
    config = parsed(*"--engine-placement colocated --ray-address auto --engine-tp 4 --num-attention-heads 4".split(),
                    "--llm-dp", "6", "--global-batch-size", "24")
    host.setenv("WORLD_SIZE", "6")
    with pytest.raises(ValueError, match="needs 4 trainer ranks on one host; there is room for 0 on 3 hosts with 2 ra"):
        check_placement(config, 0)
    host.setenv("LOCAL_WORLD_SIZE", "4")
    check_placement(config, 0)  # four ranks on one host and two on another
    host.setenv("LOCAL_WORLD_SIZE", "6")
    check_placement(config, 0)
    assert replica_gpus(config) == []
    plan = placement.dry_run_report(config, validate_rl(config, 6), registry.model_provider("causal_lm"))
    assert "GPUs: 6, one for each trainer rank; the engine shares 4 of them\n" in plan


def on_ranks(monkeypatch: pytest.MonkeyPatch, told: list[tuple[int, str, tuple[str, ...], str]]) -> None:
    """Make this process the first of so many ranks, with what each of them tells of its host."""
    def gather(grids: Any, own: Any) -> list[Any]:
        assert own[0] == 0 and {name for name, *_ in own[2:]} and own[2][0] == own[1]
        return told

    monkeypatch.setattr(launch_engine, "gather", gather)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")


def test_workers_have_the_gpus_of_ranks_on_their_hosts(host: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = [["6", "4", "5", "7"], ["0", "1", "2", "3"]]
    on_ranks(host, [(4 * number, f"host{number}", (f"host{number}", f"10.0.0.{number + 1}"), gpu)
                    for number, own in enumerate(names) for gpu in own])
    grids, platform = SimpleNamespace(rank=0), SimpleNamespace(name="cuda")
    hosts = launch_engine.find_hosts(grids, platform)
    assert [each.name for each in hosts] == ["host0, the host of trainer ranks 0 to 3",
                                             "host1, the host of trainer ranks 4 to 7"]
    actors = SimpleNamespace(RayCluster=lambda *_: None, Seat=namedtuple("Seat", "host name addresses gpus"),
                             RayEngines=lambda *arguments, seats, **others: seats)
    host.setitem(sys.modules, "mimo.rollout.ray_actors", actors)
    host.setattr(launch_engine, "describe_model", lambda *_: tmp_path)
    for flags, expected in (
            ("--engine-dp 3 --engine-tp 2", [[(0, ("6", "4"))], [(0, ("5", "7"))], [(1, ("0", "1"))]]),
            ("--engine-dp 2 --engine-tp 2 --engine-pp 2 --engine-nodes 2",
             [[(0, ("6", "4")), (1, ("0", "1"))], [(0, ("5", "7")), (1, ("2", "3"))]])):
        config = parsed("--engine-placement", "colocated", "--ray-address", "auto", *flags.split())
        seats: Any = launch_engine.start_engine(config, registry.model_provider("causal_lm"), False, hosts=hosts)
        assert [[(seat.host, seat.gpus) for seat in own] for own in seats] == expected
        assert {seat.addresses for own in seats for seat in own} == {("host0", "10.0.0.1"), ("host1", "10.0.0.2")}


def test_ranks_that_are_not_numbered_host_by_host_are_refused(host: pytest.MonkeyPatch) -> None:
    on_ranks(host, [(0, "a", ("a",), "0"), (1, "b", ("b",), "0"), (1, "a", ("a",), "1"), (2, "b", ("b",), "1")])
    with pytest.raises(ValueError, match="ranks 1, 2 are on a, b; number the ranks host by host, as torchrun does"):
        launch_engine.find_hosts(SimpleNamespace(rank=0), SimpleNamespace(name="cuda"))


def test_a_ray_cluster_knows_its_gpus_itself(host: pytest.MonkeyPatch) -> None:
    config = parsed("--engine-placement", "ray", "--ray-address", "auto", "--engine-dp", "64")
    check_placement(config, 0)
    assert replica_gpus(config) == []


@pytest.mark.parametrize(("flags", "expected"), [
    ("--engine-gpus 1", "--engine-gpus 1 is for GPUs"),
    ("--engine-memory 0.5", "--engine-memory 0.5 is for GPUs"),
    ("--engine-enforce-eager", "--engine-enforce-eager True is for GPUs"),
    ("--engine-quantization fp8_per_block", "--engine-quantization fp8_per_block is for GPUs"),
    ("--kv-channels 48 --engine-kv-cache-dtype fp8", "--engine-kv-cache-dtype fp8 with heads of 48 channels"),
    ("--engine-ep --engine-tp 2", "--engine-ep with --engine-tp 2 is for GPUs"),
    ("--engine-ep --engine-dp 2 --engine-share-experts --num-experts 4 --moe-router-topk 2",
     "--engine-ep with --engine-share-experts is for GPUs"),
    ("--engine-placement ray --engine-env HOME,NO_SUCH_VARIABLE",
     "--engine-env HOME,NO_SUCH_VARIABLE: NO_SUCH_VARIABLE is not set where the first rank runs"),
])
def test_flags_of_gpus_are_refused_on_the_cpu(flags: str, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        check_placement(parsed(*flags.split(), device="cpu"), 0)


def test_an_engine_that_is_data_parallel_by_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_DP_SIZE", "2")
    check_placement(parsed(device="cpu"), 1)  # the engine is started by the first rank
    with pytest.raises(ValueError, match=r"VLLM_DP_SIZE 2: the size .* remove it, .*\(--engine-dp 2\)"):
        check_placement(parsed(device="cpu"), 0)
    monkeypatch.setenv("VLLM_DP_SIZE", "1")
    check_placement(parsed(device="cpu"), 0)


@pytest.mark.parametrize(("device", "flags", "expected"), [
    ("cuda", "--rope-type rope --kv-lora-rank 256", ""),
    ("cpu", "--norm-epsilon 1e-5", ""),
    ("cpu", "--kv-lora-rank 256", "--kv-lora-rank 256 --qk-pos-emb-head-dim 64: .* for CPUs takes 512 and 64 only"),
    ("cpu", "--engine-kv-cache-dtype fp8", "--engine-kv-cache-dtype fp8 with .* caches latents in the dtype of the we"),
    ("cuda", "--engine-kv-cache-dtype fp8", ""),
    ("cpu", "--rope-type rope", "--rope-type rope: vLLM on CPUs applies plain rotary positions to the wrong numbers"),
])
def test_latent_attention_that_vllm_computes_otherwise_is_refused(host, device, flags, expected):
    config = parse_as(RlRunConfig, ["--model-provider", "deepseek_v3", "--device", device, *flags.split()], DESCRIPTION)
    with pytest.raises(ValueError, match=expected) if expected else nullcontext():
        check_placement(config, 1)


@pytest.mark.parametrize("model", ["nemotron_h", "nemotron-moe-vlm-tiny"])
def test_layers_that_vllm_computes_on_gpus_alone_are_refused_on_the_cpu(host: pytest.MonkeyPatch, model: str) -> None:
    flags = """--no-bf16 --transformer-impl local --seq-length 64 --max-completion-tokens 16 --global-batch-size 16
        --max-tokens-per-microbatch 128 --completions-per-prompt 4 --train-iters 3 --dataset-provider digits""".split()
    flags += ["--model-provider", model, "--hybrid-layer-pattern"]
    for device, pattern in (("cpu", "M*-"), ("cuda", "ME*")):
        check_placement(parse_as(RlRunConfig, [*flags, pattern, "--device", device], ""), 1)
    with pytest.raises(ValueError, match=re.escape(f"{model} --hybrid-layer-pattern ME*: vLLM has no kernels")):
        check_placement(parse_as(RlRunConfig, [*flags, "ME*", "--device", "cpu"], ""), 1)


def test_ray_that_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="--engine-placement ray needs the package ray"):
        check_placement(parsed("--engine-placement", "ray", device="cpu"), 0)


@pytest.mark.parametrize(("flags", "expected"), [
    ("--engine-dp 0", "--engine-dp 0 is below 1"),
    ("--ray-address auto", "--ray-address auto is for --engine-placement ray and colocated, not for separate"),
    ("--engine-placement ray --ray-address ray://head:10001", "ray://head:10001: Ray Client is not supported"),
    ("--engine-placement ray --ray-address head", "--ray-address head is neither host:port of a Ray cluster nor auto"),
    ("--engine-memory 1.5", "--engine-memory 1.5 is not above 0 and at most 1"),
    ("--engine-memory nan", "--engine-memory nan is not above 0"),
    ("--engine-gpus 4,x", "--engine-gpus 4,x: must be numbers with commas between them"),
    ("--engine-gpus 4,", "--engine-gpus 4,: must be numbers"),
    ("--engine-gpus 4,4 --engine-tp 2", "--engine-gpus 4,4 has a GPU twice"),
    ("--engine-gpus 4,5", "--engine-gpus 4,5 has 2, and --engine-dp 1 --engine-tp 1 --engine-pp 1 need 1"),
    ("--engine-env HOME", r"--engine-env HOME is for engines that Ray starts \(--engine-placement ray, or --ray-addr"),
    ("--engine-placement colocated --ray-address auto --engine-dp 2",
     "--engine-dp 2 --engine-tp 1 --engine-pp 1 need 2 trainer ranks, one for each worker, and the run has 1"),
    ("--engine-placement ray --engine-env HOME,CUDA_VISIBLE_DEVICES", "leave CUDA_VISIBLE_DEVICES out"),
    ("--refit-delta --engine-placement colocated", "--refit-delta with --engine-placement colocated: the engine loses"),
    ("--engine-gpus 4 --engine-placement ray", "--engine-gpus 4 is for --engine-placement separate, not for ray"),
])
def test_contradictions_are_refused_by_name(flags: str, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        validate_rl(parsed(*flags.split(), device="cpu"), 1)


def test_an_engine_on_gpus_fills_them_and_compiles() -> None:
    options = engine_options(parsed("--engine-tp", "2", "--seed", "7"), Path("folder"), 3, ["4", "GPU-5"])
    assert options.environment["CUDA_VISIBLE_DEVICES"] == "4,GPU-5" and options.seed == 10
    assert options.extra["gpu_memory_utilization"] == 0.85 and options.extra["enforce_eager"] is False
    assert options.extra["distributed_executor_backend"] == "mp" and "kv_cache_memory_bytes" not in options.extra
    assert "VLLM_CPU_CI_ENV" not in options.environment
    chosen = engine_options(parsed("--engine-memory", "0.5", "--engine-enforce-eager"), Path("folder"))
    assert chosen.extra["gpu_memory_utilization"] == 0.5 and chosen.extra["enforce_eager"] is True
    assert chosen.extra["distributed_executor_backend"] == "uni" and "CUDA_VISIBLE_DEVICES" not in chosen.environment


def test_an_engine_that_quantizes_leaves_routers_as_they_are() -> None:
    extra = engine_options(parsed("--engine-quantization", "fp8_per_block"), Path("folder")).extra
    layers, *_ = extra["quantization_config"]["ignore"]
    kind, _, pattern = layers.partition(":")
    assert extra["quantization"] == "fp8_per_block" and kind == "re"
    # As Qwen3-MoE, Mixtral, DeepSeek-V3, Nemotron-H and a model with images name them in vLLM; it matches from the
    # beginning.
    for router in ("model.layers.0.mlp.gate", "model.layers.0.block_sparse_moe.gate", "model.layers.3.mlp.gate",
                   "model.layers.1.mixer.gate", "language_model.model.layers.0.mlp.gate",
                   "model.layers.0.mlp.shared_expert_gate"):
        assert re.match(pattern, router), router
    for other in ("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.gate_up_proj", "model.layers.0.mlp.experts",
                  "model.layers.0.mlp.shared_experts.gate_up_proj", "model.layers.1.mixer.in_proj"):
        assert not re.match(pattern, other), other
    assert "quantization_config" not in engine_options(parsed(), Path("folder")).extra
    for flags, expected in (((), None), (("--fp8-format", "e4m3"), "0"),
                            (("--fp8-format", "hybrid", "--fp8-recipe", "blockwise"), "1")):
        environment = engine_options(parsed("--engine-quantization", "fp8_per_block", *flags), Path("f")).environment
        assert environment.get("MIMO_FP8_TRAINER_SCALES") == expected


def test_a_folder_of_the_users_is_not_deleted(tmp_path: Path) -> None:
    config, folder = parsed("--run-dir", str(tmp_path)), tmp_path / "engine"
    model = registry.model_provider("causal_lm")
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").touch()
    folder.symlink_to(other)
    with pytest.raises(ValueError, match=rf"^--run-dir {tmp_path}: .* to {folder}, which is there already"):
        launch_engine.describe_model(config, model, False)
    assert [each.name for each in other.iterdir()] == ["config.json"]
    folder.unlink()
    folder.mkdir()
    (folder / "config.json").touch()  # as an older version leaves it
    assert launch_engine.describe_model(config, model, False) == folder
    (folder / "left.txt").touch()
    launch_engine.describe_model(config, model, False)
    assert not (folder / "left.txt").exists() and (folder / "config.json").read_text()
    (folder / launch_engine.MARKER).unlink()
    (folder / "model.safetensors").touch()
    with pytest.raises(ValueError, match="Give another --run-dir, or move it away"):
        launch_engine.engine_folder(config)
    assert (folder / "model.safetensors").exists()


# Layers of encoders and projectors as vLLM names them, in llava, llava_next, qwen2_5_vl and qwen3_vl.
ENCODER_LAYERS = ("vision_tower.vision_model.encoder.layers.0.mlp.fc1", "visual.blocks.0.attn.qkv",
                  "visual.blocks.3.mlp.gate_up_proj", "visual.blocks.3.mlp.linear_fc1")
PROJECTOR_LAYERS = ("multi_modal_projector.linear_1", "visual.merger.mlp.0", "visual.merger.linear_fc2",
                    "visual.deepstack_merger_list.2.linear_fc1")


@pytest.mark.parametrize(("flags", "quantized"), [((), ()), (("--encoder-fp8-format", "e4m3"), ENCODER_LAYERS)])
def test_an_engine_that_quantizes_leaves_encoders_and_projectors_as_the_trainer_has_them(
        flags: tuple[str, ...], quantized: tuple[str, ...]) -> None:
    ignored = engine_options(parsed("--engine-quantization", "fp8_per_block", *flags),
                             Path("folder")).extra["quantization_config"]["ignore"]
    decoder = ("language_model.model.layers.0.mlp.gate_up_proj", "model.layers.0.self_attn.qkv_proj",
               "language_model.backbone.layers.1.mixer.in_proj")
    found = [name for name in (*ENCODER_LAYERS, *PROJECTOR_LAYERS, *decoder)
             if not any(re.match(pattern.removeprefix("re:"), name) for pattern in ignored)]
    assert found == [*quantized, *decoder]


def test_the_memory_of_an_engine_that_quantizes_has_its_whole_weights_in_two_bytes() -> None:
    shapes = {"language": [ParameterShape("embedding", (100, 8), 1, "tp", "first"),
                           ParameterShape("layer", (8, 8), 3), ParameterShape("output", (100, 8), 1, "tp", "last")],
              "vision": [ParameterShape("layer", (4, 4), 2), ParameterShape("projector", (8, 4), 1, "tp", "last")]}
    provider: Any = SimpleNamespace(parameter_shapes=lambda _, name: shapes[name])
    layout: Any = SimpleNamespace(grids=shapes)

    def estimate(*flags: str) -> float:
        return placement.engine_weight_bytes(parsed("--bf16", *flags), layout, provider)

    quantized = ("--engine-quantization", "fp8_per_block")
    assert estimate() == 2 * (1600 + 192 + 32 + 32)
    assert estimate(*quantized) == 2 * 1600 + 192 + 2 * (32 + 32)
    assert estimate(*quantized, "--encoder-fp8-format", "e4m3") == 2 * 1600 + 192 + 32 + 2 * 32


def test_an_engine_with_scales_uses_attention_that_reads_them_in_every_step() -> None:
    fp8 = ["--engine-kv-cache-dtype", "fp8"]
    for flags, device, dtype, backend in (((), "cuda", None, None), (fp8, "cuda", "fp8", None),
                                          ((*fp8, "--engine-kv-scales", "calibrated"), "cpu", "fp8", None),
                                          ((*fp8, "--engine-kv-scales", "calibrated"), "cuda", "fp8", "FLASH_ATTN")):
        extra = engine_options(parsed(*flags, device=device), Path("folder")).extra
        assert extra.get("kv_cache_dtype") == dtype and extra.get("attention_config", {}).get("backend") == backend


@pytest.mark.parametrize(("device", "flags", "backend"), [
    ("cuda", "", "nccl"), ("cpu", "", "gloo"), ("cuda", "--engine-placement ray", "nccl"),
    ("cuda", "--engine-placement colocated", "ipc")])
def test_weights_travel_as_fast_as_the_place_allows(device: str, flags: str, backend: str) -> None:
    assert refit_options(parsed(*flags.split(), device=device)).backend == backend


def test_an_engine_on_another_node_gets_the_variables_that_it_needs_and_no_others() -> None:
    own = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "here", "CUDA_VISIBLE_DEVICES": "0", "PATH": "/bin",
           "TORCHELASTIC_RUN_ID": "1", "VLLM_HOST_IP": "10.0.0.1", "HOME": "/root"}
    along = {"HF_HOME": "/hub", "VLLM_LOGGING_LEVEL": "INFO", "NCCL_IB_HCA": "mlx5", "OMP_NUM_THREADS": "1",
             "XDG_CACHE_HOME": "/disk/cache", "TRITON_CACHE_DIR": "/disk/triton", "TORCHINDUCTOR_CACHE_DIR": "/disk",
             "CUDA_CACHE_PATH": "/disk/cuda", "TMPDIR": "/disk/tmp", "FI_PROVIDER": "efa"}
    assert forwarded(own | along) == along
    assert "CUDA_VISIBLE_DEVICES" not in forwarded(dict(os.environ) | own)


def test_one_engine_on_one_gpu_needs_two() -> None:
    assert choose_gpus(RolloutConfig(), 1, 2) == [1]
    with pytest.raises(ValueError, match="has 1 GPUs; its 1 trainer ranks and the engine's 1 workers"):
        choose_gpus(RolloutConfig(), 1, 1)


def test_the_plan_has_the_memory_of_each_kind_of_rank() -> None:
    config = parsed("--dry-run", "--llm-pp", "2")
    plan = placement.dry_run_report(config, validate_rl(config, 2), registry.model_provider("causal_lm"))
    (line,) = [line for line in plan.splitlines() if line.startswith("  language stage 1: ")]
    parameters = 100 * 64 + 64 + 4 * 64 * 64 + 3 * 64 * 64 + 2 * 64
    assert abs(float(line.split()[3]) * 2**30 / (16 * parameters) - 1) < 0.2
