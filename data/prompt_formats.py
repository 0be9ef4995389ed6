"""Prompt formats and image tags by name."""

from __future__ import annotations

from dataclasses import dataclass

# Text before and after each image.
IMAGE_TAGS = {
    "none": ("", ""),
    "internvl": ("<img>", "</img>"),
    "nvlm": ("<Image>", "</Image>"),
    "qwen2-vl": ("<|vision_start|>", "<|vision_end|>"),
}


@dataclass(frozen=True)
class PromptFormat:
    """The form in which turns are written.

    Attributes:
        template: Jinja chat template, with {% generation %} tags around the text that the model learns to write; empty
            for the tokenizer's own template.
        tokens: special tokens that the tokenizer must have, `eos_token` for its own.
        marks: text before each answer and at its end, in a template without {% generation %} tags.
    """

    template: str
    tokens: tuple[str, ...]
    marks: tuple[str, str] | None = None


def _headed(header: str, end: str, after: str = "", *, start: str = "", content: str = "message['content']") -> str:
    """Return a template whose turns are a header with the role, the content and an end. All are Jinja expressions."""
    after = "{{ " + after + " }}" if after else ""
    return (
        f"{start}{{% for message in messages %}}{{% set role = message['role'] %}}{{{{ {header} }}}}"
        f"{{% if role == 'assistant' %}}{{% generation %}}{{{{ {content} + {end} }}}}{{% endgeneration %}}"
        f"{{% else %}}{{{{ {content} + {end} }}}}{{% endif %}}{after}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{% set role = 'assistant' %}}{{{{ {header} }}}}{{% endif %}}"
    )


_BOS = "{{ bos_token }}"
_CHATML = ("'<|im_start|>' + role + '\\n'", "'<|im_end|>'", "'\\n'")
_MISTRAL = (
    _BOS + "{% set system = namespace(text='') %}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{% set system.text = system.text + message['content'] + '\\n\\n' %}"
    "{% elif message['role'] == 'user' %}{{ '[INST] ' + system.text + message['content'] + '[/INST]' }}"
    "{% set system.text = '' %}"
    "{% else %}{% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
)
_NEMOTRON_H = (
    "{% for message in messages %}{% set content = CONTENT | trim + '\\n' %}"
    "{% if message['role'] == 'system' %}{{ '<SPECIAL_10>System\\n' + content }}"
    "{% elif message['role'] == 'user' %}{{ '<SPECIAL_11>User\\n' + content }}"
    "{% else %}{{ '<SPECIAL_11>Assistant\\n' }}{% generation %}{{ content + END }}{% endgeneration %}{{ AFTER }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<SPECIAL_11>Assistant\\n' }}{% endif %}"
)
# Words with which users switch thinking on and off are removed from the text.
_WITHOUT_SWITCHES = (
    "(message['content'] if message['role'] == 'assistant' else "
    "message['content'].replace('/think', '').replace('/no_think', ''))"
)
_PLAIN = (
    _BOS + "{% for message in messages %}{% if not loop.first %}{{ '\\n' }}{% endif %}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '\\n' }}{% endif %}"
)

_CHATML_FORMAT = PromptFormat(_headed(*_CHATML), ("<|im_start|>", "<|im_end|>"))
_LLAMA3_FORMAT = PromptFormat(
    _headed(
        "'<|start_header_id|>' + role + '<|end_header_id|>\\n\\n'", "'<|eot_id|>'",
        start=_BOS, content="message['content'] | trim",
    ),
    ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
)

# Names as in Megatron-LM's multimodal and SFT tokenizers. plain has no roles; its turns are lines.
PROMPT_FORMATS = {
    "chatml": _CHATML_FORMAT,
    "qwen2p0": _CHATML_FORMAT,
    "qwen2p5": _CHATML_FORMAT,
    "nvlm-yi-34b": PromptFormat(_headed(*_CHATML, start=_BOS), _CHATML_FORMAT.tokens),
    "llama3": _LLAMA3_FORMAT,
    "llama3p1": _LLAMA3_FORMAT,
    "llama3p2": _LLAMA3_FORMAT,
    "mistral": PromptFormat(_MISTRAL, ("eos_token",)),
    "nemotron5": PromptFormat(
        _headed("'<SPECIAL_14>' + role + '\\n'", "'<SPECIAL_15>'", "'\\n'", start=_BOS),
        ("<SPECIAL_14>", "<SPECIAL_15>"),
    ),
    "nemotron5-aligned": PromptFormat(
        _headed("role | capitalize + '\\n'", "'\\n[PREFIX]'", start=_BOS), ("[PREFIX]",)
    ),
    "nemotron-h-aligned": PromptFormat(
        _NEMOTRON_H.replace("CONTENT", "message['content']").replace("END", "''").replace("AFTER", "''"),
        ("<SPECIAL_10>", "<SPECIAL_11>"),
    ),
    "nemotron-nano-v2": PromptFormat(
        _NEMOTRON_H.replace("CONTENT", _WITHOUT_SWITCHES).replace("END", "'<SPECIAL_12>'").replace("AFTER", "'\\n'"),
        ("<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>"),
    ),
    # The tokenizer's own template. Megatron's tokenizer learns the text between these two marks.
    "nemotron6-moe": PromptFormat(
        "", ("<|im_start|>", "<|im_end|>"), marks=("<|im_start|>assistant\n", "<|im_end|>")
    ),
    "plain": PromptFormat(_PLAIN, ("eos_token",)),
}
