"""Read a record of a data set as a conversation or a document, with its images still compressed.

A record is the `json` part of a WebDataset sample, a line of a JSONL file or a row of a table. All of them take the
same forms (`from_record`); they differ in where their images are (`ImageFiles`).
"""

from __future__ import annotations

import base64
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

# `from` of a turn of `conversations`. The last three are ShareGPT's names in records with tools.
LLAVA_ROLES = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
               "function_call": "assistant", "observation": "tool", "tool": "tool"}
# Keys of a record by which its form is recognised, in this order, and what each form is.
FORMS = {"messages": "turns of role and content", "conversations": "turns of from and value",
         "texts": "pairs of user and assistant", "question": "a question with answer or answers",
         "caption": "a caption of images", "text": "a text, or a caption of images that it does not mark"}
# Forms of the `json` part of a sample in shards, in another order: what a shard means must not change.
SHARD_FORMS = ("messages", "conversations", "text", "caption", "texts", "question")
VIDEO_KEYS = ("video", "videos")
VIDEO_EXTENSIONS = frozenset("mp4 webm avi mov mkv".split())
# Keys of a turn that change what a model learns and are not read.
UNREAD_TURN_KEYS = ("weight", "reasoning_content", "function_call")
# Keys beside a question that belong to it and are not read.
UNREAD_QUESTION_KEYS = ("choices", "options", "hint", "context")
TEXT_PARTS = ("json", "txt")
# Stands for an image in the text of a turn.
IMAGE_MARKER = "<image>"
VIDEO_MARKER = "<video>"
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


class ImageFiles(Protocol):
    """The place where a record's images are."""

    def images(self) -> list[tuple[str, bytes]]:
        """Return name and bytes of all images of the record, in order."""
        ...

    def load(self, place: Any) -> tuple[str, bytes]:
        """Return name and bytes of an image that the record names. Raises ValueError if there is no such image."""
        ...


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
    that are images belong to it, sorted by name with numbers by value. Further parts are not read, except that a video
    is an error.

    Args:
        key: name of the sample in its shard.
        parts: parts by extension: `json` already parsed, `txt` as a str, the others as bytes.

    Raises:
        ValueError: the sample cannot be read; the message says why.
    """
    for name in parts:
        if name.rpartition(".")[2].lower() in VIDEO_EXTENSIONS:
            raise ValueError(f"part {name} is a video: videos are not read; leave these samples out")
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
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ValueError("images of json: expected a list of names of the sample's parts")
    # In shards, `system` is a turn and never a key beside the turns.
    content = {name: value for name, value in content.items() if name != "system"}
    return from_record(content, names, files, SHARD_FORMS)


def from_record(record: Mapping[str, Any], names: Sequence[Any] | None, files: ImageFiles,
                forms: Sequence[str] = tuple(FORMS)) -> Conversation:
    """Read a record, whose form is decided by the first key of `forms` that it has.

    Args:
        record: the record.
        names: the images that the record lists; None if it lists none, so that its images are those of `files`.
        files: where images are.
        forms: the keys of `FORMS`, in the order in which they are looked for.

    Raises:
        ValueError: the record cannot be read; the message says why.
    """
    for key in VIDEO_KEYS:
        if record.get(key):
            raise ValueError(f"{key} {str(record[key])[:80]!r}: videos are not read; leave these records out")
    form = next((key for key in forms if record.get(key) is not None), None)
    if form is None:
        known = ", ".join(f"{key} ({what})" for key, what in FORMS.items())
        raise ValueError(f"unknown form: it has {', '.join(map(str, record)) or 'no key'}, expected one of {known}")
    images = files.images() if names is None else [files.load(name) for name in names]
    if form == "caption":
        return captioned(record["caption"], images)
    if form == "text" and images and isinstance(record["text"], str) and IMAGE_MARKER not in record["text"]:
        return captioned(record["text"], images)
    if form == "text":
        (document,), images = _own_images([record["text"]], images, files, are_listed=names is not None)
        return Conversation(document=document, images=images)
    if form == "question":
        messages = _question(record, len(images))
    elif form == "texts":
        messages = [turn for pair in _turns(record["texts"], "texts") for turn in _pair(pair)]
        messages[0]["content"] = [*[{"type": "image"}] * len(images), {"type": "text", "text": messages[0]["content"]}]
    elif form == "conversations":
        turns = _turns(record["conversations"], "conversations")
        _check_turn_keys(turns)
        messages = [_from_llava(turn) for turn in turns]
    else:
        messages = _turns(record["messages"], "messages")
        _check_turn_keys(messages)
    if record.get("system"):
        if messages and isinstance(messages[0], Mapping) and messages[0].get("role") == "system":
            raise ValueError("it has both `system` and a turn of role system; keep one")
        messages = [{"role": "system", "content": record["system"]}, *messages]
    shown = [turn.get("content") if isinstance(turn, Mapping) else None for turn in messages]
    shown, images = _own_images(shown, images, files, are_listed=names is not None)
    messages = [{**turn, "content": content} if isinstance(turn, Mapping) else turn
                for turn, content in zip(messages, shown, strict=True)]
    return Conversation(messages=messages, images=images, tools=_tools(record.get("tools")))


def _question(record: Mapping[str, Any], num_images: int) -> list[dict[str, Any]]:
    """Return the turns of a question about images and its answer: the one given, or the most frequent of several."""
    for key in UNREAD_QUESTION_KEYS:
        if record.get(key):
            raise ValueError(f"{key} beside question is not read; write it into the question and remove the key")
    question, answer = record["question"], record.get("answer")
    if answer is None:
        answers = [each.get("answer") if isinstance(each, Mapping) else each for each in record.get("answers") or ()]
        if not answers:
            raise ValueError("no text: the question has neither answer nor answers")
        if not all(isinstance(each, str) for each in answers):
            raise ValueError("answers: expected a list of texts, or of objects with `answer`")
        answer = Counter(answers).most_common(1)[0][0]  # the first of equally frequent ones
    if not isinstance(question, str) or IMAGE_MARKER not in question:
        question = [*[{"type": "image"}] * num_images, *_literal(question, "question")]
    return [{"role": "user", "content": question}, {"role": "assistant", "content": _literal(answer, "answer")}]


def _pair(pair: Any) -> list[dict[str, Any]]:
    """Return the two turns of an entry of `texts`, as in The Cauldron and FineVision."""
    if not isinstance(pair, Mapping) or not all(isinstance(pair.get(name), str) for name in ("user", "assistant")):
        raise ValueError(f"{str(pair)[:80]!r} of texts: expected an object with the texts user and assistant")
    return [{"role": role, "content": pair[role]} for role in ("user", "assistant")]


def _tools(tools: Any) -> list[Any] | None:
    """Return the tools that a conversation offers. Some data sets hold them as JSON inside JSON."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise ValueError(f"tools is text that is not JSON: {error}") from error
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
        raise ValueError("tools: expected a list of objects")
    return tools or None


def _own_images(
    contents: Sequence[Any], images: list[tuple[str, bytes]], files: ImageFiles, *, are_listed: bool
) -> tuple[list[Any], list[tuple[str, bytes]]]:
    """Return contents whose image parts have no names, and their images in order.

    Args:
        contents: content of each turn, text or a list of parts.
        images: images of the record, for contents that name none themselves.
        files: where images are.
        are_listed: whether the record lists `images` itself.

    Raises:
        ValueError: an image cannot be read, or only some of the images are named.
    """
    plain: list[Any] = []
    found: list[Any] = []
    for content in contents:
        _check_video_marker(content)
        if isinstance(content, str):
            found += [None] * content.count(IMAGE_MARKER)
        elif isinstance(content, (list, tuple)):
            content = [_typed(part) for part in content]
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


def _check_video_marker(content: Any) -> None:
    """Refuse a content that begins or ends with the marker of a video. Elsewhere, `<video>` is a word of HTML."""
    texts = [content] if isinstance(content, str) else []
    if isinstance(content, (list, tuple)):
        texts = [part["text"] for part in content if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
    for text in texts:
        is_marked = text.strip().startswith(VIDEO_MARKER) or text.strip().endswith(VIDEO_MARKER)
        if is_marked and "</video>" not in text:
            raise ValueError(f"the text has the marker {VIDEO_MARKER}: videos are not read; leave these records out")


def _typed(part: Any) -> Any:
    """Return a content part with its type, which Qwen's own data leaves out: such as `{"image": ...}`."""
    given = {name: value for name, value in part.items() if value is not None} if isinstance(part, Mapping) else {}
    name = next(iter(given), "")
    return {"type": name, **given} if len(given) == 1 and name in ("text", "image", "video") else part


def image_of(part: Any) -> tuple[bool, Any]:
    """Return whether a content part shows an image, and its name, URL or data, which is None if the part does not say.

    Forms: `{"type": "image"}`, Hugging Face's `{"type": "image", "image": ...}` (or `url`, `path`, `base64`), and
    OpenAI's `{"type": "image_url", "image_url": {"url": ...}}`, also with the URL alone.

    Raises:
        ValueError: the part shows an image in another form.
    """
    given = {name: value for name, value in part.items() if value is not None} if isinstance(part, Mapping) else {}
    kind = str(given.pop("type", ""))
    if kind.startswith("video"):
        raise ValueError("the content shows a video: videos are not read; leave these records out")
    if not kind.startswith("image"):
        return False, None
    given.pop("detail", None)  # a setting for OpenAI's own models
    if kind == "image" and not given:
        return True, None
    ((name, place),) = given.items() if len(given) == 1 else (("", None),)
    if kind == "image_url" and name == "image_url" and isinstance(place, Mapping):
        place = place.get("url")
    allowed = {"image": ("image", "url", "path", "base64"), "image_url": ("image_url", "url")}
    # A row of a table may hold the image itself.
    is_place = isinstance(place, str) or (name == "image" and isinstance(place, (bytes, Mapping)))
    if name not in allowed.get(kind, ()) or not is_place:
        raise ValueError(
            f"a content part of type {kind} has {', '.join(f'{key} ({type(given[key]).__name__})' for key in given)}: "
            'an image is {"type": "image"}, {"type": "image", "image": NAME} or {"type": "image_url", "image_url": '
            '{"url": NAME}}, where NAME is a part of the sample, a file of the image folder or a data: URL'
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

    def load(self, place: Any) -> tuple[str, bytes]:
        """Return name and bytes of an image, given as the name of a part of this sample or as a data: URL.

        Raises:
            ValueError: the image is not in this sample, or not in the format that it claims.
        """
        if not isinstance(place, str):
            raise ValueError(f"an image of json is {type(place).__name__}, expected the name of a part of the sample")
        if place.startswith("data:"):
            return from_data_url(place)
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


def from_data_url(url: str) -> tuple[str, bytes]:
    """Return a name for messages and the bytes of an image in a `data:` URL. Raises ValueError if it is not base64."""
    header, comma, text = url.partition(",")
    if not comma or not header.endswith(";base64"):
        raise ValueError(f"image {url[:40]!r} is a data: URL without base64 content")
    try:
        return "of a data: URL", base64.b64decode(text, validate=True)
    except ValueError as error:
        raise ValueError(f"image {url[:40]!r} is a data: URL whose content is not base64: {error}") from error


def _turns(turns: Any, name: str) -> list[Any]:
    if not isinstance(turns, list):
        raise ValueError(f"{name} is {type(turns).__name__}, expected a list of turns")
    if not turns:
        raise ValueError(f"empty conversation: {name} has no turn")
    return turns


def _check_turn_keys(turns: Sequence[Any]) -> None:
    """Refuse turns with keys that are not read, although they change what is learned."""
    for position, turn in enumerate(turns, 1):
        for key in UNREAD_TURN_KEYS if isinstance(turn, Mapping) else ():
            value = turn.get(key)
            if value not in ((None, 1) if key == "weight" else (None, "")):
                raise ValueError(f"turn {position}: {key} {str(value)[:80]!r} is not read, and it changes what is "
                                 "learned; rewrite the record without it, or leave it out")


def _from_llava(turn: Any) -> dict[str, Any]:
    if not isinstance(turn, Mapping) or turn.get("from") not in LLAVA_ROLES:
        raise ValueError(f"turn {str(turn)[:80]!r} of conversations: `from` is none of {', '.join(LLAVA_ROLES)}")
    role, content = LLAVA_ROLES[turn["from"]], turn.get("value")
    if turn["from"] != "function_call":
        return {"role": role, "content": content}
    try:
        calls = json.loads(content) if isinstance(content, str) else content
    except ValueError as error:
        raise ValueError(f"turn {content[:80]!r} of conversations: the function call is not JSON: {error}") from error
    return {"role": role, "content": None, "tool_calls": calls if isinstance(calls, list) else [calls]}


def _literal(text: Any, name: str) -> Any:
    """Return content in which `<image>` is text and not a marker."""
    if not isinstance(text, str):
        raise ValueError(f"{name} is {type(text).__name__}, expected text")
    if not text.strip():
        raise ValueError(f"no text: {name} is empty")
    return [{"type": "text", "text": text}]
