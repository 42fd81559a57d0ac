"""Plans how to read a chat's next message, and how to constrain it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, product
from typing import Any, NamedTuple

import msgspec

from cllm.core.params import SamplingParams, ThinkingBudget
from cllm.core.vocabulary import Pieces, VocabularyFacts
from cllm.errors import BadRequest
from cllm.text.chat import Chat, Effort
from cllm.text.templates.chat_template import CHATML, choose_templates
from cllm.text.templates.fences import CUT
from cllm.text.templates.tool_declarations import declare_tools
from cllm.text.tools.call_grammar import BoundMessage, CallableTool
from cllm.text.tools.model_family import Reasoning, find_family, load_families
from cllm.text.tools.parser import Parser

TAIL = 16  # tokens at the end of a prompt that show whether it opens reasoning
# tokens; other efforts have no budget
BUDGETS = {Effort.MINIMAL: 256, Effort.LOW: 1024, Effort.MEDIUM: 4096}
# variables that switch thinking on in templates
THINKING = {"enable_thinking": True, "thinking": True}
# how clients write reasoning into a text, for models that have a separate channel for reasoning
WRITTEN_REASONING = Reasoning("<think>", "</think>")
CHATML_MARKS = ("<|im_end|>", "<|im_start|>")
# templates know low, medium and high
EFFORTS = {Effort.MINIMAL: "low", Effort.XHIGH: "high", Effort.MAX: "high"}


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """How to read a message: the bytes of each token id, marks included, and a function that
    creates a parser. Plans with equal ``name`` end equal texts at the same place.

    If the message is expected to be plain text, the parser is needed only from the token ``opener``
    on, which opens reasoning.
    """

    pieces: Pieces
    parser: Callable[[], Parser]
    name: str
    opener: int | None = None


class MessagePlan(NamedTuple):
    """How to generate a chat's next message, and how to read it.

    ``output`` says how to read it; None means plain text. ``params`` include the limit of
    reasoning. ``constraint`` says what the message must be; None means that at most
    ``params.grammar`` constrains it.
    """

    output: OutputPlan | None
    params: SamplingParams
    constraint: BoundMessage | None = None

    def constrained_params(self, grammar: str) -> SamplingParams:
        """Return params that enforce ``grammar``, which was written for ``constraint``."""
        is_loose = bool(grammar) and self.constraint is not None and self.constraint.is_loose
        return self.params.replace_unchecked(grammar=grammar, grammar_is_loose=is_loose)


class TemplateInput(NamedTuple):
    """The input of the chat template."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    variables: dict[str, Any]


class ChatFormat:
    """The family of the model's chat template, with the ids of the control tokens in its marks."""

    def __init__(
        self,
        vocabulary: VocabularyFacts,
        tokens_of: Callable[[str], list[int]],
        template: str | None = None,
    ) -> None:
        """``tokens_of`` returns the token ids of each of ``marks``, with control tokens parsed.
        ``template`` is the source of the chat template; None means the model's template for chats
        without tools.
        """
        self._vocabulary = vocabulary
        self._tokens_of = tokens_of
        self._template = template if template is not None else choose_templates(vocabulary)[0]
        self.family = find_family(self._template)
        if not (self.family.calls or re.search(r"\btools\b", self._template)):
            self.family = msgspec.structs.replace(
                self.family, calls=load_families()["prompted"].calls
            )

    @property
    def capabilities(self) -> frozenset[str]:
        """The subset of "tools" and "thinking" that the model supports."""
        thinks = self.family.header or (
            self.family.reasoning and self.family.reasoning.open in self._template
        )
        return frozenset(
            [*(["tools"] if self.family.calls else []), *(["thinking"] if thinks else [])]
        )

    @cached_property
    def _control(self) -> dict[str, int]:
        """The special tokens in the family's marks and in the calls that it writes, with their
        ids.
        """
        calls = self.family.calls
        written = [calls.begin, calls.write, calls.end, calls.pair] if calls else []
        return self._special_tokens_in([*self.family.marks, *written])

    def _special_tokens_in(self, texts: list[str]) -> dict[str, int]:
        special = self._vocabulary.special_tokens
        return {
            text: token
            for token, text in special.items()
            if text and any(text in other for other in texts)
        }

    @cached_property
    def _control_in_marks(self) -> dict[str, int]:
        return self._special_tokens_in([*self.family.marks])

    @property
    def _opener(self) -> int | None:
        """The control token that opens reasoning; None if that is no control token."""
        reasoning = self.family.reasoning
        return self._control_in_marks.get(reasoning.open) if reasoning else None

    @cached_property
    def _pieces(self) -> Pieces:
        marks = self._control_in_marks
        return self._vocabulary.pieces.with_marks(
            {token: text.encode() for text, token in marks.items()}
        )

    def template_input(self, chat: Chat) -> TemplateInput:
        """Return the input of the template for ``chat``.

        It has only the tools that may be called. Tools and calls that the template would not show
        are written as text into the messages.
        """
        calls, messages, tools = self.family.calls, chat.messages, chat.callable_tools
        if calls is not None:
            knows_results = calls is not load_families()["prompted"].calls
            messages = declare_tools(
                messages, tools, calls, self._template, knows_results=knows_results
            )
        return TemplateInput(messages, tools, self.variables(chat))

    def variables(self, chat: Chat) -> dict[str, Any]:
        """Return the template's variables: those for thinking, and those of ``chat``, which take
        precedence.
        """
        variables: dict[str, Any] = {}
        thinking = chat.thinking
        if chat.effort is not None:
            thinking = chat.effort != Effort.NONE if thinking is None else thinking
            if chat.effort != Effort.NONE:
                variables["reasoning_effort"] = EFFORTS.get(chat.effort, chat.effort.value)
        if thinking is not None:
            variables |= dict.fromkeys(THINKING, thinking)
        if chat.thinking_budget is not None:
            variables["thinking_budget"] = chat.thinking_budget
        return variables | chat.variables

    @property
    def _thinks(self) -> bool:
        """Whether the template knows the marks around reasoning, or channels for it."""
        reasoning = self.family.reasoning
        return self.family.header is not None or (
            reasoning is not None
            and (reasoning.open in self._template or reasoning.close in self._template)
        )

    def split_begun(self, chat: Chat) -> Chat:
        """Move the reasoning at the beginning of the text that ``chat`` continues to a field of its
        own, where templates expect it.

        If that reasoning is not closed, the chat continues the reasoning.
        """
        last = chat.messages[-1]
        if chat.continued != "content" or last.get("reasoning_content") or not self._thinks:
            return chat
        marks = self.family.reasoning or WRITTEN_REASONING
        text = last["content"].lstrip()
        if not text.startswith(marks.open):
            return chat
        thought, close, content = text.removeprefix(marks.open).partition(marks.close)
        if close:
            split = {"reasoning_content": thought.strip(), "content": content.lstrip()}
        else:
            split = {"reasoning_content": thought.lstrip("\n"), "content": ""}
        return replace(
            chat,
            messages=[*chat.messages[:-1], {**last, **split}],
            continued="content" if close else "reasoning_content",
        )

    def shows_thought(self, chat: Chat) -> bool:
        """Whether the prompt must show the reasoning before the text that ``chat`` continues, even
        if the template omits it: it is a part of that text, or the model thinks in this chat.
        """
        variables = self.variables(chat)
        thinks = any(map(variables.get, THINKING)) or not re.search(
            r"\b(?:enable_)?thinking\b", self._template
        )
        return self.split_begun(chat) is not chat or thinks

    def begin(self, text: str, chat: Chat, thought: str = "") -> str:
        """Return the prompt for ``text``, in which CUT marks the beginning of the field that
        ``chat`` continues.

        Continued reasoning follows the mark that opens reasoning; continued text lies outside of
        reasoning, and follows ``thought``, the reasoning of the same message, even if the template
        does not show it. Raises BadRequest for reasoning if the family has no place for it.
        """
        before, begun = text.split(CUT)
        if thought and chat.continued == "content" and self.family.reasoning and self._thinks:
            return show_thought(before, thought, self.family.reasoning) + begun
        reasoning, header, is_text = (
            self.family.reasoning,
            self.family.header,
            chat.continued == "content",
        )
        if header and before.endswith(header.close):
            return before + begun
        if header and is_text:
            return before + header.final + begun
        if reasoning:
            is_inside = before.rstrip().endswith(reasoning.open)
            mark = reasoning.close if is_text else reasoning.open + "\n"
            return before + mark * (is_inside == is_text) + begun
        if is_text:
            return before + begun
        why = "the reasoning of this model cannot be continued"
        raise BadRequest(f"Invalid 'messages': {why}.", param="messages", code="unsupported_value")

    def plan_output(
        self, prompt: list[int], chat: Chat, params: SamplingParams, message: Sequence[int] = ()
    ) -> MessagePlan:
        """Return the plan of the message that follows ``prompt``. ``message`` has the tokens of
        ``chat.budget_message``.

        Raises BadRequest for calls that cannot be forced, and for a budget of reasoning that cannot
        be enforced.
        """
        self._check_tool_choice(chat)
        if self._template == CHATML:  # models that were not trained with it do not stop at its end
            params = params.replace_unchecked(stop=(*params.stop, *CHATML_MARKS))
        tools, begun = chat.argument_schemas, chat.continued == "content"
        is_required = chat.tool_choice == "required"
        inside, thinks = (
            (chat.continued == "reasoning_content", False)
            if chat.continued
            else self._begins(prompt)
        )
        family = self.family
        if family.reasoning and not inside and family.reasoning.close not in self._template:
            family = msgspec.structs.replace(family, reasoning=None)
        if begun and (params.grammar or (family.calls and family.calls.bare)):
            tools = {}  # the text continues to the end of the message
        may_call = bool(tools and family.calls)
        bound = None
        is_loose = may_call and not (is_required or params.grammar or params.ignore_eos)
        if is_required or is_loose or (params.grammar and (may_call or thinks or inside)):
            strict = chat.strict_tools
            bound = BoundMessage(
                family,
                {name: CallableTool(schema, name in strict) for name, schema in tools.items()},
                self._control,
                "" if is_required else params.grammar,
                calls=may_call,
                is_loose=is_loose,
                max_calls=chat.max_calls,
                thinks=thinks,
                inside=inside,
                begun=begun,
            )
        is_plain = not (may_call or inside or thinks or family.header)
        opener = self._opener if family.reasoning else None
        is_limited = chat.thinking_budget is not None or chat.ends_on_request
        if inside or thinks or (opener is not None and is_limited):
            budget = self._budget(chat, message, inside=inside)
            params = params.replace_unchecked(thinking=budget)
        if is_plain and opener is None:
            return MessagePlan(None, params, bound)
        parser = partial(
            Parser,
            family,
            tools,
            inside=inside,
            begun=bool(chat.continued),
            max_calls=chat.max_calls,
            control=self._control_in_marks,
        )
        name = repr((inside, chat.continued, chat.max_calls, [*tools]))
        plan = OutputPlan(self._pieces, parser, name, opener if is_plain else None)
        return MessagePlan(plan, params, bound)

    def _check_tool_choice(self, chat: Chat) -> None:
        """Raise BadRequest for calls that cannot be forced."""
        if chat.tool_choice != "required":
            return
        if self.family.calls is None:
            why = "cannot be enforced: the format of this model's calls is unknown"
        elif not chat.callable_tools:
            why = "does not name a declared tool"
        elif chat.continued == "content":
            why = "cannot force a call if the text of a message is continued"
        else:
            return
        raise BadRequest(f"'tool_choice' {why}.", param="tool_choice", code="unsupported_parameter")

    def _begins(self, prompt: list[int]) -> tuple[bool, bool]:
        """Return whether the message begins in the middle of reasoning, and whether it may begin
        with reasoning.
        """
        reasoning = self.family.reasoning
        if self.family.header:
            return False, True
        if reasoning is None:
            return False, False
        tail = (
            b"".join(self._pieces[token] for token in prompt[-TAIL:])
            .decode(errors="replace")
            .rstrip()
        )
        inside = tail.endswith(reasoning.open)
        return inside, not inside and not tail.endswith(
            reasoning.close
        ) and reasoning.close in self._template

    def _budget(self, chat: Chat, message: Sequence[int], *, inside: bool) -> ThinkingBudget | None:
        """Return the limit of reasoning; None means no limit.

        Raises BadRequest for a message that contains the mark that ends reasoning. So it does if a
        budget was requested, but that mark is not one token.
        """
        limit = chat.thinking_budget
        if limit is None and (chat.thinking is False or chat.effort == Effort.NONE):
            limit = 0
        if limit is None and chat.effort and "reasoning_effort" not in self._template:
            limit = BUDGETS.get(chat.effort)
        if limit is None and not chat.ends_on_request:
            return None
        is_off = limit == 0 and not message
        opening, closing, force = self._ends_of_reasoning(
            may_call=bool(chat.callable_tools), is_off=is_off
        )
        close = self._tokens(closing)
        if len(close) != 1:
            if chat.thinking_budget is None:
                return None
            why = f"cannot be enforced: this model has no token for {closing}"
            raise BadRequest(
                f"'thinking_token_budget' {why}.",
                param="thinking_token_budget",
                code="unsupported_parameter",
            )
        if closing in chat.budget_message:
            why = f"it must not contain {closing}, which ends the reasoning"
            raise BadRequest(
                f"Invalid 'reasoning_budget_message': {why}.",
                param="reasoning_budget_message",
                code="invalid_value",
            )
        if not force:
            return None
        header, reasoning = self.family.header, self.family.reasoning
        return ThinkingBudget(
            limit,
            self._tokens(opening),
            close[0],
            (*message, *self._tokens(force)),
            closes_once=header is None,
            inside=inside or (header is not None and is_off),
            anywhere=reasoning is None or reasoning.anywhere,
            ends_on_request=chat.ends_on_request,
            calls=self._find_call_tokens() if chat.callable_tools else (),
        )

    def _find_call_tokens(self) -> tuple[int, ...]:
        """Return the tokens that end reasoning because they begin a call."""
        calls, control = self.family.calls, self._control_in_marks
        marks = (*calls.open, *calls.skip) if calls and calls.ends_reasoning else ()
        return tuple(control[mark] for mark in marks if mark in control)

    @cached_property
    def marks(self) -> list[str]:
        """The texts whose tokens limit reasoning."""
        if self.family.header is None and self.family.reasoning is None:
            return []
        cases = product((False, True), repeat=2)
        ends = (self._ends_of_reasoning(may_call=calls, is_off=off) for calls, off in cases)
        return sorted({*chain.from_iterable(ends)} - {""})

    def _ends_of_reasoning(self, *, may_call: bool, is_off: bool) -> tuple[str, str, str]:
        """Return the marks that begin and end reasoning, and the text that ends it when the limit
        is reached. If ``is_off``, there is no reasoning at all.
        """
        header, reasoning = self.family.header, self.family.reasoning
        if header is None:
            assert reasoning
            # spelled as models write them
            blanks = ("\n", "\n\n") if reasoning.close.startswith("</") else ("", "")
            return reasoning.open, reasoning.close, reasoning.close.join(blanks)
        # without a reasoning message, there is none to end
        end = "" if is_off else header.end[0] + header.open[0] + "assistant"
        opening = f"{header.open[1]}analysis{header.close}"
        return opening, header.end[0], end + ("" if may_call else header.final)

    def _tokens(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokens_of(text)) if text else ()


def show_thought(before: str, thought: str, marks: Reasoning) -> str:
    """Return ``before``, the prompt up to the text of a message, with the reasoning of the message
    at its end.
    """
    text = before.rstrip()
    if text.endswith(marks.close):
        inside = text.removesuffix(marks.close).rpartition(marks.open)
        if inside[2].strip():  # the template shows it
            return before
        before = inside[0]
    elif text.endswith(marks.open):
        before = text.removesuffix(marks.open)
    line = "\n" if marks.close.startswith("</") else ""
    return before + line.join((marks.open, thought, marks.close, line))


class ChatFormats:
    """The formats of chats without and with tools, for which a model may have two templates."""

    def __init__(
        self,
        vocabulary: VocabularyFacts,
        tokens_of: Callable[[str], list[int]],
        given: str = "",
    ) -> None:
        """``given`` is a template that replaces the model's."""
        sources = choose_templates(vocabulary, given)
        made = {source: ChatFormat(vocabulary, tokens_of, source) for source in sources}
        self._all = [made[source] for source in sources]

    def of(self, chat: Chat) -> ChatFormat:
        return self._all[bool(chat.callable_tools)]

    @property
    def capabilities(self) -> frozenset[str]:
        """The subset of "tools" and "thinking" that the model supports."""
        return self._all[0].capabilities | self._all[1].capabilities

    @property
    def marks(self) -> list[str]:
        """The texts whose tokens limit reasoning."""
        return sorted({*self._all[0].marks, *self._all[1].marks})
