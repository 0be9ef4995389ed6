"""Write conversations with chat templates, and find the answers in the text.

Templates are rendered as transformers renders them. A template that writes images itself gets them as content parts, so
that it decides where they are and what surrounds them. Any other template gets text with a marker for each image.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from os.path import commonprefix
from types import MappingProxyType
from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes
from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

# Some templates write today's date, but the same sample must give the same tokens every day.
DATE = datetime.date(2024, 7, 26)
# Templates that open an answer with thoughts have a switch for models that do not think.
SWITCHES: tuple[dict[str, bool], ...] = ({}, {"enable_thinking": False}, {"enable_thinking": True})
# Names that a template gets besides the conversation when it renders a generation prompt.
PROMPT_NAMES = {"add_generation_prompt", "enable_thinking"}
MARK = "mark_between_turns"


class Medium(Enum):
    """An image or a video between the texts of a turn."""

    IMAGE = "image"
    VIDEO = "video"


class Turn(NamedTuple):
    """One turn of a conversation.

    Attributes:
        role: system, user, assistant or tool.
        parts: its content, texts with images and videos between them.
        fields: further keys that templates read, such as `tool_calls`.
        tools: the tools that the conversation offers; only the first turn has them.
    """

    role: str
    parts: list[str | Medium]
    fields: Mapping[str, Any] = MappingProxyType({})
    tools: Sequence[Any] | None = None


PROBE = [Turn("user", ["one"]), Turn("assistant", ["two"]), Turn("user", ["three"]), Turn("assistant", ["four"])]
# A conversation with tools. If one of these words is missing in its text, the template leaves that part out.
TOOL_WORDS = {"offeredprobe": "tools", "calledprobe": "tool_calls", "resultprobe": "turns of role tool"}
OFFERED = {"type": "function", "function": {
    "name": "offeredprobe", "description": "a tool", "parameters": {"type": "object", "properties": {}}}}
TOOL_PROBE = [
    Turn("user", ["one"], tools=[OFFERED]),
    Turn("assistant", [], {"tool_calls": [
        {"id": "probe0001", "type": "function", "function": {"name": "calledprobe", "arguments": {"key": "value"}}}]}),
    Turn("tool", ["resultprobe"], {"name": "calledprobe", "tool_call_id": "probe0001"}),
    Turn("assistant", ["two"]),
]


@dataclass(frozen=True)
class Rendered:
    """A conversation as text.

    Attributes:
        text: the text that the template writes.
        answers: start and end of each answer to learn, including the token that ends it.
        image: word that stands for an image in `text`.
        video: the video token that stands for a video in `text`; empty if no turn shows one.
        spelling: word that stands in `text` for the image token's name if a sample's text contains that name, else
            empty.
    """

    text: str
    answers: list[tuple[int, int]]
    image: str
    spelling: str = ""
    video: str = ""


def unused_word(text: str) -> str:
    """Return a word that does not occur in a text."""
    number = 0
    while (word := f"IMAGE{number}PLACEHOLDER") in text:
        number += 1
    return word


class _WatchedMessages(Sequence[Any]):
    """Messages that record how much a template had written when it first asked for each of them.

    A template sees a conversation only through the messages that it asks for. Until it asks for message k, or whether
    there is one, it writes the same for the first k messages alone as for all of them. So if it asks between two turns,
    where nothing is left to write, the text of the first k messages is known from the text of all.

    Attributes:
        ends: length of the text of the first k messages, by k, without the text after the loop over messages.
        loop_end: length of the text at the end of that loop.
    """

    def __init__(self, messages: Sequence[Any]) -> None:
        self._messages, self._asked, self._between, self._written = messages, 0, False, 0
        self.ends: dict[int, int] = {}
        self.loop_end = 0

    def write(self, block: str) -> str:
        self._written += len(block)
        return block

    def mark(self, between: bool) -> str:
        """Record that the template is now between two turns, or within one."""
        self._between = between
        if not between:
            self.loop_end = self._written
        return ""

    def _ask(self, position: int) -> None:
        if self._between:
            self.ends.update(dict.fromkeys(range(self._asked, position + 1), self._written))
        self._asked = max(self._asked, position + 1)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice) and (index.start or 0) >= 0 and index.stop is None and index.step is None:
            return _WatchedRest(self, index.start or 0)
        whole = isinstance(index, slice) or index < 0
        self._ask(len(self._messages) if whole else index)
        return self._messages[index]

    def __len__(self) -> int:
        self._ask(len(self._messages))
        return len(self._messages)

    def __iter__(self) -> Iterator[Any]:
        return self.iterate_from(0)

    def iterate_from(self, start: int) -> Iterator[Any]:
        """Iterate over the messages from number `start` on."""
        for position in range(start, len(self._messages)):
            self._ask(position)
            yield self._messages[position]
        self._ask(len(self._messages))


class _WatchedRest(Sequence[Any]):
    """The messages from a number on, such as those after the system turn."""

    def __init__(self, messages: _WatchedMessages, start: int) -> None:
        self._messages, self._start = messages, start

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int) and index >= 0:
            return self._messages[self._start + index]
        return list(self)[index]

    def __len__(self) -> int:
        return max(len(self._messages) - self._start, 0)

    def __iter__(self) -> Iterator[Any]:
        return self._messages.iterate_from(self._start)


class ChatTemplate:
    """A Jinja chat template, and the kind of content that it takes.

    Args:
        name: the flags that chose the template, for error messages.
        template: the template itself.
        tokenizer: the tokenizer whose special tokens it writes.
        parts: whether to try lists of content parts; False if it is known to take only text.

    Attributes:
        as_parts: whether it takes the content of a turn as a list of parts.
        image_text: the text that it writes for an image part; empty if it takes no images.
        video_text: the text that it writes for a video part; empty if it takes no videos.
        switches: values of its switches to try for a generation prompt.

    Raises:
        ValueError: the template leaves out what the user says.
    """

    def __init__(self, name: str, template: str, tokenizer: Any, *, parts: bool = True) -> None:
        self.name, self._template, self._special = name, template, tokenizer.special_tokens_map
        self._bos = tokenizer.bos_token
        self._tracks_answers = "endgeneration" in template
        self.switches = SWITCHES if "enable_thinking" in template else SWITCHES[:1]
        with_text = self._probe([{"type": "text", "text": "probe"}]) if parts else ""
        self.image_text, self.video_text = (self._text_of(medium, with_text) for medium in Medium)
        self.as_parts = bool(self.image_text) or not self._probe("probe")
        if self.as_parts and not with_text:
            raise ValueError(f"{name}: the chat template leaves out what the user says")

    def _text_of(self, medium: Medium, with_text: str) -> str:
        """Return the text for an image or a video part, given a turn of text alone; empty if the template has none."""
        shown = self._probe([{"type": medium.value}, {"type": "text", "text": "probe"}]) if with_text else ""
        if not shown or shown == with_text:
            return ""
        head = len(commonprefix([with_text, shown]))
        tail = len(commonprefix([with_text[head:][::-1], shown[head:][::-1]]))
        return shown[head : len(shown) - tail]

    def _probe(self, content: Any) -> str:
        """Render one turn. Return an empty text if the template cannot take such content or leaves out its text."""
        try:
            text, _ = self.render([{"role": "user", "content": content}])
        except ValueError:
            return ""
        # A template that does not know parts may print the list as Python or JSON.
        return text if "probe" in text and not re.search("""["']type["']""", text) else ""

    def render(
        self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = False,
        tools: Sequence[Any] | None = None, **switches: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        """Write messages as text. Also return the start and end of each answer if the template marks them.

        Raises:
            ValueError: the template refuses the conversation.
        """
        try:
            rendered, spans = render_jinja_template(
                [messages],
                tools=None if tools is None else list(tools),
                chat_template=self._template,
                return_assistant_tokens_mask=self._tracks_answers,
                add_generation_prompt=add_generation_prompt,
                strftime_now=DATE.strftime,
                **switches,
                **self._special,
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(f"{self.name}: the chat template refuses the conversation: {error}") from error
        return rendered[0], spans[0] if self._tracks_answers else []

    @cached_property
    def _marked(self) -> jinja2.Template | None:
        """The template with calls of `MARK` before, between and after its turns.

        None unless it writes turns in a loop of its own, does not ask before the loop's end whether a generation prompt
        follows, and writes the same after every conversation.
        """
        environment = _compile_jinja_template(self._template).environment
        tree = environment.parse(self._template)
        at = max((number for number, node in enumerate(tree.body) if isinstance(node, nodes.For)), default=-1)
        if at < 0:
            return None
        loop, trailer = tree.body[at], tree.body[at + 1 :]
        early, late = (
            {node.name for node in nodes.Template(part).find_all((nodes.Name, nodes.NSRef))}
            for part in (tree.body[: at + 1], trailer)
        )
        if loop.test or loop.else_ or loop.recursive or early & PROMPT_NAMES or late - PROMPT_NAMES - {*self._special}:
            return None

        def mark(between: bool) -> nodes.Node:
            return nodes.ExprStmt(nodes.Call(nodes.Name(MARK, "load"), [nodes.Const(between)], [], None, None))

        loop.body = [mark(False), *loop.body, mark(True)]
        tree.body = [*tree.body[:at], mark(True), loop, mark(False), *trailer]
        tree.set_environment(environment).set_lineno(1)
        return jinja2.Template.from_code(environment, environment.compile(tree), environment.globals)

    def prefix_ends(self, messages: Sequence[dict[str, Any]], text: str, tools: Sequence[Any] | None) -> dict[int, int]:
        """Find where the first k messages end in the text of all, so that they need not be rendered separately.

        Args:
            messages: the whole conversation.
            text: the text that the template writes for it.
            tools: the tools that it offers.

        Returns:
            By k, the length of the text of the first k messages, up to the end of the loop over messages. The text
            after the loop does not depend on the conversation. A k that only a separate rendering can tell is missing.
        """
        if self._marked is None:
            return {}
        watched = _WatchedMessages(messages)
        try:
            blocks = self._marked.generate(
                messages=watched, tools=None if tools is None else list(tools), documents=None,
                add_generation_prompt=False, strftime_now=DATE.strftime, **{MARK: watched.mark}, **self._special)
            same = "".join(map(watched.write, blocks)) == text
        except (jinja2.TemplateError, TypeError):  # it uses messages in a way that only a list supports
            return {}
        # A filter, such as `messages | list`, asks for all messages before the loop begins.
        return watched.ends if same and watched.ends.get(len(messages)) == watched.loop_end else {}

    def message(self, role: str, content: str) -> dict[str, Any]:
        """Return a turn without images, with the kind of content that the template takes."""
        return {"role": role, "content": [{"type": "text", "text": content}] if self.as_parts else content}

    def adds_special_tokens(self, text: str) -> bool:
        """Return whether the tokenizer has to add its special tokens to a conversation, such as the first one.

        Processors of transformers have them added unless the template has written that token. Tokenizers of
        transformers never add any to a conversation.
        """
        return bool(self.image_text) and not (self._bos and text.startswith(self._bos))


class ConversationRenderer:
    """Write conversations with a chat template and find their answers.

    Args:
        template: the template that writes them.
        image_token: text of the model's image token; needed if the template writes images itself.
        end_tokens: tokens that may end an answer.
        video_token: text of the model's video token; empty if the model or the template takes no videos.
        eos_token: written after each answer; empty if the template ends answers.
        marks: texts right before an answer and at its end, if they are known; else the template has to show them.

    Attributes:
        rewrites_history: whether the template writes an answer differently once other turns follow.

    Raises:
        ValueError: the template does not write answers or, without `eos_token`, does not end them.
    """

    def __init__(
        self, template: ChatTemplate, image_token: str, end_tokens: Sequence[str], *, video_token: str = "",
        eos_token: str = "", marks: tuple[str, str] | None = None,
    ) -> None:
        self._template, self._image_token, self._eos, self._marks = template, image_token, eos_token, marks
        self._video_token = video_token
        self._end = ""
        self._end = self._find_end(sorted(filter(None, end_tokens), key=len, reverse=True))
        thoughts = "<think>\nwhy\n</think>\n\n"
        thinking = [turn._replace(parts=[f"{thoughts}{turn.parts[0]}"]) if turn.role == "assistant" else turn
                    for turn in PROBE]
        self.rewrites_history = any(self._loses_answers(turns) for turns in (PROBE, thinking))

    def _find_end(self, end_tokens: Sequence[str]) -> str:
        """Return the token that the template writes after an answer. Without one, a model would never stop."""
        text, (*_, (start, end)) = self._answers(PROBE[:2])
        at = text.find("two", start)
        if at < 0 or at > end:
            raise ValueError(f"{self._template.name}: the chat template does not write answers")
        after = text[at + len("two") :].lstrip()
        found = next((token for token in end_tokens if after.startswith(token)), "")
        if found and self._eos:
            raise ValueError(f"--append-eos: the chat template of {self._template.name} ends answers with {found!r} "
                             "already")
        if not found and not self._eos:
            raise ValueError(self._endless())
        return found

    def _endless(self) -> str:
        return (
            f"{self._template.name}: the chat template writes no token that ends an answer, so the model would learn "
            "answers that never end; --append-eos writes the tokenizer's end-of-sequence token after each answer, or "
            "give another --prompt-format"
        )

    def _loses_answers(self, turns: Sequence[Turn]) -> bool:
        """Return whether one of two answers would not be learned. Raises ValueError if one would lack its end."""
        try:
            rendered = self.render(turns)
        except ValueError:
            return False  # then each sample with several turns is refused
        if not all(rendered.text[:end].rstrip().endswith(self._eos or self._end) for _, end in rendered.answers):
            raise ValueError(self._endless())
        return len(rendered.answers) < 2

    def render(self, turns: Sequence[Turn]) -> Rendered:
        """Write a conversation.

        Args:
            turns: the turns of the conversation.

        Raises:
            ValueError: the template refuses the conversation, or its answers cannot be told apart from the rest.
        """
        literal = "".join(part for turn in turns for part in turn.parts if isinstance(part, str))
        if self._video_token and self._video_token in literal:
            raise ValueError(f"the text has {self._video_token!r}, the name of the video token")
        word = unused_word(literal)
        image, spelling = word, ""
        if self._template.image_text:
            image = self._image_token
            spelling = word if image and image in literal else ""
        if spelling:
            turns = [turn._replace(parts=[part.replace(image, spelling) if isinstance(part, str) else part
                                          for part in turn.parts]) for turn in turns]
        text, answers = self._answers(turns, image)
        if self._eos:
            text, answers = self._end_answers(text, answers)
        shows_video = any(part is Medium.VIDEO for turn in turns for part in turn.parts)
        return Rendered(text, answers, image, spelling, self._video_token if shows_video else "")

    def _messages(self, turns: Sequence[Turn], image: str) -> list[dict[str, Any]]:
        messages = []
        for turn in turns:
            if self._template.image_text:
                shown = [{"type": part.value} if isinstance(part, Medium) else {"type": "text", "text": part}
                         for part in turn.parts if part != ""]
                message = {"role": turn.role, "content": shown}
            else:
                text = "".join(image if isinstance(part, Medium) else part for part in turn.parts)
                message = self._template.message(turn.role, text)
            messages.append({**message, **turn.fields})
        return messages

    def _write(self, turns: Sequence[Turn], image: str, **prompt: bool) -> tuple[str, list[tuple[int, int]]]:
        tools = turns[0].tools if turns else None
        return self._template.render(self._messages(turns, image), tools=tools, **prompt)

    @cached_property
    def unwritten_tools(self) -> frozenset[str]:
        """Names in `TOOL_WORDS` of the parts that the template leaves out of a conversation with tools."""
        try:
            text, _ = self._write(TOOL_PROBE, "")
        except ValueError:
            return frozenset(TOOL_WORDS.values())
        return frozenset(name for word, name in TOOL_WORDS.items() if word not in text)

    @cached_property
    def _header(self) -> str:
        """Text before an answer if the template has no generation prompt. An answer may be a letter of its words."""
        before, after = (self._write(PROBE[:count], "")[0] for count in (1, 2))
        return after[len(before) : max(after.find("two", len(before)), 0)] if after.startswith(before) else ""

    def _answers(self, turns: Sequence[Turn], image: str = "") -> tuple[str, list[tuple[int, int]]]:
        """Write a conversation and find its answers."""
        text, marked = self._write(turns, image)
        if self._marks is not None:
            return text, self._between_marks(text, sum(turn.role == "assistant" for turn in turns))
        if not marked:
            return text, self._behind_prompts(turns, text, image)
        answers: list[tuple[int, int]] = []
        for start, end in marked:
            if answers and answers[-1][1] == start:  # both are parts of one answer
                start = answers.pop()[0]
            answers.append((start, end))
        return text, [(start, self._end_after(text, end)) for start, end in answers]

    def _between_marks(self, text: str, count: int) -> list[tuple[int, int]]:
        assert self._marks is not None
        before, after = map(re.escape, self._marks)
        answers = [match.span(1) for match in re.finditer(f"{before}(.*?{after})", text, re.DOTALL)]
        if len(answers) != count:
            raise ValueError(f"{self._template.name}: the conversation has {count} answers, and its text has "
                             f"{len(answers)} between {self._marks[0]!r} and {self._marks[1]!r}")
        return answers

    def _behind_prompts(self, turns: Sequence[Turn], text: str, image: str) -> list[tuple[int, int]]:
        """Find answers that the template does not mark: its text between a generation prompt and the next turn.

        If the template writes an answer differently once other turns follow, that answer is history. It is left out,
        because the model would never give it in this form.
        """
        # Rendering each beginning of a conversation takes time that grows with the square of its turns.
        ends = self._template.prefix_ends(self._messages(turns, image), text, turns[0].tools)
        tails: dict[tuple[tuple[str, bool], ...], str] = {}

        def write(count: int, **prompt: bool) -> str:
            """Return the text of the first turns."""
            if count not in ends:
                return self._write(turns[:count], image, **prompt)[0]
            key = tuple(prompt.items())
            if key not in tails:
                tails[key] = (self._write(turns, image, **prompt)[0] if prompt else text)[ends[len(turns)] :]
            return text[: ends[count]] + tails[key]

        answers: list[tuple[int, int]] = []
        for position, turn in enumerate(turns):
            if turn.role != "assistant":
                continue
            last = position == len(turns) - 1
            after = text if last else write(position + 1)
            # The text that the model sees before it answers.
            prompts = (write(position, add_generation_prompt=True, **switches)
                       for switches in (self._template.switches if position else ()))
            before = next((prompt for prompt in prompts if after.startswith(prompt)), None)
            if before is None and (last or position == 0):
                raise ValueError(
                    f"{self._template.name}: the chat template does not write the answer of turn {position + 1} after "
                    "its own generation prompt, so the prompt and the answer cannot be told apart; give another "
                    "--prompt-format"
                )
            if before is None or not text.startswith(after):
                continue
            start = len(before)
            if write(position) == before:  # without a generation prompt, the header of the answer comes first
                start += len(commonprefix([self._header, after[start:]]))
                content = "".join(part for part in turn.parts if isinstance(part, str)).strip()
                start = max(after.find(content, start), start)
            # Line breaks after an end-of-turn token belong to the next turn's header.
            answers.append((start, len(after.rstrip())))
        if not answers:
            raise ValueError(
                f"{self._template.name}: the chat template writes answers differently when other turns follow, and the "
                "conversation does not end with one"
            )
        return answers

    def _end_after(self, text: str, end: int) -> int:
        """Return the end of an answer, including the token that ends it even if the template does not mark it."""
        following = text[end:].lstrip()
        if self._end and following.startswith(self._end) and not text[:end].rstrip().endswith(self._end):
            return len(text) - len(following) + len(self._end)
        return end

    def _end_answers(self, text: str, answers: Sequence[tuple[int, int]]) -> tuple[str, list[tuple[int, int]]]:
        """Write the end-of-sequence token after each answer, in place of the white space there."""
        written, ended, at = "", [], 0
        for start, end in answers:
            stop = start + len(text[start:end].rstrip())
            first = len(written) + start - at
            written += text[at:stop] + self._eos
            ended.append((first, len(written)))
            at = len(text) - len(text[stop:].lstrip())
        return written + text[at:], ended
