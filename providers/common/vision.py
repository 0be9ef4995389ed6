"""A CLIP- or SigLIP-style encoder with its projector as plain data: flags, checks, parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mimo.config.toml_file import flag_name
from mimo.grid.layout import divisors
from mimo.grid.spec import GridSpec
from mimo.protocols import ParameterShape
from providers.common.checks import Problems, image_flags

if TYPE_CHECKING:
    from providers.radio import RadioConfig


@dataclass(frozen=True)
class ShuffledPatches:
    """A vision transformer with pixel shuffle, which makes one token of several patches, and its projector."""

    vision_patch_size: int = 14
    """Side length of a patch, in pixels. Each patch becomes one language token, or its share of one with pixel
    shuffle."""
    vision_dynamic_resolution: bool = False
    """Images keep their own sizes, which are multiples of patch size times pixel shuffle, and are packed into one
    row."""
    vision_pixel_shuffle: int = 1
    """N by N neighbouring patches become one language token, side by side in its channels."""
    vision_num_channels: int = 3
    """Channels of an image."""
    vision_hidden_size: int = 1024
    """Width of the vision transformer."""
    vision_num_attention_heads: int = 16
    """Attention heads of the vision transformer."""
    vision_ffn_hidden_size: int = 4096
    """Inner width of the MLP."""
    vision_norm_epsilon: float = 1e-5
    """Epsilon of the LayerNorms."""

    @property
    def size_multiple(self) -> int:
        """Pixels a side of the square that becomes one language token."""
        return self.vision_patch_size * self.vision_pixel_shuffle

    @property
    def feature_size(self) -> int:
        """Width of a token before the projector."""
        return self.vision_hidden_size * self.vision_pixel_shuffle**2


@dataclass(frozen=True)
class VisionConfig(ShuffledPatches):
    """Vision transformer and projector."""

    vision_image_size: int = 336
    """Side length of the square images, in pixels. With dynamic resolution: of the image that the position embeddings
    were made for. Pixels at the right and at the bottom that fill no patch are left out (SigLIP's 384 pixels with
    patches of 14)."""
    vision_num_layers: int = 23
    """Layers that run. LLaVA uses the features of the second-to-last layer, so this is one fewer than CLIP's 24."""
    vision_num_unused_layers: int = 1
    """Further layers at the end of a pretrained encoder, which are neither built nor loaded."""
    vision_class_token: bool = True
    """Add a learned class token before the patches and drop it from the output (CLIP)."""
    vision_patch_bias: bool = False
    """Add a bias to the patch embedding (SigLIP)."""
    vision_pre_layernorm: bool = True
    """Add a LayerNorm between the embedding and the layers (CLIP)."""
    vision_final_layernorm: bool = False
    """Add a LayerNorm after the last layer."""
    vision_hidden_act: Literal["quick_gelu", "gelu", "gelu_tanh"] = "quick_gelu"
    """Activation of the MLP."""
    projector_hidden_size: int = 0
    """Inner width of the projector; 0: the language model's width."""

    @property
    def image_shape(self) -> tuple[int, int]:
        """Height and width in pixels of every image, without dynamic resolution."""
        return self.vision_image_size, self.vision_image_size

    @property
    def num_patches(self) -> int:
        """Patches of an image of the encoder's own size."""
        return (self.vision_image_size // self.vision_patch_size) ** 2

    @property
    def num_tokens(self) -> int:
        """Language tokens of such an image."""
        return self.num_patches // self.vision_pixel_shuffle**2


def image_tokens(config: VisionConfig | RadioConfig, height: int, width: int) -> int:
    """Return the language tokens of an image of `height` by `width` pixels. Raises ValueError for other sizes."""
    fixed, multiple = config.image_shape, config.size_multiple
    image = f"an image of {height} x {width} pixels (height x width)"
    if not config.vision_dynamic_resolution:
        if (height, width) != fixed:
            raise ValueError(f"{image} does not fit {image_flags(*fixed)}, which takes {fixed[0]} x {fixed[1]}")
        return config.num_tokens
    if height < 1 or width < 1 or height % multiple or width % multiple:
        raise ValueError(f"{image}: both must be multiples of {multiple} (--vision-patch-size "
                         f"{config.vision_patch_size} times --vision-pixel-shuffle {config.vision_pixel_shuffle})")
    return (height // multiple) * (width // multiple)


def check_vision(config: VisionConfig, problems: Problems) -> None:
    """Note encoder sizes that no layout can hold."""
    for name in ("vision_image_size", "vision_patch_size", "vision_pixel_shuffle", "vision_num_channels",
                 "vision_hidden_size", "vision_num_layers", "vision_num_attention_heads", "vision_ffn_hidden_size"):
        problems.positive(name, getattr(config, name))
    problems.above_zero("vision_norm_epsilon", config.vision_norm_epsilon)
    if config.vision_num_unused_layers < 0:
        problems.add(f"--vision-num-unused-layers {config.vision_num_unused_layers} must not be negative")
    problems.least("projector_hidden_size", config.projector_hidden_size, 0)
    if problems.found:
        return
    if config.vision_image_size < config.vision_patch_size:
        problems.add(f"--vision-image-size {config.vision_image_size} is smaller than a patch, --vision-patch-size "
                     f"{config.vision_patch_size}")
    check_shuffle(config, "vision_image_size", config.vision_image_size, problems)
    if config.vision_dynamic_resolution and config.vision_class_token:
        problems.add("--vision-dynamic-resolution cannot be used with --vision-class-token: "
                     "use --no-vision-class-token")
    problems.divides("vision_hidden_size", config.vision_hidden_size, "vision_num_attention_heads",
                     config.vision_num_attention_heads)


def check_shuffle(config: VisionConfig | RadioConfig, name: str, pixels: int, problems: Problems) -> None:
    """Note that the patches along a side of images, whose length is the field `name`, make no whole number of tokens.

    With dynamic resolution, this field is not the size of an image.
    """
    patch, factor = config.vision_patch_size, config.vision_pixel_shuffle
    side = pixels // patch
    if not config.vision_dynamic_resolution and side % factor:
        fits = ", ".join(str(divisor) for divisor in divisors(side))
        problems.add(f"--vision-pixel-shuffle {factor} does not divide the {side} patches a side of "
                     f"{flag_name(name)} {pixels} with --vision-patch-size {patch}; --vision-pixel-shuffle that fit: "
                     f"{fits}")


def check_vision_grid(config: VisionConfig, projector_size: int, grid: GridSpec, problems: Problems) -> None:
    """Note sizes that the encoder grid cannot hold. `projector_size` is the projector's inner width."""
    problems.divides("vision_num_layers", config.vision_num_layers, "encoder_pp", grid.pp)
    problems.divides("vision_num_attention_heads", config.vision_num_attention_heads, "encoder_tp", grid.tp)
    problems.divides("vision_ffn_hidden_size", config.vision_ffn_hidden_size, "encoder_tp", grid.tp)
    problems.divides("projector_hidden_size", projector_size, "encoder_tp", grid.tp)


def vision_shapes(config: VisionConfig, projector_size: int, language_size: int) -> list[ParameterShape]:
    """Return every parameter of encoder and projector.

    Args:
        config: encoder sizes.
        projector_size: inner width of the projector.
        language_size: width of the language model.
    """
    hidden = config.vision_hidden_size
    patch = (hidden, config.vision_num_channels, config.vision_patch_size, config.vision_patch_size)
    tokens = config.num_patches + int(config.vision_class_token)

    shapes = [ParameterShape("conv1.weight", patch, 1, "none", "first"),
              ParameterShape("position_embeddings.weight", (tokens, hidden), 1, "none", "first")]
    if config.vision_patch_bias:
        shapes.append(ParameterShape("conv1.bias", (hidden,), 1, "none", "first"))
    if config.vision_class_token:
        shapes.append(ParameterShape("class_token", (1, 1, hidden), 1, "none", "first"))
    if config.vision_pre_layernorm:
        shapes += norm_shapes("ln_pre", hidden, stage="first")
    if config.vision_final_layernorm:
        shapes += norm_shapes("ln_post", hidden, stage="last")
    return [
        *shapes, *layer_shapes(hidden, config.vision_num_layers, config.vision_ffn_hidden_size),
        ParameterShape("projector.linear_fc1.weight", (projector_size, config.feature_size), 1, "tp", "last"),
        ParameterShape("projector.linear_fc1.bias", (projector_size,), 1, "tp", "last"),
        ParameterShape("projector.linear_fc2.weight", (language_size, projector_size), 1, "tp", "last"),
        ParameterShape("projector.linear_fc2.bias", (language_size,), 1, "none", "last"),
    ]


def layer_shapes(hidden: int, layers: int, inner: int, *, gated: bool = False, norm_bias: bool = True) -> (
        list[ParameterShape]):
    """Return every parameter of the layers of a vision transformer, whose linear layers have biases.

    Args:
        hidden: width of the layers.
        layers: their number.
        inner: inner width of the MLPs.
        gated: whether the MLPs have a gate.
        norm_bias: whether the norms have a bias.
    """
    fc1 = 2 * inner if gated else inner
    return [
        *norm_shapes("input_layernorm", hidden, layers, has_bias=norm_bias),
        *norm_shapes("pre_mlp_layernorm", hidden, layers, has_bias=norm_bias),
        ParameterShape("self_attention.linear_qkv.weight", (3 * hidden, hidden), layers, "tp"),
        ParameterShape("self_attention.linear_qkv.bias", (3 * hidden,), layers, "tp"),
        ParameterShape("self_attention.linear_proj.weight", (hidden, hidden), layers, "tp"),
        ParameterShape("self_attention.linear_proj.bias", (hidden,), layers),
        ParameterShape("mlp.linear_fc1.weight", (fc1, hidden), layers, "tp"),
        ParameterShape("mlp.linear_fc1.bias", (fc1,), layers, "tp"),
        ParameterShape("mlp.linear_fc2.weight", (hidden, inner), layers, "tp"),
        ParameterShape("mlp.linear_fc2.bias", (hidden,), layers),
    ]


def norm_shapes(name: str, width: int, count: int = 1, stage: str = "layer", *, has_bias: bool = True) -> (
        list[ParameterShape]):
    return [ParameterShape(f"{name}.{kind}", (width,), count, "none", stage)
            for kind in (("weight", "bias") if has_bias else ("weight",))]
