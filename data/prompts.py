"""Turn conversations into token ids and a loss mask, with a Hugging Face tokenizer, a prompt format and image tags."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken

from data.chat_template import PROBE, ChatTemplate, ConversationRenderer, Medium, Rendered, Turn, unused_word
from data.conversations import IMAGE_MARKER
from data.hf_tokenizer import keep_spaces, load_tokenizer
from data.prompt_formats import IMAGE_TAGS, PROMPT_FORMATS
from mimo.protocols import TokenSpec
from mimo.text import counted

ROLES = ("system", "user", "assistant", "tool")
# Image tokens of families of vision-language models.
IMAGE_TOKENS = ("<image>", "<|image_pad|>", "<IMG_CONTEXT>", "<image_soft_token>", "[IMG]", "<|patch|>", "<|image|>")
# Answers that stand for one that is not known yet, without thoughts and with some.
PROBE_ANSWERS = ("A", "<think>\nA\n</think>\n\nA")


def check_characters(text: str) -> None:
    """Raise ValueError for half a character, which JSON may contain as an escape."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        before = text[max(error.start - 20, 0) : error.start]
        raise ValueError(
            f"the text holds the lone surrogate U+{ord(text[error.start]):04X} after {before!r}, which is half a "
            "character: the escape of the other half is missing") from error


def content_parts(content: Any) -> list[str | Medium]:
    """Return the text parts of a turn's content, and the images and videos between them.

    Args:
        content: text in which each `<image>` stands for an image, or parts `{"type": "text", "text": ...}`,
            `{"type": "image"}` and `{"type": "video"}`, whose text is taken literally.

    Raises:
        ValueError: the content has neither form.
    """
    if isinstance(content, str):
        check_characters(content)
        pieces = content.split(IMAGE_MARKER)
        return [part for piece in pieces for part in (Medium.IMAGE, piece)][1:]
    if not isinstance(content, (list, tuple)):
        raise ValueError(f"content is {type(content).__name__}, expected text or a list of parts")
    parts: list[str | Medium] = []
    for part in content:
        given = {name: value for name, value in part.items() if value is not None} if isinstance(part, Mapping) else {}
        kind = str(given.get("type"))
        if kind == "text" and isinstance(given.get("text"), str):
            check_characters(given["text"])
            parts.append(given["text"])
        elif given in ({"type": "image"}, {"type": "video"}):
            parts.append(Medium(kind))
        elif kind.startswith("image"):
            raise ValueError(f"an image part has {', '.join(sorted(given))}: it may only have type image; images are "
                             "parts of the sample, in order")
        else:
            raise ValueError(f"part {str(part)[:80]!r} of the content is neither text nor image nor video")
    return parts


class Tokenizer:
    """A tokenizer with a prompt format and image tags, for one model.

    The whole text of a sample is tokenised at once, with its image tokens in it, as a processor of transformers does.
    Many tokenizers treat the first word of a text differently, so a text must not be cut at its images.

    Args:
        folder: folder of a Hugging Face tokenizer; nothing is downloaded and none of its code is run.
        prompt_format: `tokenizer` for its own chat template, or a key of `PROMPT_FORMATS`.
        image_tag_type: a key of `IMAGE_TAGS`.
        tokens: the model's vocabulary and image placeholder.
        append_eos: write the end-of-sequence token after each answer, for a chat template that ends none.

    Raises:
        ValueError: the flags cannot work; the message names them and their values.
    """

    def __init__(
        self, folder: str, prompt_format: str, image_tag_type: str, tokens: TokenSpec, *, append_eos: bool = False
    ) -> None:
        if image_tag_type not in IMAGE_TAGS:
            raise ValueError(f"--image-tag-type {image_tag_type}: unknown; known are {', '.join(IMAGE_TAGS)}")
        if prompt_format != "tokenizer" and prompt_format not in PROMPT_FORMATS:
            known = ", ".join(["tokenizer", *PROMPT_FORMATS])
            raise ValueError(f"--prompt-format {prompt_format}: unknown; known are {known}")
        self.name = f"--tokenizer {folder} --prompt-format {prompt_format}"
        self._hf = load_tokenizer(folder)
        self._backend = self._hf.backend_tokenizer
        # tokenizer.json may set both. transformers resets them at each call, but the backend does not.
        self._backend.no_truncation()
        self._backend.no_padding()
        keep_spaces(self._backend)
        self._tags = IMAGE_TAGS[image_tag_type]
        self._image_id = tokens.image_token_id
        self._image_text = ""
        # Stays empty if conversations cannot show videos.
        self._video_id, self.video_text = tokens.video_token_id, ""
        self._stand_ins: dict[str, tuple[Any, str, int]] = {}
        self._document_tags = self._tags
        self._template_is_own = prompt_format == "tokenizer" or not PROMPT_FORMATS[prompt_format].template
        self._template = self._find_template(folder, prompt_format)
        if self._image_id >= 0:
            check_image_token(folder, self._hf, tokens, self._template.image_text)
            if self._image_id in self._hf.added_tokens_decoder:
                self._image_text = self._hf.added_tokens_decoder[self._image_id].content
            self._check_images(image_tag_type)
            self.video_text = self._find_video_token()
        elif max(self._hf.get_vocab().values()) >= tokens.vocab_size:
            raise ValueError(too_small(folder, self._hf, tokens))
        self._renderer = self._find_renderer(folder, prompt_format, append_eos=append_eos)
        if self._image_text and self._image_text in self._renderer.render(PROBE).text:
            raise ValueError(
                f"--image-token-id {self._image_id}: is {self._image_text!r}, which {self.name} writes in every "
                "conversation; give the id of the image token"
            )

    @property
    def rewrites_history(self) -> bool:
        """Whether the template writes an answer differently once other turns follow. Such an answer is not learned."""
        return self._renderer.rewrites_history

    def _find_template(self, folder: str, prompt_format: str) -> ChatTemplate:
        if prompt_format == "tokenizer" or not PROMPT_FORMATS[prompt_format].template:
            if not self._hf.chat_template:
                known = ", ".join(name for name, known in PROMPT_FORMATS.items() if known.template)
                raise ValueError(f"--tokenizer {folder}: has no chat template; give --prompt-format, one of {known}")
            template = str(self._hf.get_chat_template())
        else:
            template = PROMPT_FORMATS[prompt_format].template
        if prompt_format != "tokenizer":
            known = self._hf.get_vocab()
            for token in PROMPT_FORMATS[prompt_format].tokens:
                if (self._hf.eos_token is None) if token == "eos_token" else (token not in known):
                    raise ValueError(f"--prompt-format {prompt_format}: --tokenizer {folder} has no token {token}")
        return ChatTemplate(self.name, template, self._hf, parts=prompt_format == "tokenizer")

    def _find_renderer(self, folder: str, prompt_format: str, *, append_eos: bool) -> ConversationRenderer:
        ends = [token.content for token in self._hf.added_tokens_decoder.values()]
        marks = None
        if prompt_format != "tokenizer":
            ends += PROMPT_FORMATS[prompt_format].tokens
            marks = PROMPT_FORMATS[prompt_format].marks
        eos = self._hf.eos_token or ""
        if append_eos and not eos:
            raise ValueError(f"--append-eos: --tokenizer {folder} has no end-of-sequence token")
        return ConversationRenderer(
            self._template, self._image_text, [*ends, eos], video_token=self.video_text,
            eos_token=eos if append_eos else "", marks=marks
        )

    def _find_video_token(self) -> str:
        """Return the model's video token if the chat template writes it for a video; else no sample may show one."""
        token = self._hf.added_tokens_decoder.get(self._video_id)
        return token.content if token is not None and self._template.video_text.count(token.content) == 1 else ""

    def _check_images(self, image_tag_type: str) -> None:
        """Compare the template's text for an image with the flags, and use its tags for documents."""
        written = self._template.image_text
        if not written:
            return
        if not self._image_text or written.count(self._image_text) != 1:
            name = repr(self._image_text) if self._image_text else "no token"
            raise ValueError(f"--image-token-id {self._image_id}: is {name} of {self.name}, whose chat template writes "
                             f"an image as {written!r}; give the id of the image token in it, or a --prompt-format "
                             "that writes no images itself, with --image-tag-type")
        before, after = written.split(self._image_text)
        if any(tag and tag in around for tag, around in zip(self._tags, (before, after), strict=True)):
            raise ValueError(
                f"--image-tag-type {image_tag_type}: the chat template of {self.name} writes an image as {written!r}, "
                "with these tags; leave --image-tag-type at none"
            )
        self._document_tags = before.strip() + self._tags[0], self._tags[1] + after.strip()

    def encode(
        self, messages: Sequence[Mapping[str, Any]], tiles: Sequence[int] = (), tools: Sequence[Any] | None = None,
        videos: Sequence[Sequence[str]] = (),
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokenise a conversation.

        Args:
            messages: turns with `role` and `content`, see `content_parts`; the assistant's may have `tool_calls`.
            tiles: number of placeholders of each image, in order.
            tools: tools that the conversation offers, in the form that the chat template takes.
            videos: for each video, in order, the text before each of its placeholders. Placeholders with such a text
                are within the tags that the chat template writes around a video.

        Returns:
            Tokens int64 `[T]`, and bool `[T]`, True on the answers and their ends of turn.

        Raises:
            ValueError: the conversation cannot be used; the message says why.
        """
        if not messages:
            raise ValueError("empty conversation")
        turns = [
            _checked_turn(position, message, own_lines=bool(self._template.image_text))
            for position, message in enumerate(messages, 1)
        ]
        if not any(turn.role == "assistant" for turn in turns):
            raise ValueError("no assistant turn: nothing to learn")
        shown = [part for turn in turns for part in turn.parts]
        self._check_count(shown.count(Medium.IMAGE), tiles)
        self._check_videos(shown.count(Medium.VIDEO), videos)
        self._check_tools(turns, tools)
        turns[0] = turns[0]._replace(tools=tools)
        rendered = self._renderer.render(turns)
        check_characters(rendered.text)
        for word, kind, expected in ((rendered.image, "images", len(tiles)), (rendered.video, "videos", len(videos))):
            written = rendered.text.count(word) if word else 0
            if written != expected:
                raise ValueError(f"{self.name}: the chat template writes {written} of {expected} {kind}")
        is_target = np.zeros(len(rendered.text), bool)
        for start, end in rendered.answers:
            is_target[start:end] = True
        tokens, mask = self._tokenise(rendered, is_target, self._tags, tiles, videos)
        if not mask.any():
            raise ValueError("no assistant turn has a token to learn")
        return tokens, mask

    def encode_question(self, messages: Sequence[Mapping[str, Any]], tiles: Sequence[int] = (),
                        tools: Sequence[Any] | None = None, videos: Sequence[Sequence[str]] = (), *,
                        thinks: bool = False) -> tuple[np.ndarray, tuple[int, ...]]:
        """Tokenise a conversation up to where the model answers, as `encode` writes it before an answer.

        Arguments are those of `encode`, with the turns before the answer, and whether it begins with thoughts.

        Returns:
            Tokens int64 `[T]`, and the tokens that end an answer, the one of the template first.

        Raises:
            ValueError: the conversation cannot be used; the message says why.
        """
        answer = {"role": "assistant", "content": PROBE_ANSWERS[thinks]}
        tokens, mask = self.encode([*messages, answer], tiles, tools, videos)
        targets = np.flatnonzero(mask)
        before = np.flatnonzero(~mask[:targets[-1]])  # the user's text is between earlier answers and this one
        last = int(tokens[targets[-1]])
        ends = [last if last in self._hf.added_tokens_decoder else None, self._hf.eos_token_id]
        return tokens[:before[-1] + 1], tuple(dict.fromkeys(end for end in ends if end is not None))

    def encode_document(self, content: Any, tiles: Sequence[int] = ()) -> tuple[np.ndarray, np.ndarray]:
        """Tokenise text without turns, between the tokenizer's tokens for beginning and end, if it has them.

        Args:
            content: see `content_parts`.
            tiles: number of placeholders of each image, in order.

        Returns:
            Tokens int64 `[T]`, and bool `[T]`, True on all but the first and the images with their tags.

        Raises:
            ValueError: there is no text, or images and markers do not match.
        """
        parts = content_parts(content)
        literal = "".join(part for part in parts if isinstance(part, str))
        if not literal.strip():
            raise ValueError("no text")
        if Medium.VIDEO in parts or (self.video_text and self.video_text in literal):
            raise ValueError("a text without turns shows a video; write it as a turn of `messages`")
        self._check_count(parts.count(Medium.IMAGE), tiles)
        marker = unused_word(literal)
        text = "".join(marker if isinstance(part, Medium) else part for part in parts)
        tags = self._document_tags if tiles else ("", "")
        tokens, mask = self._tokenise(Rendered(text, [], marker), np.ones(len(text), bool), tags, tiles)
        for token, position in ((self._hf.bos_token_id, 0), (self._hf.eos_token_id, None)):
            if token is not None:
                at = len(tokens) if position is None else position
                tokens, mask = np.insert(tokens, at, token), np.insert(mask, at, position is None)
        mask[0] = False
        return tokens, mask

    def _check_tools(self, turns: Sequence[Turn], tools: Sequence[Any] | None) -> None:
        used = {"tools"} if tools else set()
        used |= {"tool_calls" for turn in turns if "tool_calls" in turn.fields}
        used |= {"turns of role tool" for turn in turns if turn.role == "tool"}
        # Prompt formats do not know tools, and several would write a tool's result as an answer.
        lost = sorted(used & self._renderer.unwritten_tools if used and self._template_is_own else used)
        if lost:
            raise ValueError(
                f"the conversation has {' and '.join(lost)}, which the chat template of {self.name} does not write; "
                "--prompt-format tokenizer takes them with a tokenizer whose own template has tools"
            )

    def _check_count(self, markers: int, tiles: Sequence[int]) -> None:
        if markers != len(tiles):
            raise ValueError(f"{counted(markers, 'image marker')} but {counted(len(tiles), 'image')}")
        if tiles and self._image_id < 0:
            raise ValueError(f"has {counted(len(tiles), 'image')}, but the model takes none")

    def _check_videos(self, markers: int, videos: Sequence[Sequence[str]]) -> None:
        if markers != len(videos):
            raise ValueError(f"{counted(markers, 'video marker')} but {counted(len(videos), 'video')}")
        if videos and not self.video_text:
            raise ValueError(f"has {counted(len(videos), 'video')}, which the chat template of {self.name} does not "
                             f"write with the model's video token {self._video_id}; --prompt-format tokenizer takes "
                             "them with the model's own tokenizer")

    def _tokenise(
        self, rendered: Rendered, is_target: np.ndarray, tags: tuple[str, str], tiles: Sequence[int],
        videos: Sequence[Sequence[str]] = (),
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokenise a text with its images, and find the tokens that have a character where `is_target` is true.

        Raises:
            ValueError: the beginning or end of an answer lies inside a token.
        """
        places = [re.escape(word) for word in (rendered.image, rendered.spelling, rendered.video) if word]
        pieces = re.split(f"({'|'.join(places)})", rendered.text) if places else [rendered.text]
        # The image token's name in a sample's own text must not become an image.
        spelled = self._image_text if rendered.spelling else ""
        backend, image, image_id = self._image_token("".join(pieces[::2]) + spelled, has_images=bool(tiles))
        texts: list[str] = []
        masks: list[np.ndarray] = []
        start, images, texts_of_videos = 0, iter(tiles), iter(videos)
        for number, piece in enumerate(pieces):
            target = is_target[start : start + len(piece)]
            start += len(piece)
            if number % 2 and piece == rendered.image:
                piece = f"{tags[0]}{image * next(images)}{tags[1]}"
                target = np.zeros(len(piece), bool)
            elif number % 2 and piece == rendered.video:
                piece = self._video_placeholders(next(texts_of_videos))
                target = np.zeros(len(piece), bool)
            elif number % 2:
                piece = self._image_text
                target = np.full(len(piece), target.any())
            texts.append(piece)
            masks.append(target)
        text = "".join(texts)
        encoding = backend.encode(text, add_special_tokens=bool(rendered.answers)
                                  and self._template.adds_special_tokens(rendered.text))
        tokens = np.array(encoding.ids, np.int64)
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        targets_before = np.concatenate([[0], np.cumsum(np.concatenate(masks))])
        mask = targets_before[offsets[:, 1]] > targets_before[offsets[:, 0]]
        if rendered.answers:
            _check_boundaries(text, offsets, np.concatenate(masks), mask)
        is_image = tokens == image_id
        is_video = (tokens == self._video_id) & (self._video_id >= 0)
        for found, expected, kind in ((is_image, sum(tiles), "image"), (is_video, sum(map(len, videos)), "video")):
            if found.sum() != expected:
                raise ValueError(f"{self.name}: tokenising the text gives {found.sum()} {kind} tokens, not {expected}")
        tokens[is_image] = self._image_id
        return tokens, mask & ~is_image & ~is_video

    def _video_placeholders(self, texts: Sequence[str]) -> str:
        """Return the placeholders of a video. Those with a text before them are each within the template's tags."""
        before, after = self._template.video_text.split(self.video_text)
        return "".join(f"{text}{before}{self.video_text}{after}" if text else self.video_text for text in texts)

    def _image_token(self, text: str, *, has_images: bool) -> tuple[Any, str, int]:
        """Return a tokenizer for a text, the name of the image token in the text, and its id.

        They are the tokenizer's own, unless it has no image token or the text contains its name.
        """
        if self._image_text not in text if self._image_text else not has_images:
            return self._backend, self._image_text, self._image_id
        word = next((word for word in self._stand_ins if word not in text), unused_word(text))
        if word not in self._stand_ins:
            self._stand_ins[word] = self._stand_in(word)
        return self._stand_ins[word]

    def _stand_in(self, word: str) -> tuple[Any, str, int]:
        """Copy the tokenizer, with a word that no text contains as the name of its image token."""
        if not self._image_text:
            backend = type(self._backend).from_str(self._backend.to_str())
            backend.add_special_tokens([AddedToken(word, special=True, normalized=False)])
            return backend, word, backend.token_to_id(word)
        saved = json.loads(self._backend.to_str())
        for token in saved["added_tokens"]:
            if token["id"] == self._image_id:
                token["content"] = word
        vocabulary = saved["model"]["vocab"]
        if isinstance(vocabulary, dict):
            saved["model"]["vocab"] = {
                word if number == self._image_id else token: number for token, number in vocabulary.items()
            }
        elif self._image_id < len(vocabulary):
            vocabulary[self._image_id] = [word, *vocabulary[self._image_id][1:]]
        backend = type(self._backend).from_str(json.dumps(saved))
        assert backend.token_to_id(word) == self._image_id, (word, backend.token_to_id(word))
        return backend, word, self._image_id


def _check_boundaries(text: str, offsets: np.ndarray, is_target: np.ndarray, mask: np.ndarray) -> None:
    """Refuse tokens across the border of an answer: with the end of its prompt, or with the text that follows it.

    White space does not matter: the model does generate a token " yes" after "ASSISTANT:", although the template wrote
    the space. But the model cannot be prompted with half a token.
    """
    lengths = offsets[:, 1] - offsets[:, 0]
    targets_before = np.concatenate([[0], np.cumsum(is_target)])
    partly = targets_before[offsets[:, 1]] - targets_before[offsets[:, 0]] < lengths
    for start, end in offsets[mask & partly]:
        inside = is_target[start:end]
        outside = "".join(character for character, learned in zip(text[start:end], inside, strict=True) if not learned)
        if outside.strip():
            raise ValueError(
                f"the token {text[start:end]!r} holds a part of an answer and {outside!r}, which is none: the "
                "tokenizer merges answers with what the chat template writes around them; give another --prompt-format"
            )


def too_small(folder: str, tokenizer: Any, tokens: TokenSpec) -> str:
    """Return the error message for a vocabulary with fewer tokens than the tokenizer's."""
    largest = max(tokenizer.get_vocab().values())
    return f"--tokenizer {folder}: has token ids up to {largest}, the model's --vocab-size is {tokens.vocab_size}"


def check_image_token(folder: str, tokenizer: Any, tokens: TokenSpec, image_text: str) -> None:
    """Refuse an image token that is not the tokenizer's, or that ordinary text produces too.

    Args:
        folder: folder of the tokenizer.
        tokenizer: the Hugging Face tokenizer.
        tokens: the model's vocabulary and image placeholder.
        image_text: text that the chat template writes for an image; empty if it writes none.

    Raises:
        ValueError: the image token cannot be used; the message names flags and values.
    """
    vocabulary, image_id = tokenizer.get_vocab(), tokens.image_token_id
    size = max(vocabulary.values()) + 1
    if size > tokens.vocab_size:
        raise ValueError(too_small(folder, tokenizer, tokens))
    known = image_tokens(folder, tokenizer, image_text)
    if known and image_id not in known.values():
        right = " or ".join(f"{number} ({token!r})" for token, number in known.items())
        token = tokenizer.convert_ids_to_tokens(image_id)
        raise ValueError(
            f"--image-token-id {image_id}: is {repr(token) if token else 'no token'} of --tokenizer {folder}, whose "
            f"image token is {right}"
        )
    special = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, tokenizer.pad_token_id}
    ordinary = image_id in vocabulary.values() and image_id not in tokenizer.added_tokens_decoder
    if ordinary or image_id in special:
        raise ValueError(
            f"--image-token-id {image_id}: is {tokenizer.convert_ids_to_tokens(image_id)!r} of "
            f"--tokenizer {folder}, which text gives too; take an id that it does not use"
            + (f", such as {size}" if size < tokens.vocab_size else "")
        )


def image_tokens(folder: str, tokenizer: Any, image_text: str) -> dict[str, int]:
    """Return the tokens of a tokenizer that may stand for an image, with their ids. Most often there is one, or none.

    They come from its files, else from the chat template's text for an image, else from the names that families use.
    """
    names = [tokenizer.special_tokens_map.get("image_token")]
    saved = Path(folder) / "processor_config.json"
    if saved.is_file():
        names.append(json.loads(saved.read_text()).get("image_token"))
    added = {token.content: number for number, token in tokenizer.added_tokens_decoder.items()}
    for candidates in (names, [name for name in IMAGE_TOKENS if name in image_text], IMAGE_TOKENS):
        found = {name: added[name] for name in candidates if name in added}
        if found:
            return found
    return {}


def _checked_turn(position: int, message: Any, *, own_lines: bool) -> Turn:
    """Read role, content parts and tool calls of a turn.

    Args:
        position: number of the turn, from 1.
        message: the turn, with `role` and `content`.
        own_lines: whether the template writes images, so that a line break beside a marker belongs to the marker.

    Raises:
        ValueError: an unknown role, an empty turn, an image in an answer, tool calls that cannot be read.
    """
    if not isinstance(message, Mapping):
        raise ValueError(f"turn {position} is {type(message).__name__}, expected role and content")
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(f"turn {position}: role {role!r} is none of {', '.join(ROLES)}")
    fields: dict[str, Any] = {}
    if message.get("tool_calls"):
        if role != "assistant":
            raise ValueError(f"turn {position}: tool_calls of role {role}, expected them of the assistant")
        fields["tool_calls"] = _tool_calls(position, message["tool_calls"])
    if role == "tool":
        fields = {name: message[name] for name in ("name", "tool_call_id") if message.get(name) is not None}
    content = message.get("content")
    if content is None and "tool_calls" in fields:
        content = ""
    if own_lines and isinstance(content, str):
        content = re.sub(f"\n?{IMAGE_MARKER}\n?", IMAGE_MARKER, content)
    parts = content_parts(content)
    shown = next((part for part in parts if isinstance(part, Medium)), None)
    if role == "assistant" and shown is not None:
        raise ValueError(f"turn {position}: {shown.value} in an answer")
    if role != "tool" and not fields and not any(isinstance(part, Medium) or part.strip() for part in parts):
        raise ValueError(f"turn {position} ({role}) is empty")
    return Turn(str(role), parts, fields)


def _tool_calls(position: int, calls: Any) -> list[dict[str, Any]]:
    """Convert tool calls for chat templates, which take arguments as an object. OpenAI's are JSON."""
    if not isinstance(calls, (list, tuple)):
        raise ValueError(f"turn {position}: tool_calls is {type(calls).__name__}, expected a list")
    read = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(f"turn {position}: tool call {str(call)[:80]!r} has no function with a name")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError as error:
                raise ValueError(
                    f"turn {position}: arguments of tool call {function['name']!r} are not JSON: {error}") from error
        if not isinstance(arguments, Mapping):
            raise ValueError(f"turn {position}: arguments of tool call {function['name']!r} are "
                             f"{type(arguments).__name__}, expected an object")
        given = {"id": call["id"]} if call.get("id") is not None else {}
        read.append({**given, "type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return read
