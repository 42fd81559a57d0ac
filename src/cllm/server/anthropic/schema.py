"""Anthropic's request bodies."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import Field

from cllm.config.settings import Sampling
from cllm.core.params import SamplingParams
from cllm.errors import BadRequest
from cllm.server.anthropic.conversation import (
    BILLING,
    CACHED,
    TURNS,
    AnthropicMessage,
    Block,
    invalid,
    join_turn,
    read_text,
)
from cllm.server.body import Body, example, rename_parameters
from cllm.server.call import Call
from cllm.server.queueing import SchedulingBody
from cllm.server.sampling import add_sampling_fields, build_params, read_sampling_values
from cllm.serving.answer import SchedulingOptions
from cllm.text.chat import Chat, Effort

MAX_TOOLS = 512

NAMES = {"stop": "stop_sequences"}  # Anthropic's names of sampling parameters, where they differ
CHOICES: dict[str, Literal["auto", "none", "required"]] = {
    "auto": "auto",
    "any": "required",
    "tool": "required",
    "none": "none",
}
THINKING = {"enabled": True, "adaptive": True, "disabled": False}
ONE_KIND = "there is one service tier; use priority and deadline_ms"
NOWHERE = "the server runs no tools; declare a client tool"


class AnthropicTool(Body):
    """A tool that the client runs.

    Tools that Anthropic's servers run are rejected by their type.
    """

    ignored: ClassVar = {
        "allowed_callers": "calls are the model's own",
        "cache_control": CACHED,
        "defer_loading": "all tools are declared at once",
        "eager_input_streaming": "arguments are always streamed while they are generated",
        "input_examples": "chat templates cannot express them; write them into the description",
    }

    type: str | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None

    @pydantic.model_validator(mode="after")
    def _of_the_client(self) -> AnthropicTool:
        if self.type not in (None, "custom"):
            raise ValueError(f"the tool '{self.type[:60]}' is not available: {NOWHERE}")
        if not re.fullmatch(r"[a-zA-Z0-9_-]{1,128}", self.name):
            raise ValueError("a tool's name must have 1 to 128 letters, digits, _ and -")
        if self.input_schema is None:
            raise ValueError("a tool must have an input_schema")
        return self

    def for_template(self) -> dict[str, Any]:
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.input_schema,
            "strict": self.strict or None,
        }
        return {
            "type": "function",
            "function": {name: value for name, value in function.items() if value is not None},
        }


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Body):
    type: str = Field(
        description="enabled, adaptive or disabled; with any other type the model decides."
    )
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = Field(
        default=None,
        description="omitted: thinking blocks are empty; otherwise they contain the whole "
        "reasoning.",
    )

    @pydantic.model_validator(mode="after")
    def _has_budget(self) -> Thinking:
        if self.type == "enabled" and self.budget_tokens is None:
            raise ValueError("the type 'enabled' requires budget_tokens")
        return self


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Metadata(Body):
    user_id: Annotated[str, Field(max_length=256)] | None = Field(
        default=None, description="The account, unless the request has a token."
    )


class CountBody(Body):
    """POST /v1/messages/count_tokens: the fields that make a prompt."""

    model_config = example(
        model="cllm-builtin", messages=[{"role": "user", "content": "What is 27 plus 45?"}]
    )

    ignored: ClassVar = {
        "cache_control": CACHED,
        "context_management": "messages are never edited or left out",
        "speed": ONE_KIND,
        "user_profile_id": "the token or metadata.user_id names the account",
        "workspace_id": "there are no workspaces",
    }
    refused: ClassVar = {
        "compaction": "conversations are not summarized",
        "mcp_servers": NOWHERE,
        "thread": "conversations are not stored",
    }

    model: str
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=100_000)]
    system: str | list[Block] | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(
        default=None, description="The earlier name of output_config.format."
    )

    def chat(self) -> Chat:
        """Return the conversation. Raises BadRequest for content that is not text, and for the
        choice of a tool that does not exist.
        """
        tools, choice = self.tools or [], self.tool_choice or ToolChoice(type="auto")
        thinking = self.thinking
        effort = self.output_config.effort if self.output_config else None
        if choice.type == "tool" and choice.name not in [tool.name for tool in tools]:
            raise BadRequest(
                f"Invalid 'tool_choice.name': there is no tool {str(choice.name)[:100]!r}.",
                param="tool_choice.name",
                code="invalid_value",
            )
        chat = Chat(
            self._messages(),
            [tool.for_template() for tool in tools],
            tool_choice=CHOICES[choice.type],
            allowed_tools=(choice.name or "",) if choice.type == "tool" else (),
            parallel_tool_calls=not choice.disable_parallel_tool_use,
            thinking=THINKING.get(thinking.type) if thinking else None,
            thinking_budget=thinking.budget_tokens if thinking else None,
            effort=Effort(effort) if effort else None,
        )
        return self._continue(chat) if chat.messages[-1]["role"] == "assistant" else chat

    def _continue(self, chat: Chat) -> Chat:
        """Return ``chat``, set to continue its last message.

        Raises BadRequest in the cases that Anthropic rejects.
        """
        last = chat.messages[-1]
        if "tool_calls" in last:
            raise invalid(
                "messages",
                "a tool_use block must be followed by a user message with its tool_result block",
            )
        if last["content"] != last["content"].rstrip():
            raise invalid(
                "messages", "the last message, an assistant's, must not end with white space"
            )
        if last["content"] and (schema := self.output_schema()):
            raise invalid(
                schema[1],
                "a format cannot be combined with continuing the last message, an assistant's",
            )
        return chat.continuing()

    @property
    def shows_thinking(self) -> bool:
        return self.thinking is None or self.thinking.display != "omitted"

    def skipped_blocks(self) -> list[str]:
        """Return the types of the content blocks that are left out."""
        contents = [self.system, *(message.content for message in self.messages)]
        blocks = [block for content in contents if isinstance(content, list) for block in content]
        inner = [
            part for block in blocks if isinstance(block.content, list) for part in block.content
        ]
        return [block.type for block in (*blocks, *inner) if block.is_skipped]

    def output_schema(self) -> tuple[dict[str, Any], str] | None:
        """Return the schema of the answer and the path of its field, or None."""
        if self.output_config and self.output_config.format:
            return self.output_config.format.schema_, "output_config.format.schema"
        return (self.output_format.schema_, "output_format.schema") if self.output_format else None

    def _messages(self) -> list[dict[str, Any]]:
        """Return the messages for the chat template. Consecutive turns of the same role are merged.
        Tool results become separate messages before the user's text.
        """
        system = (
            [Block(type="text", text=self.system)]
            if isinstance(self.system, str)
            else self.system or []
        )
        texts = [read_text(block, f"system[{i}]") for i, block in enumerate(system)]
        texts = [text for text in texts if not text.startswith(BILLING)]
        messages: list[dict[str, Any]] = (
            [{"role": "system", "content": texts}] if any(texts) else []
        )
        for i, message in enumerate(self.messages):
            path = f"messages[{i}].content"
            if not message.content and message.role != "assistant":
                raise invalid(path, f"a message of the {message.role} must have content")
            if i == 0 and message.role == "system":
                raise invalid(
                    "messages[0].role",
                    "the first message must not be a system message; use the field 'system'",
                )
            for turn in TURNS[message.role](message, path):
                if messages and messages[-1]["role"] == turn["role"] != "tool":
                    for key in turn.keys() - {"role"}:
                        messages[-1][key] += turn[key]
                else:
                    messages.append(turn)
        return [join_turn(turn) for turn in messages]


@add_sampling_fields("anthropic", temperature="Values above 1 are an extension of Anthropic's API.")
class MessagesBody(CountBody, SchedulingBody):
    """POST /v1/messages."""

    model_config = example(
        model="cllm-builtin",
        max_tokens=100,
        system="Answer shortly.",
        messages=[{"role": "user", "content": "What is 27 plus 45?"}],
    )

    ignored: ClassVar = {
        **CountBody.ignored,
        "betas": "all supported features are always on",
        "billing_policy": "nothing is billed",
        "diagnostics": CACHED,
        "fallback_credit_token": "nothing is billed",
        "fallbacks": "there is one model",
        "inference_geo": "the server runs on one machine",
        "service_tier": ONE_KIND,
    }
    refused: ClassVar = {**CountBody.refused, "container": NOWHERE}

    max_tokens: Annotated[int, Field(ge=1)]
    metadata: Metadata | None = None
    stop_sequences: list[str] | None = None
    stream: bool = False

    def scheduling_options(self, call: Call, user: str | None = None) -> SchedulingOptions:
        return super().scheduling_options(
            call, user or (self.metadata.user_id if self.metadata else None)
        )

    def params(self, defaults: Sampling) -> SamplingParams:
        """Return the sampling parameters. Raises BadRequest for values out of range."""
        budget = self.thinking.budget_tokens if self.thinking else None
        if budget is not None and budget >= self.max_tokens:
            raise invalid(
                "thinking.budget_tokens",
                f"it must be less than max_tokens ({self.max_tokens}), not {budget}",
            )
        with rename_parameters(NAMES):
            return build_params(
                defaults,
                {
                    **read_sampling_values(self, "anthropic"),
                    "stop": tuple(self.stop_sequences or ()),
                    "max_tokens": self.max_tokens,
                },
            )
