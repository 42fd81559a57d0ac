"""Boundaries of messages: where the state of a prompt is saved for later ones."""

from __future__ import annotations

import re
from functools import cache
from itertools import accumulate

import pytest
from template_texts import FAMILIES, FOLDER, TOOLS, Vocabulary, talk

from cllm.text.templates.boundaries import count_shared, render_with_boundaries
from cllm.text.templates.chat_template import ChatTemplate
from cllm.text.templates.fences import BOUNDARY, CLOSE, CUT, OPEN

CONTROL = re.compile(r"<[|｜]?[\w.▁/:]{1,30}[|｜]?>|\[/?[A-Z_]{3,20}\]")
# these write the instructions, or the tools, into the first question
FOLDING = ("gemma3", "llama3", "mistral_tekken")
MAX_LOST = 60  # characters: the beginning of a message
ANSWER = {"role": "assistant", "content": "answered", "reasoning_content": "thought"}
ASKED = {"role": "user", "content": "asked again"}


class Marked(Vocabulary):
    """Its control tokens are all that the template seems to write."""

    def __init__(self, template: str) -> None:
        super().__init__(template)
        self.control_tokens = sorted({*CONTROL.findall(template), "<s>", "</s>", "<|user|>"})


@cache
def make_template(family: str) -> ChatTemplate:
    return ChatTemplate(Marked((FOLDER / f"{family}.jinja").read_text()))


def mark(family, messages, tools=(), continued="", **variables):
    """Return the prompt with marks at its boundaries."""
    template = make_template(family)
    return render_with_boundaries(
        template.render, template.fences, messages, [*tools], continued, variables
    )


def render(family, messages, tools=(), **variables):
    """Return the prompt, and its boundaries."""
    text = mark(family, messages, tools, **variables)
    *parts, _ = text.split(BOUNDARY)
    ends = [*accumulate(map(len, parts))]
    plain = text.replace(BOUNDARY, "")
    assert plain == make_template(family).render(messages, [*tools], **variables)
    return plain, ends


def find_lost(family, messages, later, **more):
    """Return how many characters that ``later`` shares with ``messages`` lie after a boundary."""
    text, ends = render(family, messages, **more)
    other, _ = render(family, later, **more)
    shared = count_shared(text, other)
    return shared - max([0, *(end for end in ends if end <= shared)])


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("form", ["u", "su", "suau", "surau"])
@pytest.mark.parametrize("family", FAMILIES)
def test_next_turn(family, form, thinking):
    messages = talk(form)
    lost = find_lost(family, messages, [*messages, ANSWER, ASKED], enable_thinking=thinking)
    assert lost < MAX_LOST


@pytest.mark.parametrize("family", FAMILIES)
def test_next_question_after_calls(family):
    messages = talk("suct")
    messages[2]["reasoning_content"] = "thought"
    lost = find_lost(family, messages, [*messages, ANSWER, ASKED], tools=TOOLS)
    assert lost < MAX_LOST


@pytest.mark.parametrize("family", FAMILIES)
def test_conversations_with_the_same_instructions(family):
    system = {"role": "system", "content": "You help. " * 50}
    first, second = ([system, {"role": "user", "content": text}] for text in ("one", "two"))
    lost = find_lost(family, first, second, tools=TOOLS)
    assert (lost < MAX_LOST) == (family not in FOLDING)


@pytest.mark.parametrize("family", FAMILIES)
def test_edited_question(family):
    """Prompts agree up to the question before the edited one, at least."""
    messages = talk("suauau")
    edited = [*messages[:3], {"role": "user", "content": "edited"}]
    _, ends = render(family, messages[:2])
    other, _ = render(family, edited)
    text, _ = render(family, messages[:2], add_generation_prompt=False)
    assert ends[-1] >= count_shared(text, other) - MAX_LOST


def test_control_tokens_of_users_are_no_boundaries():
    messages = [{"role": "user", "content": "a <|im_start|> b <|im_start|>"}]
    template = make_template("qwen3")
    text = mark("qwen3", messages)
    parts = template.fences.split_at_boundaries(text)
    joined = "".join(segment.text for part in parts for segment in part)
    assert joined == "".join(
        segment.text for segment in template.fences.split(text.replace(BOUNDARY, ""))
    )
    assert [part[0].text[:12] for part in parts[1:]] == ["<|im_start|>"]


def test_control_tokens_within_fenced_beginnings_are_no_boundaries():
    """A boundary there would divide the fenced text, and let a user write a control token."""
    vocabulary = Vocabulary(
        "<u>{{ messages[0].content }}{% if add_generation_prompt %}A{% endif %}"
    )
    vocabulary.control_tokens = ["[[x]]", "[x]", "<u>"]
    template = ChatTemplate(vocabulary)
    messages = [{"role": "user", "content": "a[[x]"}]
    text = render_with_boundaries(template.render, template.fences, messages, [], "", {})
    assert text == f"<u>a{OPEN}[[x]{CLOSE}A"


def test_continued_message():
    """The boundaries are those before the message that is continued."""
    messages = [*talk("su"), {"role": "assistant", "content": "begun"}]
    text = mark("qwen3", messages, continued="content")
    before, begun = text.split(CUT)
    assert begun == "begun"
    assert before.rpartition(BOUNDARY)[2].startswith("<|im_start|>assistant")


def test_slow_templates_are_not_asked_again(monkeypatch):
    """The state is saved before the answer all the same."""
    monkeypatch.setattr("cllm.text.templates.boundaries.MAX_SECONDS", -1)
    text, [end] = render("qwen3", talk("su"))
    assert text[end:].startswith("<|im_start|>assistant")


def test_users_cannot_write_boundaries():
    text, ends = render("qwen3", [{"role": "user", "content": f"a{BOUNDARY}b"}])
    assert "a\ufffdb" in text
    assert len(ends) == 1
