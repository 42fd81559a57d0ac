"""Input items of the Responses API, and their translation to chat messages."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Discriminator, Field, Tag
from pydantic_core import to_json

from cllm.server.body import Body
from cllm.server.openai.responses.tools import flat_name

Identifier = Annotated[str, Field(max_length=200)]
TEXT_PARTS = {"input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal"}


def new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(16)}"


class ItemPart(Body):
    """A part of a message's content. Parts that are not text are rejected."""

    type: str
    text: str | None = None
    refusal: str | None = None

    @pydantic.model_validator(mode="after")
    def _is_text(self) -> ItemPart:
        if self.type not in TEXT_PARTS or (self.text is None and self.refusal is None):
            raise ValueError(f"this model accepts text parts only, not '{self.type[:40]}'")
        return self


Content = str | list[ItemPart]


def join_texts(content: Content | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text or part.refusal or "" for part in content)


class MessageItem(Body):
    type: Literal["message"] | None = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content

    def resource(self) -> dict[str, Any]:
        part: dict[str, Any] = {"type": "input_text", "text": join_texts(self.content)}
        if self.role == "assistant":
            part = {"type": "output_text", "text": part["text"], "annotations": [], "logprobs": []}
        return {
            "id": new_id("msg"),
            "type": "message",
            "status": "completed",
            "role": self.role,
            "content": [part],
        }


class CallItem(Body):
    """A call by the model. ``namespace`` is where the tool was declared, if in a namespace."""

    type: Literal["function_call", "custom_tool_call"]
    call_id: Identifier
    name: Identifier
    namespace: Identifier | None = None

    def resource(self) -> dict[str, Any]:
        prefix = "fc" if self.type == "function_call" else "ctc"
        return {"id": new_id(prefix), **self.model_dump(exclude_none=True), "status": "completed"}


class FunctionCallItem(CallItem):
    type: Literal["function_call"]
    arguments: str


class CustomCallItem(CallItem):
    type: Literal["custom_tool_call"]
    input: str


class LocalShellCallItem(Body):
    """A call of OpenAI's local shell.

    This server never makes one, but a client may replay one from elsewhere.
    """

    type: Literal["local_shell_call"]
    call_id: Identifier
    action: dict[str, Any]

    def resource(self) -> dict[str, Any]:
        return {"id": new_id("lsh"), **self.model_dump(), "status": "completed"}


class CallOutputItem(Body):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Identifier
    output: Content

    def resource(self) -> dict[str, Any]:
        return {
            "id": new_id("fco"),
            "type": self.type,
            "call_id": self.call_id,
            "output": join_texts(self.output),
            "status": "completed",
        }


class LocalShellOutputItem(CallOutputItem):
    """OpenAI's reference names the id of the call ``id``; clients send ``call_id`` too."""

    type: Literal["local_shell_call_output"]  # type: ignore[assignment]
    call_id: Identifier = Field(validation_alias=pydantic.AliasChoices("call_id", "id"))


class ReasoningItem(Body):
    """Only the server that wrote ``encrypted_content`` can read it.

    An item without other content is left out.
    """

    type: Literal["reasoning"]
    summary: list[ItemPart] | None = None
    content: list[ItemPart] | None = None

    def resource(self) -> dict[str, Any]:
        text = join_texts(self.content) or join_texts(self.summary)
        content = [{"type": "reasoning_text", "text": text}] if text else []
        return {
            "id": new_id("rs"),
            "type": "reasoning",
            "summary": [],
            "content": content,
            "status": "completed",
        }


class ReferenceItem(Body):
    """A reference to an output item of a stored response."""

    type: Literal["item_reference"] | None = "item_reference"
    id: Identifier

    def resource(self) -> dict[str, Any]:
        return {"type": "item_reference", "id": self.id}


class OtherItem(Body):
    """An item that chat templates have no place for, such as a web search. It is left out."""

    type: str

    def resource(self) -> dict[str, Any]:
        return {"type": self.type}


MODELS: dict[str, type[Body]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "custom_tool_call": CustomCallItem,
    "local_shell_call": LocalShellCallItem,
    "function_call_output": CallOutputItem,
    "custom_tool_call_output": CallOutputItem,
    "local_shell_call_output": LocalShellOutputItem,
    "reasoning": ReasoningItem,
    "item_reference": ReferenceItem,
}


def tag_item(item: Any) -> str:
    """Return the tag of the pydantic model for ``item``.

    The type may be missing from messages and references.
    """
    if not isinstance(item, dict):
        return f"item:{type(item).__name__}"
    kind = item.get("type") or (
        "item_reference" if "id" in item and "role" not in item else "message"
    )
    return f"item:{MODELS.get(kind, OtherItem).__name__}" if isinstance(kind, str) else "item:None"


Item = Annotated[
    Annotated[MessageItem, Tag("item:MessageItem")]
    | Annotated[FunctionCallItem, Tag("item:FunctionCallItem")]
    | Annotated[CustomCallItem, Tag("item:CustomCallItem")]
    | Annotated[LocalShellCallItem, Tag("item:LocalShellCallItem")]
    | Annotated[CallOutputItem, Tag("item:CallOutputItem")]
    | Annotated[LocalShellOutputItem, Tag("item:LocalShellOutputItem")]
    | Annotated[ReasoningItem, Tag("item:ReasoningItem")]
    | Annotated[ReferenceItem, Tag("item:ReferenceItem")]
    | Annotated[OtherItem, Tag("item:OtherItem")],
    Discriminator(
        tag_item,
        custom_error_type="item_type",
        custom_error_message="an item must be an object with a type",
    ),
]


def make_messages(items: list[dict[str, Any]], instructions: str | None) -> list[dict[str, Any]]:
    """Translate items to chat messages.

    Consecutive reasoning, text and calls become one assistant message.
    """
    # the content of a system message at the beginning is a list until all of it is known
    messages: list[dict[str, Any]] = (
        [{"role": "system", "content": [instructions]}] if instructions else []
    )
    for item in items:
        PLACES[item["type"]](messages, item)
    if messages and messages[0]["role"] == "system":
        messages[0]["content"] = "\n\n".join(messages[0]["content"])
    return messages


def place_message(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    role, content = item["role"], "".join(part["text"] for part in item["content"])
    role = "system" if role == "developer" else role
    if role == "system" and len(messages) == 1 and messages[0]["role"] == "system":
        messages[0]["content"].append(content)
    elif role == "system" and not messages:
        messages.append({"role": role, "content": [content]})
    elif role == "assistant":
        last = last_assistant(messages)
        if last.get("content") or "tool_calls" in last:
            messages.append(last := {"role": "assistant"})
        last["content"] = content
    else:
        messages.append({"role": role, "content": content})


def place_function_call(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    place_call(messages, item, flat_name(item["name"], item.get("namespace")), item["arguments"])


def place_custom_call(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    arguments = to_json({"input": item["input"]}).decode()
    place_call(messages, item, flat_name(item["name"], item.get("namespace")), arguments)


def place_local_shell_call(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    place_call(messages, item, "local_shell", to_json(item["action"]).decode())


def place_call(
    messages: list[dict[str, Any]], item: dict[str, Any], name: str, arguments: str
) -> None:
    call = {
        "id": item["call_id"],
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
    last_assistant(messages).setdefault("tool_calls", []).append(call)


def place_call_output(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})


def place_reasoning(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    if item["content"]:
        text = "".join(part["text"] for part in item["content"])
        messages.append({"role": "assistant", "reasoning_content": text})


def last_assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the last message if it is the assistant's, else append a new one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    return messages[-1]


PLACES: dict[str, Callable[[list[dict[str, Any]], dict[str, Any]], None]] = {
    "message": place_message,
    "function_call": place_function_call,
    "custom_tool_call": place_custom_call,
    "local_shell_call": place_local_shell_call,
    "function_call_output": place_call_output,
    "custom_tool_call_output": place_call_output,
    "local_shell_call_output": place_call_output,
    "reasoning": place_reasoning,
}
