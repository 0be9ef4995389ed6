"""The LLaVA architecture at sizes that build in a moment, for tests, benchmarks and layout trials on mock data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from providers import llava


@dataclass(frozen=True)
class Config(llava.Config):
    """Model family: mock, a small LLaVA; --num-experts above 0 makes it a mixture of experts."""

    vision_image_size: int = 32
    vision_patch_size: int = 8
    vision_hidden_size: int = 64
    vision_num_layers: int = 2
    vision_num_attention_heads: int = 4
    vision_ffn_hidden_size: int = 256
    num_layers: int = 4
    hidden_size: int = 128
    num_attention_heads: int = 8
    num_query_groups: int = 4
    ffn_hidden_size: int = 256
    vocab_size: int = 512
    moe_ffn_hidden_size: int = 64
    image_token_id: int = 511


class MockProvider(llava.LlavaProvider):
    """The `mimo.protocols.ModelProvider` of the mock model."""

    Config: ClassVar[type] = Config
    # A folder with a LLaVA belongs to the `llava` provider.
    hf_architectures: ClassVar[tuple[str, ...]] = ()


provider = MockProvider()
