"""Small random models saved by transformers, loaded by the trainer and run on any layout; inside worker processes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import torch

from data import mock
from mimo.config.validate import validate
from mimo.data.batch import Microbatch
from mimo.protocols import LANGUAGE, Lane
from mimo.registry import model_provider
from mimo.visual import ImageSize, VideoSize, num_pictures
from tests.support import deepseek, equality
from tests.support.provider_cases import randomize
from tests.support.steps import logits_by_sample

BASE = """--dataset-provider mock --device cpu --no-bf16 --transformer-impl local --seq-length 24 --row-lengths 1
--micro-batch-size 2 --global-batch-size 4 --train-iters 1 --mock-min-length 5 --mock-max-length 12 --mock-images-max 2
--mock-text-only-fraction 0.3 --watchdog-timeout-s 60""".split()
# No multiple of 128, nor of anything.
VOCAB_SIZE = 99
TEXT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 64, "pad_token_id": 0,
    "rms_norm_eps": 0.05}
LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}
QWEN3_MOE = TEXT | {"model_type": "qwen3_moe", "head_dim": 16, "num_experts": 4, "moe_intermediate_size": 24}
# Smaller models of each family; `vision_config` makes it a LLaVA.
TEXT_MODELS: dict[str, dict[str, Any]] = {
    # A base whose frequencies Llama 3's scaling leaves alone, interpolates and divides, all three.
    "llama": TEXT | {"model_type": "llama", "head_dim": 16, "rope_theta": 5e5, "rope_scaling": LLAMA3},
    "qwen2-tied-one-key-head": TEXT | {"model_type": "qwen2", "tie_word_embeddings": True, "num_key_value_heads": 1},
    "qwen3": TEXT | {"model_type": "qwen3", "head_dim": 16, "rope_theta": 500.0},
    "qwen3-moe": QWEN3_MOE | {"num_experts_per_tok": 2, "norm_topk_prob": True},
    "mixtral": TEXT | {"model_type": "mixtral", "num_local_experts": 4},
}
CLIP = {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "image_size": 16, "patch_size": 8, "layer_norm_eps": 0.03}
# The last layer but one: a layer, the last norm and SigLIP's head are in the checkpoint and not in the model.
SIGLIP = CLIP | {"model_type": "siglip_vision_model", "hidden_act": "gelu_pytorch_tanh"}
LLAVA_MODELS: dict[str, dict[str, Any]] = {
    "clip-llama": {"vision_config": CLIP, "text_config": TEXT | {"model_type": "llama"}},
    # Four pixels a side fill no patch.
    "clip-last-layer-qwen2-tied": {"vision_config": CLIP | {"num_hidden_layers": 2, "image_size": 20},
                                   "vision_feature_layer": -1, "text_config": TEXT_MODELS["qwen2-tied-one-key-head"]},
    "siglip-qwen3": {"vision_config": SIGLIP, "vision_feature_select_strategy": "full",
                     "text_config": TEXT_MODELS["qwen3"]},
    "clip-gelu-qwen3-moe-unnormalized": {
        "vision_config": CLIP | {"hidden_act": "gelu"},
        "text_config": QWEN3_MOE | {"num_experts_per_tok": 1, "norm_topk_prob": False}},
}
# Tiles of 2 x 2 tokens, in grids of up to three. What is tied inside text_config alone is not tied.
LLAVA_NEXT_MODELS: dict[str, dict[str, Any]] = {
    "llava-next": {"vision_config": CLIP, "text_config": TEXT | {"model_type": "llama", "max_position_embeddings": 128},
                   "image_grid_pinpoints": [[16, 32], [32, 16], [32, 32], [48, 16]]},
    "llava-next-siglip-qwen2-tied": {
        "vision_config": SIGLIP | {"image_size": 28}, "vision_feature_select_strategy": "full",
        "text_config": TEXT_MODELS["qwen2-tied-one-key-head"] | {"max_position_embeddings": 128},
        "image_grid_pinpoints": [[28, 56], [56, 28]], "tie_word_embeddings": True},
    "llava-next-tied-inside": {
        "vision_config": CLIP, "image_grid_pinpoints": [[16, 32]],
        "text_config": TEXT_MODELS["qwen2-tied-one-key-head"] | {"max_position_embeddings": 128}},
}
NEMOTRON = {
    "model_type": "nemotron_h", "vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "ssm_state_size": 6, "mamba_num_heads": 4,
    "mamba_head_dim": 8, "n_groups": 2, "n_routed_experts": 4, "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40, "num_experts_per_tok": 2, "routed_scaling_factor": 2.5,
    "max_position_embeddings": 64, "use_mamba_kernels": False, "use_cache": False,
    # transformers, unlike engines and this trainer, never steps less than time_step_min (5.12 in its PyTorch path
    # alone, where it also carries states from chunk to chunk along the wrong axis: a sequence here is one chunk).
    "time_step_min": 1e-30, "chunk_size": 64}
# Layers of every kind on either of two stages.
NEMOTRON_MODELS: dict[str, dict[str, Any]] = {
    "nemotron-h": NEMOTRON | {"layers_block_type": ["mamba", "moe", "attention", "mlp"] * 2},
    "nemotron-h-latent": NEMOTRON | {"layers_block_type": ["attention", "moe"], "moe_latent_size": 16},
    "nemotron-h-top1": NEMOTRON | {"layers_block_type": ["moe", "attention"], "num_experts_per_tok": 1,
                                   "norm_topk_prob": False},
}
DEEPSEEK_MODELS: dict[str, dict[str, Any]] = {
    f"deepseek-{name}": {**sizes, "model_type": "deepseek_v3", "vocab_size": VOCAB_SIZE}
    for name, sizes in deepseek.VARIANTS.items()}
QWEN_TEXT = TEXT | {"max_position_embeddings": 4096, "rope_parameters": {
    "rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 2, 1]}}
# Windows of 2 x 2 tokens, of images up to 5 x 5 tokens; head size 8 in the tower.
QWEN_TOWER = {"depth": 4, "hidden_size": 16, "intermediate_size": 20, "num_heads": 2, "patch_size": 4,
              "spatial_merge_size": 2, "window_size": 16, "fullatt_block_indexes": [1], "out_hidden_size": 32}
# Levels for both layers of the language model, the second of them on another pipeline stage. Axes take turns among 8
# frequencies, and learned positions are stretched and shrunk.
QWEN3_TEXT = TEXT | {"max_position_embeddings": 4096, "head_dim": 16, "rope_parameters": {
    "rope_type": "default", "rope_theta": 100.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}}
QWEN3_TOWER = {"depth": 4, "hidden_size": 16, "intermediate_size": 20, "num_heads": 2, "patch_size": 4,
               "spatial_merge_size": 2, "num_position_embeddings": 36, "deepstack_visual_indexes": [0, 2],
               "out_hidden_size": 32}
QWEN_MODELS: dict[str, dict[str, Any]] = {
    "qwen2.5-vl": {"model_type": "qwen2_5_vl", "text_config": QWEN_TEXT, "vision_config": QWEN_TOWER},
    "qwen2.5-vl-tied": {"model_type": "qwen2_5_vl", "text_config": QWEN_TEXT | {"num_key_value_heads": 1},
                        "vision_config": QWEN_TOWER | {"fullatt_block_indexes": [0, 2]}, "tie_word_embeddings": True},
    "qwen3-vl": {"model_type": "qwen3_vl", "text_config": QWEN3_TEXT, "vision_config": QWEN3_TOWER},
    "qwen3-vl-tied": {
        "model_type": "qwen3_vl", "text_config": QWEN3_TEXT | {"num_key_value_heads": 1}, "tie_word_embeddings": True,
        "vision_config": QWEN3_TOWER | {"deepstack_visual_indexes": [1], "hidden_act": "gelu"}},
    "qwen3-vl-moe": {
        "model_type": "qwen3_vl_moe", "vision_config": QWEN3_TOWER, "tie_word_embeddings": False,
        "text_config": QWEN3_TEXT | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}},
}
VISION_LANGUAGE = (*LLAVA_MODELS, *LLAVA_NEXT_MODELS, *QWEN_MODELS)
MODELS = TEXT_MODELS | LLAVA_MODELS | LLAVA_NEXT_MODELS | NEMOTRON_MODELS | DEEPSEEK_MODELS | QWEN_MODELS


def build_hf(name: str) -> Any:
    """The model `name` as transformers builds it, its parameters drawn by `randomize`."""
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaNextConfig,
        LlavaNextForConditionalGeneration,
    )

    sizes = {key: dict(value) if isinstance(value, dict) else value for key, value in MODELS[name].items()}
    if name in LLAVA_MODELS:
        config = LlavaConfig(**sizes, image_token_index=VOCAB_SIZE - 1)
        model = LlavaForConditionalGeneration._from_config(config, attn_implementation="eager")
    elif name in LLAVA_NEXT_MODELS:
        config = LlavaNextConfig(**sizes, image_token_index=VOCAB_SIZE - 1)
        model = LlavaNextForConditionalGeneration._from_config(config, attn_implementation="eager")
    elif name in QWEN_MODELS:
        ids = {"image_token_id": VOCAB_SIZE - 1, "video_token_id": VOCAB_SIZE - 2}
        config = AutoConfig.for_model(sizes.pop("model_type"), **ids | sizes)
        model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    else:
        config = AutoConfig.for_model(sizes.pop("model_type"), **sizes)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    randomize(model)
    generator = torch.Generator().manual_seed(5)
    for name, tensor in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator))
    return model.eval()


def save_hf(rank: int, name: str, folder: str) -> dict[str, torch.Tensor]:
    """Save the model `name`; gives its logits `[s, vocab]` of each sample of the tests' batch, by key."""
    model = build_hf(name)
    save_published(model, folder)
    return _hf_logits(rank, model, name, folder)


def save_published(model: Any, folder: str) -> None:
    """Save a model in the layout of published files, which have the experts of Qwen3-VL transposed."""
    from safetensors.torch import load_file, save_file

    model.save_pretrained(folder)
    if model.config.model_type == "qwen3_vl_moe":
        path = f"{folder}/model.safetensors"
        stacked = ("experts.gate_up_proj", "experts.down_proj")
        tensors = {key: tensor.mT.contiguous() if key.endswith(stacked) else tensor
                   for key, tensor in load_file(path).items()}
        save_file(tensors, path, {"format": "pt"})


def reloaded_logits(rank: int, name: str, folder: str, source: str) -> dict[str, torch.Tensor]:
    """Logits of the tests' batch by transformers, from an exported folder; the batch is that of the model `source`."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kind = AutoModelForImageTextToText if name in VISION_LANGUAGE else AutoModelForCausalLM
    model = kind.from_pretrained(folder, attn_implementation="eager", dtype="float32")
    return _hf_logits(rank, model.eval(), name, source)


@torch.no_grad()
def _hf_logits(rank: int, model: Any, name: str, folder: str) -> dict[str, torch.Tensor]:
    found = {}
    flags = flags_of(name, folder, one_process(name))
    for batch in _batches(rank, flags, 1):
        assert batch.text is not None
        logits = model(**hf_inputs(model.config, name, flags, batch)).logits
        found |= dict(zip(batch.text.keys, logits, strict=True))
    return found


def hf_inputs(config: Any, name: str, flags: tuple[str, ...], batch: Microbatch) -> dict[str, torch.Tensor]:
    """A microbatch of a run with `flags`, as the model `name` of transformers takes it."""
    assert batch.text is not None
    ids, inputs = batch.text.input_ids, {}
    for encoder in batch.encoders.values():
        inputs = dict(encoder.inputs)
    if name in LLAVA_NEXT_MODELS and inputs:
        inputs = {"pixel_values": inputs["pixel_values"], "image_sizes": torch.from_numpy(inputs["imgs_sizes"])}
    if name in QWEN_MODELS:
        inputs = qwen_inputs(config, inputs, sizes_of(flags, batch.text.keys))
        inputs["position_ids"] = batch.text.position_ids
    return inputs | {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def one_process(name: str) -> tuple[str, ...]:
    """Flags of the layout of one process."""
    return ("--layout", "colocated") if name in VISION_LANGUAGE else ()


def sizes_of(flags: tuple[str, ...], keys: Sequence[str]) -> list[ImageSize]:
    """Sizes of the images and videos of samples of the mock data set, in order."""
    config = equality.parse(list(flags))
    tokens = model_provider(config.model.model_provider).token_spec(config.model_family)
    lane = Lane(LANGUAGE, 0, 1, config.train.seed)
    return [size for key in keys for size in
            mock.build_sample(config.dataset, tokens, lane, int(key.rpartition("/")[2])).image_sizes]


def qwen_inputs(config: Any, inputs: dict[str, Any], sizes: Sequence[ImageSize]) -> dict[str, torch.Tensor]:
    """Inputs of an encoder as transformers' models of the Qwen-VL families take them: images and videos apart."""
    if not inputs:
        return {}
    vision = config.vision_config
    grids = [(num_pictures(size, vision.temporal_patch_size), size[0] // vision.patch_size,
              size[1] // vision.patch_size) for size in sizes]
    pixels = inputs["pixel_values"][0].split([math.prod(grid) for grid in grids])
    found = {}
    for names, is_video in ((("pixel_values", "image_grid_thw"), False),
                            (("pixel_values_videos", "video_grid_thw"), True)):
        chosen = [place for place, size in enumerate(sizes) if isinstance(size, VideoSize) == is_video]
        if chosen:
            values = torch.cat([pixels[place] for place in chosen]), torch.tensor([grids[place] for place in chosen])
            found |= dict(zip(names, values, strict=True))
    return found


def flags_of(name: str, folder: str, layout: tuple[str, ...]) -> tuple[str, ...]:
    """Flags of a run of the model `name` that is saved in `folder`."""
    provider = "llava" if name in LLAVA_MODELS else "nemotron_h" if name in NEMOTRON_MODELS else "causal_lm"
    sizes: tuple[str, ...] = ()
    if name in LLAVA_NEXT_MODELS:
        provider = "llava_next"
        sizes = ("--mock-image-size", "30", "--mock-image-size-cv", "0.8", "--seq-length", "96")
    if MODELS[name].get("model_type") == "deepseek_v3":
        provider, sizes = "deepseek_v3", ("--moe-aux-loss-coeff", "0")
    if name in QWEN_MODELS:
        provider = MODELS[name]["model_type"].removesuffix("_moe")
        sizes = ("--mock-image-size", "16", "--mock-image-size-cv", "0.8", "--seq-length", "128",
                 "--mock-video-fraction", "0.5", "--mock-video-frames", "6", "--moe-aux-loss-coeff", "0")
    return ("--model-provider", provider, "--hf-config", folder, *BASE, *sizes, *layout)


def _batches(rank: int, flags: tuple[str, ...], world_size: int) -> list[Microbatch]:
    """This rank's side of the tests' global batch."""
    config = equality.parse(list(flags))
    loader = equality.make_loader(config, validate(config, world_size), rank)
    try:
        return list(loader.next_step())
    finally:
        loader.close()


def trainer_of(flags: tuple[str, ...], world_size: int) -> contextlib.AbstractContextManager[Any]:
    """Open a trainer of this rank; see `flags_of`."""
    config = equality.parse(list(flags))
    return equality.open_trainer(config, validate(config, world_size))


def load(parts: Any, **folders: str) -> Any:
    """Load the trainer's model from Hugging Face folders: `model`, `vision`, `language`."""
    from mimo.weights.load import HfPaths, load_hf

    provider = model_provider(parts.config.model.model_provider)
    return load_hf(parts.built, parts.grids, provider, parts.config.model_family, HfPaths(**folders))


def logits_of(rank: int, name: str, folder: str, layout: tuple[str, ...], world_size: int,
              out: str = "", base: str = "") -> dict[str, torch.Tensor]:
    """Load a saved model and run the tests' batch on this rank of a layout.

    Args:
        rank: this process.
        name: one of `MODELS`.
        folder: where it is saved.
        layout: flags of the layout.
        world_size: number of processes.
        out: folder to export to; empty: no export.
        base: folder of the export's base; empty: the saved model.

    Returns:
        Logits `[s, padded vocabulary]` of this rank's samples by key; empty where it has none.
    """
    from mimo.weights.export import ExportOptions
    from tests.support.export_live import export_model

    flags = flags_of(name, folder, layout)
    with trainer_of(flags, world_size) as parts:
        load(parts, model=folder)
        found = logits_by_sample(parts, _batches(rank, flags, world_size))
        if out:
            provider = model_provider(parts.config.model.model_provider)
            export_model(parts.built, parts.grids, provider, parts.config.model_family, out,
                         ExportOptions(base=base or folder))
    return found


def load_errors(rank: int, name: str, folder: str, source: str) -> list[str]:
    """Lines of the error of a load of `source` into the model that is saved in `folder`; none where it went through."""
    with trainer_of(flags_of(name, folder, ()), 1) as parts:
        try:
            load(parts, model=source)
        except ValueError as error:
            return str(error).splitlines()
    return []


def import_error(rank: int, name: str, folder: str, source: str, save: str) -> str:
    """The error of an import of `source` as the model that is saved in `folder`; empty where it went through."""
    from mimo.weights.import_checkpoint import import_hf

    config = equality.parse(list(flags_of(name, folder, ())))
    try:
        import_hf(source, save, model_provider(config.model.model_provider), config.model_family)
    except ValueError as error:
        return str(error)
    return ""


def import_and_export(rank: int, name: str, folder: str, source: str, save: str) -> list[str]:
    """Import `source` as the model that is saved in `folder`, and export it with it as the base to `save`/out.

    Returns:
        What `mimo inspect` says about tensors of the import that are not those of the model.
    """
    from mimo.commands.compare import read_contents, tensor_differences
    from mimo.weights.export import ExportOptions, export_checkpoint
    from mimo.weights.import_checkpoint import import_hf

    config = equality.parse(list(flags_of(name, folder, ())))
    model = model_provider(config.model.model_provider), config.model_family
    imported = import_hf(source, save, *model, torch.float32)
    export_checkpoint(imported, f"{save}/out", *model, ExportOptions(source))
    return tensor_differences(read_contents(imported), config)


def export(rank: int, name: str, folder: str, out: str, base: str = "") -> None:
    """Load a saved model on one process and export it; without a base, names and configuration are the provider's."""
    from mimo.weights.export import ExportOptions
    from tests.support.export_live import export_model

    with trainer_of(flags_of(name, folder, one_process(name)), 1) as parts:
        load(parts, model=folder)
        provider = model_provider(parts.config.model.model_provider)
        export_model(parts.built, parts.grids, provider, parts.config.model_family, out, ExportOptions(base))


def save_parts(rank: int, name: str, tower: str, text: str) -> None:
    """Save the vision tower and the language model of a LLaVA as models of their own."""
    from transformers import AutoModelForCausalLM

    model = build_hf(name)
    model.model.vision_tower.save_pretrained(tower)
    language = AutoModelForCausalLM.from_config(model.config.text_config)
    language.model.load_state_dict(model.model.language_model.state_dict())
    language.lm_head.load_state_dict(model.lm_head.state_dict())
    language.save_pretrained(text)


def load_parts(rank: int, name: str, folder: str, tower: str, text: str) -> dict[str, Any]:
    """Load a LLaVA whole, then over other values from its parts, and its language model into a text model.

    Returns:
        `absent`: what the parts lack; `changed`: names of tensors that differ from those of the whole; `text`: the same
        for the text model.
    """
    from mimo.model.build import named_modules_of
    from mimo.weights.match import module_pieces

    def tensors(parts: Any) -> dict[str, torch.Tensor]:
        return {f"{module}.{piece.name} {piece.box.slices}": piece.tensor.clone()
                for module, part in named_modules_of(parts.built.model)
                for piece in module_pieces(part, parts.grids.collections[module])}

    with trainer_of(flags_of(name, folder, ("--layout", "colocated")), 1) as parts:
        load(parts, model=folder)
        whole = tensors(parts)
        with torch.no_grad():
            for parameter in parts.built.model.parameters():
                parameter.fill_(7.0)
        report = load(parts, vision=tower, language=text)
        changed = [key for key, value in tensors(parts).items() if not torch.equal(value, whole[key])]
    with trainer_of(("--model-provider", "causal_lm", "--hf-config", text, *BASE), 1) as parts:
        load(parts, model=folder)
        differs = [key for key, value in tensors(parts).items() if not torch.equal(value, whole[key])]
    return {"absent": report.absent, "changed": changed, "text": differs}


def save_hf_gradients(rank: int, name: str, folder: str, out: str) -> None:
    """Save the gradients of the tests' batch by transformers as the tensors of a folder, zeros where there are none."""
    model = build_hf(name)
    flags = flags_of(name, folder, one_process(name))
    for batch in _batches(rank, flags, 1):
        assert batch.text is not None
        logits = model(**hf_inputs(model.config, name, flags, batch)).logits
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.text.labels.flatten(), reduction="none")
        (losses * batch.text.loss_mask.flatten()).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            # Of a CLIP tower whose last layers are not used.
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    save_published(model, out)


def export_gradients(rank: int, name: str, folder: str, out: str) -> None:
    """Export the trainer's gradients of the tests' batch on one process, as `save_hf_gradients`."""
    from tests.support.export_live import export_model

    flags = flags_of(name, folder, one_process(name))
    with trainer_of(flags, 1) as parts:
        load(parts, model=folder)
        model = parts.built.model
        for batch in _batches(rank, flags, 1):
            assert batch.text is not None
            for bridge in model.colocated_comms.values():
                counts = [[sum(batch.encoders["vision"].token_counts)]]
                bridge.begin_step(counts, counts)
            (model(batch) * batch.text.loss_mask).sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.main_grad)
        export_model(parts.built, parts.grids, model_provider(parts.config.model.model_provider),
                     parts.config.model_family, out)
