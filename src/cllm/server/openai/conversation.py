"""Messages, tools and template variables in the bodies of OpenAI's clients."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field
from pydantic_core import to_json

from cllm.errors import BadRequest
from cllm.server.body import Body, limit_entries
from cllm.text.chat import RESERVED, Chat

MAX_TOOLS = 512
MAX_NAME = 64  # characters of a variable of a chat template
MAX_VARIABLES = 64
MAX_VARIABLES_BYTES = 10_000


class TextPart(Body):
    """A part of the type text (in the Responses API input_text or output_text), or an assistant's
    refusal.
    """

    type: str
    text: str | None = None
    refusal: str | None = None

    def plain_text(self) -> str | None:
        """Return the text; None if the part is not text."""
        if self.type == "refusal":
            return self.refusal
        return self.text if self.type in ("text", "input_text", "output_text") else None


class FunctionCall(Body):
    name: str
    arguments: str | dict[str, Any] = Field(
        default="{}", description="JSON text, or the object that it stands for."
    )


class ChatToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(default=None, description="Another name of reasoning_content.")
    tool_calls: list[ChatToolCall] | None = None
    tool_call_id: str | None = Field(
        default=None,
        description="Of a tool's result. By default that of the first call without a result.",
    )

    @pydantic.model_validator(mode="after")
    def _complete(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message of the role '{self.role}' must have content")
        return self

    def for_template(self, param: str) -> dict[str, Any]:
        """Return the message in the format of chat templates.

        Raises BadRequest for parts that are not text.
        """
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self._text(param),
        }
        if self.name is not None:
            message["name"] = self.name
        if (
            thoughts := self.reasoning if self.reasoning_content is None else self.reasoning_content
        ) is not None:
            message["reasoning_content"] = thoughts
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message

    def _text(self, param: str) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        texts = [part.plain_text() for part in self.content]
        for i, (part, text) in enumerate(zip(self.content, texts, strict=True)):
            if text is None:
                message = (
                    f"Invalid '{param}.content[{i}]': this model accepts text parts only, not "
                    f"'{part.type[:40]}'."
                )
                raise BadRequest(message, param=f"{param}.content[{i}]", code="unsupported_value")
        return "".join(filter(None, texts))


ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,256}$")]


class FunctionDeclaration(Body):
    model_config = pydantic.ConfigDict(extra="allow")
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(Body):
    type: Literal["function"] = "function"
    function: FunctionDeclaration


class FunctionName(Body):
    name: str


class NamedFunction(Body):
    type: Literal["function"]
    function: FunctionName


class Allowed(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(Body):
    type: Literal["allowed_tools"]
    allowed_tools: Allowed


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

ToolChoice = Literal["none", "auto", "required"] | NamedFunction | AllowedTools


def check_variable(name: str) -> str:
    if not name.isidentifier() or len(name) > MAX_NAME:
        raise ValueError(
            f"the name of a variable must have at most {MAX_NAME} letters, digits and _"
        )
    if name in RESERVED:
        raise ValueError("this template variable is set by the server")
    return name


def check_size(variables: dict[str, Any]) -> dict[str, Any]:
    if len(to_json(variables)) > MAX_VARIABLES_BYTES:
        raise ValueError(f"the variables must have at most {MAX_VARIABLES_BYTES} bytes as JSON")
    return variables


Scalar = bool | int | float | str | None
# Variables that a client passes to the chat template.
TemplateVariables = Annotated[
    dict[
        Annotated[str, pydantic.AfterValidator(check_variable)],
        Scalar | list[Scalar] | dict[str, Scalar],
    ],
    limit_entries(MAX_VARIABLES),
    pydantic.AfterValidator(check_size),
    Field(
        description="Variables of the chat template, such as enable_thinking. A value is a text, "
        "a number, true "
        "or false, or a flat list or object of these. Variables unknown to the template have no "
        "effect."
    ),
]


def drop_nulls(variables: dict[str, Any] | None) -> dict[str, Any]:
    """Return ``variables`` without those that are null."""
    return {name: value for name, value in (variables or {}).items() if value is not None}


def continue_chat(chat: Chat) -> Chat:
    """Return ``chat``, set to continue its last message.

    Raises BadRequest if that is not an assistant's, or has tool calls.
    """
    if chat.messages[-1]["role"] != "assistant" or "tool_calls" in chat.messages[-1]:
        message = (
            "Invalid 'continue_final_message': the last message must be an assistant's, "
            "without tool calls."
        )
        raise BadRequest(message, param="continue_final_message", code="invalid_value")
    return chat.continuing()
