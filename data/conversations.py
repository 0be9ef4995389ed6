"""Read a record of a data set as a conversation or a document, with its images and videos still compressed.

A record is the `json` part of a WebDataset sample, a line of a JSONL file or a row of a table. All of them take the
same forms (`from_record`); they differ in where their images and videos are (`MediaFiles`).
"""

from __future__ import annotations

import base64
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

# `from` of a turn of `conversations`. The last three are ShareGPT's names in records with tools.
LLAVA_ROLES = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
               "function_call": "assistant", "observation": "tool", "tool": "tool"}
# Keys of a record by which its form is recognised, in this order, and what each form is.
FORMS = {"messages": "turns of role and content", "conversations": "turns of from and value",
         "texts": "pairs of user and assistant", "question": "a question with answer or answers",
         "caption": "a caption of images or videos", "text": "a text, or a caption of images that it does not mark"}
# Forms of the `json` part of a sample in shards, in another order: what a shard means must not change.
SHARD_FORMS = ("messages", "conversations", "text", "caption", "texts", "question")
VIDEO_KEYS = ("video", "videos")
VIDEO_EXTENSIONS = frozenset("mp4 webm avi mov mkv m4v mpg mpeg".split())
# Keys of a turn that change what a model learns and are not read.
UNREAD_TURN_KEYS = ("weight", "loss", "reasoning_content", "reasoning", "thinking", "function_call")
# Of these, weights of a turn in the loss, which change nothing if they are 1 or true. ms-swift has the second.
TURN_WEIGHTS = ("weight", "loss")
# Keys beside a question that belong to it and are not read.
UNREAD_QUESTION_KEYS = ("choices", "options", "hint", "context")
TEXT_PARTS = ("json", "txt")
# Marker of an image in the text of a turn, and marker of a video if the record has one.
IMAGE_MARKER = "<image>"
VIDEO_MARKER = "<video>"
# Names of the rate of a video that is given as images.
RATE_KEYS = ("fps", "sample_fps")
# Some of these formats cannot be decoded. Samples with them are bad samples, not samples without an image.
IMAGE_EXTENSIONS = frozenset(
    "png jpg jpeg jpe jfif webp bmp dib gif tif tiff ppm pgm pbm pnm avif heic heif jp2 svg img image".split()
)
# First bytes of files in common formats.
SIGNATURES = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"II*\0", b"MM\0*")


@dataclass(frozen=True)
class FrameList:
    """A video that is given as images: name and compressed bytes of each, and images per second."""

    frames: list[tuple[str, bytes]]
    rate: float


type Video = bytes | Path | FrameList
"""A video: content of its file, its file, or images."""


@dataclass(frozen=True)
class Conversation:
    """Content of a sample before it is checked: either turns or one text.

    Attributes:
        messages: turns with `role` and `content`; None for a document.
        document: text or content parts without turns; None for a conversation.
        images: name and compressed bytes of each image, in the order in which the text shows them.
        tools: tools that the conversation offers; None if there are none.
        videos: name and content of each video, in the order in which the text shows them.
    """

    messages: list[Any] | None = None
    document: Any = None
    images: list[tuple[str, bytes]] = field(default_factory=list)
    tools: list[Any] | None = None
    videos: list[tuple[str, Video]] = field(default_factory=list)


class MediaFiles(Protocol):
    """The place where a record's images and videos are."""

    def images(self) -> list[tuple[str, bytes]]:
        """Return name and bytes of all images of the record, in order."""
        ...

    def videos(self) -> list[tuple[str, Video]]:
        """Return name and content of all videos of the record, in order."""
        ...

    def load(self, place: Any) -> tuple[str, bytes]:
        """Return name and bytes of an image that the record names. Raises ValueError if there is no such image."""
        ...

    def load_video(self, place: Any) -> tuple[str, Video]:
        """Return name and content of a video that the record names. Raises ValueError if there is no such video."""
        ...


def natural_order(name: str) -> list[tuple[int, str]]:
    """Sort key under which `2.png` comes before `10.png`."""
    return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in re.split(r"([0-9]+)", name) if piece]


def captioned(caption: Any, images: list[tuple[str, bytes]], prompt: str = "",
              videos: Sequence[tuple[str, Video]] = ()) -> Conversation:
    """Make a conversation of images and a text about them: the user shows them, the assistant answers with the text."""
    if not images and not videos:
        raise ValueError("a caption without an image")
    shown = _shown(len(images), len(videos))
    if prompt:
        shown = [*shown, {"type": "text", "text": prompt}]
    return Conversation(
        messages=[{"role": "user", "content": shown}, {"role": "assistant", "content": _literal(caption, "caption")}],
        images=images, videos=list(videos),
    )


def _shown(num_images: int, num_videos: int) -> list[dict[str, str]]:
    """Return the content parts of images and videos that no text marks."""
    return [{"type": "image"}] * num_images + [{"type": "video"}] * num_videos


def _marks(text: str, has_videos: object) -> bool:
    """Return whether a text marks an image or, in a record with videos, a video."""
    return IMAGE_MARKER in text or bool(has_videos) and VIDEO_MARKER in text


def is_image(name: str, data: Any = b"") -> bool:
    """Return whether a part of a sample is an image, by its extension or else by its first bytes."""
    if name.rpartition(".")[2].lower() in IMAGE_EXTENSIONS:
        return True
    return isinstance(data, bytes) and (data.startswith(SIGNATURES) or data[8:12] == b"WEBP")


def is_video(name: str) -> bool:
    """Return whether a part of a sample is a video, by its extension."""
    return name.rpartition(".")[2].lower() in VIDEO_EXTENSIONS


def is_read(name: str) -> bool:
    """Return whether the name alone shows that a part of a sample is read, as text, image or video."""
    return name in TEXT_PARTS or is_image(name) or is_video(name)


def from_parts(key: str, parts: Mapping[str, Any]) -> Conversation:
    """Read a sample of a crude data set.

    Its part `json` holds `messages` (turns of `role` and `content`), `conversations` (turns of `from` and `value`, as
    in LLaVA), `text` or `caption`. Without it, the part `txt` is a caption, or a text if there is no image. If
    `images` of the json or the content itself names images, these are the sample's images. Otherwise all other parts
    that are images belong to it, sorted by name with numbers by value. Videos likewise. Further parts are not read.

    Args:
        key: name of the sample in its shard.
        parts: parts by extension: `json` already parsed, `txt` as a str, the others as bytes.

    Raises:
        ValueError: the sample cannot be read; the message says why.
    """
    files = SampleFiles(key, {name: part for name, part in parts.items() if name not in TEXT_PARTS})
    if "json" not in parts:
        images, videos = files.images(), files.videos()
        if "txt" not in parts:
            raise ValueError(f"no text: has neither json nor txt, only {', '.join(sorted(parts)) or 'nothing'}")
        return (captioned(parts["txt"], images, videos=videos) if images or videos
                else Conversation(document=_literal(parts["txt"], "txt")))
    content = parts["json"]
    if not isinstance(content, Mapping):
        raise ValueError(f"json is {type(content).__name__}, expected an object")
    names = content.get("images")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ValueError("images of json: expected a list of names of the sample's parts")
    # In shards, `system` is a turn and never a key beside the turns.
    content = {name: value for name, value in content.items() if name != "system"}
    return from_record(content, names, files, SHARD_FORMS)


def from_record(record: Mapping[str, Any], names: Sequence[Any] | None, files: MediaFiles,
                forms: Sequence[str] = tuple(FORMS)) -> Conversation:
    """Read a record, whose form is decided by the first key of `forms` that it has.

    Args:
        record: the record. `video` or `videos` lists its videos.
        names: the images that the record lists; None if it lists none, so that its images are those of `files`.
        files: where images and videos are.
        forms: the keys of `FORMS`, in the order in which they are looked for.

    Raises:
        ValueError: the record cannot be read; the message says why.
    """
    form = next((key for key in forms if record.get(key) is not None), None)
    if form is None:
        known = ", ".join(f"{key} ({what})" for key, what in FORMS.items())
        raise ValueError(f"unknown form: it has {', '.join(map(str, record)) or 'no key'}, expected one of {known}")
    _check_keys_beside(record, form)
    listed = _listed_videos(record)
    media = _Media(files, files.images() if names is None else [files.load(name) for name in names],
                   files.videos() if listed is None else [_load_video(place, files) for place in listed],
                   lists_images=names is not None, lists_videos=listed is not None)
    if form == "caption":
        return captioned(record["caption"], media.images, videos=media.videos)
    if form == "text" and (media.images or media.videos) and isinstance(record["text"], str) and not _marks(
            record["text"], media.videos):
        return captioned(record["text"], media.images, videos=media.videos)
    if form == "text":
        (document,) = media.owned([record["text"]])
        return Conversation(document=document, images=media.images, videos=media.videos)
    if form == "question":
        messages = _question(record, _shown(len(media.images), len(media.videos)))
    elif form == "texts":
        messages = [turn for pair in _turns(record["texts"], "texts") for turn in _pair(pair)]
        if not any(_marks(turn["content"], media.videos) for turn in messages):
            messages[0]["content"] = [*_shown(len(media.images), len(media.videos)),
                                      {"type": "text", "text": messages[0]["content"]}]
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
    contents = media.owned([turn.get("content") if isinstance(turn, Mapping) else None for turn in messages])
    messages = [{**turn, "content": content} if isinstance(turn, Mapping) else turn
                for turn, content in zip(messages, contents, strict=True)]
    return Conversation(messages=messages, images=media.images, tools=_tools(record.get("tools")), videos=media.videos)


def _check_keys_beside(record: Mapping[str, Any], form: str) -> None:
    """Refuse keys beside a caption or a text that belong to a conversation and are not read."""
    for key in ("system", "tools") if form in ("caption", "text") else ():
        if record.get(key):
            raise ValueError(f"{key} {str(record[key])[:80]!r} beside {form} is not read; write the record as "
                             "`messages`, or remove the key")


def _listed_videos(record: Mapping[str, Any]) -> list[Any] | None:
    """Return the videos that a record lists under `video` or `videos`; None if it lists none."""
    keys = [key for key in VIDEO_KEYS if record.get(key)]
    if not keys:
        return None
    if len(keys) > 1:
        raise ValueError("has both video and videos; keep one")
    listed = record[keys[0]]
    if not isinstance(listed, list) or _is_frames(listed):
        listed = [listed]
    return [{"frames": video, "fps": _rate(record)} if _is_frames(video) else video for video in listed]


def _rate(given: Mapping[str, Any]) -> Any:
    """Return the rate of a video that is given as images; None without one. Raises ValueError for two rates."""
    rates = {key: given[key] for key in RATE_KEYS if given.get(key) is not None}
    first = next(iter(rates.values()), None)
    if any(rate != first for rate in rates.values()):
        raise ValueError(f"a video of images has {' and '.join(f'{key} {rate!r}' for key, rate in rates.items())}; "
                         "keep the one that says how many of the images a second has")
    return first


def _is_frames(value: Any) -> bool:
    """Return whether a value names the images of a video rather than several videos."""
    return isinstance(value, list) and bool(value) and all(
        isinstance(name, str) and (is_image(name) or name.startswith("data:image/")) for name in value)


def _load_video(place: Any, files: MediaFiles) -> tuple[str, Video]:
    """Return name and content of a video that a record names, or gives as `{"frames": [...], "fps": ...}`."""
    if not isinstance(place, Mapping) or "frames" not in place:
        return files.load_video(place)
    frames, rate = place["frames"], place.get("fps")
    if not isinstance(frames, list) or not frames:
        raise ValueError(f"frames {str(frames)[:80]!r} of a video: expected a list of images")
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not rate > 0:
        raise ValueError(f"a video of {len(frames)} images has fps {rate!r}: say how many of the images a second has")
    return f"of {len(frames)} images", FrameList([files.load(frame) for frame in frames], float(rate))


def _question(record: Mapping[str, Any], shown: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the turns of a question and its answer: the one given, or the most frequent of several.

    Unless the question marks its images and videos, `shown` comes before it.
    """
    for key in UNREAD_QUESTION_KEYS:
        if record.get(key):
            raise ValueError(f"{key} beside question is not read; write it into the question and remove the key")
    question, answer = record["question"], record.get("answer")
    if answer is None:
        given = record.get("answers") or []
        if not given:
            raise ValueError("no text: the question has neither answer nor answers")
        # The elements of a text would be letters, and those of an object its keys.
        answers = [each.get("answer") if isinstance(each, Mapping) else each
                   for each in (given if isinstance(given, list) else ())]
        if not answers or not all(isinstance(each, str) for each in answers):
            raise ValueError("answers: expected a list of texts, or of objects with `answer`")
        answer = Counter(answers).most_common(1)[0][0]  # the first of equally frequent ones
    if not isinstance(question, str) or not _marks(question, {"type": "video"} in shown):
        question = [*shown, *_literal(question, "question")]
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


@dataclass
class _Media:
    """Images and videos of a record.

    Attributes:
        files: where they are.
        images: name and bytes of each image that the record lists; replaced by those that its content names.
        videos: name and content of each video that the record lists; replaced by those that its content names.
        lists_images: whether the record lists images itself.
        lists_videos: whether it lists videos itself.
    """

    files: MediaFiles
    images: list[tuple[str, bytes]]
    videos: list[tuple[str, Video]]
    lists_images: bool
    lists_videos: bool

    def owned(self, contents: Sequence[Any]) -> list[Any]:
        """Return contents whose image and video parts have no names, and load those that they named.

        Args:
            contents: content of each turn, text or a list of parts.

        Raises:
            ValueError: an image cannot be read, or only some of the images are named.
        """
        contents = _split_at_videos(contents, has_images=bool(self.images)) if self.videos else contents
        plain: list[Any] = []
        found: dict[str, list[Any]] = {"image": [], "video": []}
        for content in contents:
            if isinstance(content, str):
                found["image"] += [None] * content.count(IMAGE_MARKER)
            elif isinstance(content, (list, tuple)):
                content = [_typed(part) for part in content]
                shown = [media_of(part) for part in content]
                for kind, place in filter(None, shown):
                    found[kind].append(place)
                content = [{"type": each[0]} if each else part for part, each in zip(content, shown, strict=True)]
            plain.append(content)
        if not found["video"]:
            for content in contents:
                _check_video_marker(content)
        if _are_named("image", found["image"]):
            own = [self.files.load(place) for place in found["image"]]
            _check_listed("images", own, self.images if self.lists_images else None)
            self.images = own
        if _are_named("video", found["video"]):
            videos = [_load_video(place, self.files) for place in found["video"]]
            _check_listed("videos", videos, self.videos if self.lists_videos else None)
            self.videos = videos
        return plain


def _split_at_videos(contents: Sequence[Any], *, has_images: bool) -> list[Any]:
    """Return contents in which texts that mark a video are lists of parts.

    A line break beside a marker belongs to it. LLaVA's records with a single video mark it as an image.
    """
    texts = [content for content in contents if isinstance(content, str)]
    if not has_images and not any(VIDEO_MARKER in text for text in texts):
        contents = [content.replace(IMAGE_MARKER, VIDEO_MARKER) if isinstance(content, str) else content
                    for content in contents]
    split = []
    for content in contents:
        if isinstance(content, str) and VIDEO_MARKER in content:
            pieces = re.split(f"\n?({IMAGE_MARKER}|{VIDEO_MARKER})\n?", content)
            content = [{"type": piece.strip("<>")} if number % 2 else {"type": "text", "text": piece}
                       for number, piece in enumerate(pieces) if piece]
        split.append(content)
    return split


def _are_named(kind: str, places: Sequence[Any]) -> bool:
    """Return whether the content names its images or videos. Raises ValueError if it names only some of them."""
    named = sum(place is not None for place in places)
    if 0 < named < len(places):
        raise ValueError(f"the content names only {named} of its {len(places)} {kind}s, so their order is unknown; "
                         "name all of them or none")
    return named > 0


def _check_listed(key: str, own: Sequence[tuple[str, Any]], listed: Sequence[tuple[str, Any]] | None) -> None:
    """Raise ValueError if a record lists other images or videos than its content names."""
    if listed is not None and [name for name, _ in own] != [name for name, _ in listed]:
        raise ValueError(f"{key} of json names {', '.join(name for name, _ in listed) or 'none'}, the content shows "
                         f"{', '.join(name for name, _ in own)}")


def _check_video_marker(content: Any) -> None:
    """Refuse a content without videos that begins or ends with the marker of one. Elsewhere, it is a word of HTML."""
    texts = [content] if isinstance(content, str) else []
    if isinstance(content, (list, tuple)):
        texts = [part["text"] for part in content if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
    for text in texts:
        is_marked = text.strip().startswith(VIDEO_MARKER) or text.strip().endswith(VIDEO_MARKER)
        if is_marked and "</video>" not in text:
            raise ValueError(f"the text has the marker {VIDEO_MARKER}, and there is no video; name it under `video`")


def _typed(part: Any) -> Any:
    """Return a content part with its type, which Qwen's own data leaves out, as in `{"image": ...}`."""
    given = {name: value for name, value in part.items() if value is not None} if isinstance(part, Mapping) else {}
    if "video" in given and "type" not in given:
        return {"type": "video", **given}
    name = next(iter(given), "")
    return {"type": name, **given} if len(given) == 1 and name in ("text", "image") else part


def media_of(part: Any) -> tuple[str, Any] | None:
    """Return what a content part shows, `image` or `video`, and its name, URL or data; None for other parts.

    The name is None if the part does not say it. Forms: `{"type": "image"}`, Hugging Face's `{"type": "image", "image":
    ...}` (or `url`, `path`, `base64`), and OpenAI's `{"type": "image_url", "image_url": {"url": ...}}`, also with the
    URL alone. Videos have the same forms, and a list of images with their rate: `{"type": "video", "video": [...],
    "fps": ...}`.

    Raises:
        ValueError: the part shows an image or a video in another form.
    """
    given = {name: value for name, value in part.items() if value is not None} if isinstance(part, Mapping) else {}
    kind = str(given.pop("type", ""))
    medium = next((name for name in ("image", "video") if kind.startswith(name)), "")
    if not medium:
        return None
    given.pop("detail", None)  # a setting for OpenAI's own models
    if kind == medium and not given:
        return medium, None
    if kind == "video" and isinstance(given.get("video"), list):
        rate, given = _rate(given), {key: value for key, value in given.items() if key not in RATE_KEYS}
        if len(given) == 1:
            return medium, {"frames": given["video"], "fps": rate}
    ((name, place),) = given.items() if len(given) == 1 else (("", None),)
    if kind == f"{medium}_url" and name == kind and isinstance(place, Mapping):
        place = place.get("url")
    allowed = {medium: (medium, "url", "path", "base64"), f"{medium}_url": (f"{medium}_url", "url")}
    # A row of a table may hold the image itself.
    is_place = isinstance(place, str) or (name == medium and isinstance(place, (bytes, Mapping)))
    if name not in allowed.get(kind, ()) or not is_place:
        sampling = "; how frames are sampled is set by the --video-... flags" if medium == "video" else ""
        raise ValueError(
            f"a content part of type {kind} has {', '.join(f'{key} ({type(given[key]).__name__})' for key in given)}: "
            f'{"an image" if medium == "image" else "a video"} is {{"type": "{medium}"}}, {{"type": "{medium}", '
            f'"{medium}": NAME}} or {{"type": "{medium}_url", "{medium}_url": {{"url": NAME}}}}, where NAME is a part '
            f"of the sample, a file of the image folder or a data: URL{sampling}"
        )
    return medium, f"data:;base64,{place}" if name == "base64" else place


@dataclass(frozen=True)
class SampleFiles:
    """The parts of a sample that may be images or videos.

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

    def videos(self) -> list[tuple[str, Video]]:
        """Return all videos in the order of their names."""
        return [(name, self.parts[name]) for name in sorted(filter(is_video, self.parts), key=natural_order)]

    def load(self, place: Any, kind: str = "image") -> tuple[str, bytes]:
        """Return name and bytes of an image, given as the name of a part of this sample or as a data: URL.

        Args:
            place: the name or URL.
            kind: `image` or `video`, for messages.

        Raises:
            ValueError: the image is not in this sample, or not in the format that it claims.
        """
        if not isinstance(place, str):
            raise ValueError(f"{'an' if kind == 'image' else 'a'} {kind} of json is {type(place).__name__}, expected "
                             "the name of a part of the sample")
        if place.startswith("data:"):
            return from_data_url(place, kind)
        if re.match(r"https?://", place):
            raise ValueError(f"{kind} {place[:200]!r} is on the network, from where nothing is fetched; store it as a "
                             "part of the sample")
        if "/" in place or "\\" in place or ".." in place or re.match(r"[A-Za-z]:", place):
            raise ValueError(f"{kind} {place!r} of json is a path outside the dataset; {kind}s are parts of the sample")
        part = place if place in self.parts else place.removeprefix(f"{self.key.rpartition('/')[2]}.")
        if part not in self.parts:
            known = ", ".join(name for name, _ in [*self.images(), *self.videos()]) or f"no {kind}s"
            raise ValueError(f"{kind} {place!r} of json is no part of the sample, which has {known}")
        return part, self.parts[part]

    def load_video(self, place: Any) -> tuple[str, Video]:
        """Return name and bytes of a video; see `load`."""
        return self.load(place, "video")


def from_data_url(url: str, kind: str) -> tuple[str, bytes]:
    """Return a name for messages and the bytes of an image in a `data:` URL. Raises ValueError if it is not base64."""
    header, comma, text = url.partition(",")
    if not comma or not header.endswith(";base64"):
        raise ValueError(f"{kind} {url[:40]!r} is a data: URL without base64 content")
    try:
        return "of a data: URL", base64.b64decode(text, validate=True)
    except ValueError as error:
        raise ValueError(f"{kind} {url[:40]!r} is a data: URL whose content is not base64: {error}") from error


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
            if value not in ((None, 1) if key in TURN_WEIGHTS else (None, "")):
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
