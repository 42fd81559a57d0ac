"""Render messages to prompt text with the model's own Jinja template.

Only this module builds Jinja environments.
"""

from __future__ import annotations

import datetime
import json
import re
import sys
import zlib
from collections.abc import Iterator
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn, cast

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.sandbox

from cllm.errors import BadRequest, StartupError
from cllm.text.fences import CUT, Fences

if TYPE_CHECKING:  # which imports more than a process that only renders needs
    from cllm.core.vocabulary import VocabularyFacts
    from cllm.text.worker import Work

# The template of models without one, which other servers also use.
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MAX_LENGTH = 1 << 23  # characters of a prompt
# What a template may raise on odd messages, in addition to TemplateError.
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
        """``source``: the template; None is the model's for chats without tools.

        Raises StartupError if it has a syntax error.
        """
        self._vocabulary = vocabulary
        self._fences = Fences(vocabulary)
        self._source = source if source is not None else choose_templates(vocabulary)[0]
        self._template = compile_template(self._source)
        self._wants_short_ids = bool(re.search(r"length\s*!=\s*9", self._source))  # Mistral
        self._asks_for_none = bool(re.search(r"\bcontent\W{0,3} is (?:not )?none", self._source))
        self._wants_thinking = "message.thinking" in self._source  # gpt-oss

    @cached_property
    def _wants_objects(self) -> bool:
        """Whether arguments must be an object.

        Some templates want JSON text. Where both work, text is more exact.
        """
        if "arguments is string" in self._source:
            return False
        content = "" if self._shows_calls[""] else None
        shown = self._probe({"probe_key": 1}, content)
        return (
            "'probe_key'" not in shown if shown is not None else self._probe("{}", content) is None
        )

    @cached_property
    def _shows_calls(self) -> dict[str | None, bool]:
        """Whether the template shows calls, by the content of their message: some templates want it
        to be None.
        """
        forms: tuple[Any, ...] = ({}, "{}")
        shown = {
            content: [self._probe(given, content) or "" for given in forms]
            for content in ("", None)
        }
        return {content: any("probe" in text for text in texts) for content, texts in shown.items()}

    @cached_property
    def _shows_system(self) -> tuple[bool, bool]:
        """Whether a system message is shown as the first one, and after others; some templates
        refuse or drop it.
        """
        system, user = {"role": "system", "content": "probe"}, {"role": "user", "content": "a"}
        first, later = (self._try(messages) or "" for messages in ([system, user], [user, system]))
        return "probe" in first, "probe" in later

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
        parts, room = [], MAX_LENGTH
        if "xml_tools" in self._source:  # SmolLM3, which can also be shown them as Python
            variables = {"xml_tools": tools or None, **variables}
        try:
            adapted = self._fences.enclose(self._adapted(messages))
            if continued:
                variables["add_generation_prompt"] = False
                field = continued if continued in adapted[-1] else "thinking"
                adapted[-1][field] = CUT + adapted[-1][field] + CUT
            for part in self._template.generate(
                messages=adapted,
                tools=self._fences.enclose(tools) or None,
                **self._vocabulary.special_texts,
                **self._fences.enclose({"add_generation_prompt": True, **variables}),
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
        text = "".join(parts)
        if not continued:
            return text
        before, *begun = text.rsplit(CUT, 2)
        if len(begun) != 2:
            raise BadRequest(
                "The chat template omits the message to be continued.", param="messages"
            )
        return before.replace(CUT, "") + CUT + begun[0]

    def _adapted(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return ``messages`` as this template wants them: the type of arguments, and its own field
        names.
        """
        return [
            self._adapted_message(message) if message["role"] in ("assistant", "tool") else message
            for message in self._with_shown_systems(messages)
        ]

    def _with_shown_systems(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return ``messages`` with all system messages shown.

        One that the template would not show is appended to the message before it, or begins the
        user's next message, so that roles which alternated still do.
        """
        shown: list[dict[str, Any]] = []
        was_hidden = False
        for i, message in enumerate(messages):
            role, before = message["role"], shown[-1]["role"] if shown else ""
            is_hidden = role == "system" and not self._shows_system[i > 0]
            if (is_hidden and before in ("system", "user")) or (
                was_hidden and role == before == "user"
            ):
                texts = filter(None, (shown[-1]["content"], message["content"]))
                shown[-1] = {**shown[-1], "content": "\n\n".join(texts)}
            else:
                shown.append({**message, "role": "user"} if is_hidden else message)
            was_hidden = is_hidden
        return shown

    def _adapted_message(self, message: dict[str, Any]) -> dict[str, Any]:
        message = dict(message)
        if self._wants_thinking and message.get("reasoning_content"):
            message["thinking"] = message.pop("reasoning_content")
            if message.get("tool_calls"):
                message["content"] = ""  # the template takes one of them
        if self._wants_short_ids and "tool_call_id" in message:
            message["tool_call_id"] = short_id(message["tool_call_id"])
        if calls := message.get("tool_calls"):
            is_silent = self._asks_for_none and not message.get("content")
            if self._shows_calls[None] and (is_silent or not self._shows_calls[""]):
                message["content"] = None
            message["tool_calls"] = [self._adapted_call(call) for call in calls]
        return message

    def _adapted_call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = dict(call["function"])
        arguments = function["arguments"]
        if isinstance(arguments, str) and self._wants_objects:
            parsed = parse_object(arguments or "{}")
            function["arguments"] = arguments if parsed is None else parsed
        elif not isinstance(arguments, str) and not self._wants_objects:
            function["arguments"] = tojson(arguments)
        call = {**call, "function": function}
        return (
            {**call, "id": short_id(call["id"])} if self._wants_short_ids and "id" in call else call
        )

    def _probe(self, arguments: Any, content: str | None) -> str | None:
        """Render a conversation with a call that has these arguments; None if the template refuses
        it.
        """
        call = {
            "id": "probe1234",
            "type": "function",
            "function": {"name": "probe", "arguments": arguments},
        }
        message = {"role": "assistant", "content": content, "tool_calls": [call]}
        return self._try([{"role": "user", "content": "a"}, message])

    def _try(self, messages: list[dict[str, Any]]) -> str | None:
        """Render ``messages``; None if the template refuses them."""
        try:
            return self._template.render(messages=messages, **self._vocabulary.special_texts)
        except (TemplateRefusal, jinja2.TemplateError, *TEMPLATE_FAULTS):
            return None


def parse_object(arguments: str) -> dict[str, Any] | None:
    """Return the object that ``arguments``, JSON text, contains; None if it contains none.

    Lone surrogates, which are not text, become question marks.
    """
    try:
        value = json.loads(arguments)
        if "\\u" in arguments:
            value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def short_id(name: str) -> str:
    """Return nine letters and digits for the id of a call: the id itself if it has that form, else
    a checksum.
    """
    return name if re.fullmatch(r"[a-zA-Z0-9]{9}", name) else f"{zlib.crc32(name.encode()):09x}"


def prepare(texts: dict[str, Any]) -> Work:
    """Return the Work of a rendering process; its input is the arguments of
    ``ChatTemplate.render``.

    ``texts``: the fields of VocabularyFacts that it needs. With a template that has a syntax error,
    every chat is refused, and other requests are served.
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
    return lambda asked: templates[bool(asked[1])].render(*asked[:3], **asked[3])


def choose_templates(vocabulary: VocabularyFacts, given: str = "") -> tuple[str, str]:
    """Return the templates for chats without and with tools. ``given``: replaces the model's."""
    if given:
        return given, given
    plain = vocabulary.chat_template or vocabulary.tool_template or CHATML
    return plain, vocabulary.tool_template or plain


def make_templates(vocabulary: VocabularyFacts, given: str = "") -> list[ChatTemplate]:
    """Return what renders chats without and with tools. Raises StartupError on a syntax error."""
    made = {
        source: ChatTemplate(vocabulary, source) for source in choose_templates(vocabulary, given)
    }
    return [made[source] for source in choose_templates(vocabulary, given)]


class TemplateRefusal(Exception):
    """The template called raise_exception."""


def compile_template(source: str, name: str = "the model's chat template") -> jinja2.Template:
    """Compile the template in a sandbox, with transformers' extensions.

    Raises StartupError, with the template's ``name``, on a syntax error.
    """
    environment = Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,
        extensions=[jinja2.ext.loopcontrols, Generation],
    )
    environment.code_generator_class = Unfolded
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: (
        datetime.datetime.now().astimezone().strftime(form)
    )
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        why = f"{error.message} (line {error.lineno})"
    except RecursionError as error:
        why = str(error)
    raise StartupError(f"{name} has a syntax error: {why}")


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Lets templates append to lists and pop from them, as Kimi K2's does: their lists exist for
    one rendering only.
    """

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return (type(obj) is list and attr in ("append", "pop")) or super().is_safe_attribute(
            obj, attr, value
        )


class Unfolded(jinja2.compiler.CodeGenerator):
    """Computes no constant expressions at compile time: that would happen in this process, without
    limits.
    """

    def _output_child_to_const(
        self,
        node: jinja2.nodes.Expr,
        frame: jinja2.compiler.Frame,
        finalize: jinja2.compiler.CodeGenerator._FinalizeInfo,
    ) -> str:
        if not isinstance(node, jinja2.nodes.TemplateData):
            raise jinja2.nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


def tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, **({"default": as_list} | options)
    )


def as_list(value: Any) -> list[Any]:
    """Return the list of a generator, which filters like ``map`` return.

    Raises TypeError.
    """
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def refuse(message: str) -> NoReturn:
    raise TemplateRefusal(message)


class Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks a model's own text for training; here it has no effect."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
