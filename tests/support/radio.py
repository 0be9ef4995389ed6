"""RADIO in front of the decoder of `mock`, inside worker processes, and the published definition of the encoder."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mimo.grid.spec import Layout
from mimo.protocols import LANGUAGE, ParameterShape
from providers import llava
from providers.common.checks import Problems
from providers.common.decoder import DecoderConfig, check_decoder_grid, decoder_shapes
from providers.radio import RadioConfig, check_radio, check_radio_grid, radio_image_tokens, radio_shapes

if TYPE_CHECKING:
    import numpy as np
    import torch

VISION, ENCODER = "vision", "radio"
Size = tuple[int, int]


@dataclass(frozen=True)
class Config(RadioConfig, DecoderConfig):
    """Model family: a small RADIO, a small decoder."""

    vision_image_size: int = 64
    vision_patch_size: int = 8
    vision_hidden_size: int = 32
    vision_num_layers: int = 2
    vision_num_attention_heads: int = 4
    vision_ffn_hidden_size: int = 48
    vision_class_token_len: int = 3
    vision_max_image_size: int = 128
    projector_hidden_size: int = 40
    num_layers: int = 2
    hidden_size: int = 24
    num_attention_heads: int = 4
    num_query_groups: int = 2
    ffn_hidden_size: int = 48
    vocab_size: int = 96
    image_token_id: int = 95
    hf_config: str = ""


class RadioProvider(llava.LlavaProvider):
    Config = Config
    hf_architectures = ()

    def validate(self, config: Config, layout: Layout, seq_length: int) -> None:
        problems = Problems()
        check_radio(config, problems)
        if not problems.found:
            check_decoder_grid(config, layout.language, seq_length, problems)
            for grid in layout.encoders:
                check_radio_grid(config, grid, problems)
        problems.report()

    def num_image_tokens(self, config: Config, module: str, height: int, width: int) -> int:
        return radio_image_tokens(config, height, width)

    def parameter_shapes(self, config: Config, module: str) -> list[ParameterShape]:
        return decoder_shapes(config) if module == LANGUAGE else radio_shapes(config, config.hidden_size)

    def encoder_spec(self, config: Config, module: str, context: Any) -> Any:
        from providers.common.radio_build import radio_spec

        return radio_spec(config, ENCODER, config.hidden_size, context)

    def weight_map(self, config: Config, module: str) -> Any:
        from providers.common.radio_weights import radio_map

        return super().weight_map(config, module) if module == LANGUAGE else radio_map(config, ENCODER)

    def hf_config(self, config: Config) -> dict[str, Any]:
        return {"architectures": ["NemotronH_Nano_VL_V2"]}


provider = RadioProvider()


# Inside a worker

def build(grids: Any, config: Config, recompute: str = "none") -> Any:
    """This rank's vision module, with parameters that all matter."""
    import torch

    from mimo.platform import current_platform
    from tests.support import provider_cases as cases

    current_platform().seed(7, tp_rank=0, ep_rank=0, expt_tp_rank=0)
    context = dataclasses.replace(cases.context_of(grids, VISION, 64), recompute=recompute)
    spec = provider.encoder_spec(config, VISION, context)
    module = spec.module.from_spec(spec, is_first_stage=True, is_last_stage=True)
    cases.randomize(module)
    with torch.no_grad():
        module.encoder.position_embeddings.copy_(cases.draw(*module.encoder.position_embeddings.shape, seed=21))
    return module


def inputs_of(config: Config, sizes: Sequence[Size], dtype: Any = None) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Random images of these sizes, and the encoder's inputs."""
    import torch

    from mimo.data.encoder_inputs import PatchOrder, packed_patches, whole_images
    from tests.support import provider_cases as cases

    images = [cases.draw(3, *size, seed=30 + number).numpy() for number, size in enumerate(sizes)]
    dtype = dtype or torch.float32
    if config.vision_dynamic_resolution:
        return images, packed_patches(images, sizes, PatchOrder(config.vision_patch_size), dtype)
    return images, whole_images(images, dtype)


def hf_weights(module: Any, config: Config, groups: Any) -> dict[str, torch.Tensor]:
    """Return the module's tensors under their Hugging Face names, on one process."""
    from mimo.weights.match import module_pieces

    pieces = {piece.name: piece.tensor for piece in module_pieces(module, groups)}
    found = {}
    for rule in provider.weight_map(config, VISION).rules:
        found |= dict(zip(rule.hf, rule.convert.to_hf(pieces.pop(rule.megatron)), strict=True))
    assert not pieces, f"no rule for {sorted(pieces)}"
    return found


def published_forward(weights: dict[str, torch.Tensor], config: Config, image: np.ndarray) -> torch.Tensor:
    """Language tokens `[tokens, hidden_size]` of one image `[3, height, width]`, in float64.

    Written from the published definitions: `ViTPatchGenerator` of RADIO, timm's pre-norm `Block`, and `pixel_shuffle`
    (version 2) and `mlp1` of `NemotronH_Nano_VL_V2`.
    """
    import torch
    import torch.nn.functional as F

    weights = {name: value.double() for name, value in weights.items()}
    radio, patch, (_, height, width) = "vision_model.radio_model.model.", config.vision_patch_size, image.shape
    rows, columns, hidden = height // patch, width // patch, config.vision_hidden_size

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(x, (hidden,), weights[name + ".weight"], weights[name + ".bias"],
                            config.vision_norm_epsilon)

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, weights[name + ".weight"], weights.get(name + ".bias"))

    # Patches, row by row, each flattened as (channel, row, column).
    pixels = torch.from_numpy(image).double()
    patches = torch.stack([pixels[:, y:y + patch, x:x + patch].flatten()
                           for y in range(0, height, patch) for x in range(0, width, patch)])
    x = linear(patches, radio + "patch_generator.embedder")
    # Positions: the square grid to the longer side, then the window of the image.
    side, longer = config.vision_max_image_size // patch, max(rows, columns)
    positions = weights[radio + "patch_generator.pos_embed"].reshape(1, side, side, hidden).permute(0, 3, 1, 2)
    positions = F.interpolate(positions, size=(longer, longer), mode="bilinear", align_corners=False)
    x = x + positions[0, :, :rows, :columns].flatten(1).t()
    num_skip = 0
    if config.vision_class_token_len:
        class_token = weights[radio + "patch_generator.cls_token.token"]
        x, num_skip = torch.cat([class_token, x]), len(class_token)
    heads = config.vision_num_attention_heads
    for layer in range(config.vision_num_layers):
        block = f"{radio}blocks.{layer}."
        qkv = linear(norm(x, block + "norm1"), block + "attn.qkv").reshape(len(x), 3, heads, hidden // heads)
        q, k, v = qkv.permute(1, 2, 0, 3)
        scores = (q @ k.transpose(1, 2) / (hidden // heads) ** 0.5).softmax(-1)
        x = x + linear((scores @ v).transpose(0, 1).reshape(len(x), hidden), block + "attn.proj")
        inner = F.gelu(linear(norm(x, block + "norm2"), block + "mlp.fc1"),
                       approximate="tanh" if config.vision_hidden_act == "gelu_tanh" else "none")
        x = x + linear(inner, block + "mlp.fc2")
    if config.vision_final_layernorm:
        x = norm(x, radio + "norm")
    # pixel_shuffle as Hugging Face writes it, one view and permutation after the other.
    factor = config.vision_pixel_shuffle
    x = x[num_skip:].reshape(1, rows, columns, hidden)
    x = x.view(1, rows, columns // factor, hidden * factor).permute(0, 2, 1, 3).contiguous()
    x = x.view(1, columns // factor, rows // factor, hidden * factor**2).permute(0, 2, 1, 3)
    x = x.reshape(rows // factor * (columns // factor), hidden * factor**2)
    x = x * (x.square().mean(-1, keepdim=True) + config.projector_norm_epsilon).rsqrt() * weights["mlp1.0.weight"]
    return linear(F.relu(linear(x, "mlp1.1")) ** 2, "mlp1.3")
