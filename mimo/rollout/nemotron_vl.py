"""The Nemotron VLM in vLLM, for encoders of any size and in any dtype. Imports vLLM.

vLLM's `NemotronH_Nano_VL_V2` takes RADIO encoders of timm's four sizes without a norm after the last layer, and rounds
their features to bfloat16. For published models in bfloat16, the class here computes the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.nano_nemotron_vl import NemotronH_Nano_VL_V2
from vllm.model_executor.models.radio import RadioModel
from vllm.transformers_utils.configs.radio import VIT_TIMM_DIM_BY_NAME

# Keys of a vision configuration that hold the sizes of an encoder that timm does not have, in timm's order.
SIZE_KEYS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
# The norm's name in a checkpoint. vLLM's own loader ignores it.
NORM = "vision_model.radio_model.model.norm."
NORM_EPSILON = 1e-6


class NemotronVl(NemotronH_Nano_VL_V2):
    """vLLM's model with the extensions that the docstring of this module names."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        model = vllm_config.model_config
        model.hf_config.text_config.dtype = model.dtype
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        if self.config.vision_config.args.get("model_norm"):
            norm = torch.nn.LayerNorm(self.config.vit_hidden_size, eps=NORM_EPSILON)
            self.vision_final_layernorm = norm.to(self.llm_dtype)
        elif not hasattr(self, "vision_final_layernorm"):  # vLLM 0.26 has no place for such a norm
            self.vision_final_layernorm = None

    def get_vit_model_from_radio_config(self, hf_config: Any) -> RadioModel:
        """Build the encoder. vLLM looks its sizes up by the name of timm's model."""
        vision = hf_config.vision_config
        if not vision.args.get("model"):
            sizes = tuple(getattr(vision, key) for key in SIZE_KEYS)
            vision.args["model"] = "vit_" + "_".join(map(str, sizes))
            VIT_TIMM_DIM_BY_NAME[vision.args["model"]] = sizes
        encoder: RadioModel = super().get_vit_model_from_radio_config(hf_config)
        for layer in encoder.model.encoder.layers:
            # Scales of 1 that no checkpoint has. As parameters they would get made-up values with `dummy` weights.
            for name in ("ls1", "ls2"):
                delattr(layer, name)
                setattr(layer, name, 1.0)
        return encoder

    def extract_feature_dynamic(self, pixel_values: torch.Tensor, imgs_sizes: list[tuple[int, int]]) -> torch.Tensor:
        """Encode packed images of any size: patches `[1, patches, channels * patch_size ** 2]` to `[1, tokens, h]`."""
        _, features = self.vision_model(pixel_values.to(self.llm_dtype), imgs_sizes=imgs_sizes)
        projected: torch.Tensor = self.mlp1(self.pixel_shuffle_dynamic_res(self._normed(features),
                                                                           imgs_sizes=imgs_sizes))
        return projected

    def extract_feature(self, pixel_values: torch.Tensor, num_frames: int | None = None) -> torch.Tensor:
        """Encode images of one size: `[n, channels, height, width]` to `[n, tokens, h]`."""
        if num_frames is not None:  # a video, of a published model
            frames: torch.Tensor = super().extract_feature(pixel_values, num_frames=num_frames)
            return frames
        _, features = self.vision_model(pixel_values.to(self.llm_dtype))
        grid = [side // self.patch_size for side in pixel_values.shape[-2:]]
        shuffled = self.pixel_shuffle(self._normed(features).unflatten(1, grid), scale_factor=self.downsample_ratio)
        projected: torch.Tensor = self.mlp1(shuffled.flatten(1, 2))
        return projected

    def _normed(self, features: torch.Tensor) -> torch.Tensor:
        return features if self.vision_final_layernorm is None else self.vision_final_layernorm(features)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        """Load a checkpoint."""
        return super().load_weights(self._without_norm(weights))

    def _without_norm(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Load the norm after the last layer, and yield everything else."""
        for name, tensor in weights:
            if name.startswith(NORM) and self.vision_final_layernorm is not None:
                parameter = self.vision_final_layernorm.get_parameter(name.removeprefix(NORM))
                default_weight_loader(parameter, tensor)
            else:
                yield name, tensor
