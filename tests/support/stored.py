"""The tensors of a checkpoint as they lie in its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mimo.checkpoint.reader import CheckedReader, read_index


def safetensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of a folder of safetensors."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a mapping
    return found


def save_small_llama(folder: Path, changes: dict[str, torch.Tensor], **config: Any) -> None:
    """Write a Llama of one layer as Hugging Face saves it, with other tensors and keys of its configuration."""
    shapes = {"model.embed_tokens.weight": (20, 8), "lm_head.weight": (20, 8), "model.norm.weight": (8,)}
    layer = {"input_layernorm": (8,), "post_attention_layernorm": (8,), "mlp.gate_proj": (12, 8),
             "mlp.up_proj": (12, 8), "mlp.down_proj": (8, 12), **{f"self_attn.{name}_proj": (8, 8) for name in "qkvo"}}
    shapes |= {f"model.layers.0.{name}.weight": shape for name, shape in layer.items()}
    generator = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    folder.mkdir()
    save_file(tensors | changes, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "intermediate_size": 12,
        "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 20, "max_position_embeddings": 64, **config}))


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Read the whole global tensors by key."""
    metadata = read_index(folder).state_dict_metadata
    tensors = {
        key: torch.full(tuple(value.size), torch.nan, dtype=value.properties.dtype)
        for key, value in metadata.items()
        if isinstance(value, TensorStorageMetadata)
    }
    dcp.load(tensors, storage_reader=CheckedReader(folder), no_dist=True)
    return tensors
