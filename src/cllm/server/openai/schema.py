"""What OpenAI's clients send, checked field by field; bounds of sampling are those of core/params.py."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from cllm.core.params import SamplingParams
from cllm.errors import BadRequest
from cllm.server.body import Body, example
from cllm.server.defaults import SamplingDefaults
from cllm.server.queueing import TermsBody
from cllm.text.chat import Chat

MAX_PROMPTS = 128

Count = Annotated[int, Field(ge=1)]


class StreamOptions(Body):
    include_usage: bool = False


class GenerationBody(TermsBody):
    """What chat completions and completions have in common."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    max_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None

    def num_new_tokens(self) -> int | None:
        return self.max_tokens

    def params(self, defaults: SamplingDefaults) -> SamplingParams:
        """Raises BadRequest for values out of range."""
        bias = None
        if self.logit_bias is not None:
            if not all(key.isascii() and key.isdigit() and len(key) < 12 for key in self.logit_bias):
                message = "Invalid 'logit_bias': keys must be token ids."
                raise BadRequest(message, param="logit_bias", code="invalid_value")
            bias = {int(key): value for key, value in self.logit_bias.items()}
        top_k = 0 if self.top_k == -1 else self.top_k  # vLLM's way to say "off"
        return defaults.params(
            n=self.n,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            max_tokens=self.num_new_tokens(),
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=bias,
            seed=self.seed,
            ignore_eos=self.ignore_eos,
            stop_token_ids=tuple(self.stop_token_ids) if self.stop_token_ids else None,
        )

    def refuse(self, field: str, why: str) -> BadRequest:
        return BadRequest(f"'{field}' {why}.", param=field, code="unsupported_parameter")


class TextPart(Body):
    type: str
    text: str | None = None


class FunctionCall(Body):
    name: str
    arguments: str


class ToolCall(Body):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @pydantic.model_validator(mode="after")
    def _complete(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message of the role '{self.role}' must have content")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("a message of the role 'tool' must have a tool_call_id")
        return self

    def for_template(self, param: str) -> dict[str, Any]:
        """The message as chat templates know it. Raises BadRequest for parts that are not text."""
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self._text(param),
        }
        if self.name is not None:
            message["name"] = self.name
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message

    def _text(self, param: str) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        for i, part in enumerate(self.content):
            if part.type != "text" or part.text is None:
                message = f"Invalid '{param}.content[{i}]': this model takes text parts, not '{part.type[:40]}'."
                raise BadRequest(message, param=f"{param}.content[{i}]", code="unsupported_value")
        return "".join(part.text or "" for part in self.content)


class Function(Body):
    model_config = pydantic.ConfigDict(extra="allow")
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]


class ChatBody(GenerationBody):
    model_config = example(
        messages=[{"role": "user", "content": "What is 27 plus 45?"}], temperature=0, max_tokens=50, stream=False
    )

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[Literal["enable_thinking"], bool] | None = None

    def num_new_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def check(self) -> None:
        """Raise BadRequest for what would change the answer and cannot be done yet."""
        if self.logprobs or self.top_logprobs is not None:
            raise self.refuse("logprobs", "are not supported yet")
        if self.response_format is not None and self.response_format.type != "text":
            raise self.refuse("response_format", "other than text is not supported yet")
        if self.tool_choice == "required" or isinstance(self.tool_choice, dict):
            raise self.refuse("tool_choice", "can be 'auto' or 'none'; forcing a call is not supported yet")

    def chat(self) -> Chat:
        return Chat(
            [message.for_template(f"messages[{i}]") for i, message in enumerate(self.messages)],
            [tool.model_dump(exclude_none=True) for tool in self.tools or []],
            tool_choice="auto" if isinstance(self.tool_choice, dict) else self.tool_choice or "auto",
            variables={str(name): value for name, value in (self.chat_template_kwargs or {}).items()},
        )


class CompletionBody(GenerationBody):
    model_config = example(prompt="27 plus 45 is", temperature=0, max_tokens=16)

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: Count | None = 16
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    logprobs: int | None = None

    def check(self) -> None:
        """Raise BadRequest for what would change the answer and cannot be done yet."""
        for field in ("echo", "suffix", "logprobs"):
            if getattr(self, field):
                raise self.refuse(field, "is not supported yet")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise self.refuse("best_of", "other than n is not supported yet")

    def prompts(self) -> list[str] | list[list[int]]:
        """One or more prompts, as text or as token ids. Raises BadRequest if there are none or too many."""
        prompts: Any = self.prompt
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
            prompts = [prompts]
        if not 1 <= len(prompts) <= MAX_PROMPTS:
            raise BadRequest(
                f"Invalid 'prompt': 1 to {MAX_PROMPTS} prompts are accepted, not {len(prompts)}.", param="prompt"
            )
        checked: list[str] | list[list[int]] = prompts
        return checked
