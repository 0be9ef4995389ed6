"""Tiny checkpoints, and vLLM's models for them: any rank of any parallel sizes in one process."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ.setdefault("VLLM_CPU_CI_ENV", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import safetensors.torch
import torch
import transformers
from vllm import LLM, SamplingParams
from vllm.config import CacheConfig, LoadConfig, ModelConfig, ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.fused_moe import config as fused_moe_config
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from mimo.refit.loader_trace import Recording, record
from mimo.refit.tensor_slices import TensorMeta
from tests.support.lazy import Rank

TEXT: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64, "tie_word_embeddings": False}
MOE = TEXT | {"moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 1}
CLIP = {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "image_size": 16, "patch_size": 8}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": TEXT | {"model_type": "qwen3"},
    "qwen3-tied": TEXT | {"model_type": "qwen3", "tie_word_embeddings": True},
    "qwen3-moe": MOE | {"model_type": "qwen3_moe"},
    "nemotron-h": {
        "model_type": "nemotron_h", "vocab_size": 99, "hidden_size": 32, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 48, "ssm_state_size": 8, "mamba_num_heads": 8,
        "mamba_head_dim": 8, "n_groups": 8, "max_position_embeddings": 64, "hybrid_override_pattern": "M*-",
        "num_hidden_layers": 3, "tie_word_embeddings": False},
    "nemotron-h-latent": {
        "model_type": "nemotron_h", "vocab_size": 99, "hidden_size": 32, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 32, "ssm_state_size": 8, "mamba_num_heads": 8, "mamba_head_dim": 8,
        "n_groups": 1, "max_position_embeddings": 64, "hybrid_override_pattern": "ME", "num_hidden_layers": 2,
        "tie_word_embeddings": False, "n_routed_experts": 4, "moe_intermediate_size": 16, "moe_latent_size": 16,
        "moe_shared_expert_intermediate_size": 24, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1,
        "topk_group": 1},
    "deepseek-v3": TEXT | {
        "model_type": "deepseek_v3", "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "first_k_dense_replace": 1,
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 8},
    "llava": {
        "model_type": "llava", "vision_config": CLIP, "text_config": TEXT | {"model_type": "qwen3"},
        "image_token_index": 98, "vision_feature_layer": -1},
}


def checkpoint(name: str, directory: Path) -> dict[str, torch.Tensor]:
    """Saves a random model of `MODELS` as transformers does; what it saved, a vision tower spelled as vLLM wants it."""
    fields = dict(MODELS[name])
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    kind = transformers.AutoModelForImageTextToText if name == "llava" else transformers.AutoModelForCausalLM
    model = kind.from_config(config)
    generator = torch.Generator().manual_seed(5)  # whichever tests ran before: some weights repeat one token for ever
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.uniform_(-1, 1, generator=generator)
    model.save_pretrained(directory)
    saved = {key: tensor for file in sorted(directory.glob("*.safetensors"))
             for key, tensor in safetensors.torch.load_file(file).items()}
    return {re.sub(r"^vision_tower\.", "vision_tower.vision_model.", key): tensor for key, tensor in saved.items()}


def entries_of(tensors: dict[str, torch.Tensor]) -> list[TensorMeta]:
    """Return the chunk plan of a checkpoint."""
    return [TensorMeta(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for name, tensor in tensors.items()]


@contextmanager
def as_rank(directory: Path, rank: Rank, dtype: str = "float32") -> Iterator[VllmConfig]:
    """vLLM's groups and configuration are those of one worker; nothing is ever communicated."""
    world = rank.tp[1] * rank.pp[1]
    groups = {"_TP": rank.tp, "_PP": rank.pp, "_EP": rank.tp, "_DP": (0, 1), "_DCP": (0, 1), "_PCP": (0, 1),
              "_WORLD": (rank.pp[0] * rank.tp[1] + rank.tp[0], world)}
    before = {name: vars(parallel_state)[name] for name in groups}
    config = VllmConfig(
        model_config=ModelConfig(model=str(directory), dtype=dtype, skip_tokenizer_init=True, max_model_len=64,
                                 enforce_eager=True),
        cache_config=CacheConfig(block_size=16), load_config=LoadConfig(load_format="dummy"),
        parallel_config=ParallelConfig(enable_expert_parallel=rank.experts_over_tp))
    config.parallel_config.tensor_parallel_size = rank.tp[1]
    config.parallel_config.pipeline_parallel_size = rank.pp[1]
    try:
        for name, place in groups.items():
            setattr(parallel_state, name, _group(name, *place))
        with set_current_vllm_config(config):
            yield config
    finally:
        for name, group in before.items():
            setattr(parallel_state, name, group)


def build(config: VllmConfig) -> torch.nn.Module:
    """Return a worker's model with parameters of NaN, not processed; inside `as_rank`.

    Experts without a gate have kernels on accelerators only; a model that has them is built as there.
    """
    accelerator = SimpleNamespace(is_cuda_alike=lambda: True, is_cuda=lambda: True, is_xpu=lambda: False,
                                  is_rocm=lambda: False, is_cpu=lambda: False)
    with set_default_torch_dtype(config.model_config.dtype), contextlib.ExitStack() as patches:
        if config.model_config.hf_config.model_type == "nemotron_h":
            patches.enter_context(mock.patch.object(fused_moe_config, "current_platform", accelerator))
            patches.enter_context(mock.patch.object(
                unquantized_fused_moe_method, "select_unquantized_moe_backend",
                lambda moe_config: (UnquantizedMoeBackend.TRITON, TritonExperts)))
        model = initialize_model(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    return model


def live_recording(directory: str, entries: list[TensorMeta]) -> tuple[object, object, Recording]:
    """Return a new engine's answers before and after it is recorded, and the recording; in an own process."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_ALLOW_INSECURE_SERIALIZATION="1")
    engine = LLM(directory, dtype="float32", enforce_eager=True, max_model_len=64, skip_tokenizer_init=True,
                 kv_cache_memory_bytes=64 << 20, max_num_seqs=4, enable_prefix_caching=False)

    def observed() -> object:
        options = SamplingParams(temperature=0, max_tokens=8, detokenize=False, logprobs=1)
        (output,) = engine.generate([{"prompt_token_ids": list(range(3, 19))}], options)
        logprobs = [{token: value.logprob for token, value in step.items()} for step in output.outputs[0].logprobs]
        return list(output.outputs[0].token_ids), logprobs, engine.apply_model(_contents)

    before = observed()
    (recording,) = engine.apply_model(partial(record, entries=entries))
    return before, observed(), recording


def _contents(model: torch.nn.Module) -> list[tuple[str, int, int, str]]:
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return [(path, id(tensor), tensor.data_ptr(), hashlib.sha256(tensor.detach().contiguous().numpy()).hexdigest())
            for path, tensor in tensors]


def _group(name: str, rank: int, size: int) -> parallel_state.GroupCoordinator:
    group = object.__new__(parallel_state.GroupCoordinator)
    processes = SimpleNamespace(rank=lambda: rank, size=lambda: size)
    vars(group).update(
        unique_name=name, rank=rank, local_rank=rank, rank_in_group=rank, world_size=size, ranks=list(range(size)),
        device=torch.device("cpu"), cpu_group=processes, device_group=processes, device_communicator=None)
    return group
