"""Render messages to prompt text with the model's own Jinja template."""

from __future__ import annotations

import copy
import hashlib
import re
import sys
from collections.abc import Callable
from functools import cached_property
from itertools import product
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn, cast

import jinja2

from cllm.errors import BadRequest, StartupError
from cllm.text.templates.boundaries import render_with_boundaries
from cllm.text.templates.call_ids import CallIds, link_results
from cllm.text.templates.cut_marks import CutMarks
from cllm.text.templates.fences import CUT, Fences
from cllm.text.templates.sandbox import TemplateRefusal, compile_template, tojson
from cllm.text.templates.tool_declarations import (
    PROBED_NAME,
    PROBED_TOOLS,
    object_or_text,
    parse_object,
    render_with_tools,
    with_tools_in_system,
    write_calls_as_text,
)
from cllm.text.templates.turns import Repair, find_repair, join_texts, shorten, with_marks

if TYPE_CHECKING:  # this imports more than a process that only renders needs
    from cllm.core.vocabulary import VocabularyFacts

# The template of models without one, which other servers also use.
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MAX_LENGTH = 1 << 23  # characters of a prompt
MAX_PROBE_LENGTH = 1 << 20  # characters of a prompt with marks in place of texts
MAX_FORMS = 1000  # remembered forms of conversations, each with its repair
# Exceptions that a template may raise on unusual messages, in addition to TemplateError.
TEMPLATE_FAULTS = (
    MemoryError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
)


class ChatTemplate:
    """Renders messages.

    The text of a control token inside a message is fenced before rendering (fences.py). A
    template's time cannot be limited here; text/rendering.py limits it, in processes that can be
    killed.
    """

    def __init__(self, vocabulary: VocabularyFacts, source: str | None = None) -> None:
        """Compile the template ``source``; None means the model's for chats without tools.

        Raises StartupError if it has a syntax error.
        """
        self._vocabulary = vocabulary
        self.fences = Fences(vocabulary)
        self._source = source if source is not None else choose_templates(vocabulary)[0]
        self._template = compile_template(self._source)
        self._asks_for_none = bool(re.search(r"\bcontent\W{0,3} is (?:not )?none", self._source))
        self._wants_thinking = "message.thinking" in self._source  # gpt-oss
        self._ids = CallIds(self._show_history)
        self._cut_marks = CutMarks(self._source, self._try)
        self._repairs: dict[bytes, Repair] = {}  # by the form of the conversation

    @cached_property
    def _wants_objects(self) -> bool:
        """Whether arguments must be an object.

        Text is more exact where the template shows it as JSON. But a template that has its own form
        for the names and values of an object cannot show text in that form.
        """
        takes_text = "arguments is string" in self._source
        content = "" if self._shows_calls[""] else None
        shown = self._probe({"probe_key": 1}, content)
        if shown is None:
            return not takes_text and self._probe("{}", content) is None
        if takes_text and ("probe_key" not in shown or '"probe_key"' in shown):
            return False
        return "'probe_key'" not in shown

    @cached_property
    def _shows_other_arguments(self) -> bool:
        """Whether the template shows arguments that are not an object, such as cut JSON text."""
        content = "" if self._shows_calls[""] else None
        return "probe_text" in (self._probe("probe_text", content) or "")

    @cached_property
    def _shows_calls(self) -> dict[str | None, bool]:
        """Whether the template shows calls, for each content of their message, because some
        templates require None.
        """
        forms: tuple[Any, ...] = ({}, "{}")
        shown = {
            content: [self._probe(given, content) or "" for given in forms]
            for content in ("", None)
        }
        return {content: any("probe" in text for text in texts) for content, texts in shown.items()}

    @cached_property
    def _wants_tools_in_system(self) -> bool:
        """Whether the template shows only tools that are a text in the system message (Phi 4)."""
        messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
        given = self._try(messages, PROBED_TOOLS)
        inside = self._try(with_tools_in_system(messages, PROBED_TOOLS))
        return PROBED_NAME not in (given or "") and PROBED_NAME in (inside or "")

    @cached_property
    def _shows_tools(self) -> bool:
        """Whether the template shows tools, at least in some conversations."""
        asked = [{"role": "user", "content": "a"}]
        ordered = [{"role": "system", "content": "b"}, *asked]
        shown = (self._try(self._in_parts(form), PROBED_TOOLS) or "" for form in (asked, ordered))
        return any(PROBED_NAME in text for text in shown)

    @cached_property
    def _opens_answers(self) -> bool:
        """Whether the template begins the next message after a user's."""
        asked = [{"role": "user", "content": "a"}]
        return self._try(asked) != self._try(asked, add_generation_prompt=False)

    @cached_property
    def _wants_parts(self) -> bool:
        """Whether the template shows texts only in lists of parts, like some for images."""
        text, parts = (
            self._try([{"role": "user", "content": content}]) or ""
            for content in ("probe", [{"type": "text", "text": "probe"}])
        )
        return "probe" not in text and "probe" in parts

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        continued: str = "",
        /,
        **variables: Any,
    ) -> str:
        """Return the text of the prompt for the next assistant message, with fences around control
        tokens that must stay plain text.

        With ``add_generation_prompt=False`` the prompt does not open another message. ``continued``
        is a field of the last message: then the text ends where that field ends, and CUT marks
        where it begins. Raises BadRequest if the template fails, refuses the messages, leaves out
        that field, or returns too long a text.
        """
        if continued:
            variables["add_generation_prompt"] = False
        adapted = self.fences.enclose(self._adapt(messages, tools, variables))
        if continued and adapted and adapted[-1]["role"] == "assistant":  # else it is left out
            field = continued if continued in adapted[-1] else "thinking"
            adapted[-1][field] = CUT + adapted[-1].get(field, "") + CUT
        adapted = [self._cut_marks.protect(message) for message in adapted]
        text = self._render_with(self._in_parts(adapted), tools, variables)
        if not continued:
            return text
        before, *begun = text.rsplit(CUT, 2)
        if len(begun) != 2:
            raise BadRequest(
                "The chat template omits the message to be continued.", param="messages"
            )
        return before.replace(CUT, "") + CUT + begun[0]

    def _render_with(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        variables: dict[str, Any],
    ) -> str:
        """Return the text of messages that have been adapted. Raises BadRequest.

        If the template fails, or omits parameters of the tools, missing fields of ``tools`` are
        filled in.
        """

        def render(declared: list[dict[str, Any]] | None) -> str:
            return self._generate(messages, declared, variables, MAX_LENGTH)

        return render_with_tools(render, tools, is_shown=bool(tools) and self._shows_tools)

    def _generate(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        variables: dict[str, Any],
        room: int,
    ) -> str:
        """Return what the template writes, at most ``room`` characters. Raises BadRequest."""
        parts = []
        if "xml_tools" in self._source:  # SmolLM3, which can also be shown them as Python
            variables = {"xml_tools": tools or None, **variables}
        try:
            for part in self._template.generate(
                messages=messages,
                tools=self.fences.enclose(tools),
                **self._vocabulary.special_texts,
                **self.fences.enclose({"add_generation_prompt": True, **variables}),
            ):
                parts.append(part)
                room -= len(part)
                if room < 0:
                    raise OverflowError(f"its text is longer than {MAX_LENGTH} characters")
        except TemplateRefusal as error:
            raise BadRequest(
                f"The chat template refused the messages: {str(error)[:200]}", param="messages"
            ) from None
        except (jinja2.TemplateError, *TEMPLATE_FAULTS) as error:
            why = str(error)[:200] or type(error).__name__
            raise BadRequest(f"The chat template failed: {why}", param="messages") from None
        return "".join(parts)

    def _adapt(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        variables: dict[str, Any],
    ) -> list[dict[str, Any]]:
        """Return ``messages`` in the form that this template requires: the order of roles, ids, the
        type of arguments, and field names.
        """
        messages = link_results([{"content": "", **message} for message in messages])
        messages = self._with_fields(self._repair(messages, tools, variables)(messages))
        if tools and self._wants_tools_in_system:
            return with_tools_in_system(messages, tools)
        return messages

    def _repair(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        variables: dict[str, Any],
    ) -> Repair:
        """Return the repair with which the template shows all texts of such conversations."""
        marked = with_marks(shorten(messages))
        probed = PROBED_TOOLS if tools else []
        asked = {key: variables[key] for key in ("add_generation_prompt",) if key in variables}
        form = repr((marked, bool(tools), asked)).encode()
        key = hashlib.blake2b(form, digest_size=16).digest()
        if key not in self._repairs:

            def show(repaired: list[dict[str, Any]], **more: bool) -> str | None:
                adapted = self._in_parts(self._with_fields(repaired))
                return self._try(adapted, probed, **asked, **more)

            def show_opened(repaired: list[dict[str, Any]]) -> str | None:
                """Render messages; None also if the answer is not opened after a system message."""
                text = show(repaired)
                is_last = bool(repaired) and repaired[-1]["role"] == "system"
                if not is_last or asked or not self._opens_answers:
                    return text
                return None if text == show(repaired, add_generation_prompt=False) else text

            if len(self._repairs) == MAX_FORMS:
                del self._repairs[next(iter(self._repairs))]
            names = (PROBED_NAME,) if tools and self._shows_tools else ()
            self._repairs[key] = find_repair(marked, show_opened, self._as_text, names)
        return self._repairs[key]

    def _as_text(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return ``messages`` with calls and their results as text."""
        from cllm.text.tools.model_family import find_family, load_families

        calls = find_family(self._source).calls or load_families()["prompted"].calls
        assert calls
        return write_calls_as_text(messages, calls, knows_results=False)

    def _with_fields(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [
            self._adapted_message(message) if message["role"] == "assistant" else message
            for message in self._ids.adapt(messages)
        ]

    def _in_parts(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if not self._wants_parts:
            return messages
        return [
            {**message, "content": [{"type": "text", "text": message["content"] or ""}]}
            for message in messages
        ]

    def _adapted_message(self, message: dict[str, Any]) -> dict[str, Any]:
        message = dict(message)
        calls = message.get("tool_calls")
        if self._wants_thinking and message.get("reasoning_content"):
            message["thinking"] = message.pop("reasoning_content")
            if calls:  # the template takes one of them
                message["thinking"] = join_texts(message["thinking"], message["content"])
                message["content"] = ""
        if calls:
            is_silent = self._asks_for_none and not message.get("content")
            if self._shows_calls[None] and (is_silent or not self._shows_calls[""]):
                message["content"] = None
            message["tool_calls"] = [self._adapted_call(call) for call in calls]
        return message

    def _adapted_call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = dict(call["function"])
        arguments = function["arguments"]
        if isinstance(arguments, str) and self._wants_objects:
            if parse_object(arguments or "{}") is not None or not self._shows_other_arguments:
                function["arguments"] = object_or_text(arguments)
        elif not isinstance(arguments, str) and not self._wants_objects:
            function["arguments"] = tojson(arguments)
        return {**call, "function": function}

    def _probe(self, arguments: Any, content: str | None) -> str | None:
        """Render a conversation with a call that has these arguments; None if the template refuses
        it.
        """
        call = {
            "id": self._ids.sample,
            "type": "function",
            "function": {"name": "probe", "arguments": arguments},
        }
        message = {"role": "assistant", "content": content, "tool_calls": [call]}
        return self._try([{"role": "user", "content": "a"}, message])

    def _show_history(self, messages: list[dict[str, Any]]) -> str | None:
        """Render a conversation with calls without arguments, with their names if possible; None if
        the template refuses it.
        """
        best = None
        for content, arguments in product(("", None), ({}, "{}")):
            changed = copy.deepcopy(messages)
            for message in changed:
                for call in message.get("tool_calls", ()):
                    message["content"] = content
                    call["function"]["arguments"] = arguments
            text = self._try(changed)
            if text is not None and "probename" in text:
                return text
            best = best or text
        return best

    def _try(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        **variables: Any,
    ) -> str | None:
        """Render ``messages``; None if the template refuses them."""
        alternatives: tuple[list[dict[str, Any]] | None, ...] = (tools,) if tools else (None, [])
        for declared in alternatives:
            try:
                return self._generate(messages, declared, variables, MAX_PROBE_LENGTH)
            except BadRequest:
                continue
        return None


def prepare(texts: dict[str, Any]) -> Callable[[Any], str]:
    """Return the Work (text/worker.py) of a rendering process; its input is the arguments of
    ``Renderer.render``.

    ``texts`` has the fields of VocabularyFacts that it needs. With a template that has a syntax
    error, every chat is refused, and other requests are served.
    """
    vocabulary = cast("VocabularyFacts", SimpleNamespace(**texts))
    try:
        templates = make_templates(vocabulary)
    except StartupError as error:
        broken = BadRequest(f"Chats are not available: {error}", code="no_chat_template")
        sys.stderr.write(f"cllm: {error}; chats are refused\n")

        def refuse_chat(_: Any) -> NoReturn:
            raise broken

        return refuse_chat

    def render(asked: Any) -> str:
        messages, tools, continued, variables, has_boundaries = asked
        template = templates[bool(tools)]
        if not has_boundaries:
            return template.render(messages, tools, continued, **variables)
        return render_with_boundaries(
            template.render, template.fences, messages, tools, continued, variables
        )

    return render


def choose_templates(vocabulary: VocabularyFacts, given: str = "") -> tuple[str, str]:
    """Return the templates for chats without and with tools. ``given`` replaces the model's."""
    if given:
        return given, given
    plain = vocabulary.chat_template or vocabulary.tool_template or CHATML
    return plain, vocabulary.tool_template or plain


def make_templates(vocabulary: VocabularyFacts, given: str = "") -> list[ChatTemplate]:
    """Compile the templates for chats without and with tools. Raises StartupError."""
    made = {
        source: ChatTemplate(vocabulary, source) for source in choose_templates(vocabulary, given)
    }
    return [made[source] for source in choose_templates(vocabulary, given)]
