"""Answers of templates that do not mark them: found without a rendering for each turn, where the template allows it."""

import pytest
from transformers import AutoTokenizer

from data import chat_template
from data.chat_template import TOOL_PROBE, ChatTemplate, ConversationRenderer, Turn
from tests.support import chat_templates as templates
from tests.support.small_tokenizer import CHATML_TOKENS, write_tokenizer

TURN = "{{ m.role }}:{{ m.content }}</s>"
PROMPT = "{% if add_generation_prompt %}assistant:{% endif %}"
LOOP = "{% for m in messages %}"
# Renderings of a conversation of twelve turns; None: one or more for each turn.
CASES = {
    "chatml": (templates.CHATML, 2),
    "llama3": (templates.LLAMA3, 2),
    "qwen2.5": (templates.QWEN25_TOOLS, 2),
    "qwen2-vl": (templates.QWEN2_VL, 2),
    "qwen3": (templates.QWEN3, None),
    "mistral-v3": (templates.MISTRAL_V3, None),
    "the rest of the messages": (
        "{% set rest = messages[1:] if messages[0].role == 'system' else messages %}{{ messages[0].role }}"
        f"{{% for m in rest %}}{TURN}{{% endfor %}}{PROMPT}", 2),
    "a turn looks back": (LOOP + "{{ '' if loop.previtem is defined }}" + TURN + "{% endfor %}" + PROMPT, 2),
    "a turn looks ahead": (LOOP + TURN + "{% if loop.nextitem is defined %}{% endif %}{% endfor %}" + PROMPT, None),
    "the loop leaves turns out": (LOOP.replace(" %}", " if m.role != 'system' %}") + TURN + "{% endfor %}" + PROMPT,
                                  None),
    "the prompt depends on the turns": (
        "{% set ns = namespace(n=0) %}" + LOOP + "{% set ns.n = ns.n + 1 %}" + TURN + "{% endfor %}"
        "{% if add_generation_prompt and ns.n > 2 %}assistant:{% endif %}", None),
    "turns depend on a switch": (LOOP + "{% if enable_thinking %}T{% endif %}" + TURN + "{% endfor %}" + PROMPT, None),
    "the end depends on the last turn": (
        LOOP + TURN + "{% endfor %}{% if messages[-1].role == 'user' %}assistant:{% endif %}", None),
    "a filter copies the turns": (LOOP.replace("messages", "messages | list") + TURN + "{% endfor %}" + PROMPT, None),
    "a filter leaves turns out": (LOOP.replace("messages", "messages | rejectattr('role', 'equalto', 'tool')") + TURN
                                  + "{% endfor %}" + PROMPT, None),
    "the loop ends early": (LOOP + "{% if loop.index > 20 %}{% break %}{% endif %}" + TURN + "{% endfor %}" + PROMPT,
                            2),
}


def conversation(turns: int, system: bool = False) -> list[Turn]:
    talk = [Turn("assistant" if number % 2 else "user", [f"what is {number}?"]) for number in range(turns)]
    return [Turn("system", ["be brief"]), *talk] if system else talk


@pytest.mark.parametrize("case", CASES)
def test_answers_are_those_of_renderings_of_each_turn(tmp_path, monkeypatch, case):
    template, wanted_renderings = CASES[case]
    write_tokenizer(tmp_path, special=[*CHATML_TOKENS, "<|image_pad|>", "<|eot_id|>"], chat_template=template)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    image_token = "<|image_pad|>" if "image_pad" in template else ""
    writer = ConversationRenderer(ChatTemplate("the template", template, tokenizer), image_token,
                                  ["</s>", "<|im_end|>", "<|eot_id|>"])
    renderings = 0
    render = chat_template.render_jinja_template

    def counted(*args, **kwargs):
        nonlocal renderings
        renderings += 1
        return render(*args, **kwargs)

    monkeypatch.setattr(chat_template, "render_jinja_template", counted)
    writer.render(conversation(12))
    assert renderings == wanted_renderings if wanted_renderings else renderings > 12

    def outcomes() -> list[object]:
        results: list[object] = []
        for talk in (conversation(2), conversation(5), conversation(12, system=True), conversation(24),
                     conversation(4)[1:], conversation(7)[2:], [*conversation(2), Turn("assistant", ["more"])],
                     TOOL_PROBE, [*TOOL_PROBE[:3], *TOOL_PROBE[2:]]):
            try:
                results.append(writer.render(talk))
            except ValueError as error:
                results.append(str(error))
        return results

    found = outcomes()
    monkeypatch.setattr(ChatTemplate, "prefix_ends", lambda *_: {})
    assert outcomes() == found
