"""A model family of one's own: a convolutional encoder in front of the decoder of `mock`."""

from dataclasses import dataclass

from mimo.protocols import LANGUAGE, ParameterShape
from providers import mock


@dataclass(frozen=True)
class Config(mock.Config):
    """Model family: convolutions instead of a vision transformer."""

    conv_channels: int = 48
    """Channels between the two convolutions."""


def conv_encoder():
    import torch  # not at the top: --help and --dry-run import this file and need no torch

    class ConvEncoder(torch.nn.Module):
        def __init__(self, config, sizes):
            super().__init__()
            self.config, self.seq_length, patch = config, sizes.num_patches, sizes.vision_patch_size
            self.layers = torch.nn.Sequential(
                torch.nn.Conv2d(sizes.vision_num_channels, sizes.conv_channels, patch, stride=patch), torch.nn.GELU(),
                torch.nn.Conv2d(sizes.conv_channels, config.hidden_size, 3, padding=1))

        def set_input_tensor(self, hidden):
            assert hidden is None, "the encoder has one pipeline stage: --encoder-pp 1"

        def forward(self, pixel_values):  # [images, channels, height, width] -> [images, tokens, hidden]
            return self.layers(pixel_values.to(self.config.params_dtype)).flatten(2).transpose(1, 2)

    return ConvEncoder


class OwnProvider(mock.MockProvider):
    Config = Config

    def parameter_shapes(self, config, module):  # for --dry-run
        if module == LANGUAGE:
            return super().parameter_shapes(config, module)
        width, pixels = config.conv_channels, config.vision_num_channels * config.vision_patch_size**2
        return [ParameterShape("layers.0, with bias", (width, pixels + 1)),
                ParameterShape("layers.2, with bias", (config.hidden_size, 9 * width + 1))]

    def encoder_spec(self, config, module, context):
        from megatron.core.transformer.spec_utils import ModuleSpec

        from mimo.model.submodule import VisionSubmodule
        from providers.common.build import transformer_config

        sizes = transformer_config(context, num_layers=1, hidden_size=config.hidden_size,
                                   num_attention_heads=context.grid.tp)
        encoder = ModuleSpec(module=conv_encoder(), params={"config": sizes, "sizes": config})
        return ModuleSpec(module=VisionSubmodule, params={"pg_collection": context.groups},
                          submodules={"encoders": {"conv": encoder}})


provider = OwnProvider()
