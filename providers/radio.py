"""The RADIO encoder with its projector as plain data: flags, checks, parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mimo.config.toml_file import flag_name
from mimo.grid.spec import GridSpec
from mimo.protocols import ParameterShape
from providers.common.checks import Problems
from providers.common.vision import ShuffledPatches, check_shuffle, layer_shapes, norm_shapes

NUM_CHANNELS = 3


@dataclass(frozen=True)
class RadioConfig(ShuffledPatches):
    """RADIO vision transformer, pixel shuffle and projector; the defaults are those of ViT-H/16."""

    vision_image_size: int = 512
    """Side length of the images in pixels, or their height if --vision-image-width is given. No effect with dynamic
    resolution."""
    vision_image_width: int = 0
    """Width of the images in pixels; 0: equal to their height. Not with dynamic resolution."""
    vision_patch_size: int = 16
    vision_pixel_shuffle: int = 2
    vision_num_channels: int = NUM_CHANNELS
    """Channels of an image; only 3 is possible."""
    vision_hidden_size: int = 1280
    vision_num_layers: int = 32
    """Layers of the vision transformer."""
    vision_ffn_hidden_size: int = 5120
    vision_class_token_len: int = 10
    """Class and register tokens before the patches of each image, which are dropped from the output. Their number is
    that of the rows of the pretrained encoder's class token."""
    vision_max_image_size: int = 2048
    """Side length in pixels of the image that has a position embedding for each of its patches. Positions of other
    images are interpolated. With --no-vision-dynamic-resolution no image may be larger."""
    vision_norm_epsilon: float = 1e-6
    vision_final_layernorm: bool = True
    """Add a LayerNorm after the last layer. Megatron checkpoints of models with --mtp-num-layers 0 have it; published
    Hugging Face checkpoints have it only where their encoder's arguments say `model_norm`."""
    vision_hidden_act: Literal["gelu", "gelu_tanh"] = "gelu"
    """Activation of the MLP: exact as in timm, or with the tanh approximation as in Megatron's multimodal example."""
    vision_cpe_augmentation: bool = False
    """While the encoder trains, take the positions of each image from a random crop of the position grid, as when the
    published weights were made. Without it, training uses the positions of evaluation and serving, so a batch always
    has the same loss and layouts can be compared. A frozen encoder draws no crops."""
    projector_hidden_size: int = 20480
    """Inner width of the projector."""
    projector_norm_epsilon: float = 1e-5
    """Epsilon of the projector's RMSNorm."""

    @property
    def image_shape(self) -> tuple[int, int]:
        """Height and width in pixels of every image, without dynamic resolution."""
        return self.vision_image_size, self.vision_image_width or self.vision_image_size

    @property
    def num_tokens(self) -> int:
        """Language tokens of an image of `image_shape`."""
        height, width = self.image_shape
        return (height // self.size_multiple) * (width // self.size_multiple)

    @property
    def num_positions(self) -> int:
        """Number of position embeddings."""
        return (self.vision_max_image_size // self.vision_patch_size) ** 2


def check_radio(config: RadioConfig, problems: Problems) -> None:
    """Note encoder sizes that no layout can hold."""
    for name in ("vision_image_size", "vision_patch_size", "vision_pixel_shuffle", "vision_hidden_size",
                 "vision_num_layers", "vision_num_attention_heads", "vision_ffn_hidden_size", "vision_max_image_size",
                 "projector_hidden_size"):
        problems.positive(name, getattr(config, name))
    for name in ("vision_norm_epsilon", "projector_norm_epsilon"):
        problems.above_zero(name, getattr(config, name))
    if config.vision_num_channels != NUM_CHANNELS:
        problems.add(f"--vision-num-channels {config.vision_num_channels}: RADIO takes {NUM_CHANNELS} channels")
    if config.vision_class_token_len < 0:
        problems.add(f"--vision-class-token-len {config.vision_class_token_len} must not be negative")
    if config.vision_image_width < 0:
        problems.add(f"--vision-image-width {config.vision_image_width} must not be negative; 0: same as the height")
    if problems.found:
        return
    problems.divides("vision_max_image_size", config.vision_max_image_size, "vision_patch_size",
                     config.vision_patch_size)
    problems.divides("vision_hidden_size", config.vision_hidden_size, "vision_num_attention_heads",
                     config.vision_num_attention_heads)
    if not config.vision_dynamic_resolution:
        for name in ("vision_image_size", *(("vision_image_width",) if config.vision_image_width else ())):
            pixels = getattr(config, name)
            problems.divides(name, pixels, "vision_patch_size", config.vision_patch_size)
            if pixels % config.vision_patch_size == 0:
                check_shuffle(config, name, pixels, problems)
            if pixels > config.vision_max_image_size:
                problems.add(f"{flag_name(name)} {pixels} is larger than --vision-max-image-size "
                             f"{config.vision_max_image_size}, the side of the position grid")
    elif config.vision_image_width:
        problems.add(f"--vision-image-width {config.vision_image_width} is for images of one size, but with "
                     "--vision-dynamic-resolution they keep their own sizes: leave it out, or use "
                     "--no-vision-dynamic-resolution")


def check_radio_grid(config: RadioConfig, grid: GridSpec, problems: Problems) -> None:
    """Note sizes that the encoder grid cannot hold."""
    if grid.pp > 1:
        problems.add(f"--encoder-pp {grid.pp}: the RADIO encoder has one pipeline stage; use --encoder-pp 1, and "
                     f"--encoder-tp to split it")
    problems.divides("vision_num_attention_heads", config.vision_num_attention_heads, "encoder_tp", grid.tp)
    problems.divides("vision_ffn_hidden_size", config.vision_ffn_hidden_size, "encoder_tp", grid.tp)
    problems.divides("projector_hidden_size", config.projector_hidden_size, "encoder_tp", grid.tp)


def radio_shapes(config: RadioConfig, language_size: int) -> list[ParameterShape]:
    """Return every parameter of encoder and projector; `language_size` is the width of the language model."""
    hidden = config.vision_hidden_size
    pixels, projected = config.vision_num_channels * config.vision_patch_size**2, config.projector_hidden_size

    shapes = [ParameterShape("embedder.weight", (hidden, pixels), 1, "tp", "first"),
              ParameterShape("position_embeddings", (1, config.num_positions, hidden), 1, "none", "first")]
    if config.vision_class_token_len:
        shapes.append(ParameterShape("class_token", (config.vision_class_token_len, hidden), 1, "none", "first"))
    shapes += layer_shapes(hidden, config.vision_num_layers, config.vision_ffn_hidden_size)
    if config.vision_final_layernorm:
        shapes += norm_shapes("final_layernorm", hidden, stage="last")
    return [
        *shapes,
        ParameterShape("projector.norm.weight", (config.feature_size,), 1, "none", "last"),
        ParameterShape("projector.linear_fc1.weight", (projected, config.feature_size), 1, "tp", "last"),
        ParameterShape("projector.linear_fc2.weight", (language_size, projected), 1, "tp", "last"),
    ]
