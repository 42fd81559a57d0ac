"""Earlier answers that mention a mark at which the chat template cuts them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cllm.backends.fake.vocabulary import FakeVocabulary
from cllm.text.templates.chat_template import ChatTemplate
from cllm.text.templates.fences import MARKS, Fences, remove_fences

FOLDER = Path(__file__).parents[2] / "data" / "templates"
END = "<|im_end|>"
# as Qwen3's: reasoning is shown after the last question only
MOVING = (
    "{% for m in messages %}{% set content = m.content %}{% set thought = m.reasoning_content %}"
    "{% if m.role == 'assistant' and not thought and '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "[{{ m.role }}]{% if thought and loop.last %}<think>{{ thought }}</think>{% endif %}"
    "{{ content }}<|im_end|>{% endfor %}"
)
TEMPLATES = {
    "deepseek": (FOLDER / "deepseek_r1.jinja").read_text() + END,
    "moving": MOVING,
    "brackets": "{% for m in messages %}{{ m.content.split('[/THINK]', 1)[-1] if m.role == "
    "'assistant' else m.content }}<|im_end|>{% endfor %}",
}


class Vocabulary(FakeVocabulary):
    def __init__(self, template: str, more: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.chat_template = TEMPLATES[template]
        self.control_tokens = [*FakeVocabulary.control_tokens, *more]
        self.special_texts = {"bos_token": "<s>", "eos_token": END}


def rendered(vocabulary: Vocabulary, content: str, **more: str) -> str:
    """Return the prompt with ``content`` as an earlier answer. Check that its fences are whole."""
    answer = {"role": "assistant", "content": content, **more}
    asked = {"role": "user", "content": "And now?"}
    text = ChatTemplate(vocabulary).render([asked, answer, asked], [])
    segments = Fences(vocabulary).split(text)
    assert not MARKS.search("".join(segment.text for segment in segments))
    assert segments[-1].parse_special
    assert segments[-1].text.endswith(END)
    return remove_fences(text)


MARK_TOKENS = ("<think>", "</think>", "[THINK]", "[/THINK]")


@pytest.mark.parametrize("control", [(), MARK_TOKENS])
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize(
    "content",
    [
        "Models write <think>hm</think> before the answer.",
        "Close it with </think> at its end.",
        "```\n<think>\nhm\n</think>\n```\nThat is the form.",
        "Both: </think> and again </think>, done.",
    ],
)
def test_answer_that_mentions_a_mark_is_shown_whole(content, template, control):
    if template == "brackets":
        content = re.sub("<(/?)think>", r"[\1THINK]", content)
    assert content in rendered(Vocabulary(template, control), content)


@pytest.mark.parametrize("control", [(), MARK_TOKENS])
@pytest.mark.parametrize("template", ["deepseek", "moving"])
@pytest.mark.parametrize(
    "content", ["<think>\nhm\n</think>\n\n", "hm\n</think>\n\n", "hm</think>\n"]
)
@pytest.mark.parametrize("answer", ["It is 4.", "It is </think>, I think."])
def test_reasoning_before_an_answer_is_left_to_the_template(content, answer, template, control):
    """Both templates omit it from earlier answers, and show all of the answer."""
    prompt = rendered(Vocabulary(template, control), content + answer)
    assert answer in prompt
    assert "hm" not in prompt


def test_answer_with_reasoning_in_its_own_field_is_shown_whole():
    prompt = rendered(Vocabulary("moving"), "hm\n</think>\nso", reasoning_content="apart")
    assert "hm\n</think>\nso" in prompt
