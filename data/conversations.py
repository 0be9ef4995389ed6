"""The parts of a WebDataset sample as a conversation or a document, with its images still compressed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LLAVA_ROLES = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
TEXT_PARTS = ("json", "txt")


@dataclass(frozen=True)
class Conversation:
    """What a sample says, not yet checked: either turns or one text.

    Attributes:
        messages: turns of `role` and `content`; None of a document.
        document: text, or content parts, without turns; None of a conversation.
        images: name and compressed bytes of each image, in the order in which the text shows them.
    """

    messages: list[Any] | None = None
    document: Any = None
    images: list[tuple[str, bytes]] = field(default_factory=list)


def natural_order(name: str) -> list[tuple[int, str]]:
    """Sort key under which `2.png` comes before `10.png`."""
    return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in re.split(r"([0-9]+)", name) if piece]


def captioned(caption: Any, images: list[tuple[str, bytes]], prompt: str = "") -> Conversation:
    """Images with a text about them: shown by the user, after whom the assistant writes the text."""
    if not images:
        raise ValueError("a caption without an image")
    shown: list[dict[str, str]] = [{"type": "image"}] * len(images)
    if prompt:
        shown = [*shown, {"type": "text", "text": prompt}]
    return Conversation(
        messages=[{"role": "user", "content": shown}, {"role": "assistant", "content": _literal(caption, "caption")}],
        images=images,
    )


def from_parts(key: str, parts: Mapping[str, Any]) -> Conversation:
    """A sample of free form.

    Its part `json` holds `messages` (turns of `role` and `content`), `conversations` (turns of `from` and `value`, as
    in LLaVA), `text` or `caption`; without it, its part `txt` is a caption, or a text where there is no image. The
    other parts are images, in order of their names, numbers by value; or `images` of the json names some of them.

    Args:
        key: name of the sample in its shard.
        parts: by extension; `json` already parsed, `txt` a str, the others bytes.

    Raises:
        ValueError: what is wrong with it.
    """
    available = {name: part for name, part in parts.items() if name not in TEXT_PARTS}
    if "json" not in parts:
        images = _all_images(available)
        if "txt" not in parts:
            raise ValueError(f"no text: has neither json nor txt, only {', '.join(sorted(parts)) or 'nothing'}")
        return captioned(parts["txt"], images) if images else Conversation(document=_literal(parts["txt"], "txt"))
    content = parts["json"]
    if not isinstance(content, Mapping):
        raise ValueError(f"json is {type(content).__name__}, expected an object")
    names = content.get("images")
    images = _all_images(available) if names is None else _named_images(key, names, available)
    if "messages" in content:
        return Conversation(messages=_turns(content["messages"], "messages"), images=images)
    if "conversations" in content:
        turns = [_from_llava(turn) for turn in _turns(content["conversations"], "conversations")]
        return Conversation(messages=turns, images=images)
    if "text" in content:
        return Conversation(document=content["text"], images=images)
    if "caption" in content:
        return captioned(content["caption"], images)
    raise ValueError(
        f"no text: json has none of messages, conversations, text, caption, only {', '.join(sorted(content))}"
    )


def _all_images(available: Mapping[str, Any]) -> list[tuple[str, bytes]]:
    return [(name, available[name]) for name in sorted(available, key=natural_order)]


def _named_images(key: str, names: Any, available: Mapping[str, Any]) -> list[tuple[str, bytes]]:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("images of json: expected a list of names of the sample's parts")
    prefix = f"{key.rpartition('/')[2]}."
    images = []
    for name in names:
        if "/" in name or "\\" in name or ".." in name or re.match(r"[A-Za-z]:", name):
            raise ValueError(f"image {name!r} of json is a path outside the dataset; images are parts of the sample")
        part = name if name in available else name.removeprefix(prefix)
        if part not in available:
            known = ", ".join(sorted(available, key=natural_order)) or "no images"
            raise ValueError(f"image {name!r} of json is no part of the sample, which has {known}")
        images.append((part, available[part]))
    return images


def _turns(turns: Any, name: str) -> list[Any]:
    if not isinstance(turns, list):
        raise ValueError(f"{name} of json is {type(turns).__name__}, expected a list of turns")
    return turns


def _from_llava(turn: Any) -> dict[str, Any]:
    if not isinstance(turn, Mapping) or turn.get("from") not in LLAVA_ROLES:
        raise ValueError(f"turn {str(turn)[:80]!r} of conversations: `from` is none of {', '.join(LLAVA_ROLES)}")
    return {"role": LLAVA_ROLES[turn["from"]], "content": turn.get("value")}


def _literal(text: Any, name: str) -> Any:
    """A text in which `<image>` is not a marker."""
    if not isinstance(text, str):
        raise ValueError(f"{name} is {type(text).__name__}, expected text")
    if not text.strip():
        raise ValueError(f"no text: {name} is empty")
    return [{"type": "text", "text": text}]
