"""Write Hugging Face configurations of the models here: the inverse of `hf` and `hf_text`.

Rotary positions are spelt as transformers 4 and serving engines read them. transformers 5 accepts that spelling too.
"""

from __future__ import annotations

from typing import Any

from providers.common.decoder import DecoderConfig
from providers.common.hf import ACTIVATIONS
from providers.common.hf_text import LLAMA3_ROPE
from providers.common.vision import VisionConfig

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
                 "qwen3_moe": "Qwen3MoeForCausalLM", "mixtral": "MixtralForCausalLM"}


def model_type(config: DecoderConfig) -> str:
    """Return the Hugging Face family that has the decoder's parts.

    Raises:
        ValueError: no family has all of them.
    """
    kind = {(False, False): "llama", (False, True): "qwen3", (True, False): "mixtral", (True, True): "qwen3_moe"}[
        bool(config.num_experts), config.qk_layernorm]
    if config.add_qkv_bias:
        if kind != "llama":
            raise ValueError("no Hugging Face family has --add-qkv-bias together with "
                             f"{'--qk-layernorm' if config.qk_layernorm else f'--num-experts {config.num_experts}'}")
        return "qwen2"
    if kind == "mixtral" and config.moe_router_pre_softmax:
        raise ValueError("no Hugging Face family has --moe-router-pre-softmax without --qk-layernorm")
    return kind


def text_config(config: DecoderConfig) -> dict[str, Any]:
    """Return a decoder as a text configuration. Raises the errors of `model_type`."""
    kind = model_type(config)
    text: dict[str, Any] = {
        "model_type": kind,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.query_groups,
        "head_dim": config.head_dim,
        "intermediate_size": config.moe_ffn_hidden_size if kind == "mixtral" else config.ffn_hidden_size,
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rotary_base,
        "rope_scaling": None,
        "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
    }
    if config.use_rope_scaling:
        text["rope_scaling"] = {"rope_type": "llama3", "factor": config.rope_scaling_factor, **LLAMA3_ROPE}
    if kind == "mixtral":
        text |= {"num_local_experts": config.num_experts, "num_experts_per_tok": config.moe_router_topk,
                 "sliding_window": None}
    if kind == "qwen3_moe":
        text |= {"num_experts": config.num_experts, "num_experts_per_tok": config.moe_router_topk,
                 "moe_intermediate_size": config.moe_ffn_hidden_size,
                 "norm_topk_prob": not config.moe_router_pre_softmax}
    return text


def causal_lm_config(config: DecoderConfig) -> dict[str, Any]:
    """Return a text model as a config.json. Raises the errors of `model_type`."""
    text = text_config(config)
    return {"architectures": [ARCHITECTURES[text["model_type"]]], **text}


def vision_config(config: VisionConfig) -> dict[str, Any]:
    """Return a tower as the configuration of a CLIP or SigLIP vision model in which every layer runs.

    Raises:
        ValueError: neither of them has all its parts.
    """
    clip = config.vision_class_token
    if (config.vision_pre_layernorm, config.vision_patch_bias) != (clip, not clip):
        flags = [name for name in ("vision_class_token", "vision_pre_layernorm", "vision_patch_bias")
                 if vars(config)[name]]
        given = ", ".join("--" + name.replace("_", "-") for name in flags) or "none of them"
        raise ValueError("CLIP has --vision-class-token and --vision-pre-layernorm, SigLIP --vision-patch-bias; this "
                         f"encoder has {given}")
    if config.vision_final_layernorm:
        raise ValueError("a LlavaConfig takes the features before the last norm; this encoder has "
                         "--vision-final-layernorm")
    activation = {ours: theirs for theirs, ours in ACTIVATIONS.items()}[config.vision_hidden_act]
    vision: dict[str, Any] = {
        "model_type": "clip_vision_model" if clip else "siglip_vision_model",
        "hidden_size": config.vision_hidden_size,
        "intermediate_size": config.vision_ffn_hidden_size,
        "num_hidden_layers": config.vision_num_layers,
        "num_attention_heads": config.vision_num_attention_heads,
        "num_channels": config.vision_num_channels,
        "image_size": config.vision_image_size,
        "patch_size": config.vision_patch_size,
        "hidden_act": activation,
        "layer_norm_eps": config.vision_norm_epsilon,
    }
    # The pooling head is not part of the model here.
    return vision if clip else vision | {"vision_use_head": False}


def llava_config(decoder: DecoderConfig, vision: VisionConfig, image_token_id: int) -> dict[str, Any]:
    """Return a LLaVA model as a config.json. Its tower has only the layers that run.

    Raises:
        ValueError: no LlavaConfig has all its parts; see `model_type` and `vision_config`.
    """
    if vision.vision_dynamic_resolution or vision.vision_pixel_shuffle > 1:
        given = "--vision-dynamic-resolution" if vision.vision_dynamic_resolution else (
            f"--vision-pixel-shuffle {vision.vision_pixel_shuffle}")
        raise ValueError(f"{given}: a LlavaConfig takes images of one size and makes every patch a token")
    if vision.projector_hidden_size not in (0, decoder.hidden_size):
        raise ValueError(f"--projector-hidden-size {vision.projector_hidden_size}: a LlavaConfig's projector is as "
                         f"wide as the language model, --hidden-size {decoder.hidden_size}")
    text = text_config(decoder)
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_token_index": image_token_id,
        "image_seq_length": vision.num_patches,
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": True,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default" if vision.vision_class_token else "full",
        "tie_word_embeddings": text["tie_word_embeddings"],
        "text_config": {"architectures": [ARCHITECTURES[text["model_type"]]], **text},
        "vision_config": vision_config(vision),
    }
