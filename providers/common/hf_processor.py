"""Image processors of Hugging Face for models that were trained here: what an engine turns images into pixels with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

IMAGE_TOKEN = "<image>"


def write_llava(config: Any, folder: Path, mean: Sequence[float], std: Sequence[float]) -> None:
    """Write a `LlavaProcessor` for images that have the size of the encoder already, with a tokenizer of made-up words.

    Prompts are token ids: of the tokenizer only the image token is used. Images are neither resized nor cut.

    Args:
        config: the family's flags, resolved.
        folder: of the model's config.json.
        mean: of each channel.
        std: of each channel; pixels are (value / 255 - mean) / std.
    """
    from transformers import CLIPImageProcessor, LlavaProcessor

    size = {"height": config.vision_image_size, "width": config.vision_image_size}
    images = CLIPImageProcessor(do_resize=False, do_center_crop=False, do_convert_rgb=False, size=size, crop_size=size,
                                image_mean=list(mean), image_std=list(std))
    LlavaProcessor(
        images, _tokenizer(config.vocab_size, config.image_token_id), patch_size=config.vision_patch_size,
        vision_feature_select_strategy="default" if config.vision_class_token else "full",
        num_additional_image_tokens=int(config.vision_class_token)).save_pretrained(folder)


def _tokenizer(vocab_size: int, image_token_id: int) -> Any:
    """One made-up word for each id, and the image token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"<{index}>": index for index in range(vocab_size) if index != image_token_id}
    tokenizer = Tokenizer(models.WordLevel(words | {IMAGE_TOKEN: image_token_id}, unk_token=next(iter(words))))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    first = next(iter(words))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=first, unk_token=first,
                                   additional_special_tokens=[IMAGE_TOKEN])
