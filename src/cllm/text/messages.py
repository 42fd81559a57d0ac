"""Check messages and tools in OpenAI's format that did not come through a dialect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cllm.errors import BadRequest

Messages = list[dict[str, Any]]

ROLES = ("system", "developer", "user", "assistant", "tool")


def messages_for_template(messages: Any) -> Messages:
    """Return the messages in the form that chat templates expect.

    Raises BadRequest, naming the invalid message.
    """
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        form = '[{"role": "user", "content": "..."}]'
        raise BadRequest(
            f"messages must be a list of one or more messages, such as {form}.", param="messages"
        )
    return [message_for_template(message, f"messages[{i}]") for i, message in enumerate(messages)]


def tools_for_template(tools: Any) -> Messages:
    """Return ``tools``, or [] for None.

    Raises BadRequest, naming the entry, if they are not in OpenAI's format.
    """
    tools = [] if tools is None else tools
    if not isinstance(tools, list):
        form = '[{"type": "function", "function": {"name": "...", "parameters": {...}}}]'
        raise BadRequest(f"tools must be a list such as {form}.", param="tools")
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        param = f"tools[{i}].function"
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRequest(f"{param} must be a dictionary with a name.", param=param)
        if not isinstance(function.get("parameters") or {}, dict):
            raise BadRequest(
                f"{param}.parameters must be a dictionary.", param=f"{param}.parameters"
            )
    return tools


def message_for_template(message: Any, param: str) -> dict[str, Any]:
    """Return a message in the form that templates expect. Raises BadRequest."""
    if not isinstance(message, dict):
        raise BadRequest(
            f"{param} must be a dictionary, not {type(message).__name__}.", param=param
        )
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        known = ", ".join(ROLES)
        raise BadRequest(
            f"{param}.role must be one of {known}, not {str(role)[:40]!r}.", param=f"{param}.role"
        )
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" for part in content
    ):
        content = "".join(str(part.get("text", "")) for part in content)
    if content is None and role == "assistant":
        content = ""
    if not isinstance(content, str):
        raise BadRequest(f"{param}.content must be text.", param=f"{param}.content")
    return {**message, "role": "system" if role == "developer" else role, "content": content}
