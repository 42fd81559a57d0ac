"""The plan for the next message of a chat: how it is parsed, and its grammar."""

from dataclasses import replace

import pytest
from call_texts import chat_format_of

from cllm.backends.fake.vocabulary import FakeVocabulary
from cllm.core.params import SamplingParams, ThinkingBudget
from cllm.core.vocabulary import Pieces
from cllm.errors import BadRequest
from cllm.text.chat import Chat, Effort
from cllm.text.tools.call_grammar import message_grammar
from cllm.text.tools.parser import Channel

THINKING = "{{ tools }}<tool_call><think></think>"
HARMONY = "{{ tools }}<|start|><|channel|><|message|>reasoning_effort"
TOOLS = [{"type": "function", "function": {"name": "f"}}]
MARKS = ["<think>", "</think>", "<tool_call>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>"]
SPECIAL = {300 + i: mark for i, mark in enumerate(MARKS)}
THINK, END_THINK, CALL, START, CHANNEL, MESSAGE, END = SPECIAL
CLOSING = (*b"\n", END_THINK, *b"\n\n")


class Vocabulary(FakeVocabulary):
    """A token a byte, and the marks as control tokens, whose pieces are empty."""

    def __init__(self, template: str, special: dict[int, str]) -> None:
        super().__init__()
        self.chat_template = template
        self.special_tokens = special
        num_more = 300 + len(SPECIAL) - len(self.pieces)
        self.pieces = Pieces.of([*self.pieces, *[b""] * num_more])

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        for token, mark in self.special_tokens.items():
            head, found, tail = text.partition(mark)
            if found:
                options = {"add_special": False, "parse_special": True}
                return [*self.tokenize(head, **options), token, *self.tokenize(tail, **options)]
        return list(text.encode())


def read(template: str, prompt: str, chat: Chat, special=SPECIAL, message=(), **params):
    vocabulary = Vocabulary(template, special)
    tokens = vocabulary.tokenize(prompt, add_special=False, parse_special=True)
    return chat_format_of(vocabulary).plan_output(tokens, chat, SamplingParams(**params), message)


def grammar(*arguments, **options) -> str:
    """Return the grammar of the message."""
    return message_grammar(read(*arguments, **options)[2], SPECIAL)


def test_plain_text_is_not_parsed() -> None:
    """There are no tools, and there is no reasoning or the prompt has closed it."""
    assert read("{{ messages }}", "a", Chat([]))[0] is None
    assert read(THINKING, "<think>\n\n</think>\n\n", Chat([]), {})[0] is None
    assert (
        read("<tool_call>{% if enable_thinking %}<think>{% endif %}", "a", Chat([], TOOLS, "none"))[
            0
        ]
        is None
    )
    assert read(THINKING, "<think>\n\n</think>\n\n", Chat([], TOOLS))[0] is not None


def test_plain_text_is_parsed_from_the_token_on_that_resumes_reasoning() -> None:
    plan = read(THINKING, "<think>\n\n</think>\n\n", Chat([]))[0]
    assert plan.opener == THINK
    assert read(THINKING, "<think>", Chat([]))[0].opener is None
    assert read(THINKING, "</think>", Chat([], TOOLS))[0].opener is None
    unknown = "<tool_call>{% if enable_thinking %}<think>{% endif %}"
    assert read(unknown, "a", Chat([]))[0] is None


@pytest.mark.parametrize(
    ("prompt", "channel"), [("a<think>\n", Channel.REASONING), ("a", Channel.TEXT)]
)
def test_prompt_may_open_the_reasoning(prompt: str, channel: Channel) -> None:
    plan, _, _ = read(THINKING, prompt, Chat([]))
    assert plan.parser().channel == channel
    pieces = plan.pieces
    assert (pieces[THINK], pieces[END_THINK], pieces[65]) == (b"<think>", b"</think>", b"A")


@pytest.mark.parametrize(
    ("chat", "inside", "num_tokens"),
    [
        (Chat([]), True, None),
        (Chat([], thinking_budget=7), True, 7),
        (Chat([], thinking_budget=7), False, 7),
        (Chat([], effort=Effort.LOW), True, 1024),
        (Chat([], effort=Effort.LOW, thinking_budget=7), True, 7),
        (Chat([], effort=Effort.HIGH), True, None),
        (Chat([], effort=Effort.NONE), True, 0),
        (Chat([], thinking=False), False, 0),
    ],
)
def test_thinking_budget_is_planned_from_the_prompt(
    chat: Chat, inside: bool, num_tokens: int | None
) -> None:
    _, params, _ = read(THINKING, "<think>\n" if inside else "a", chat)
    budget = ThinkingBudget(num_tokens, (THINK,), END_THINK, CLOSING, True, inside=inside)
    assert params.thinking == (None if num_tokens is None else budget)
    if chat.thinking_budget is None:
        assert read(THINKING, "<think></think>", chat)[1].thinking is None


def test_budget_covers_reasoning_that_resumes() -> None:
    """It counts although the prompt has closed the first reasoning. Without a control token that
    resumes reasoning, there is none to limit.
    """
    budget = read(THINKING, "</think>", Chat([], thinking_budget=7))[1].thinking
    assert budget == ThinkingBudget(7, (THINK,), END_THINK, CLOSING, True)
    only_end = {END_THINK: "</think>"}
    assert read(THINKING, "</think>", Chat([], thinking_budget=7), only_end)[1].thinking is None
    budget = read(THINKING, "a", Chat([], thinking_budget=7), only_end)[1].thinking
    assert (budget.open, budget.anywhere) == ((*b"<think>",), False)


def test_message_comes_before_the_end_of_the_reasoning() -> None:
    """Its text is no control token, and must not end the reasoning itself."""
    chat = Chat([], thinking_budget=0, budget_message="Time is up.")
    assert read(THINKING, "<think>", chat, message=b"Time")[1].thinking.force == (
        *b"Time",
        *CLOSING,
    )
    budget = read(HARMONY, "<|start|>assistant", chat, message=b"Time")[1].thinking
    assert budget.force[:6] == (*b"Time", END, START)
    assert not budget.inside, "there is a reasoning message, with that text"
    with pytest.raises(BadRequest) as caught:
        read(THINKING, "<think>", replace(chat, budget_message="so</think>"))
    assert (caught.value.param, caught.value.code) == ("reasoning_budget_message", "invalid_value")
    assert read(THINKING, "<think>", Chat([], budget_message="Time"))[1].thinking is None


def test_calls_end_reasoning_in_families_that_forget_to_close_it() -> None:
    chat = Chat([], TOOLS, thinking_budget=7)
    assert read(THINKING, "<think>", chat)[1].thinking.calls == ()
    coder = THINKING + "<function="
    assert read(coder, "<think>", chat)[1].thinking.calls == (CALL,)
    assert read(coder, "<think>", replace(chat, tools=[]))[1].thinking.calls == ()


def test_client_may_end_reasoning_without_a_budget() -> None:
    chat = Chat([], ends_on_request=True)
    budget = read(THINKING, "<think>", chat)[1].thinking
    assert (budget.num_tokens, budget.ends_on_request, budget.force) == (None, True, CLOSING)
    assert read(HARMONY, "<|start|>assistant", chat)[1].thinking.num_tokens is None
    assert read(THINKING, "<think>", chat, special={})[1].thinking is None
    assert read("{{ messages }}", "a", chat)[1].thinking is None


def test_budget_ends_the_reasoning_message_in_forms_with_headers() -> None:
    """The forced tokens end that message and begin the next one. With a budget of 0 there is no
    reasoning message.
    """
    final = [CHANNEL, *b"final", MESSAGE]
    force = (END, START, *b"assistant", *final)
    assert (
        read(HARMONY, "<|start|>assistant", Chat([], thinking_budget=5))[1].thinking.force == force
    )
    assert read(HARMONY, "<|start|>assistant", Chat([], effort=Effort.NONE))[
        1
    ].thinking.force == tuple(final)
    # the template's own
    assert read(HARMONY, "<|start|>assistant", Chat([], effort=Effort.LOW))[1].thinking is None
    force = (END, START, *b"assistant")
    assert (
        read(HARMONY, "<|start|>assistant", Chat([], TOOLS, thinking_budget=5))[1].thinking.force
        == force
    )


def test_budget_that_cannot_be_enforced_is_rejected() -> None:
    """An effort that cannot be enforced is ignored."""
    with pytest.raises(BadRequest) as caught:
        read(THINKING, "<think>", Chat([], thinking_budget=7), special={})
    assert caught.value.param == "thinking_token_budget"
    assert read(THINKING, "<think>", Chat([], effort=Effort.LOW), special={})[1].thinking is None


@pytest.mark.parametrize(("special", "said"), [(SPECIAL, "if a <"), ({}, "if a")])
def test_cut_text_keeps_what_the_control_tokens_of_the_model_cannot_complete(special, said):
    """Without control tokens, the model may have begun to write a mark."""
    parser = read(THINKING, "", Chat([], TOOLS), special)[0].parser()
    parts = parser.feed("if a <") + parser.flush(is_cut=True)
    assert "".join(part.text for part in parts) == said


def test_template_variables_of_the_client_come_first() -> None:
    chat_format = chat_format_of(Vocabulary(THINKING, SPECIAL))
    assert chat_format.variables(Chat([])) == {}
    on, off = ({"enable_thinking": value, "thinking": value} for value in (True, False))
    assert chat_format.variables(Chat([], thinking=False)) == off
    assert chat_format.variables(Chat([], effort=Effort.NONE)) == off
    assert chat_format.variables(Chat([], effort=Effort.MINIMAL)) == {
        "reasoning_effort": "low",
        **on,
    }
    assert (
        chat_format.variables(Chat([], effort=Effort.LOW, variables={"thinking": False}))[
            "thinking"
        ]
        is False
    )


def test_forced_call_needs_tools_and_a_known_form() -> None:
    for template, chat in (
        (THINKING, Chat([], [], "required")),
        ("{{ tools }}", Chat([], TOOLS, "required")),
    ):
        with pytest.raises(BadRequest) as caught:
            read(template, "a", chat)
        assert caught.value.param == "tool_choice"
    assert grammar(THINKING, "a", Chat([], TOOLS, "required")).startswith("start: ")
    assert not read(THINKING, "a", Chat([], TOOLS, "required"))[2].is_loose


def test_optional_calls_are_constrained_in_free_text() -> None:
    """With ignore_eos they are not, because the text has no end to constrain."""
    strict = {
        "type": "function",
        "function": {"name": "g", "strict": True, "parameters": {"required": ["x"]}},
    }
    bound = read(THINKING, "a", Chat([], [*TOOLS, strict]))[2]
    assert bound.is_loose
    assert {name: tool.strict for name, tool in bound.tools.items()} == {"f": False, "g": True}
    assert r'"\"x\""' in grammar(THINKING, "a", Chat([], [*TOOLS, strict]))
    assert [*read(THINKING, "a", Chat([], [*TOOLS, strict], allowed_tools=("f",)))[2].tools] == [
        "f"
    ]
    assert read(THINKING, "a", Chat([], TOOLS, "none"))[2] is None
    assert read(THINKING, "a", Chat([]))[2] is None
    assert read(THINKING, "a", Chat([], TOOLS), ignore_eos=True)[2] is None


def test_answer_grammar_is_unchanged_without_tools_and_reasoning() -> None:
    _, params, bound = read("{{ messages }}", "a", Chat([]), grammar='start: "a"')
    assert (params.grammar, bound) == ('start: "a"', None)
    assert "@answer" in grammar(THINKING, "a", Chat([]), grammar='start: "a"')
    assert "<[302]>" in grammar(THINKING, "<think></think>", Chat([], TOOLS), grammar='start: "a"')


def test_mark_may_be_a_special_token_followed_by_text() -> None:
    """Gemma 4 opens its reasoning with a special token and a word."""
    template, special = (
        "{{ tools }}<|tool_call><|channel>thought<channel|>",
        {300: "<|channel>", 301: "<channel|>"},
    )
    plan, params, bound = read(
        template, "a", Chat([], thinking_budget=3), special, grammar='start: "a"'
    )
    assert r"<[300]> \"thought\"" in message_grammar(bound)
    opening = (300, *b"thought")
    assert params.thinking == ThinkingBudget(3, opening, 301, (301,), True, anywhere=True)
    assert plan.pieces[300] == b"<|channel>"
    assert (
        read(template, "<|channel>thought\n", Chat([]), special)[0].parser().channel
        == Channel.REASONING
    )
