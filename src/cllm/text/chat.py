"""A conversation and the settings of its next message, independent of dialects."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from typing import Any, Literal

# Names that already have a meaning in templates. Clients cannot use them for variables.
RESERVED = frozenset(
    {
        *("range", "dict", "lipsum", "cycler", "joiner", "namespace"),  # of Jinja
        "add_generation_prompt",
        "bos_token",
        "eos_token",
        "messages",
        "raise_exception",
        "self",
        "strftime_now",
        "tools",
        "xml_tools",
    }
)


MAX_FORCED_CALLS = 8  # calls in a forced message, because weak models would never stop calling


class Effort(enum.StrEnum):
    """How much the model should think before it answers."""

    NONE = "none"
    MINIMAL = "minimal"
    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"
    XHIGH = "xhigh"
    MAX = "max"


@dataclass(frozen=True, slots=True)
class Chat:
    """The input of a chat template, and the constraints on the answer.

    ``messages`` are dicts with a ``role`` (system, user, assistant, tool) and ``content`` (text).
    An assistant's may have ``reasoning_content`` and ``tool_calls``, dicts with an ``id``, the
    ``type`` "function", and a ``function``, which has a ``name`` and ``arguments``, a JSON text or
    an object. A tool's has ``tool_call_id``, and ``name`` if it is known. ``tools`` are declared as
    OpenAI does, ``{"type": "function", "function": {"name", "description", "parameters"}}``.
    ``tool_choice`` is auto, none or required (at least one call, and nothing else). Only the tools
    named in ``allowed_tools`` may be called; () means all. To force a call of one function, set
    "required" and its name. None as ``thinking`` leaves it to the template; a template without such
    a switch ignores it. After ``thinking_budget`` tokens of reasoning, the model is made to end it.
    ``effort`` is a level that sets both. If ``ends_on_request``, the client may end the reasoning
    earlier. The reasoning that is ended in one of these ways ends with ``budget_message``.
    ``variables`` are further variables of the template.
    ``continued`` is the field of the last message, an assistant's, that the answer continues; "" if
    the answer is a new message.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    tool_choice: Literal["auto", "none", "required"] = "auto"
    allowed_tools: tuple[str, ...] = ()
    parallel_tool_calls: bool = True
    thinking: bool | None = None
    thinking_budget: int | None = None
    effort: Effort | None = None
    ends_on_request: bool = False
    budget_message: str = ""
    variables: dict[str, Any] = field(default_factory=dict)
    continued: Literal["", "content", "reasoning_content"] = ""

    def continuing(self) -> Chat:
        """Return a chat that continues its last message, which has no calls. If that message is
        empty, return a chat without it.
        """
        last = self.messages[-1]
        if last.get("content"):
            return replace(self, continued="content")
        if last.get("reasoning_content"):
            return replace(self, continued="reasoning_content")
        return replace(self, messages=self.messages[:-1])

    @property
    def callable_tools(self) -> list[dict[str, Any]]:
        """The tools that the answer may call."""
        if self.tool_choice == "none":
            return []
        allowed = self.allowed_tools
        return [tool for tool in self.tools if not allowed or tool["function"]["name"] in allowed]

    @property
    def argument_schemas(self) -> dict[str, dict[str, Any]]:
        """The schemas of the arguments of ``callable_tools``, by the function's name."""
        functions = [tool["function"] for tool in self.callable_tools]
        return {
            function["name"]: function.get("parameters") or {"type": "object"}
            for function in functions
        }

    @property
    def max_calls(self) -> int | None:
        """The maximum number of calls in the answer; None means no limit."""
        is_required = self.tool_choice == "required"
        if not self.parallel_tool_calls or (is_required and len(self.allowed_tools) == 1):
            return 1
        return MAX_FORCED_CALLS if is_required else None

    @property
    def strict_tools(self) -> set[str]:
        """Names of the tools whose arguments must follow their schema."""
        return {
            tool["function"]["name"]
            for tool in self.tools
            if tool["function"].get("strict") is True
        }
