"""Effect of each key of a Hugging Face configuration, found by changing it: the table of docs/hf_config_keys.md.

`python -m tests.support.hf_keys` writes the table.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from providers import nemotron_moe_vlm
from providers.common.hf import causal_lm_sizes, llava_next_sizes, llava_sizes
from providers.common.hf_deepseek import deepseek_sizes
from providers.common.hf_nemotron import OLD_NAMES, nemotron_sizes, vlm_config, vlm_sizes
from providers.common.hf_qwen3_vl import language_sizes, qwen3_vl_sizes, vision_sizes
from providers.common.hf_qwen_vl import language_sizes as qwen2_5_language_sizes
from providers.common.hf_qwen_vl import qwen2_5_vl_sizes
from providers.common.hf_qwen_vl import vision_sizes as qwen2_5_vision_sizes
from providers.common.hf_text import ALIASES, LLAMA3_ROPE

PAGE = Path(__file__).parents[2] / "docs" / "hf_config_keys.md"
BEGIN, END = "<!-- The table is written by tests/support/hf_keys.py. -->", "<!-- The end of the table. -->"
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, **LLAMA3_ROPE}
ROPES: list[Any] = [{"rope_type": "default", "rope_theta": 7.0}, LLAMA3, {"rope_type": "linear", "factor": 2.0},
                    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}]
# Values to try in place of the one that is there, where twice a number or the other truth value does not tell.
VALUES: dict[str, list[Any]] = {
    "rope_parameters": ROPES, "rope_scaling": ROPES, "rope_theta": [7.0], "head_dim": [48], "num_key_value_heads": [2],
    "layer_types": [["sliding_attention"] * 2], "layers_block_type": [["mamba", "moe", "mlp"], ["moe+"]],
    "hybrid_override_pattern": ["M-", "MX"], "mtp_layers_block_type": [["mamba"]], "mlp_only_layers": [[0]],
    "mtp_hybrid_override_pattern": ["M"], "quantization_config": [{"quant_method": "fp8"}], "sliding_window": [4096],
    "per_layer_config": [{"0": {"hidden_size": 4}}], "partial_rotary_factor": [0.5], "q_lora_rank": [None],
    "image_grid_pinpoints": [[[336, 336]], [336]],
    "vision_feature_layer": [-1, [-2, -5]], "vision_feature_select_strategy": ["default", "full"],
    "hidden_act": ["gelu", "gelu_pytorch_tanh", "relu"], "mlp_hidden_act": ["silu"], "image_size": [64, [64, 32]],
    "time_step_min": [0.0005, 0.01], "time_step_limit": [[0.0, 1.0]], "vision_config.max_resolution": [1024],
    "routed_scaling_factor": [3.0, 0.0], "moe_latent_size": [16], "residual_in_fp32": [True],
    "num_experts_per_tok": [3, 1], "router_jitter_noise": [0.1],
    "vision_config": [{"hidden_size": 96, "out_hidden_size": 4096}],
    "text_config": [{"num_hidden_layers": 3, "hidden_size": 4096}], "moe_router_dtype": ["bfloat16"],
    "scoring_func": ["softmax"], "topk_method": ["greedy"], "moe_layer_freq": [2], "attention_dropout": [0.1],
    "hidden_dropout": [0.1],
    "downsample_ratio": [0.25, 0.3], "ps_version": ["v1"], "patch_size": [8], "vision_config.patch_size": [8],
    "vision_config.args.model": ["vit_large_patch16_224", "resnet"], "vision_config.args.in_chans": [4],
    "vision_config.args.teachers": [[{"name": "a"}, {"name": "b"}]], "vision_config.args.cpe_num_registers": [4],
    "vision_config.args.register_multiple": [16], "vision_config.preferred_resolution": [[256, 768]],
    "vision_config.vitdet_window_size": [8], "vision_config.feature_normalizer_config": [{"a": 1}],
    "vision_config.inter_feature_normalizer_config": [{"a": 1}], "vision_config.args.min_num_patches": [4, None],
    "vision_config.min_num_patches": [4, None], "template": ["other"], "sound_config": [{"a": 1}],
    "norm_topk_prob": [True, False], "tie_word_embeddings": [True, False],
    "deepstack_visual_indexes": [[5, 11], [11, 5]], "fullatt_block_indexes": [[3, 5]], "in_chans": [1],
    "spatial_patch_size": [8],
    "llm_config": [{"model_type": "nemotron_h", "layers_block_type": ["mamba"]}],
}
# What else has to be so for a key to have an effect; None: the key is not there.
WITH: dict[str, dict[str, Any]] = {
    "mtp_layers_block_type": {"num_nextn_predict_layers": 1},
    "mtp_hybrid_override_pattern": {"num_nextn_predict_layers": 1},
    "hybrid_override_pattern": {"layers_block_type": None, "hybrid_override_pattern": "M"},
    "vision_config.preferred_resolution": {"force_image_size": None},
    "vision_config.args.cls_token_per_teacher": {"vision_config.args.teachers": [{"name": "a"}, {"name": "b"}],
                                                 "vision_config.args.register_multiple": None},
    "vision_config.args.teachers": {"vision_config.args.cls_token_per_teacher": True,
                                    "vision_config.args.register_multiple": None},
    "vision_config.args.model": {"vit_hidden_size": None}, "vision_config.max_resolution": {
        "vision_config.args.cpe_max_size": None},
    "vision_config.args.min_num_patches": {"vision_config.min_num_patches": None},
    "vision_config.min_num_patches": {"vision_config.args.min_num_patches": None},
    "vision_config.patch_size": {"patch_size": None}, "patch_size": {"vision_config.patch_size": None},
}
GENERATED = "a setting of generation"
INITIAL = "a setting of initial values, which loaded weights replace"
TOKENIZER = "the data set's tokenizer decides"
DATA = "the data set decides what is written around images"
NO_WINDOW = "sliding windows are off (`use_sliding_window`)"
SAME_SCAN = "the result is the same for every size"
WIDTH = "the width is `mamba_num_heads` times `mamba_head_dim`"
OTHER_HEAD = "a setting of a head that this model does not have"
PRECISION = "`--bf16` or `--no-bf16` decides"
# Why a key has no effect.
REASONS: dict[str, str] = {
    "attention_dropout": "a setting of training: `--attention-dropout`",
    "hidden_dropout": "a setting of training: `--hidden-dropout`",
    "initializer_range": INITIAL, "initializer_factor": INITIAL, "rescale_prenorm_residual": INITIAL,
    "time_step_max": INITIAL, "time_step_floor": INITIAL, "mamba_dt_max": INITIAL, "mamba_dt_init_floor": INITIAL,
    "use_cache": GENERATED, "num_logits_to_keep": GENERATED, "mamba_ssm_cache_dtype": GENERATED,
    "pad_token_id": TOKENIZER, "bos_token_id": TOKENIZER, "eos_token_id": TOKENIZER,
    "pretraining_tp": "the result is the same for every value",
    "output_router_logits": "a setting of training: `--moe-aux-loss-coeff`",
    "router_aux_loss_coef": "a setting of training: `--moe-aux-loss-coeff`",
    "sliding_window": NO_WINDOW, "max_window_layers": NO_WINDOW,
    "image_seq_length": "it follows from the encoder's sizes", "projection_dim": OTHER_HEAD,
    "vision_use_head": OTHER_HEAD, "dtype": PRECISION, "torch_dtype": PRECISION,
    "use_mamba_kernels": "a choice of kernels in transformers",
    "tie_word_embeddings": "the value outside of `text_config` decides",
    "expand": WIDTH, "mamba_expand": WIDTH, "chunk_size": SAME_SCAN, "mamba_chunk_size": SAME_SCAN,
    "moe_shared_expert_overlap": "a setting of the order of execution",
    "num_hidden_layers": "`layers_block_type` has one entry for each layer",
    "max_sequence_length": "`llm_config.max_position_embeddings` decides",
    "img_context_token": "`img_context_token_id` decides", "img_start_token": DATA, "img_end_token": DATA,
    "image_tag_type": DATA, "template": "the data set decides how conversations are written",
    "use_thumbnail": "no effect on the model; with `--image-tiling auto` it sets `--use-thumbnail`",
    "video_pruning_rate": "video is not supported", "sound_config": "sound is not supported",
    "norm_mean": "no effect on the model; it is the default of `--image-mean`",
    "norm_std": "no effect on the model; it is the default of `--image-std`",
    "vision_config.architectures": "the encoder is always a RADIO encoder",
    "vision_config.args.max_num_patches": "no effect on the model; it is the default of `--max-patches`",
    "vision_config.max_num_patches": "no effect on the model; it is the default of `--max-patches`",
}
# Keys that a file may have beside the fields of its class.
MORE = ("quantization_config", "per_layer_config", "torch_dtype", "dtype")
ROPE = ("rope_theta", "rope_scaling", "partial_rotary_factor")


@dataclass(frozen=True)
class Family:
    """One kind of configuration: its name in the table, what reads it, one that is read, its further keys."""

    name: str
    read: Callable[[dict[str, Any]], Any]
    base: dict[str, Any]
    more: tuple[str, ...] = ()

    def keys(self) -> list[str]:
        """Return every key of the class in transformers, and of files beyond it."""
        if self.name == "NemotronH_Nano_VL_V2":
            return [*_flat(vlm_config(nemotron_moe_vlm.Config())), *self.more]
        from transformers import AutoConfig
        from transformers.configuration_utils import PreTrainedConfig

        config, kind = AutoConfig.for_model(self.name), set(dataclasses.fields(PreTrainedConfig))
        common = {one.name for one in kind}
        own = [one.name for one in dataclasses.fields(config) if one.name not in common]
        return list(dict.fromkeys([*own, *config.attribute_map, *MORE, *self.more]))


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        if key in ("vision_config", "args"):
            yield from _flat(value, f"{prefix}{key}.")
        elif key not in ("architectures", "model_type") or prefix:
            yield prefix + key


def _llava(section: str, **others: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda values: llava_sizes({"model_type": "llava", **others, section: values})


def families() -> list[Family]:
    text = {"num_hidden_layers": 2, "head_dim": 32, "max_position_embeddings": 8192}
    nemotron = {"model_type": "nemotron_h", "layers_block_type": ["mamba", "moe", "attention", "mlp"]}
    moe = ("head_dim",)
    found = [Family(kind, causal_lm_sizes, {"model_type": kind, "sliding_window": None, **text},
                    (*ROPE, "head_dim", *more))
             for kind, more in (("llama", ("layer_types",)), ("mistral", ("layer_types",)), ("qwen2", ()),
                                ("qwen3", ()), ("qwen3_moe", (*moe, "layer_types")),
                                ("mixtral", (*moe, "layer_types")))]
    return [
        *found,
        Family("deepseek_v3", deepseek_sizes, {"model_type": "deepseek_v3"},
               (*ROPE, "moe_router_dtype", "scoring_func", "topk_method", "moe_layer_freq")),
        Family("nemotron_h", nemotron_sizes, nemotron, (
            "num_hidden_layers", "hybrid_override_pattern", "mtp_hybrid_override_pattern", "mamba_n_groups",
            "mamba_d_conv", "mamba_conv_bias", "mamba_dt_limit", "mamba_dt_min", "mamba_dt_max", "mamba_dt_init_floor",
            "mamba_expand", "mamba_chunk_size")),
        Family("llava", llava_sizes, {"model_type": "llava"}),
        Family("llava_next", llava_next_sizes, {"model_type": "llava_next"}),
        Family("clip_vision_model", _llava("vision_config"), {"model_type": "clip_vision_model"}),
        Family("siglip_vision_model", _llava("vision_config", vision_feature_select_strategy="full"),
               {"model_type": "siglip_vision_model"}, ("vision_use_head",)),
        Family("qwen2_5_vl", qwen2_5_vl_sizes, {
            "model_type": "qwen2_5_vl", "text_config": {"hidden_size": 4096},
            "vision_config": {"out_hidden_size": 4096}}),
        Family("qwen2_5_vl_text", lambda values: qwen2_5_language_sizes({"text_config": values}),
               {"model_type": "qwen2_5_vl_text"}, (*ROPE, "head_dim", "tie_word_embeddings")),
        Family("qwen2_5_vl_vision", lambda values: qwen2_5_vision_sizes({"vision_config": values}, 3584),
               {"model_type": "qwen2_5_vl_vision"}, ("in_chans", "spatial_patch_size")),
        Family("qwen3_vl", qwen3_vl_sizes, {"model_type": "qwen3_vl", "vision_config": {"out_hidden_size": 4096}}),
        Family("qwen3_vl_moe", qwen3_vl_sizes, {"model_type": "qwen3_vl_moe", "text_config": {"hidden_size": 4096},
                                                "vision_config": {"out_hidden_size": 4096}}),
        *(Family(f"{kind}_text", lambda values, kind=kind: language_sizes({"model_type": kind, "text_config": values}),
                 {"model_type": f"{kind}_text"}, (*ROPE, "tie_word_embeddings", *more))
          for kind, more in (("qwen3_vl", ()), ("qwen3_vl_moe", ("norm_topk_prob",)))),
        *(Family(f"{kind}_vision", lambda values, kind=kind: vision_sizes(
            {"model_type": kind, "vision_config": values}, 3584), {"model_type": f"{kind}_vision"})
          for kind in ("qwen3_vl", "qwen3_vl_moe")),
        Family("NemotronH_Nano_VL_V2", vlm_sizes, vlm_config(nemotron_moe_vlm.Config()), (
            "vision_config.args.in_chans", "vision_config.args.cpe_num_registers", "quantization_config",
            "sound_config", "dtype")),
    ]


def outcome(family: Family, key: str) -> str:
    """Say what happens to a key."""
    base = copy.deepcopy(family.base)
    for name, value in WITH.get(key, {}).items():
        if "." not in name or "vision_config" in base:
            _set(base, name, value)
    canonical = (ALIASES.get(family.name, {}) | OLD_NAMES).get(key, key)
    before = family.read(copy.deepcopy(base))
    is_read, refusals = False, []
    for value in VALUES.get(canonical) or _others(_default(family, canonical)):
        changed = copy.deepcopy(base)
        if canonical != key:
            changed.pop(canonical, None)
        _set(changed, key, value)
        try:
            is_read |= family.read(changed) != before
        except ValueError as error:
            assert key.rpartition(".")[2] in str(error) or canonical in str(error), f"{family.name} {key}: {error}"
            refusals.append(str(error))
    supported = next((message.rsplit("supported: ")[-1] for message in refusals if "; supported: " in message), "")
    if refusals and not is_read:
        return f"must be {_code(supported)}" if supported else "must not be there"
    if is_read:
        if supported.startswith("num_experts_per_tok"):
            return f"used; needs {supported}"
        return "used" + (f"; must be {_code(supported)}" if supported else "; must not be 0" if refusals else "")
    reason = REASONS[key]
    return reason if reason.startswith("no effect") else f"no effect: {reason}"


def _code(values: str) -> str:
    if values.startswith("["):
        return f"`{values}`"
    choices = values.split() if values == "M * E -" else values.split(", ")
    if any(" " in one for one in choices):
        return values
    *others, last = (f"`{one}`" for one in choices)
    return f"{', '.join(others)} or {last}" if others else last


def _default(family: Family, key: str) -> Any:
    if key in family.base or family.name == "NemotronH_Nano_VL_V2":
        found: Any = family.base
        for part in key.split("."):
            found = found.get(part)
        return found
    from transformers import AutoConfig

    return getattr(AutoConfig.for_model(family.name), key, None)


def _others(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, (int, float)):
        return [value * 2 or 1, value + 1]
    if isinstance(value, list):
        return [[one * 2 for one in value]]
    return ["another"] if isinstance(value, str) else [3]


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    for part in path:
        values = values[part]
    values[last] = value
    if value is None and last not in ("template", "q_lora_rank"):
        del values[last]


def table() -> str:
    """Return the table as Markdown: a row for each key and outcome, with the families that share it."""
    rows: dict[tuple[str, str], list[str]] = {}
    for family in families():
        for key in family.keys():  # noqa: SIM118, not a mapping
            rows.setdefault((key, outcome(family, key)), []).append(family.name)
    lines = [f"| `{key}` | {', '.join(names)} | {what} |" for (key, what), names in sorted(rows.items())]
    return "\n".join([BEGIN, "| key | configuration | what happens |", "| --- | --- | --- |", *lines, END])


if __name__ == "__main__":
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(before + table() + rest.split(END)[1], encoding="utf-8")
