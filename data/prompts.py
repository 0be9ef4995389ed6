"""Conversations to token ids and a loss mask: a Hugging Face tokenizer with a prompt format and image tags."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from transformers.utils.chat_template_utils import render_jinja_template

from data.prompt_formats import IMAGE_TAGS, PROMPT_FORMATS
from mimo.protocols import TokenSpec

IMAGE_MARKER = "<image>"
ROLES = ("system", "user", "assistant")


def content_parts(content: Any) -> list[str | None]:
    """The text parts of a turn's content, None for each image between them.

    Args:
        content: text in which each `<image>` stands for an image, or parts `{"type": "text", "text": ...}` and
            `{"type": "image"}`, whose text is taken literally.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(content, str):
        pieces = content.split(IMAGE_MARKER)
        return [part for piece in pieces for part in (None, piece)][1:]
    if not isinstance(content, (list, tuple)):
        raise ValueError(f"content is {type(content).__name__}, expected text or a list of parts")
    parts: list[str | None] = []
    for part in content:
        given = {name: value for name, value in part.items() if value is not None} if isinstance(part, Mapping) else {}
        if given.get("type") == "text" and isinstance(given.get("text"), str):
            parts.append(given["text"])
        elif given == {"type": "image"}:
            parts.append(None)
        elif str(given.get("type")).startswith("image"):
            raise ValueError(
                f"an image part has {', '.join(sorted(given))}: it may have type image alone; images are parts of the "
                "sample, in order"
            )
        else:
            raise ValueError(f"part {str(part)[:80]!r} of the content is neither text nor image")
    return parts


def _place_images(texts: Sequence[list[str | None]], tags: tuple[str, str]) -> tuple[list[str], str]:
    """Each text with its images as markers between tags, and the marker: a word that occurs in none of the texts."""
    literal = "".join(part for parts in texts for part in parts if part is not None)
    number = 0
    while (marker := f"IMAGE{number}PLACEHOLDER") in literal:
        number += 1
    image = f"{tags[0]}{marker}{tags[1]}"
    return ["".join(image if part is None else part for part in parts) for parts in texts], marker


class Tokenizer:
    """A tokenizer with a prompt format and image tags, for one model.

    Args:
        folder: where a Hugging Face tokenizer was saved; nothing is downloaded and none of its code is run.
        prompt_format: `tokenizer` for its own chat template, or a key of `PROMPT_FORMATS`.
        image_tag_type: a key of `IMAGE_TAGS`.
        tokens: the model's vocabulary and image placeholder.

    Raises:
        ValueError: naming flags and values, for what cannot work.
    """

    def __init__(self, folder: str, prompt_format: str, image_tag_type: str, tokens: TokenSpec) -> None:
        if image_tag_type not in IMAGE_TAGS:
            raise ValueError(f"--image-tag-type {image_tag_type}: unknown; known are {', '.join(IMAGE_TAGS)}")
        if prompt_format != "tokenizer" and prompt_format not in PROMPT_FORMATS:
            known = ", ".join(["tokenizer", *PROMPT_FORMATS])
            raise ValueError(f"--prompt-format {prompt_format}: unknown; known are {known}")
        self.name = f"--tokenizer {folder} --prompt-format {prompt_format}"
        self._hf = load_tokenizer(folder)
        self._backend = self._hf.backend_tokenizer
        # tokenizer.json may hold either, and what transformers would reset at each call, the backend does not.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._tags = IMAGE_TAGS[image_tag_type]
        self._image_id = tokens.image_token_id
        self._check_vocabulary(folder, tokens)
        self._image_text = self._hf.decode([self._image_id]) if self._image_id in self._hf.added_tokens_decoder else ""
        self._template = self._find_template(folder, prompt_format)
        self._tracks_answers = "endgeneration" in self._template
        self._as_parts = False
        self._check_template()

    def _check_vocabulary(self, folder: str, tokens: TokenSpec) -> None:
        vocabulary = self._hf.get_vocab()
        size = max(vocabulary.values()) + 1
        if size > tokens.vocab_size:
            raise ValueError(
                f"--tokenizer {folder}: has token ids up to {size - 1}, the model's --vocab-size is {tokens.vocab_size}"
            )
        special = {self._hf.bos_token_id, self._hf.eos_token_id, self._hf.unk_token_id}
        ordinary = self._image_id in vocabulary.values() and self._image_id not in self._hf.added_tokens_decoder
        if self._image_id >= 0 and (ordinary or self._image_id in special):
            raise ValueError(
                f"--image-token-id {self._image_id}: is {self._hf.convert_ids_to_tokens(self._image_id)!r} of "
                f"--tokenizer {folder}, which text gives too; take an id that it does not use"
                + (f", such as {size}" if size < tokens.vocab_size else "")
            )

    def _find_template(self, folder: str, prompt_format: str) -> str:
        if prompt_format == "tokenizer":
            if not self._hf.chat_template:
                raise ValueError(
                    f"--tokenizer {folder}: has no chat template; give --prompt-format, one of "
                    f"{', '.join(PROMPT_FORMATS)}"
                )
            return str(self._hf.get_chat_template())
        known = self._hf.get_vocab()
        for token in PROMPT_FORMATS[prompt_format].tokens:
            if (self._hf.eos_token is None) if token == "eos_token" else (token not in known):
                raise ValueError(f"--prompt-format {prompt_format}: --tokenizer {folder} has no token {token}")
        return PROMPT_FORMATS[prompt_format].template

    def _check_template(self) -> None:
        """Find out how the template takes text, and that it works for a conversation of several turns."""
        if "probe" not in self._render([("user", "probe")])[0]:
            self._as_parts = True  # templates of vision models may read nothing but content parts
            if "probe" not in self._render([("user", "probe")])[0]:
                raise ValueError(f"{self.name}: the chat template leaves out what the user says")
        turns = [("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four")]
        text, spans = self._answers(turns)
        if ["two" in text[start:end] or "four" in text[start:end] for start, end in spans] != [True, True]:
            raise ValueError(f"{self.name}: the chat template does not write both answers of two turns")

    def _render(self, turns: Sequence[tuple[str, str]], add_generation_prompt: bool = False) -> tuple[str, list[Any]]:
        """Turns (role, text) as text, and where answers stand in it if the template tells.

        Raises:
            ValueError: the template refuses the conversation.
        """
        messages = [
            {"role": role, "content": [{"type": "text", "text": text}] if self._as_parts else text}
            for role, text in turns
        ]
        try:
            rendered, spans = render_jinja_template(
                [messages],
                chat_template=self._template,
                return_assistant_tokens_mask=self._tracks_answers,
                add_generation_prompt=add_generation_prompt,
                # Some templates write today's date; the same sample must give the same tokens every day.
                strftime_now=datetime.date(2024, 7, 26).strftime,
                **self._hf.special_tokens_map,
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(f"{self.name}: the chat template refuses the conversation: {error}") from error
        return rendered[0], spans[0] if self._tracks_answers else []

    def _answers(self, turns: Sequence[tuple[str, str]]) -> tuple[str, list[tuple[int, int]]]:
        """The rendered conversation, and start and end of each answer with its end of turn in it."""
        text, spans = self._render(turns)
        if self._tracks_answers:
            return text, spans
        for position, (role, content) in enumerate(turns):
            if role != "assistant":
                continue
            plain = self._render(turns[:position])[0] if position else ""
            before = self._render(turns[:position], add_generation_prompt=True)[0] if position else ""
            after = self._render(turns[: position + 1])[0]
            if position == 0 or not (after.startswith(before) and text.startswith(after)):
                raise ValueError(
                    f"{self.name}: the chat template writes a turn differently when others follow, or cannot start "
                    f"with an answer (turn {position + 1} of {len(turns)}), so answers cannot be told apart; give "
                    f"another --prompt-format: {', '.join(PROMPT_FORMATS)}"
                )
            spans.append(_answer_span(after, len(before), content.strip(), has_header=plain != before))
        return text, spans

    def encode(self, messages: Sequence[Mapping[str, Any]], tiles: Sequence[int] = ()) -> tuple[np.ndarray, np.ndarray]:
        """A conversation as tokens.

        Args:
            messages: turns with `role` and `content`; see `content_parts`.
            tiles: placeholders of each image, in order.

        Returns:
            Tokens int64 `[T]`, and bool `[T]`, True on the answers and their ends of turn.

        Raises:
            ValueError: what is wrong with the conversation.
        """
        if not messages:
            raise ValueError("empty conversation")
        turns = [_checked_turn(position, message) for position, message in enumerate(messages, 1)]
        if not any(role == "assistant" for role, _ in turns):
            raise ValueError("no assistant turn: nothing to learn")
        texts, marker = _place_images([parts for _, parts in turns], self._tags)
        self._check_count(sum(parts.count(None) for _, parts in turns), tiles)
        rendered, spans = self._answers([(role, text) for (role, _), text in zip(turns, texts, strict=True)])
        if rendered.count(marker) != len(tiles):
            raise ValueError(f"{self.name}: the chat template writes {rendered.count(marker)} of {len(tiles)} images")
        is_target = np.zeros(len(rendered), bool)
        for start, end in spans:
            is_target[start:end] = True
        tokens, mask = self._tokenise(rendered, marker, tiles, is_target)
        if not mask.any():
            raise ValueError("no assistant turn has a token to learn")
        return tokens, mask

    def encode_document(self, content: Any, tiles: Sequence[int] = ()) -> tuple[np.ndarray, np.ndarray]:
        """Text without turns, between the tokens of its beginning and end, if the tokenizer has them.

        Args:
            content: see `content_parts`.
            tiles: placeholders of each image, in order.

        Returns:
            Tokens int64 `[T]`, and bool `[T]`, True on all but the first and the images with their tags.

        Raises:
            ValueError: there is no text, or images and markers do not match.
        """
        parts = content_parts(content)
        if not any(part and part.strip() for part in parts):
            raise ValueError("no text")
        self._check_count(parts.count(None), tiles)
        (text,), marker = _place_images([parts], self._tags)
        tag_lengths = [len(tag) for tag in self._tags]
        is_target = np.ones(len(text), bool)
        end = -1
        while (start := text.find(marker, end + 1)) >= 0:
            end = start + len(marker)
            is_target[start - tag_lengths[0] : end + tag_lengths[1]] = False
        tokens, mask = self._tokenise(text, marker, tiles, is_target)
        for token, position in ((self._hf.bos_token_id, 0), (self._hf.eos_token_id, None)):
            if token is not None:
                at = len(tokens) if position is None else position
                tokens, mask = np.insert(tokens, at, token), np.insert(mask, at, position is None)
        mask[0] = False
        return tokens, mask

    def _check_count(self, markers: int, tiles: Sequence[int]) -> None:
        if markers != len(tiles):
            raise ValueError(f"{markers} image markers but {len(tiles)} images")
        if tiles and self._image_id < 0:
            raise ValueError(f"has {len(tiles)} images, but the model takes none")

    def _tokenise(
        self, text: str, marker: str, tiles: Sequence[int], is_target: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of `text` between its markers, and which of them have a character where `is_target`."""
        tokens: list[int] = []
        mask: list[bool] = []
        targets_before = np.concatenate([[0], np.cumsum(is_target)])
        start = 0
        for position, piece in enumerate(text.split(marker)):
            if position:
                tokens += [self._image_id] * tiles[position - 1]
                mask += [False] * tiles[position - 1]
                start += len(marker)
            for offset, fragment in self._fragments(piece):
                encoding = self._backend.encode(fragment, add_special_tokens=False)
                first = start + offset
                tokens += encoding.ids
                mask += [bool(targets_before[first + b] > targets_before[first + a]) for a, b in encoding.offsets]
            start += len(piece)
        return np.array(tokens, np.int64), np.array(mask, bool)

    def _fragments(self, piece: str) -> Iterator[tuple[int, str]]:
        """A piece of text cut inside every spelling of the image token, which must not become an image there."""
        cuts = [0, len(piece)]
        at = piece.find(self._image_text) if self._image_text else -1
        while at >= 0:
            cuts.append(at + 1)
            at = piece.find(self._image_text, at + 1)
        for start, end in pairwise(sorted(cuts)):
            if end > start:
                yield start, piece[start:end]


def load_tokenizer(folder: str) -> Any:
    """The fast Hugging Face tokenizer of a folder. Raises ValueError, naming --tokenizer, where there is none."""
    if not folder:
        raise ValueError("--tokenizer: give the folder of a Hugging Face tokenizer")
    if not Path(folder).is_dir():
        raise ValueError(f"--tokenizer {folder}: there is no such folder")
    # Seconds to import, and --help needs none of it.
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    try:
        if (Path(folder) / "tokenizer.json").exists():
            # The file says all; AutoTokenizer would look for the model's own class, and every rank would wait for that
            # import. Nor is it news that the class is another.
            logging.set_verbosity_error()
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        else:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise ValueError(f"--tokenizer {folder}: not a Hugging Face tokenizer: {error}") from error
    finally:
        logging.set_verbosity(verbosity)
    if not tokenizer.is_fast:
        raise ValueError(f"--tokenizer {folder}: has no tokenizer.json, whose offsets the loss mask needs")
    if not tokenizer.get_vocab():
        raise ValueError(f"--tokenizer {folder}: has no vocabulary; is it the folder of a tokenizer?")
    return tokenizer


def _checked_turn(position: int, message: Any) -> tuple[str, list[str | None]]:
    """Role and content parts of a turn. Raises ValueError for an unknown role, an empty turn, an image in an answer."""
    if not isinstance(message, Mapping):
        raise ValueError(f"turn {position} is {type(message).__name__}, expected role and content")
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(f"turn {position}: role {role!r} is none of {', '.join(ROLES)}")
    parts = content_parts(message.get("content"))
    if role == "assistant" and None in parts:
        raise ValueError(f"turn {position}: image in an answer")
    if not any(part is None or part.strip() for part in parts):
        raise ValueError(f"turn {position} ({role}) is empty")
    return str(role), parts


def _answer_span(text: str, start: int, content: str, *, has_header: bool) -> tuple[int, int]:
    """Where an answer stands in a text that ends with it: after the header, up to its end-of-turn token.

    Args:
        text: the conversation up to the answer, its end of turn included.
        start: where the answer starts, by the template's generation prompt.
        content: the answer, stripped.
        has_header: whether the template has a generation prompt; if not, `start` may be before the answer's header.
    """
    at = text.find(content, start)
    if at < 0:
        return start, len(text)  # the template rewrites answers
    # Line breaks behind an end-of-turn token belong to the next turn's header.
    end = len(text.rstrip()) if text[at + len(content) :].strip() else len(text)
    return start if has_header else at, end
