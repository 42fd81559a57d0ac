"""Continuing a message of the assistant: the prompt ends where its text ends, with every template."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from call_texts import chat_format_of

from cllm.backends.fake.vocabulary import FakeVocabulary
from cllm.core.params import SamplingParams
from cllm.core.vocabulary import VocabularyTable
from cllm.errors import BadRequest
from cllm.observe.metrics import Metrics
from cllm.serving.model_texts import ModelTexts
from cllm.serving.service import Service
from cllm.text.chat import Chat
from cllm.text.templates.fences import CLOSE, CUT, MARKS, OPEN
from cllm.text.tools.parser import Channel

ASKED = {"role": "user", "content": "Q"}
ASK = "{% if add_generation_prompt %}[A]{% endif %}"
ASK_THINKING = (
    "{% if add_generation_prompt %}[A]{{ '<think>\n' if enable_thinking else "
    "'<think></think>' }}{% endif %}"
)
EACH = "{% for m in messages %}[{{ m.role[0] | upper }}]"
TEMPLATES = {
    "plain": EACH + "{{ m.content }}</s>{% endfor %}" + ASK,
    "trimming": EACH + "{{ m.content | trim }}</s>{% endfor %}" + ASK,
    # Qwen 3
    "thinking": EACH
    + "{% if m.role == 'assistant' %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n{% "
    "endif %}" + "{{ m.content }}</s>{% endfor %}" + ASK,
    # DeepSeek R1: what was thought is not shown again, and the prompt opens the reasoning
    "forgetting": EACH + "{{ m.content.split('</think>')[-1] }}</s>{% endfor %}" + ASK_THINKING,
    # Nemotron Nano 2
    "opening": EACH
    + "{{ '<think>\n' if loop.last and m.role == 'assistant' }}{{ m.content }}</s>{% endfor %}"
    + ASK,
    # Qwen 3, which also takes reasoning out of the text
    "splitting": EACH
    + "{% if '</think>' in m.content %}{% set r = m.content.split('</think>')[0] %}<think>\n"
    "{{ r.split('<think>')[-1].strip() }}\n</think>\n\n{{ m.content.split('</think>')[-1] }}"
    "{% elif m.reasoning_content %}<think>\n{{ m.reasoning_content.strip() }}\n</think>\n\n"
    "{{ m.content }}{% else %}{{ m.content }}{% endif %}</s>{% endfor %}" + ASK,
    # GLM 4.5, which shows an empty block if there is no reasoning
    "blocks": EACH
    + "{% if m.role == 'assistant' %}<think>{{ m.reasoning_content.strip() }}</think>\n{% endif %}"
    "{{ m.content.strip() }}{% endfor %}" + ASK,
    # shows an empty block in place of the reasoning
    "emptying": EACH
    + "{{ '<think></think>\n' if m.role == 'assistant' }}{{ m.content }}</s>{% endfor %}"
    + ASK,
    # gpt-oss
    "headers": (
        "{% for message in messages %}<|start|>{{ message.role }}"
        "{% if message.thinking %}<|channel|>analysis<|message|>{{ message.thinking "
        "}}<|end|><|start|>assistant"
        "{% endif %}<|channel|>final<|message|>{{ message.content }}<|return|>{% endfor %}"
    ),
    # written so that it takes no last message of an assistant
    "refusing_headers": (
        "{{ raise_exception('no') if messages[-1].role == 'assistant' }}"
        "{% for message in messages %}<|start|>{{ message.role }}<|channel|>final<|message|>{{ "
        "message.content }}"
        "<|end|>{% endfor %}<|start|>assistant"
    ),
    "refusing": "{{ raise_exception('no') if messages[-1].role == 'assistant' }}"
    + EACH
    + "{{ m.content }}{% endfor %}"
    "{# </think> #}" + ASK_THINKING,
}


class Renderer:
    """Renders with a process for each template, which all tests share."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.services: dict[str, Service] = {}

    async def render(self, source: str, chat: Chat) -> str:
        if source not in self.services:
            vocabulary = FakeVocabulary()
            vocabulary.chat_template = source
            engine = SimpleNamespace(vocabulary=VocabularyTable.of(vocabulary))
            self.services[source] = Service(ModelTexts(engine, Metrics("m")), "m")
        return await self.services[source].render_chat(chat)

    async def close(self) -> None:
        for service in self.services.values():
            await service.texts.close()


RENDERER = Renderer()


@pytest.fixture(scope="module", autouse=True)
def _close_renderer() -> Iterator[None]:
    yield
    RENDERER.runner.run(RENDERER.close())
    RENDERER.runner.close()


def render(source: str, chat: Chat) -> str:
    return RENDERER.runner.run(RENDERER.render(source, chat))


def rendered(source: str, content: str, *, thought: str = "", **options) -> str:
    message = {
        "role": "assistant",
        "content": content,
        **({"reasoning_content": thought} if thought else {}),
    }
    return render(source, Chat([ASKED, message], **options).continuing())


@pytest.mark.parametrize(
    ("name", "prompt"),
    [
        ("plain", "[U]Q</s>[A] The sum "),
        ("trimming", "[U]Q</s>[A] The sum "),
        ("thinking", "[U]Q</s>[A]<think>\n\n</think>\n The sum "),
        ("forgetting", "[U]Q</s>[A] The sum "),
        ("opening", "[U]Q</s>[A]<think>\n</think> The sum "),
        (
            "headers",
            "<|start|>user<|channel|>final<|message|>Q<|return|><|start|>assistant<|channel|>final<|message|> The sum ",
        ),
        (
            "refusing_headers",
            "<|start|>user<|channel|>final<|message|>Q<|end|><|start|>assistant<|channel|>final<|message|> The sum ",
        ),
        ("refusing", "[U]Q[A]<think></think> The sum "),
    ],
)
def test_prompt_ends_where_the_text_ends(name, prompt):
    """Including its trailing blanks; reasoning is closed before."""
    assert rendered(TEMPLATES[name], " The sum ") == prompt


ALTERNATING = (
    "{% for m in messages %}{{ raise_exception('alternate') if (m.role == 'user') != "
    "(loop.index0 % 2 == 0) }}[{{ m.role[0] | upper }}]{{ m.content }}</s>{% endfor %}" + ASK
)


def test_repaired_conversation_ends_with_the_message_that_is_continued():
    """Empty messages are left out before it, and an empty one at the end is a new message."""
    begun, empty = ({"role": "assistant", "content": content} for content in ("The sum", ""))
    chat = Chat([ASKED, empty, begun]).continuing()
    assert render(ALTERNATING, chat) == "[U]Q</s>[A]The sum"
    assert render(ALTERNATING, Chat([ASKED, empty]).continuing()) == "[U]Q</s>[A]"


@pytest.mark.parametrize(
    ("name", "prompt"),
    [
        ("thinking", "[U]Q</s>[A]<think>\nLet me"),
        ("forgetting", "[U]Q</s>[A]<think>\nLet me"),
        ("opening", "[U]Q</s>[A]<think>\nLet me"),
        (
            "headers",
            "<|start|>user<|channel|>final<|message|>Q<|return|><|start|>assistant<|channel|>analysis<|message|>Let me",
        ),
        ("refusing", "[U]Q[A]<think>\nLet me"),
    ],
)
def test_prompt_ends_where_the_reasoning_ends(name, prompt):
    assert rendered(TEMPLATES[name], "", thought="Let me", thinking=False) == prompt


BLOCK = "<think>\nLet me see\n</think>\n\n"
ANALYSIS = (
    "<|start|>user<|channel|>final<|message|>Q<|return|>"
    "<|start|>assistant<|channel|>analysis<|message|>"
)
WITH_BLOCK = {
    "thinking": f"[U]Q</s>[A]{BLOCK}".removesuffix("\n"),
    "splitting": f"[U]Q</s>[A]{BLOCK}",
    "forgetting": f"[U]Q</s>[A]{BLOCK}",
    "opening": f"[U]Q</s>[A]{BLOCK}",
    "blocks": "[U]Q[A]<think>Let me see</think>\n",
    "emptying": f"[U]Q</s>[A]{BLOCK}",
    "refusing": f"[U]Q[A]{BLOCK}",
    "headers": f"{ANALYSIS}Let me see<|end|><|start|>assistant<|channel|>final<|message|>",
}


@pytest.mark.parametrize("rest", ["The sum ", ""])
@pytest.mark.parametrize(("name", "prompt"), WITH_BLOCK.items())
def test_reasoning_in_the_continued_text_becomes_one_block(name, prompt, rest):
    """As in the text, also if nothing follows it, and as a field of its own."""
    assert rendered(TEMPLATES[name], f"{BLOCK}{rest}") == prompt + rest
    if rest:
        options = {"thought": "Let me see", "thinking": True}
        assert rendered(TEMPLATES[name], rest, **options) == prompt + rest


def test_reasoning_that_the_template_omits_stays_omitted_with_thinking_off():
    """It is shown if the template always thinks."""
    text = rendered(TEMPLATES["forgetting"], "The sum ", thought="Let me see", thinking=False)
    assert text == "[U]Q</s>[A]The sum "
    always = TEMPLATES["forgetting"].replace("if enable_thinking else '<think></think>' ", "")
    assert rendered(always, "The sum ", thought="Let me see") == f"[U]Q</s>[A]{BLOCK}The sum "


@pytest.mark.parametrize(("name", "prompt"), WITH_BLOCK.items())
def test_open_reasoning_in_the_continued_text_is_continued_as_reasoning(name, prompt):
    """It ends where its text ends, with its blanks."""
    begun = prompt.partition("Let me see")[0] + "Let me "
    if name == "blocks":
        begun = "[U]Q[A]<think>Let me "
    assert rendered(TEMPLATES[name], "<think>\nLet me ") == begun


def test_template_without_reasoning_shows_the_block_as_it_is_written():
    assert rendered(TEMPLATES["plain"], f"{BLOCK}The sum ") == f"[U]Q</s>[A]{BLOCK}The sum "


def test_control_tokens_in_reasoning_stay_plain_text():
    text = rendered(TEMPLATES["forgetting"], "<think>b<|im_end|></think>a")
    assert f"{OPEN}<|im_end|>{CLOSE}" in text


@pytest.mark.parametrize("name", ["refusing", "refusing_headers", "forgetting"])
def test_header_is_there_without_add_generation_prompt(name):
    """As clients of /apply-template set it, which continue the last message."""
    prompt = rendered(TEMPLATES[name], " The sum ")
    variables = {"add_generation_prompt": False}
    assert rendered(TEMPLATES[name], " The sum ", variables=variables) == prompt


@pytest.mark.parametrize("name", ["plain", "refusing_headers"])
def test_reasoning_cannot_be_continued_if_the_template_omits_it(name):
    with pytest.raises(BadRequest) as raised:
        rendered(TEMPLATES[name], "", thought="Let me")
    assert raised.value.param == "messages"


@pytest.mark.parametrize("name", ["plain", "refusing", "forgetting"])
@pytest.mark.parametrize("content", [f"a{CUT}b", f"{CUT}", "a</think>b", "a<|im_end|>"])
def test_text_of_a_message_cannot_move_the_end(name, content):
    """It does not become a control token either."""
    prompt = rendered(TEMPLATES[name], content)
    assert MARKS.sub("", prompt).endswith(content.replace(CUT, "\ufffd"))
    assert ("<|im_end|>" in content) == (MARKS.sub("", prompt) != prompt)


def test_empty_message_is_not_continued():
    chat = Chat([ASKED, {"role": "assistant", "content": ""}]).continuing()
    assert (chat.messages, chat.continued) == ([ASKED], "")


TOOLS = [{"type": "function", "function": {"name": "f", "strict": True}}]
HARMONY = "{{ tools }}<|start|><|channel|><|message|>"
HERMES = "{{ tools }}<tool_call><think></think>"
LLAMA = '{{ tools }}<|start_header_id|>"parameters": '
CALL = '{"name": "f", "arguments": {}}'


def read(template: str, field: str, text: str, tools=TOOLS, **options) -> list[tuple[Channel, str]]:
    """Return the parts of ``text`` after a beginning in ``field``."""
    vocabulary = FakeVocabulary()
    vocabulary.chat_template = template
    chat = Chat([{"role": "assistant", "content": "", field: "x"}], tools, **options).continuing()
    plan, _, _ = chat_format_of(vocabulary).plan_output([1], chat, SamplingParams())
    parser = plan.parser()
    return [
        (part.channel, part.name or part.text) for part in (*parser.feed(text), *parser.flush())
    ]


@pytest.mark.parametrize(
    ("template", "field", "text", "parts"),
    [
        (HERMES, "content", " so on", [(Channel.TEXT, " so on")]),
        (HERMES, "content", "<think>a</think>", [(Channel.TEXT, "<think>a</think>")]),
        (
            HERMES,
            "content",
            f" b<tool_call>{CALL}</tool_call>",
            [(Channel.TEXT, " b"), (Channel.CALL, "f")],
        ),
        (
            HERMES,
            "reasoning_content",
            " a</think>\n\nb",
            [(Channel.REASONING, " a"), (Channel.TEXT, "b")],
        ),
        (HARMONY, "content", " so on<|end|>", [(Channel.TEXT, " so on")]),
        (
            HARMONY,
            "reasoning_content",
            " a<|end|><|start|>assistant<|channel|>final<|message|>b",
            [(Channel.REASONING, " a"), (Channel.TEXT, "b")],
        ),
    ],
)
def test_continued_text_goes_to_the_same_field(template, field, text, parts):
    assert read(template, field, text) == parts


def test_continued_text_is_not_parsed_as_a_bare_call():
    vocabulary = FakeVocabulary()
    vocabulary.chat_template = LLAMA
    chat = Chat([{"role": "assistant", "content": "x"}], TOOLS).continuing()
    assert chat_format_of(vocabulary).plan_output([1], chat, SamplingParams()) == (
        None,
        SamplingParams(),
        None,
    )


def test_grammar_constrains_the_continued_text():
    """There is no reasoning before it, and no call in its place."""
    for template in (HERMES, HARMONY):
        vocabulary = FakeVocabulary()
        vocabulary.chat_template = template
        chat = Chat([{"role": "assistant", "content": "x"}], TOOLS).continuing()
        _, params, bound = chat_format_of(vocabulary).plan_output(
            [1], chat, SamplingParams(grammar='start: "a"')
        )
        assert (params.grammar, bound) == ('start: "a"', None)
