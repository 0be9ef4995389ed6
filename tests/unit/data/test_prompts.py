"""Prompt formats, image tags and the loss mask."""

from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from data.prompt_formats import IMAGE_TAGS, PROMPT_FORMATS
from data.prompts import Tokenizer, content_parts
from mimo.protocols import TokenSpec
from tests.support.small_tokenizer import CHATML_TOKENS, write_tokenizer

IMAGE = 390
TOKENS = TokenSpec(vocab_size=400, image_token_id=IMAGE, image_size=16, num_channels=3)
SPECIAL = (
    *CHATML_TOKENS, "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<SPECIAL_10>", "<SPECIAL_11>",
    "<SPECIAL_12>", "<SPECIAL_14>", "<SPECIAL_15>", "[PREFIX]",
)
TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "a <image> b"},
    {"role": "assistant", "content": "red cat"},
    {"role": "user", "content": "and <image>?"},
    {"role": "assistant", "content": "blue dog"},
]
# What each format writes for TALK, answers between brackets, an image as #.
WRITTEN = {
    "chatml": (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\na # b<|im_end|>\n<|im_start|>assistant\n"
        "[red cat<|im_end|>]\n<|im_start|>user\nand #?<|im_end|>\n<|im_start|>assistant\n[blue dog<|im_end|>]\n"
    ),
    "llama3": (
        "<s><|start_header_id|>system<|end_header_id|>\n\nbe brief<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\na # b<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[red cat<|eot_id|>]"
        "<|start_header_id|>user<|end_header_id|>\n\nand #?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[blue dog<|eot_id|>]"
    ),
    "mistral": "<s>[INST] be brief\n\na # b[/INST][ red cat</s>][INST] and #?[/INST][ blue dog</s>]",
    "nemotron5": (
        "<s><SPECIAL_14>system\nbe brief<SPECIAL_15>\n<SPECIAL_14>user\na # b<SPECIAL_15>\n<SPECIAL_14>assistant\n"
        "[red cat<SPECIAL_15>]\n<SPECIAL_14>user\nand #?<SPECIAL_15>\n<SPECIAL_14>assistant\n[blue dog<SPECIAL_15>]\n"
    ),
    "nemotron5-aligned": (
        "<s>System\nbe brief\n[PREFIX]User\na # b\n[PREFIX]Assistant\n[red cat\n[PREFIX]]User\nand #?\n[PREFIX]"
        "Assistant\n[blue dog\n[PREFIX]]"
    ),
    "nemotron-h-aligned": (
        "<SPECIAL_10>System\nbe brief\n<SPECIAL_11>User\na # b\n<SPECIAL_11>Assistant\n[red cat\n]"
        "<SPECIAL_11>User\nand #?\n<SPECIAL_11>Assistant\n[blue dog\n]"
    ),
    "nemotron-nano-v2": (
        "<SPECIAL_10>System\nbe brief\n<SPECIAL_11>User\na # b\n<SPECIAL_11>Assistant\n[red cat\n<SPECIAL_12>]\n"
        "<SPECIAL_11>User\nand #?\n<SPECIAL_11>Assistant\n[blue dog\n<SPECIAL_12>]\n"
    ),
    "plain": "<s>be brief\na # b\n[red cat</s>]\nand #?\n[blue dog</s>]",
}
WRITTEN |= {"qwen2p0": WRITTEN["chatml"], "qwen2p5": WRITTEN["chatml"], "nvlm-yi-34b": "<s>" + WRITTEN["chatml"]}
WRITTEN |= {"llama3p1": WRITTEN["llama3"], "llama3p2": WRITTEN["llama3"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), special=SPECIAL)


def shown(tokenizer_folder: Path, tokens: np.ndarray, mask: np.ndarray) -> str:
    """Tokens as text, runs of targets between brackets, an image as #."""
    backend = AutoTokenizer.from_pretrained(tokenizer_folder)
    text, start = "", 0
    bounds = [*(np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist(), len(tokens)]
    for end in bounds:
        run = "".join("#" if token == IMAGE else backend.decode([token]) for token in tokens[start:end])
        text += f"[{run}]" if mask[start] else run
        start = end
    return text


def templated(folder: Path, template: str | None) -> Tokenizer:
    write_tokenizer(folder, special=CHATML_TOKENS, chat_template=template)
    return Tokenizer(str(folder), "tokenizer", "none", TOKENS)


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.mark.parametrize("prompt_format", PROMPT_FORMATS)
def test_each_format_writes_turns_and_learns_answers_with_their_end(folder, prompt_format):
    tokens, mask = Tokenizer(str(folder), prompt_format, "none", TOKENS).encode(TALK, [1, 1])
    assert tokens.dtype == np.int64 and mask.dtype == np.bool_ and tokens.shape == mask.shape
    assert shown(folder, tokens, mask) == WRITTEN[prompt_format]


def test_a_template_without_generation_tags_gives_the_same_tokens_and_mask(folder, tmp_path):
    tokens, mask = templated(tmp_path, CHATML).encode(TALK, [1, 1])
    assert shown(tmp_path, tokens, mask) == WRITTEN["chatml"]


def test_the_tokenizers_own_template_is_what_is_used(tmp_path):
    """The reference system lost it on the way: its adapter did not hand it on (bug 24).

    This one has no generation prompt, so the answer starts with its content; the space before is of the same token.
    """
    turn = "message['role'] | upper + ': ' + message['content'] + '</s>'"
    template = f"{{% for message in messages %}}{{{{ {turn} }}}}{{% endfor %}}"
    tokens, mask = templated(tmp_path, template).encode(TALK[1:3], [1])
    assert shown(tmp_path, tokens, mask) == "USER: a # b</s>ASSISTANT:[ red cat</s>]"


def test_a_template_that_takes_only_content_parts_is_given_them(tmp_path):
    template = (
        "{% for message in messages %}{{ message['role'] }}:{% for part in message['content'] %}{{ part.text }}"
        "{% endfor %}</s>{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    tokens, mask = templated(tmp_path, template).encode(TALK[1:3], [1])
    assert shown(tmp_path, tokens, mask) == "user:a # b</s>assistant:[red cat</s>]"


def test_a_template_that_writes_the_last_answer_differently_is_refused_by_name(tmp_path):
    template = CHATML.replace("message['content'] +", "('' if loop.last else 'Earlier: ') + message['content'] +")
    with pytest.raises(ValueError, match=f"--tokenizer {tmp_path}.*differently.*--prompt-format: chatml"):
        templated(tmp_path, template)


@pytest.mark.parametrize("lost", ["", "{% for message in messages %}{{ message['role'] }}{% endfor %}"])
def test_a_template_that_loses_text_is_refused(tmp_path, lost):
    with pytest.raises(ValueError, match=f"--tokenizer {tmp_path}"):
        templated(tmp_path, lost)


def test_a_template_that_leaves_out_a_turn_with_an_image_is_refused(tmp_path):
    template = "{% for message in messages %}{% if message['role'] != 'system' %}" + CHATML.removeprefix(
        "{% for message in messages %}"
    ).replace("{% endfor %}", "{% endif %}{% endfor %}")
    talk = [{"role": "system", "content": "like <image>"}, *TALK[1:3]]
    with pytest.raises(ValueError, match="writes 1 of 2 images"):
        templated(tmp_path, template).encode(talk, [1, 1])


def test_a_template_that_refuses_a_conversation_is_a_bad_sample(tmp_path):
    template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML
    )
    with pytest.raises(ValueError, match="refuses the conversation: no system role"):
        templated(tmp_path, template).encode(TALK, [1, 1])


def test_todays_date_is_not_written(tmp_path):
    template = "{{ strftime_now('%d %b %Y') }}\n" + CHATML
    tokens, mask = templated(tmp_path, template).encode(TALK[1:3], [1])
    assert shown(tmp_path, tokens, mask).startswith("26 Jul 2024")


@pytest.mark.parametrize("kind", IMAGE_TAGS)
def test_tags_stand_around_all_tiles_of_an_image(folder, kind):
    before, after = IMAGE_TAGS[kind]
    tokens, mask = Tokenizer(str(folder), "plain", kind, TOKENS).encode(TALK[1:3], [3])
    assert shown(folder, tokens, mask) == f"<s>a {before}###{after} b\n[red cat</s>]"


def test_a_literal_marker_in_a_part_is_text(folder):
    parts = [{"type": "text", "text": "<image> is "}, {"type": "image"}]
    talk = [{"role": "user", "content": parts}, {"role": "assistant", "content": [{"type": "text", "text": "<image>"}]}]
    tokens, mask = Tokenizer(str(folder), "plain", "none", TOKENS).encode(talk, [1])
    assert shown(folder, tokens, mask) == "<s><image> is #\n[<image></s>]"


def test_a_literal_marker_stays_text_where_the_tokenizer_has_an_image_token(tmp_path):
    write_tokenizer(tmp_path, special=["<image>"])
    tokens = TokenSpec(vocab_size=400, image_token_id=3, image_size=16, num_channels=3)
    parts = [{"type": "text", "text": "<image><image>"}, {"type": "image"}]
    talk = [{"role": "user", "content": parts}, {"role": "assistant", "content": "yes"}]
    ids, mask = Tokenizer(str(tmp_path), "plain", "none", tokens).encode(talk, [2])
    assert (ids == 3).sum() == 2
    assert AutoTokenizer.from_pretrained(tmp_path).decode(ids[~mask]) == "<s><image><image><image><image>\n"


def test_text_that_looks_like_the_inner_marker_does_no_harm(folder):
    talk = [{"role": "user", "content": "IMAGE0PLACEHOLDER <image>"}, {"role": "assistant", "content": "yes"}]
    tokens, mask = Tokenizer(str(folder), "plain", "none", TOKENS).encode(talk, [1])
    assert shown(folder, tokens, mask) == "<s>IMAGE0PLACEHOLDER #\n[yes</s>]"


def test_a_document_learns_all_but_its_start_and_images(folder):
    tokenizer = Tokenizer(str(folder), "plain", "nvlm", TOKENS)
    tokens, mask = tokenizer.encode_document("red<image> cat", [2])
    assert shown(folder, tokens, mask) == "<s>[red]<Image>##</Image>[ cat</s>]"


def test_a_document_without_special_tokens_still_has_a_first_token_that_is_no_target(tmp_path):
    write_tokenizer(tmp_path, bos=False, eos=False, special=CHATML_TOKENS)
    tokens, mask = Tokenizer(str(tmp_path), "chatml", "none", TOKENS).encode_document("the cat")
    assert not mask[0] and mask[1:].all()
    assert AutoTokenizer.from_pretrained(tmp_path).decode(tokens) == "the cat"


@pytest.mark.parametrize(
    ("talk", "tiles", "message"),
    [
        ([], [], "empty conversation"),
        (TALK[:2], [1], "no assistant turn"),
        (TALK[1:3], [], "1 image markers but 0 images"),
        (TALK[1:3], [1, 1], "1 image markers but 2 images"),
        ([TALK[1], {"role": "assistant", "content": "<image>"}], [1, 1], "turn 2: image in an answer"),
        ([{"role": "user", "content": " "}, TALK[2]], [], r"turn 1 \(user\) is empty"),
        ([TALK[0], {"role": "assistant", "content": ""}], [], r"turn 2 \(assistant\) is empty"),
        ([{"role": "tool", "content": "a"}, TALK[2]], [], "turn 1: role 'tool' is none of system, user, assistant"),
        (["hello", TALK[2]], [], "turn 1 is str"),
        ([{"role": "user", "content": None}, TALK[2]], [], "content is NoneType"),
        ([{"role": "user", "content": [{"type": "audio"}]}, TALK[2]], [], "neither text nor image"),
        ([{"role": "user", "content": [{"type": "image", "image": "/etc/x.png"}]}, TALK[2]], [1], "type image alone"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, TALK[2]], [1], "type image alone"),
    ],
)
def test_what_is_wrong_with_a_conversation_is_said(folder, talk, tiles, message):
    with pytest.raises(ValueError, match=message):
        Tokenizer(str(folder), "chatml", "none", TOKENS).encode(talk, tiles)


def test_a_document_needs_text_and_as_many_images_as_markers(folder):
    tokenizer = Tokenizer(str(folder), "plain", "none", TOKENS)
    with pytest.raises(ValueError, match="no text"):
        tokenizer.encode_document("  ")
    with pytest.raises(ValueError, match="0 image markers but 1 images"):
        tokenizer.encode_document("a cat", [1])


def test_a_text_model_takes_no_image(folder):
    text_model = TokenSpec(vocab_size=400, image_token_id=-1, image_size=0, num_channels=3)
    tokenizer = Tokenizer(str(folder), "plain", "none", text_model)
    assert tokenizer.encode_document("a cat")[1].any()
    with pytest.raises(ValueError, match="1 images, but the model takes none"):
        tokenizer.encode_document("a <image>", [1])


def test_string_content_is_cut_at_its_markers():
    assert content_parts("<image>a<image><image>b") == ["", None, "a", None, "", None, "b"]


@pytest.mark.parametrize(
    ("prompt_format", "tags", "tokens", "message"),
    [
        ("tokenizer", "none", {}, "--tokenizer .*no chat template; give --prompt-format, one of chatml"),
        ("chatlm", "none", {}, "--prompt-format chatlm: unknown; known are tokenizer, chatml"),
        ("chatml", "intern", {}, "--image-tag-type intern: unknown; known are none, internvl, nvlm"),
        ("chatml", "none", {"vocab_size": 300}, "--tokenizer .*token ids up to 318.*--vocab-size is 300"),
        ("chatml", "none", {"image_token_id": 100}, "--image-token-id 100: is .*take an id that.*such as 319"),
        ("chatml", "none", {"image_token_id": 2}, "--image-token-id 2: is '</s>'"),
    ],
)
def test_what_cannot_work_names_the_flag(folder, prompt_format, tags, tokens, message):
    spec = {"vocab_size": 400, "image_token_id": IMAGE, "image_size": 16, "num_channels": 3} | tokens
    with pytest.raises(ValueError, match=message):
        Tokenizer(str(folder), prompt_format, tags, TokenSpec(**spec))


def test_a_format_whose_tokens_the_tokenizer_lacks_is_refused(tmp_path):
    write_tokenizer(tmp_path, eos=False)
    for prompt_format, token in (("chatml", r"<\|im_start\|>"), ("plain", "eos_token")):
        with pytest.raises(ValueError, match=f"--prompt-format {prompt_format}: --tokenizer .* has no token {token}"):
            Tokenizer(str(tmp_path), prompt_format, "none", TOKENS)


@pytest.mark.parametrize("name", ["", "missing", "empty"])
def test_a_folder_without_a_tokenizer_names_the_flag(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="--tokenizer"):
        Tokenizer(str(tmp_path / name) if name else "", "chatml", "none", TOKENS)
