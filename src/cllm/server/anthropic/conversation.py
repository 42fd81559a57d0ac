"""Anthropic's messages and content blocks, and their translation to the messages of templates."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import Field

from cllm.errors import BadRequest
from cllm.server.body import Body

CACHED = "prefixes are always cached; usage reports what was reused"
# types with fields of their own
BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result", "image")
# Fields in which blocks of other types have texts, in the order in which they are read.
TEXT_FIELDS = (
    *(
        "title",
        "context",
        "url",
        "source",
        "tool_name",
        "text",
        "data",
        "content",
        "tool_references",
    ),
    *("stdout", "stderr"),
)
UNREADABLE = ("image", "base64", "url", "file")  # types of blocks and of their sources
BILLING = "x-anthropic-billing-header:"
"""The beginning of a block that Claude Code adds to its system prompt for Anthropic's accounting.

The block is left out, because it differs in every session, and prompts could not share a prefix.
"""


def collect_texts(value: Any) -> str:
    """Return the texts in a block of any type."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n".join(filter(None, map(collect_texts, value)))
    if isinstance(value, dict) and value.get("type") not in UNREADABLE:
        return "\n".join(filter(None, (collect_texts(value.get(field)) for field in TEXT_FIELDS)))
    return ""


class Block(Body):
    """A content block of any type. Its required fields are checked when it is translated."""

    ignored: ClassVar = {
        "cache_control": CACHED,
        "caller": "calls are the model's own",
        "citations": "cited text is read like any other text",
        "data": "encrypted thinking cannot be read; a redacted_thinking block is left out",
        "is_error": "chat templates cannot express it; the model reads the content",
        "signature": "signatures are not checked",
        "toolset_name": "toolsets are not supported",
    }

    type: str = Field(
        description="text, thinking, tool_use, tool_result. Images and documents without text "
        "are rejected. Of other types the text is read; blocks without text are left out."
    )
    text: str | None = None
    thinking: str | None = None
    id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    input: dict[str, Any] | None = None
    tool_use_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    content: str | list[Block] | None = None

    @pydantic.model_validator(mode="before")
    @classmethod
    def _read_other_types(cls, value: Any) -> Any:
        if (
            not isinstance(value, dict)
            or not isinstance(kind := value.get("type"), str)
            or kind in BLOCKS
        ):
            return value
        return {"type": kind, "text": collect_texts(value)}

    @property
    def is_skipped(self) -> bool:
        """Whether the block is left out, because it has no text and its type may lack one."""
        return self.type not in (*BLOCKS, "document") and not self.text


class AnthropicMessage(Body):
    role: Literal["user", "assistant", "system"] = Field(
        description="system: later system texts; the first one is the field system."
    )
    content: str | list[Block]

    def blocks(self) -> list[Block]:
        return (
            [Block(type="text", text=self.content)]
            if isinstance(self.content, str)
            else self.content
        )


def make_assistant_turn(message: AnthropicMessage, path: str) -> list[dict[str, Any]]:
    turn: dict[str, Any] = {
        "role": "assistant",
        "content": [],
        "reasoning_content": [],
        "tool_calls": [],
    }
    for i, block in enumerate(message.blocks()):
        at = f"{path}[{i}]"
        if block.type == "thinking":
            turn["reasoning_content"].append(require(block.thinking, at, "thinking"))
        elif block.type == "tool_use":
            function = {
                "name": require(block.name, at, "name"),
                "arguments": require(block.input, at, "input"),
            }
            turn["tool_calls"].append({"id": block.id, "type": "function", "function": function})
        elif block.type != "redacted_thinking":  # only its author can read it
            turn["content"].append(read_text(block, at))
    return [turn]


def make_user_turns(message: AnthropicMessage, path: str) -> list[dict[str, Any]]:
    """Return the chat messages of a user's turn. Raises BadRequest."""
    results: list[dict[str, Any]] = []
    texts = []
    for i, block in enumerate(message.blocks()):
        at = f"{path}[{i}]"
        if block.type == "tool_result":
            parts = (
                [Block(type="text", text=block.content)]
                if isinstance(block.content, str)
                else block.content or []
            )
            content = [read_text(part, f"{at}.content[{j}]") for j, part in enumerate(parts)]
            results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
        else:
            texts.append(read_text(block, at))
    return [*results, {"role": "user", "content": texts}] if any(texts) or not results else results


def make_system_turn(message: AnthropicMessage, path: str) -> list[dict[str, Any]]:
    return [
        {
            "role": "system",
            "content": [
                read_text(block, f"{path}[{i}]") for i, block in enumerate(message.blocks())
            ],
        }
    ]


TURNS = {"assistant": make_assistant_turn, "user": make_user_turns, "system": make_system_turn}


def join_turn(turn: dict[str, Any]) -> dict[str, Any]:
    """Return ``turn`` with its lists of texts joined, and without empty fields other than
    ``content``.
    """
    whole = {
        key: "\n".join(filter(None, turn[key]))
        if key in ("content", "reasoning_content")
        else turn[key]
        for key in turn
    }
    return {key: value for key, value in whole.items() if value or key == "content"}


def read_text(block: Block, path: str) -> str:
    """Return the text of a block. Raises BadRequest if its type is not allowed here, or if it has
    no text and must not be left out.
    """
    if block.is_skipped:
        return ""
    if block.type != "text" and (block.type in BLOCKS or not block.text):
        raise BadRequest(
            f"Invalid '{path}': this model accepts text here, not a block of the type "
            f"'{block.type[:60]}'.",
            param=path,
            code="unsupported_value",
        )
    text: str = require(block.text, path, "text")
    return text


def require(value: Any, path: str, name: str) -> Any:
    """Return a field of a block. Raises BadRequest if it is missing."""
    if value is None:
        message = f"Missing required parameter: '{path}.{name}'."
        raise BadRequest(message, param=f"{path}.{name}", code="missing_required_parameter")
    return value


def invalid(path: str, why: str) -> BadRequest:
    return BadRequest(f"Invalid '{path}': {why}.", param=path, code="invalid_value")
