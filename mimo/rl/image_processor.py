"""What the rollout engine makes pixels of images with: files beside its config.json."""

from __future__ import annotations

from pathlib import Path

from mimo.config.rl_run import RlRunConfig
from mimo.protocols import ImageProcessorProvider, ModelProvider
from mimo.rl.prompts import ImagePromptSet, Normalisation

TOKENIZER = "tokenizer_config.json"


def write_processor(config: RlRunConfig, provider: ModelProvider, folder: Path) -> None:
    """Write the processor of a model with an encoder, for the images of the run's prompts.

    Args:
        config: the run.
        provider: the model family.
        folder: of the model's config.json.

    Raises:
        OSError: the folder cannot be written.
    """
    if not provider.encoders(config.model_family):
        return
    assert isinstance(provider, ImageProcessorProvider), "others are refused at set-up"
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
