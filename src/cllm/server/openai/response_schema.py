"""What clients of the Responses API send, and its translation to a chat, which is what is computed."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import BeforeValidator, Discriminator, Field, Tag

from cllm.errors import BadRequest
from cllm.server.body import Body, example, explain
from cllm.server.openai.schema import ChatBody, Function, GenerationBody, Limit, Metadata

MAX_ITEMS = 10_000
Identifier = Annotated[str, Field(max_length=200)]
TEXT_PARTS = {"input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal"}
# The names of a chat's parameters in this dialect, for errors.
NAMES = {
    "messages": "input",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
}


def served(default: str | None, kinds: Iterable[str], what: str) -> BeforeValidator:
    """Names the type of what is not served."""

    def check(value: Any) -> Any:
        kind = value.get("type", default) if isinstance(value, dict) else None
        if isinstance(kind, str) and kind not in kinds:
            raise ValueError(f"{what} of the type '{kind[:40]}' are not served, only {', '.join(kinds)}")
        return value

    return BeforeValidator(check)


class Part(Body):
    """A part of a content; what is no text is refused."""

    type: str
    text: str | None = None
    refusal: str | None = None

    @pydantic.model_validator(mode="after")
    def _is_text(self) -> Part:
        if self.type not in TEXT_PARTS or (self.text is None and self.refusal is None):
            raise ValueError(f"this model takes text parts, not '{self.type[:40]}'")
        return self


Content = str | list[Part]


def text_of(content: Content | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text or part.refusal or "" for part in content)


class MessageItem(Body):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content

    def resource(self) -> dict[str, Any]:
        part: dict[str, Any] = {"type": "input_text", "text": text_of(self.content)}
        if self.role == "assistant":
            part = {"type": "output_text", "text": part["text"], "annotations": [], "logprobs": []}
        return {"id": new_id("msg"), "type": "message", "status": "completed", "role": self.role, "content": [part]}


class FunctionCallItem(Body):
    type: Literal["function_call"]
    call_id: Identifier
    name: Identifier
    arguments: str

    def resource(self) -> dict[str, Any]:
        return {"id": new_id("fc"), **self.model_dump(), "status": "completed"}


class FunctionCallOutputItem(Body):
    type: Literal["function_call_output"]
    call_id: Identifier
    output: Content

    def resource(self) -> dict[str, Any]:
        return {
            "id": new_id("fco"),
            "type": self.type,
            "call_id": self.call_id,
            "output": text_of(self.output),
            "status": "completed",
        }


class ReasoningItem(Body):
    type: Literal["reasoning"]
    summary: list[Part] | None = None
    content: list[Part] | None = None

    def resource(self) -> dict[str, Any]:
        text = text_of(self.content) or text_of(self.summary)
        content = [{"type": "reasoning_text", "text": text}] if text else []
        return {"id": new_id("rs"), "type": "reasoning", "summary": [], "content": content, "status": "completed"}


def kind_of(item: Any) -> str:
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    return f"item:{kind}"


Item = Annotated[
    Annotated[MessageItem, Tag("item:message")]
    | Annotated[FunctionCallItem, Tag("item:function_call")]
    | Annotated[FunctionCallOutputItem, Tag("item:function_call_output")]
    | Annotated[ReasoningItem, Tag("item:reasoning")],
    Discriminator(kind_of, custom_error_type="item_type", custom_error_message="an item must be an object with a type"),
    served("message", ("message", "function_call", "function_call_output", "reasoning"), "items"),
]


class FunctionTool(Function):
    type: Literal["function"]

    def of_chat(self) -> dict[str, Any]:
        return {"type": "function", "function": self.model_dump(exclude={"type"}, exclude_none=True)}

    def resource(self) -> dict[str, Any]:
        return {"parameters": None, "strict": None, **self.model_dump(exclude_unset=True)}


class NamedTool(Body):
    type: Literal["function"]
    name: str


class AllowedTools(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=128)]


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")] | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @pydantic.model_validator(mode="after")
    def _complete(self) -> TextFormat:
        if self.type == "json_schema" and (self.name is None or self.schema_ is None):
            raise ValueError("a json_schema must have a name and a schema")
        return self

    def resource(self) -> dict[str, Any]:
        return self.model_dump(by_alias=True, exclude_none=True)

    def of_chat(self) -> dict[str, Any]:
        values = self.resource()
        kind = values.pop("type")
        return {"type": kind, "json_schema": values} if kind == "json_schema" else {"type": kind}


class TextConfig(Body):
    ignored: ClassVar[Mapping[str, str]] = {"verbosity": "nothing tells a model to be brief but its instructions"}

    format: TextFormat = TextFormat()


class Reasoning(Body):
    ignored: ClassVar[Mapping[str, str]] = {
        "summary": "what the model thinks is given in its own words",
        "generate_summary": "what the model thinks is given in its own words",
        "context": "the template decides which reasoning of earlier turns the model reads",
        "mode": "there is one",
    }

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None


class ResponseStreamOptions(Body):
    ignored: ClassVar[Mapping[str, str]] = {"include_obfuscation": "events are as long as their texts"}


class ResponseBody(GenerationBody):
    model_config = example(input="What is 27 plus 45?", temperature=0)
    ignored: ClassVar[Mapping[str, str]] = {
        "service_tier": "there is one tier; `priority` says how urgent a request is",
        "prompt_cache_key": "prefixes are found by their tokens",
        "prompt_cache_retention": "prefixes are kept as long as there is memory",
        "prompt_cache_options": "prefixes are kept as long as there is memory",
        "safety_identifier": "nothing is reported to anybody",
        "max_tool_calls": "it limits calls of built-in tools, and there are none",
        "context_management": "nothing is compacted; a prompt that is too long is refused with both numbers",
        "image": "there are no images",
        "access_programs": "there are none",
    }
    refused: ClassVar[Mapping[str, str]] = {
        **GenerationBody.refused,
        "background": "a response is computed while its client waits; use /v1/batches for what may take long",
        "conversation": "conversations are not kept; use previous_response_id",
        "prompt": "prompt templates are not kept; send instructions and input",
        "moderation": "there is no moderation model",
    }

    input: str | Annotated[list[Item], Field(max_length=MAX_ITEMS)] | None = Field(
        default=None, description="Needed unless there is a previous_response_id."
    )
    stream_options: ResponseStreamOptions | None = None  # type: ignore[assignment]  # has other options than a chat's
    instructions: str | None = None
    previous_response_id: Identifier | None = None
    store: bool | None = Field(
        default=None, description="Kept in memory for a while, unless false; in a batch, only if true."
    )
    metadata: Metadata | None = None
    tools: (
        Annotated[list[Annotated[FunctionTool, served(None, ("function",), "tools")]], Field(max_length=128)] | None
    ) = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | Annotated[NamedTool | AllowedTools, Field(discriminator="type")] | None,
        served(None, ("function", "allowed_tools"), "choices"),
    ] = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: Limit = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    truncation: Literal["auto", "disabled"] | None = Field(
        default=None, description="auto is read as disabled: a prompt that is too long is refused, with both numbers."
    )
    include: Annotated[list[str], Field(max_length=20)] | None = Field(
        default=None, description="message.output_text.logprobs; what else there is belongs to built-in tools."
    )
    n: Literal[1] | None = Field(default=None, description="A response is one answer.")

    def check(self) -> None:
        """Raise BadRequest if there is nothing to answer."""
        if not self.input and self.previous_response_id is None:
            message = "Missing required parameter: 'input'."
            raise BadRequest(message, param="input", code="missing_required_parameter")

    def items(self) -> list[dict[str, Any]]:
        """What was sent, as the resources that are kept."""
        if isinstance(self.input, str):
            return [MessageItem(role="user", content=self.input).resource()] if self.input else []
        return [item.resource() for item in self.input or []]

    def chat(self, items: list[dict[str, Any]]) -> ChatBody:
        """The chat that asks for the same after ``items``. Raises BadRequest."""
        own = {*ResponseBody.__annotations__, "max_tokens"}
        shared = (set(GenerationBody.model_fields) - own) & self.model_fields_set
        values = self.model_dump(include=shared, by_alias=True)
        values["messages"] = messages_of(items, self.instructions)
        choice, tools = self.tool_choice, self.tools
        if isinstance(choice, AllowedTools):
            allowed = {tool.name for tool in choice.tools}
            tools, choice = [tool for tool in tools or [] if tool.name in allowed], choice.mode
        if tools:
            values["tools"] = [tool.of_chat() for tool in tools]
        if choice is not None:
            named = {"type": "function", "function": {"name": choice.name}} if isinstance(choice, NamedTool) else choice
            values["tool_choice"] = named
        if self.parallel_tool_calls is not None:
            values["parallel_tool_calls"] = self.parallel_tool_calls
        if self.text is not None and self.text.format.type != "text":
            values["response_format"] = self.text.format.of_chat()
        if self.reasoning is not None and self.reasoning.effort is not None:
            values["reasoning_effort"] = self.reasoning.effort
        if (limit := self.max_output_tokens or self.max_tokens) is not None:
            values["max_completion_tokens"] = limit
        if self.wants_logprobs:
            values |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        try:
            return ChatBody.model_validate(values)
        except pydantic.ValidationError as error:
            raise renamed(explain(error)) from None

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())


def renamed(error: BadRequest) -> BadRequest:
    """``error`` about a chat, in this dialect's names."""
    param, message = error.param or "", str(error)
    for name, here in NAMES.items():
        if param == name or param.startswith((f"{name}[", f"{name}.")):
            message = message.replace(f"'{param}", f"'{here}{param[len(name) :]}").replace(f"'{name}", f"'{here}")
            return BadRequest(message, param=here + param[len(name) :], code=error.code, status=error.status)
    return error


def new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(16)}"


def messages_of(items: list[dict[str, Any]], instructions: str | None) -> list[dict[str, Any]]:
    """The messages of a chat. What an assistant thought, said and called in a row is one message."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    for item in items:
        PLACES[item["type"]](messages, item)
    return messages


def place_message(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    role, content = item["role"], "".join(part["text"] for part in item["content"])
    if role in ("system", "developer") and [message["role"] for message in messages] == ["system"]:
        messages[0]["content"] += f"\n\n{content}"  # many templates take one system message and no second
    elif role == "assistant":
        last = assistant(messages)
        if last.get("content") or "tool_calls" in last:
            messages.append(last := {"role": "assistant"})
        last["content"] = content
    else:
        messages.append({"role": role, "content": content})


def place_call(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    function = {"name": item["name"], "arguments": item["arguments"]}
    call = {"id": item["call_id"], "type": "function", "function": function}
    assistant(messages).setdefault("tool_calls", []).append(call)


def place_call_output(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})


def place_reasoning(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    text = "".join(part["text"] for part in item["content"])
    messages.append({"role": "assistant", "reasoning_content": text})


def assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message that others would be added to."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    return messages[-1]


PLACES: dict[str, Callable[[list[dict[str, Any]], dict[str, Any]], None]] = {
    "message": place_message,
    "function_call": place_call,
    "function_call_output": place_call_output,
    "reasoning": place_reasoning,
}
