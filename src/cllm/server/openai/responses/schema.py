"""Request bodies of the Responses API, and their translation to chats."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import Field

from cllm.errors import BadRequest
from cllm.server.body import Body, example, first_fault, rename_parameters
from cllm.server.openai.conversation import MAX_TOOLS, ReasoningEffort
from cllm.server.openai.responses.items import Identifier, Item, MessageItem, make_messages
from cllm.server.openai.responses.tools import ResponseTool, Toolset
from cllm.server.openai.schema import (
    ChatBody,
    GenerationBody,
    Limit,
    Metadata,
    ReasoningBody,
)

MAX_ITEMS = 10_000
# Maps the names of a chat's parameters to their names in this dialect, for errors.
NAMES = {
    "messages": "input",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
}


# Several items become one message, so errors cannot name parts of messages.
rename_fields = partial(rename_parameters, NAMES, opaque="messages")
CHOICES = ("function", "custom", "allowed_tools")


def check_choice(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind not in CHOICES:
        raise ValueError(
            f"tools of the type '{kind[:40]}' cannot be chosen, only {', '.join(CHOICES)}"
        )
    return value


class NamedResponseTool(Body):
    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class AllowedResponseTool(Body):
    """A declared tool. Only tools that this server leaves out may lack a name."""

    type: str
    name: str | None = None
    namespace: str | None = None


class AllowedResponseTools(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedResponseTool], Field(min_length=1, max_length=MAX_TOOLS)]


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
    ignored: ClassVar[Mapping[str, str]] = {
        "verbosity": "models have no such option; use instructions"
    }

    format: TextFormat | None = None


class ReasoningConfig(Body):
    ignored: ClassVar[Mapping[str, str]] = {
        "summary": "reasoning is returned unabridged",
        "generate_summary": "reasoning is returned unabridged",
        "context": "the chat template decides which earlier reasoning the model sees",
        "mode": "there is one mode",
    }

    effort: ReasoningEffort | None = None


class ResponseStreamOptions(Body):
    ignored: ClassVar[Mapping[str, str]] = {"include_obfuscation": "events are not padded"}


class ResponseBody(GenerationBody, ReasoningBody):
    model_config = example(input="What is 27 plus 45?", temperature=0)
    ignored: ClassVar[Mapping[str, str]] = {
        "service_tier": "there is one service tier; use priority",
        "prompt_cache_key": "prefixes are matched by tokens",
        "prompt_cache_retention": "prefixes are kept while there is memory",
        "prompt_cache_options": "prefixes are kept while there is memory",
        "safety_identifier": "misuse is not reported",
        "max_tool_calls": "there are no built-in tools",
        "context_management": "conversations are not compacted; a prompt that is too long gets 400",
        "image": "there are no images",
        "access_programs": "there are no access programs",
        "client_metadata": "it is meant for OpenAI's servers",
    }
    refused: ClassVar[Mapping[str, str]] = {
        **GenerationBody.refused,
        "background": "responses are not computed in the background; use /v1/batches",
        "conversation": "conversations are not stored; use previous_response_id",
        "prompt": "prompt templates are not stored; send instructions and input",
        "moderation": "there is no moderation model",
    }

    input: str | Annotated[list[Item], Field(max_length=MAX_ITEMS)] | None = Field(
        default=None, description="Required unless previous_response_id is given."
    )
    stream_options: ResponseStreamOptions | None = None  # type: ignore[assignment]  # has other options than a chat's
    instructions: str | None = None
    previous_response_id: Identifier | None = None
    store: bool | None = Field(
        default=None,
        description="Whether to keep the response in memory; default true, in a batch false.",
    )
    metadata: Metadata | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS)] | None = Field(
        default=None,
        description="Functions and custom tools, also within namespaces. Tools of other types "
        "are left out; the header "
        "x-cllm-skipped names their types.",
    )
    tool_choice: Annotated[
        Literal["none", "auto", "required"]
        | Annotated[NamedResponseTool | AllowedResponseTools, Field(discriminator="type")]
        | None,
        pydantic.BeforeValidator(check_choice),
    ] = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    max_output_tokens: Limit = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    truncation: Literal["auto", "disabled"] | None = Field(
        default=None, description="auto is treated as disabled: a prompt that is too long gets 400."
    )
    include: Annotated[list[str], Field(max_length=20)] | None = Field(
        default=None,
        description="message.output_text.logprobs; the other values concern built-in tools.",
    )
    n: Literal[1] | None = Field(default=None, description="A response has one answer.")
    continue_final_message: bool | None = Field(
        default=None,
        description="Continue the last item, an assistant's message. The response contains only "
        "the new text.",
    )

    def check(self) -> None:
        """Raise BadRequest if there is nothing to answer."""
        if not self.input and self.previous_response_id is None:
            message = "Missing required parameter: 'input'."
            raise BadRequest(message, param="input", code="missing_required_parameter")

    def items(self) -> list[dict[str, Any]]:
        """Return the input as item resources. References and items that will be left out are
        included.
        """
        if isinstance(self.input, str):
            return [MessageItem(role="user", content=self.input).resource()] if self.input else []
        return [item.resource() for item in self.input or []]

    def chat(self, items: list[dict[str, Any]]) -> ChatBody:
        """Return the equivalent chat request for the conversation ``items``.

        Raises BadRequest with the names of a chat's parameters.
        """
        own = {*ResponseBody.__annotations__, "max_tokens"}
        of_chat = {*GenerationBody.model_fields, *ReasoningBody.model_fields}
        shared = (of_chat - own) & self.model_fields_set
        values = self.model_dump(include=shared, by_alias=True)
        values["messages"] = make_messages(items, self.instructions)
        toolset = self.toolset()
        if toolset.functions:
            values["tools"] = toolset.functions
        if (choice := self._choice(toolset)) is not None:
            values["tool_choice"] = choice
        if self.continue_final_message is not None:
            values["continue_final_message"] = self.continue_final_message
        if self.parallel_tool_calls is not None:
            values["parallel_tool_calls"] = self.parallel_tool_calls
        if self.text and self.text.format and self.text.format.type != "text":
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
            raise first_fault(error) from None

    def toolset(self) -> Toolset:
        toolset = Toolset()
        toolset.add(self.tools or [])
        return toolset

    def _choice(self, toolset: Toolset) -> str | dict[str, Any] | None:
        """Translate ``tool_choice`` for a chat, where every tool is a function."""
        choice = self.tool_choice
        if choice is None or isinstance(choice, str):
            return choice
        if isinstance(choice, NamedResponseTool):
            (name, *_) = toolset.flat_names(choice.name, choice.namespace) or [choice.name]
            return force_function(name)
        names = [
            name
            for tool in choice.tools
            if tool.name
            for name in toolset.flat_names(tool.name, tool.namespace)
        ]
        if not names and choice.mode == "required":
            raise self.refuse(
                "tool_choice", "requires a call, but none of the allowed tools is available"
            )
        if not names:
            return "none"
        return {
            "type": "allowed_tools",
            "allowed_tools": {
                "mode": choice.mode,
                "tools": [force_function(name) for name in names],
            },
        }

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())


def force_function(name: str) -> dict[str, Any]:
    """Return the ``tool_choice`` of a chat that forces the function ``name``."""
    return {"type": "function", "function": {"name": name}}
