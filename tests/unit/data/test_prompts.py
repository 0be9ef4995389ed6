"""Prompt formats, image tags and the loss mask."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from data.chat_template import Medium
from data.prompt_formats import IMAGE_TAGS, PROMPT_FORMATS
from data.prompts import Tokenizer, content_parts
from mimo.protocols import TokenSpec
from tests.support.chat_templates import CHATML, LLAVA, MISTRAL_V3, NEMOTRON3, QWEN2_VL, QWEN3, QWEN25_TOOLS, TRIMMING
from tests.support.small_tokenizer import CHATML_TOKENS, CORPUS, IMAGE, shown, write_tokenizer

TOKENS = TokenSpec(vocab_size=400, image_token_id=IMAGE, image_size=16, num_channels=3)
SPECIAL = (*CHATML_TOKENS, "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<SPECIAL_10>", "<SPECIAL_11>",
           "<SPECIAL_12>", "<SPECIAL_14>", "<SPECIAL_15>", "[PREFIX]")
TALK = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a <image> b"},
        {"role": "assistant", "content": "red cat"}, {"role": "user", "content": "and <image>?"},
        {"role": "assistant", "content": "blue dog"}]
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
        "<SPECIAL_10>System\nbe brief\n<SPECIAL_11>User\na # b\n<SPECIAL_11>Assistant\n[red cat</s>]"
        "<SPECIAL_11>User\nand #?\n<SPECIAL_11>Assistant\n[blue dog</s>]"
    ),
    "nemotron-nano-v2": (
        "<SPECIAL_10>System\nbe brief\n<SPECIAL_11>User\na # b\n<SPECIAL_11>Assistant\n[red cat\n<SPECIAL_12>]\n"
        "<SPECIAL_11>User\nand #?\n<SPECIAL_11>Assistant\n[blue dog\n<SPECIAL_12>]\n"
    ),
    "plain": "<s>be brief\na # b\n[red cat</s>]\nand #?\n[blue dog</s>]",
}
WRITTEN |= {"qwen2p0": WRITTEN["chatml"], "qwen2p5": WRITTEN["chatml"], "nvlm-yi-34b": "<s>" + WRITTEN["chatml"]}
WRITTEN["nemotron6-moe"] = WRITTEN["chatml"]
WRITTEN |= {"llama3p1": WRITTEN["llama3"], "llama3p2": WRITTEN["llama3"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), special=SPECIAL)


@pytest.fixture(scope="module")
def chatml_folder(tmp_path_factory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("chatml"), special=SPECIAL, chat_template=CHATML)


def templated(folder: Path, template: str | None, *, append_eos: bool = False, special=CHATML_TOKENS) -> Tokenizer:
    write_tokenizer(folder, special=special, chat_template=template)
    tokens = TOKENS
    for token in ("<image>", "<|image_pad|>"):
        if token in special:
            tokens = replace(TOKENS, image_token_id=3 + list(special).index(token))
    return Tokenizer(str(folder), "tokenizer", "none", tokens, append_eos=append_eos)


@pytest.mark.parametrize("prompt_format", PROMPT_FORMATS)
def test_each_format_writes_turns_and_learns_answers_with_their_end(folder, chatml_folder, prompt_format):
    chosen = folder if PROMPT_FORMATS[prompt_format].template else chatml_folder
    endless = prompt_format == "nemotron-h-aligned"
    tokens, mask = Tokenizer(str(chosen), prompt_format, "none", TOKENS, append_eos=endless).encode(TALK, [1, 1])
    assert tokens.dtype == np.int64 and mask.dtype == np.bool_ and tokens.shape == mask.shape
    assert shown(folder, tokens, mask) == WRITTEN[prompt_format]


# Chat template, turns of TALK, and what it writes for them.
OWN = {
    # The reference system lost it on the way: its adapter did not hand it on (bug 24). This one has no generation
    # prompt, so the answer starts with its content; the space before is of the same token.
    "the tokenizer's own": (
        "{% for message in messages %}{{ message['role'] | upper + ': ' + message['content'] + '</s>' }}{% endfor %}",
        slice(1, 3), "USER: a # b</s>ASSISTANT:[ red cat</s>]"),
    "without generation tags": (CHATML, slice(None), WRITTEN["chatml"]),
    "of content parts alone": (
        "{% for message in messages %}{{ message['role'] }}:{% for part in message['content'] %}{{ part.text }}"
        "{% endfor %}</s>{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}",
        slice(1, 3), "user:a # b</s>assistant:[red cat</s>]"),
    "whose end is not marked": (
        "{% for message in messages %}{{ message['role'] + ':' }}{% if message['role'] == 'assistant' %}"
        "{% generation %}{{ message['content'] }}{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}"
        "{{ '</s>\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}",
        slice(1, None), "user:a # b</s>\nassistant:[red cat</s>]\nuser:and #?</s>\nassistant:[blue dog</s>]\n"),
    "with a date, which is not today's": (
        "{{ strftime_now('%d %b %Y') }}\n" + CHATML, slice(1, 3),
        "26 Jul 2024\n" + WRITTEN["chatml"].split("<|im_start|>user\nand")[0].partition("<|im_end|>\n")[2]),
}


@pytest.mark.parametrize("case", OWN)
def test_a_chat_template_writes_turns_and_answers_are_learned_with_their_end(tmp_path, case):
    template, turns, written = OWN[case]
    talk = TALK[turns]
    tokens, mask = templated(tmp_path, template).encode(talk, [1] * (len(talk) // 2))
    assert shown(tmp_path, tokens, mask) == written


@pytest.mark.parametrize("answer", ["A", "S", "ASSISTANT", "AS"])
def test_an_answer_of_letters_of_its_header_begins_behind_the_header(tmp_path, answer):
    tokenizer = templated(tmp_path, OWN["the tokenizer's own"][0])
    talk = [*TALK[1:3], TALK[3], {"role": "assistant", "content": answer}]
    tokens, mask = tokenizer.encode(talk, [1, 1])
    assert shown(tmp_path, tokens, mask) == (
        f"USER: a # b</s>ASSISTANT:[ red cat</s>]USER: and #?</s>ASSISTANT: [{answer}</s>]")
    prompt, _ = tokenizer.encode_question(TALK[1:2], [1])
    assert shown(tmp_path, prompt, prompt < 0) == "USER: a # b</s>ASSISTANT: "


LIKE = [{"role": "system", "content": "like <image>"}, *TALK[1:3]]
# Chat template, and a talk that it cannot write, or None where it is refused by itself.
UNFIT = {
    "writes the last answer differently": (
        CHATML.replace("message['content'] +", "('' if loop.last else 'Earlier: ') + message['content'] +"), None,
        "--tokenizer {folder}.*turn 2 after its own.*another --prompt-format"),
    "writes nothing": ("", None, "--tokenizer {folder}"),
    "loses text": ("{% for message in messages %}{{ message['role'] }}{% endfor %}", None, "--tokenizer {folder}"),
    "leaves out a turn with an image": (
        "{% for message in messages %}{% if message['role'] != 'system' %}" + CHATML.removeprefix(
            "{% for message in messages %}").replace("{% endfor %}", "{% endif %}{% endfor %}"), LIKE,
        "writes 1 of 2 images"),
    "refuses a conversation": (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML, TALK,
        "refuses the conversation: no system role"),
    "drops the system turn once an answer follows": (MISTRAL_V3, TALK[:3], "turn 3 after its own generation prompt"),
    "makes a token that is half an answer": (
        "{% for message in messages %}{{ 'catu' if message['role'] == 'user' else 'th' }}{{ message['content'] }}"
        "{{ '</s>' }}{% endfor %}{% if add_generation_prompt %}{{ 'th' }}{% endif %}",
        [TALK[1], {"role": "assistant", "content": "e cat"}], "the token 'the' holds a part of an answer and 'th'"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_a_chat_template_that_does_not_write_a_conversation_is_refused(tmp_path, case):
    template, talk, message = UNFIT[case]
    if talk is not None:
        tokenizer = templated(tmp_path, template)
        assert tokenizer.encode(TALK[1:], [1, 1])[1].any()
    with pytest.raises(ValueError, match=message.format(folder=tmp_path)):
        tokenizer.encode(talk, [1] * str(talk).count("<image>")) if talk else templated(tmp_path, template)


VISION = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]
GEMMA = ["<image>", "<start_of_turn>", "<end_of_turn>"]


@pytest.mark.parametrize(("template", "special", "written"), [
    # The images first, each on a line of its own; </s> in place of the space behind an answer.
    (LLAVA, ["<image>"], "USER: #\na   b ASSISTANT:[ red cat</s>]USER: #\nand  ? ASSISTANT:[ blue dog</s>]"),
    (QWEN2_VL, VISION,
     "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
     "a <|vision_start|>#<|vision_end|> b<|im_end|>\n<|im_start|>assistant\n[red cat<|im_end|>]\n"
     "<|im_start|>user\nand <|vision_start|>#<|vision_end|>?<|im_end|>\n<|im_start|>assistant\n"
     "[blue dog<|im_end|>]\n"),
    (TRIMMING.replace("<start_of_image>", "<image>"), GEMMA,
     "<s><start_of_turn>user\na#b<end_of_turn>\n<start_of_turn>model\n[red cat<end_of_turn>]\n"
     "<start_of_turn>user\nand#?<end_of_turn>\n<start_of_turn>model\n[blue dog<end_of_turn>]\n"),
])
def test_a_template_that_writes_images_places_them_itself(tmp_path, template, special, written):
    tokenizer = templated(tmp_path, template, special=special, append_eos=template is LLAVA)
    tokens, mask = tokenizer.encode(TALK[1:], [1, 1])
    image = AutoTokenizer.from_pretrained(tmp_path).convert_tokens_to_ids(
        "<|image_pad|>" if special is VISION else "<image>")
    assert shown(tmp_path, np.where(tokens == image, IMAGE, tokens), mask) == written


def test_a_line_break_beside_a_marker_is_the_templates(tmp_path):
    tokenizer = templated(tmp_path, LLAVA, special=["<image>"], append_eos=True)
    parts = [{"type": "image"}, {"type": "text", "text": "the cat"}]
    talks = [[{"role": "user", "content": content}, TALK[2]] for content in (parts, "<image>\nthe cat")]
    (tokens, _), (same, _) = (tokenizer.encode(talk, [2]) for talk in talks)
    assert tokens.tolist() == same.tolist()


def test_a_template_that_ends_no_answer_is_refused_and_eos_can_end_them(tmp_path):
    with pytest.raises(ValueError, match=f"--tokenizer {tmp_path}.*never end; --append-eos"):
        templated(tmp_path, LLAVA, special=["<image>"])
    with pytest.raises(ValueError, match=r"--append-eos: .* ends answers with '<\|im_end\|>' already"):
        templated(tmp_path, CHATML, append_eos=True)


def test_an_answer_that_the_template_rewrites_later_is_history(tmp_path):
    """Qwen3's last answer has a block of thoughts, if only an empty one; earlier answers have none."""
    tokenizer = templated(tmp_path, QWEN3)
    assert tokenizer.rewrites_history
    tokens, mask = tokenizer.encode(TALK[1:3], [1])
    user = "<|im_start|>user\na # b<|im_end|>\n<|im_start|>assistant\n"
    assert shown(tmp_path, tokens, mask) == f"{user}[<think>\n\n</think>\n\nred cat<|im_end|>]\n"
    tokens, mask = tokenizer.encode(TALK[1:], [1, 1])
    assert shown(tmp_path, tokens, mask) == (
        f"{user}red cat<|im_end|>\n<|im_start|>user\nand #?<|im_end|>\n<|im_start|>assistant\n"
        "[<think>\n\n</think>\n\nblue dog<|im_end|>]\n")
    with pytest.raises(ValueError, match="differently when other turns follow"):
        tokenizer.encode(TALK[1:4], [1, 1])


def test_a_template_that_asks_for_thoughts_takes_answers_with_and_without(tmp_path):
    """Nemotron 3's generation prompt opens the thoughts; its switch for none opens and closes them."""
    tokenizer = templated(tmp_path, NEMOTRON3)
    head = "<|im_start|>system\n<|im_end|>\n<|im_start|>user\na # b<|im_end|>\n<|im_start|>assistant\n"
    tokens, mask = tokenizer.encode(TALK[1:3], [1])
    assert shown(tmp_path, tokens, mask) == f"{head}<think></think>[red cat<|im_end|>]\n"
    thinking = {"role": "assistant", "content": "<think>\nwhy\n</think>\nred cat"}
    tokens, mask = tokenizer.encode([TALK[1], thinking], [1])
    assert shown(tmp_path, tokens, mask) == f"{head}<think>\n[why\n</think>\nred cat<|im_end|>]\n"
    assert tokenizer.rewrites_history


@pytest.mark.parametrize(("template", "special", "image_id", "tags", "message"), [
    (LLAVA, ["<image>"], 390, "none", "--image-token-id 390: is no token of .*image token is 3 \\('<image>'\\)"),
    (QWEN2_VL, VISION, 5, "none",
     r"--image-token-id 5: is '<\|vision_start\|>' of .*image token is 6 \('<\|image_pad\|>'\)"),
    (CHATML, [*CHATML_TOKENS, "<image>"], 390, "none", "--image-token-id 390: .*image token is 5"),
    (LLAVA, ["<pixels>"], 3, "none", r"--image-token-id 3: is '<pixels>' of .*writes an image as '<image>\\n'"),
    (QWEN2_VL, VISION, 6, "qwen2-vl", "--image-tag-type qwen2-vl: .*leave --image-tag-type at none"),
])
def test_an_image_token_that_is_not_the_tokenizers_is_refused(tmp_path, template, special, image_id, tags, message):
    write_tokenizer(tmp_path, special=special, chat_template=template)
    with pytest.raises(ValueError, match=message):
        Tokenizer(str(tmp_path), "tokenizer", tags, replace(TOKENS, image_token_id=image_id),
                  append_eos=template is LLAVA)


def test_the_image_token_may_be_told_by_the_files_of_the_processor(tmp_path):
    write_tokenizer(tmp_path, special=[*CHATML_TOKENS, "<pixels>"], chat_template=CHATML)
    (tmp_path / "processor_config.json").write_text('{"image_token": "<pixels>"}')
    with pytest.raises(ValueError, match="--image-token-id 390: .*image token is 5 \\('<pixels>'\\)"):
        Tokenizer(str(tmp_path), "tokenizer", "none", TOKENS)


def test_the_template_of_the_processor_is_the_one_that_is_used(tmp_path):
    write_tokenizer(tmp_path, special=[*CHATML_TOKENS, "<image>"], chat_template=CHATML)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": LLAVA}))
    tokens = Tokenizer(str(tmp_path), "tokenizer", "none", replace(TOKENS, image_token_id=5), append_eos=True).encode(
        TALK[1:3], [1])[0]
    assert AutoTokenizer.from_pretrained(tmp_path).decode(tokens) == "USER: <image>\na   b ASSISTANT: red cat</s>"


def test_a_document_has_the_tags_that_the_template_writes_around_images(tmp_path):
    tokenizer = templated(tmp_path, QWEN2_VL, special=VISION)
    tokens, mask = tokenizer.encode_document("red<image> cat", [2])
    assert shown(tmp_path, np.where(tokens == 6, IMAGE, tokens), mask) == (
        "<s>[red]<|vision_start|>##<|vision_end|>[ cat</s>]")


@pytest.mark.parametrize(
    "prompt_format",
    ["mistral", "qwen2p0", "qwen2p5", "llama3p1", "llama3p2", "nemotron5", "nemotron5-aligned", "nemotron-nano-v2"],
)
def test_formats_write_what_megatrons_tokenizers_write(folder, prompt_format):
    from megatron.core.tokenizers.text.libraries.sft_tokenizer import SFTTokenizer
    from megatron.core.tokenizers.vision.libraries.multimodal_tokenizer import MegatronMultimodalTokenizer

    talk = [{"role": "system", "content": "be brief /no_think"}, *TALK[1:]]
    talk = talk[1:] if prompt_format == "mistral" else talk  # Megatron leaves it out
    tokens, _ = Tokenizer(str(folder), prompt_format, "internvl", TOKENS).encode(talk, [1, 1])
    turns = [dict(turn) for turn in talk]
    if prompt_format == "nemotron-nano-v2":
        for turn in turns:
            turn["content"] = turn["content"].replace("<image>", "<img><image></img>")
        megatrons = SFTTokenizer(str(folder), prompt_format)
        megatrons._tokenizer.add_tokens(["<image>"], special_tokens=True)
        image = megatrons._tokenizer.convert_tokens_to_ids("<image>")
    else:
        megatrons = MegatronMultimodalTokenizer(str(folder), prompt_format, ["<image>"], "internvl")
        image = megatrons.convert_tokens_to_ids("<image>")
    wanted = megatrons.tokenize_conversation(turns, False, False)
    assert tokens.tolist() == np.where(wanted == image, IMAGE, wanted).tolist()


def test_prompt_format_nemotron6_moe_learns_what_megatrons_tokenizer_learns(tmp_path):
    """Megatron learns all between these marks, of the tokenizer's own template, in every answer of a conversation."""
    write_tokenizer(tmp_path, special=[*CHATML_TOKENS, "<image>", "<img>", "</img>"], chat_template=NEMOTRON3)
    tokens = replace(TOKENS, image_token_id=5)
    thinking = {"role": "assistant", "content": "<think>\nwhy\n</think>\nred cat"}
    ids, mask = Tokenizer(str(tmp_path), "nemotron6-moe", "internvl", tokens).encode(
        [TALK[1], thinking, *TALK[3:]], [1, 2])
    assert shown(tmp_path, np.where(ids == 5, IMAGE, ids), mask) == (
        "<|im_start|>system\n<|im_end|>\n<|im_start|>user\na <img>#</img> b<|im_end|>\n<|im_start|>assistant\n"
        "[<think></think>\nred cat<|im_end|>]\n<|im_start|>user\nand <img>##</img>?<|im_end|>\n"
        "<|im_start|>assistant\n[<think></think>blue dog<|im_end|>]\n")
    write_tokenizer(tmp_path / "bare", special=CHATML_TOKENS)
    with pytest.raises(ValueError, match="has no chat template"):
        Tokenizer(str(tmp_path / "bare"), "nemotron6-moe", "none", TOKENS)


# How tokenizers treat the first word of a text, and what an image token takes away from the text around it.
PIPELINES = {
    "metaspace-first": (None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False), {}),
    "metaspace-always": (None, pre_tokenizers.Metaspace(prepend_scheme="always", split=False), {}),
    "metaspace-never": (None, pre_tokenizers.Metaspace(prepend_scheme="never", split=False), {}),
    "legacy-llama": (
        normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]), None, {}),
    "byte-level": (None, pre_tokenizers.ByteLevel(add_prefix_space=False), {}),
    "byte-level-space": (None, pre_tokenizers.ByteLevel(add_prefix_space=True), {}),
    "image-strips": (None, pre_tokenizers.Metaspace(prepend_scheme="first"), {"lstrip": True, "rstrip": True}),
}


@pytest.mark.parametrize("kind", PIPELINES)
def test_the_whole_text_is_tokenised_as_transformers_does(tmp_path, kind):
    normalizer, pre_tokenizer, image = PIPELINES[kind]
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    backend.normalizer = normalizer or normalizers.Sequence([])
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    alphabet = sorted({*pre_tokenizers.ByteLevel.alphabet(), "\u2581", " ", "\n"})
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=["<unk>", "<s>", "</s>"], initial_alphabet=alphabet,
                                  show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    hf.add_special_tokens({"additional_special_tokens": [AddedToken("<image>", special=True, **image)]})
    hf.chat_template = (
        "{% for message in messages %}{% if message['role'] == 'assistant' %}{% generation %}"
        "{{ ' ' + message['content'] + '</s>' }}{% endgeneration %}{% else %}{{ message['content'] + ':' }}{% endif %}"
        "{% endfor %}"
    )
    hf.save_pretrained(tmp_path)
    talk = [{"role": "user", "content": "see <image> the<image>cat <image>"}, TALK[2], *TALK[3:]]
    shown_to_hf = [turn | {"content": turn["content"].replace("<image>", "<image><image>")} for turn in talk]
    wanted = hf.apply_chat_template(shown_to_hf, return_dict=True, return_assistant_tokens_mask=True)
    image_id = hf.convert_tokens_to_ids("<image>")
    spec = TokenSpec(vocab_size=len(hf) + 10, image_token_id=image_id, image_size=16, num_channels=3)
    tokens, mask = Tokenizer(str(tmp_path), "tokenizer", "none", spec).encode(talk, [2] * 4)
    assert tokens.tolist() == wanted["input_ids"]
    assert mask.tolist() == [bool(learned) for learned in wanted["assistant_masks"]]


@pytest.mark.parametrize("nested", [False, True])
def test_spaces_are_learned_where_the_post_processor_trims_offsets(tmp_path, nested):
    write_tokenizer(tmp_path)
    saved = json.loads((tmp_path / "tokenizer.json").read_text())
    talk = [{"role": "user", "content": "list"}, {"role": "assistant", "content": "a,  b\n\n -   c  "}]
    found = []
    for trims in (False, True):
        trimming = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": trims, "use_regex": True}
        saved["post_processor"] = {"type": "Sequence", "processors": [trimming]} if nested else trimming
        (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
        tokens, mask = Tokenizer(str(tmp_path), "plain", "none", TOKENS).encode(talk, [])
        found.append((tokens.tolist(), mask.tolist()))
    assert found[0] == found[1]
    assert AutoTokenizer.from_pretrained(tmp_path).decode(tokens[mask]) == "a,  b\n\n -   c  </s>"


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
    tokenizer = Tokenizer(str(folder), "plain", "none", TOKENS)
    plain = [{"role": "user", "content": "a <image>"}, talk[1]]
    tokenizer.encode(plain, [1])  # IMAGE0PLACEHOLDER is the image token of this one
    tokens, mask = tokenizer.encode(talk, [1])
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


@pytest.mark.parametrize(("talk", "tiles", "message"), [
    ([], [], "empty conversation"),
    (TALK[:2], [1], "no assistant turn"),
    (TALK[1:3], [], "1 image marker but 0 images"),
    (TALK[1:3], [1, 1], "1 image marker but 2 images"),
    ([TALK[1], {"role": "assistant", "content": "<image>"}], [1, 1], "turn 2: image in an answer"),
    ([{"role": "user", "content": " "}, TALK[2]], [], r"turn 1 \(user\) is empty"),
    ([TALK[0], {"role": "assistant", "content": ""}], [], r"turn 2 \(assistant\) is empty"),
    ([{"role": "tool", "content": "a"}, TALK[2]], [], "turns of role tool, which the chat template of .* not"),
    ([{"role": "function", "content": "a"}, TALK[2]], [], "role 'function' is none of system, user, assistant, to"),
    (["hello", TALK[2]], [], "turn 1 is str"),
    ([{"role": "user", "content": None}, TALK[2]], [], "content is NoneType"),
    ([{"role": "user", "content": [{"type": "audio"}]}, TALK[2]], [], "neither text nor image"),
    ([{"role": "user", "content": [{"type": "image", "image": "/etc/x.png"}]}, TALK[2]], [1], "may only have type"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, TALK[2]], [1], "may only have type"),
])
def test_the_fault_of_a_conversation_is_named(folder, talk, tiles, message):
    with pytest.raises(ValueError, match=message):
        Tokenizer(str(folder), "chatml", "none", TOKENS).encode(talk, tiles)


def test_a_document_needs_text_and_as_many_images_as_markers(folder):
    tokenizer = Tokenizer(str(folder), "plain", "none", TOKENS)
    with pytest.raises(ValueError, match="no text"):
        tokenizer.encode_document("  ")
    with pytest.raises(ValueError, match="0 image markers but 1 image"):
        tokenizer.encode_document("a cat", [1])


def test_a_text_model_takes_no_image(folder):
    text_model = TokenSpec(vocab_size=400, image_token_id=-1, image_size=0, num_channels=3)
    tokenizer = Tokenizer(str(folder), "plain", "none", text_model)
    assert tokenizer.encode_document("a cat")[1].any()
    with pytest.raises(ValueError, match="1 image, but the model takes none"):
        tokenizer.encode_document("a <image>", [1])


def test_string_content_is_cut_at_its_markers():
    image = Medium.IMAGE
    assert content_parts("<image>a<image><image>b") == ["", image, "a", image, "", image, "b"]


@pytest.mark.parametrize(("prompt_format", "tags", "tokens", "message"), [
    ("tokenizer", "none", {}, "--tokenizer .*no chat template; give --prompt-format, one of chatml"),
    ("chatlm", "none", {}, "--prompt-format chatlm: unknown; known are tokenizer, chatml"),
    ("chatml", "intern", {}, "--image-tag-type intern: unknown; known are none, internvl, nvlm"),
    ("chatml", "none", {"vocab_size": 300}, "--tokenizer .*token ids up to 318.*--vocab-size is 300"),
    ("chatml", "none", {"image_token_id": 100}, "--image-token-id 100: is .*take an id that.*such as 319"),
    ("chatml", "none", {"image_token_id": 2}, "--image-token-id 2: is '</s>'"),
    ("chatml", "none", {"image_token_id": 4}, r"--image-token-id 4: is '<\|im_end\|>', which .* in every"),
])
def test_an_impossible_setting_names_its_flag(folder, prompt_format, tags, tokens, message):
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


OFFERED = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


def call(arguments: object, name: object = "look") -> dict:
    """Return an answer of the assistant that calls a tool, in OpenAI's form."""
    return {"role": "assistant", "content": None, "tool_calls": [
        {"id": "call_0001", "type": "function", "function": {"name": name, "arguments": arguments}}]}


TOOL_TALK = [{"role": "user", "content": "which cat?"}, call('{"at": "cat"}'),
             {"role": "tool", "tool_call_id": "call_0001", "content": "a red cat"},
             {"role": "tool", "tool_call_id": "call_0002", "content": "a blue cat"},
             {"role": "assistant", "content": "the red cat"}]


def test_tool_turns_are_written_as_transformers_does_and_results_are_not_learned(tmp_path):
    folder = write_tokenizer(tmp_path, special=SPECIAL, chat_template=QWEN25_TOOLS)
    for tools in (OFFERED, None):
        tokens, mask = Tokenizer(str(folder), "tokenizer", "none", TOKENS).encode(TOOL_TALK, tools=tools)
        hf = AutoTokenizer.from_pretrained(folder)
        talk = [{**turn, "content": turn["content"] or ""} for turn in TOOL_TALK]
        talk[1] = {**talk[1], **{"tool_calls": call({"at": "cat"})["tool_calls"]}}
        expected = hf.apply_chat_template(talk, tools=tools, tokenize=False)
        assert tokens.tolist() == hf(expected, add_special_tokens=False)["input_ids"]
        assert ("<tools>" in expected) == (tools is not None)
        learned = shown(folder, tokens, mask).split("[")[1:]
        assert [text.split("]")[0] for text in learned] == [
            '<tool_call>\n{"name": "look", "arguments": {"at": "cat"}}\n</tool_call><|im_end|>',
            "the red cat<|im_end|>"]


@pytest.mark.parametrize("prompt_format", ["chatml", "llama3", "mistral", "nemotron-nano-v2", "plain"])
def test_a_format_without_tools_refuses_them(folder, prompt_format):
    tokenizer = Tokenizer(str(folder), prompt_format, "none", TOKENS)
    words = f"which the chat template of .* --prompt-format {prompt_format} does not write; --prompt-format tokenizer"
    for talk, tools, named in ((TOOL_TALK, None, "tool_calls and turns of role tool"),
                               ([*TOOL_TALK[:1], *TOOL_TALK[2:]], None, "turns of role tool"),
                               ([TOOL_TALK[0], TALK[2]], OFFERED, "tools")):
        with pytest.raises(ValueError, match=f"the conversation has {named}, {words}"):
            tokenizer.encode(talk, tools=tools)


@pytest.mark.parametrize("prompt_format", ["nemotron6-moe", "tokenizer"])
def test_a_chat_template_that_drops_tool_calls_is_told(chatml_folder, prompt_format):
    tokenizer = Tokenizer(str(chatml_folder), prompt_format, "none", TOKENS)
    with pytest.raises(ValueError, match="the conversation has tool_calls, which the chat template of .* does not"):
        tokenizer.encode(TOOL_TALK)


@pytest.mark.parametrize(("turn", "message"), [
    (call("{"), "turn 2: arguments of tool call 'look' are not JSON"),
    (call("[1]"), "turn 2: arguments of tool call 'look' are list, expected an object"),
    (call({}, None), "turn 2: tool call .* has no function with a name"),
    ({"role": "assistant", "tool_calls": "look"}, "turn 2: tool_calls is str, expected a list"),
    ({"role": "user", "content": "a", "tool_calls": [1]}, "turn 2: tool_calls of role user"),
    (call({"at": "\ud83d"}), "lone surrogate U\\+D83D"),
])
def test_tool_calls_that_cannot_be_read_are_named(tmp_path, turn, message):
    tokenizer = Tokenizer(str(write_tokenizer(tmp_path, special=SPECIAL, chat_template=QWEN25_TOOLS)), "tokenizer",
                          "none", TOKENS)
    with pytest.raises(ValueError, match=message):
        tokenizer.encode([TOOL_TALK[0], turn, *TOOL_TALK[2:]])
