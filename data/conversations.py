"""Read the parts of a WebDataset sample as a conversation or a document, with its images still compressed."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

LLAVA_ROLES = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
TEXT_PARTS = ("json", "txt")
# Stands for an image in the text of a turn.
IMAGE_MARKER = "<image>"
# Some of these formats cannot be decoded. Samples with them are bad samples, not samples without an image.
IMAGE_EXTENSIONS = frozenset(
    "png jpg jpeg jpe jfif webp bmp dib gif tif tiff ppm pgm pbm pnm avif heic heif jp2 svg img image".split()
)
# First bytes of files in common formats.
SIGNATURES = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"II*\0", b"MM\0*")


@dataclass(frozen=True)
class Conversation:
    """Content of a sample before it is checked: either turns or one text.

    Attributes:
        messages: turns with `role` and `content`; None for a document.
        document: text or content parts without turns; None for a conversation.
        images: name and compressed bytes of each image, in the order in which the text shows them.
        tools: tools that the conversation offers; None if there are none.
    """

    messages: list[Any] | None = None
    document: Any = None
    images: list[tuple[str, bytes]] = field(default_factory=list)
    tools: list[Any] | None = None


def natural_order(name: str) -> list[tuple[int, str]]:
    """Sort key under which `2.png` comes before `10.png`."""
    return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in re.split(r"([0-9]+)", name) if piece]


def captioned(caption: Any, images: list[tuple[str, bytes]], prompt: str = "") -> Conversation:
    """Make a conversation of images and a text about them: the user shows them, the assistant answers with the text."""
    if not images:
        raise ValueError("a caption without an image")
    shown: list[dict[str, str]] = [{"type": "image"}] * len(images)
    if prompt:
        shown = [*shown, {"type": "text", "text": prompt}]
    return Conversation(
        messages=[{"role": "user", "content": shown}, {"role": "assistant", "content": _literal(caption, "caption")}],
        images=images,
    )


def is_image(name: str, data: Any = b"") -> bool:
    """Whether a part of a sample is an image, by its extension or else by its first bytes."""
    if name.rpartition(".")[2].lower() in IMAGE_EXTENSIONS:
        return True
    return isinstance(data, bytes) and (data.startswith(SIGNATURES) or data[8:12] == b"WEBP")


def is_read(name: str) -> bool:
    """Whether the name alone shows that a part of a sample is read, as text or as an image."""
    return name in TEXT_PARTS or is_image(name)


def from_parts(key: str, parts: Mapping[str, Any]) -> Conversation:
    """Read a sample of a crude data set.

    Its part `json` holds `messages` (turns of `role` and `content`), `conversations` (turns of `from` and `value`, as
    in LLaVA), `text` or `caption`. Without it, the part `txt` is a caption, or a text if there is no image. If
    `images` of the json or the content itself names images, these are the sample's images. Otherwise all other parts
    that are images belong to it, sorted by name with numbers by value. Further parts are not read.

    Args:
        key: name of the sample in its shard.
        parts: parts by extension: `json` already parsed, `txt` as a str, the others as bytes.

    Raises:
        ValueError: the sample cannot be read; the message says why.
    """
    files = SampleFiles(key, {name: part for name, part in parts.items() if name not in TEXT_PARTS})
    if "json" not in parts:
        images = files.images()
        if "txt" not in parts:
            raise ValueError(f"no text: has neither json nor txt, only {', '.join(sorted(parts)) or 'nothing'}")
        return captioned(parts["txt"], images) if images else Conversation(document=_literal(parts["txt"], "txt"))
    content = parts["json"]
    if not isinstance(content, Mapping):
        raise ValueError(f"json is {type(content).__name__}, expected an object")
    names = content.get("images")
    images = files.images() if names is None else files.named(names)
    if "messages" in content:
        messages = _turns(content["messages"], "messages")
    elif "conversations" in content:
        messages = [_from_llava(turn) for turn in _turns(content["conversations"], "conversations")]
    elif "text" in content:
        (document,), images = _own_images([content["text"]], images, files, are_listed=names is not None)
        return Conversation(document=document, images=images)
    elif "caption" in content:
        return captioned(content["caption"], images)
    else:
        raise ValueError(
            f"no text: json has none of messages, conversations, text, caption, only {', '.join(sorted(content))}"
        )
    shown = [turn.get("content") if isinstance(turn, Mapping) else None for turn in messages]
    shown, images = _own_images(shown, images, files, are_listed=names is not None)
    messages = [{**turn, "content": content} if isinstance(turn, Mapping) else turn
                for turn, content in zip(messages, shown, strict=True)]
    return Conversation(messages=messages, images=images, tools=_tools(content.get("tools")))


def _tools(tools: Any) -> list[Any] | None:
    """Return the tools that a conversation offers. Some data sets hold them as JSON inside JSON."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise ValueError(f"tools of json is text that is not JSON: {error}") from error
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
        raise ValueError("tools of json: expected a list of objects")
    return tools or None


def _own_images(
    contents: Sequence[Any], images: list[tuple[str, bytes]], files: SampleFiles, *, are_listed: bool
) -> tuple[list[Any], list[tuple[str, bytes]]]:
    """Return contents whose image parts have no names, and their images in order.

    Args:
        contents: content of each turn, text or a list of parts.
        images: images of the sample, for contents that name none themselves.
        files: the sample's parts.
        are_listed: whether `images` of the json names `images`.

    Raises:
        ValueError: an image cannot be read from the sample, or only some of the images are named.
    """
    plain: list[Any] = []
    found: list[str | None] = []
    for content in contents:
        if isinstance(content, str):
            found += [None] * content.count(IMAGE_MARKER)
        elif isinstance(content, (list, tuple)):
            places = [image_of(part) for part in content]
            found += [place for is_shown, place in places if is_shown]
            content = [{"type": "image"} if is_shown else part
                       for part, (is_shown, _) in zip(content, places, strict=True)]
        plain.append(content)
    named = [place for place in found if place is not None]
    if not named:
        return plain, images
    if len(named) < len(found):
        raise ValueError(f"{len(named)} images of the content are named and {len(found) - len(named)} are not: which "
                         "image belongs where cannot be told; name all of them or none")
    own = [files.load(place) for place in named]
    if are_listed and [name for name, _ in own] != [name for name, _ in images]:
        raise ValueError(f"images of json names {', '.join(name for name, _ in images) or 'none'}, the content shows "
                         f"{', '.join(name for name, _ in own)}")
    return plain, own


def image_of(part: Any) -> tuple[bool, str | None]:
    """Return whether a content part shows an image, and its name or URL, which is None if the part does not say.

    Forms: `{"type": "image"}`, Hugging Face's `{"type": "image", "image": ...}` (or `url`, `path`, `base64`), and
    OpenAI's `{"type": "image_url", "image_url": {"url": ...}}`, also with the URL alone.

    Raises:
        ValueError: the part shows an image in another form.
    """
    given = {name: value for name, value in part.items() if value is not None} if isinstance(part, Mapping) else {}
    kind = str(given.pop("type", ""))
    if not kind.startswith("image"):
        return False, None
    given.pop("detail", None)  # a setting for OpenAI's own models
    if kind == "image" and not given:
        return True, None
    ((name, place),) = given.items() if len(given) == 1 else (("", None),)
    if kind == "image_url" and name == "image_url" and isinstance(place, Mapping):
        place = place.get("url")
    allowed = {"image": ("image", "url", "path", "base64"), "image_url": ("image_url", "url")}
    if name not in allowed.get(kind, ()) or not isinstance(place, str):
        raise ValueError(
            f"a content part of type {kind} has {', '.join(f'{key} ({type(given[key]).__name__})' for key in given)}: "
            'an image is {"type": "image"}, {"type": "image", "image": NAME} or {"type": "image_url", "image_url": '
            '{"url": NAME}}, where NAME is a part of the sample or a data: URL'
        )
    return True, f"data:;base64,{place}" if name == "base64" else place


@dataclass(frozen=True)
class SampleFiles:
    """The parts of a sample that may be images.

    Attributes:
        key: name of the sample in its shard.
        parts: by extension.
    """

    key: str
    parts: Mapping[str, Any]

    def images(self) -> list[tuple[str, bytes]]:
        """Return all images in the order of their names."""
        names = [name for name, data in self.parts.items() if is_image(name, data)]
        return [(name, self.parts[name]) for name in sorted(names, key=natural_order)]

    def named(self, names: Any) -> list[tuple[str, bytes]]:
        """Return the images that `images` of the json names."""
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError("images of json: expected a list of names of the sample's parts")
        return [self.load(name) for name in names]

    def load(self, place: str) -> tuple[str, bytes]:
        """Return name and bytes of an image, given as the name of a part of this sample or as a data: URL.

        Raises:
            ValueError: the image is not in this sample, or not in the format that it claims.
        """
        if place.startswith("data:"):
            header, comma, text = place.partition(",")
            if not comma or not header.endswith(";base64"):
                raise ValueError(f"image {place[:40]!r} is a data: URL without base64 content")
            try:
                return "of a data: URL", base64.b64decode(text, validate=True)
            except ValueError as error:
                raise ValueError(f"image {place[:40]!r} is a data: URL whose content is not base64: {error}") from error
        if re.match(r"https?://", place):
            raise ValueError(f"image {place[:200]!r} is on the network, from where nothing is fetched; store it as a "
                             "part of the sample")
        if "/" in place or "\\" in place or ".." in place or re.match(r"[A-Za-z]:", place):
            raise ValueError(f"image {place!r} of json is a path outside the dataset; images are parts of the sample")
        part = place if place in self.parts else place.removeprefix(f"{self.key.rpartition('/')[2]}.")
        if part not in self.parts:
            known = ", ".join(name for name, _ in self.images()) or "no images"
            raise ValueError(f"image {place!r} of json is no part of the sample, which has {known}")
        return part, self.parts[part]


def _turns(turns: Any, name: str) -> list[Any]:
    if not isinstance(turns, list):
        raise ValueError(f"{name} of json is {type(turns).__name__}, expected a list of turns")
    return turns


def _from_llava(turn: Any) -> dict[str, Any]:
    if not isinstance(turn, Mapping) or turn.get("from") not in LLAVA_ROLES:
        raise ValueError(f"turn {str(turn)[:80]!r} of conversations: `from` is none of {', '.join(LLAVA_ROLES)}")
    return {"role": LLAVA_ROLES[turn["from"]], "content": turn.get("value")}


def _literal(text: Any, name: str) -> Any:
    """Return content in which `<image>` is text and not a marker."""
    if not isinstance(text, str):
        raise ValueError(f"{name} is {type(text).__name__}, expected text")
    if not text.strip():
        raise ValueError(f"no text: {name} is empty")
    return [{"type": "text", "text": text}]
