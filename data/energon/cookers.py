"""Read samples of Energon's types, and crude ones, as conversations."""

from __future__ import annotations

import json
from typing import Any

from megatron.energon import (
    CaptioningSample,
    InterleavedSample,
    TextSample,
    VQASample,
    basic_sample_keys,
    edataclass,
    stateless,
)
from megatron.energon import Sample as EnergonSample
from megatron.energon.cache import FileStoreDecoder

from data.conversations import IMAGE_MARKER, Conversation, captioned, from_parts


@edataclass
class ParsedSample(EnergonSample):
    """Parsed sample of a crude data set."""

    conversation: Conversation


class TextDecoder(FileStoreDecoder):
    """Parse the json and txt parts of a sample. Everything else stays bytes.

    Further parts of these kinds, such as meta.json, stay bytes too if they cannot be parsed, because nothing may read
    them.
    """

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return {name: self.decode(name, part) for name, part in sample.items()}

    def decode(self, fname: str, data: Any) -> Any:
        """Parse one part. Raises ValueError, with its name, if `json` or `txt` cannot be parsed."""
        extension = fname.rpartition(".")[2]
        if not isinstance(data, bytes) or extension not in ("json", "txt"):
            return data
        try:
            return json.loads(data) if extension == "json" else data.decode()
        except (ValueError, RecursionError) as error:
            if fname != extension:
                return data
            raise ValueError(f"part {fname} is not {extension}: {error}") from error

    def config(self) -> dict[str, Any]:
        """Return the values that Energon compares between a checkpoint and a data set."""
        return {"decoder": "text"}


@stateless
def cook(sample: dict[str, Any]) -> ParsedSample:
    """Parse a crude sample. Raises ValueError if it cannot be used."""
    parts = {name: part for name, part in sample.items() if not name.startswith("__")}
    return ParsedSample(**basic_sample_keys(sample), conversation=from_parts(sample["__key__"], parts))


def conversation_of(sample: EnergonSample) -> Conversation:
    """Read the content of a sample of any supported type. Raises ValueError if it cannot be used."""
    if isinstance(sample, ParsedSample):
        return sample.conversation
    if isinstance(sample, CaptioningSample):
        return captioned(sample.caption, [("image", sample.image)])
    if isinstance(sample, VQASample):
        conversation = captioned(best_answer(sample), [("image", sample.image)], prompt=sample.context)
        if IMAGE_MARKER in sample.context:
            conversation.messages[0] = {"role": "user", "content": sample.context}  # type: ignore[index]
        return conversation
    if isinstance(sample, InterleavedSample):
        pieces = list(sample.sequence)
        image = {"type": "image"}
        document = [{"type": "text", "text": piece} if isinstance(piece, str) else image for piece in pieces]
        images = [(f"number {number}", piece) for number, piece in enumerate(pieces) if not isinstance(piece, str)]
        return Conversation(document=document, images=images)
    if isinstance(sample, TextSample):
        return Conversation(document=sample.text)
    raise ValueError(
        f"sample type {type(sample).__name__} is not supported; supported are CaptioningSample, VQASample, "
        "InterleavedSample, TextSample and CrudeWebdataset"
    )


def best_answer(sample: VQASample) -> Any:
    """Return the answer of the highest weight, the first of equal ones. Raises ValueError if there is none."""
    answers = [sample.answers] if isinstance(sample.answers, str) else list(sample.answers or ())
    if not answers:
        raise ValueError("no text: the question has no answer")
    if sample.answer_weights is None:
        return answers[0]
    weights = [float(weight) for weight in sample.answer_weights]
    if len(weights) != len(answers):
        raise ValueError(f"{len(answers)} answers but {len(weights)} weights")
    return answers[weights.index(max(weights))]
