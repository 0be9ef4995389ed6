"""What the rollout engine makes pixels of images with: files beside its config.json."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from mimo.config.rl_run import RlRunConfig
from mimo.protocols import ModelProvider
from mimo.rl.prompts import ImagePromptSet, Normalisation

TOKENIZER = "tokenizer_config.json"


@runtime_checkable
class ImageProcessorProvider(Protocol):
    """A model provider that can write the image processor of its models."""

    def write_processor(self, config: Any, folder: Path, mean: Sequence[float], std: Sequence[float]) -> None:
        """Write processor and tokenizer as Hugging Face saves them.

        Images have the size that the encoder takes, and come out as (value / 255 - mean) / std.

        Args:
            config: the family's flags.
            folder: of the model's config.json.
            mean: of each channel.
            std: of each channel.

        Raises:
            ValueError: no processor is known for these models.
        """
        ...


def write_processor(config: RlRunConfig, provider: ModelProvider, folder: Path) -> None:
    """Write the processor of a model with an encoder, for the images of the run's prompts.

    Args:
        config: the run.
        provider: the model family.
        folder: of the model's config.json.

    Raises:
        ValueError: none is known for the model.
        OSError: the folder cannot be written.
    """
    if not provider.encoders(config.model_family):
        return
    if not isinstance(provider, ImageProcessorProvider):
        raise ValueError(f"--model-provider {config.model.model_provider}: it has no image processor for the rollout "
                         "engine (write_processor)")
    tokens = provider.token_spec(config.model_family)
    prompts = config.find_dataset(config.data.dataset_provider).open(config.dataset, tokens, "train", config.train.seed)
    channels = tokens.num_channels
    # Text prompts have no images, and the engine wants a processor all the same.
    chosen = Normalisation((0.5,) * channels, (0.5,) * channels)
    if isinstance(prompts, ImagePromptSet):
        chosen = prompts.normalisation
    provider.write_processor(config.model_family, folder, chosen.mean, chosen.std)


def has_processor(folder: Path) -> bool:
    """Whether the folder has an image processor, which vLLM gives its tokenizer: it then has to load one."""
    return (folder / TOKENIZER).is_file()
