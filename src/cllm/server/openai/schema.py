"""Request bodies of OpenAI's clients.

The ranges of sampling parameters are checked in core/params.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import Field

from cllm.core.params import LARGEST, MAX_LOGIT_BIAS, MAX_LOGPROBS, SamplingParams
from cllm.core.segments import Segment
from cllm.errors import BadRequest
from cllm.server.body import Body, example, limit_entries, rename_parameters
from cllm.server.off_loop import in_thread
from cllm.server.openai.conversation import (
    MAX_TOOLS,
    AllowedTools,
    ChatMessage,
    ChatTool,
    NamedFunction,
    ReasoningEffort,
    TemplateVariables,
    ToolChoice,
    continue_chat,
    drop_nulls,
)
from cllm.server.queueing import SchedulingBody
from cllm.server.sampling import add_sampling_fields, build_params, read_sampling_values
from cllm.server.structured import ConstrainedBody
from cllm.serving.service import Service
from cllm.text.chat import Chat, Effort

MAX_PROMPTS = 128
MAX_STOP_TOKENS = 256
MAX_BEST_OF = 20
MAX_METADATA = 16
MAX_BUDGET_MESSAGE = 4096  # characters
# the names of the number of tokens that reasoning may take; the first one that is given counts
BUDGETS = ("thinking_token_budget", "reasoning_budget_tokens", "thinking_budget_tokens")
TOKEN_ID = re.compile(r"[+-]?\d+", re.ASCII)
LIMITS = {"max_tokens", "max_completion_tokens", "n_predict"}


def read_limit(value: Any) -> Any:
    """Read -1 as the largest number, because clients of llama-server use it for no limit."""
    return LARGEST if type(value) is int and value == -1 else value


def read_biases(value: Any) -> Any:
    """Read logit_bias as llama-server does: also a list of [token id or text, bias], where false
    forbids the token.
    """
    if isinstance(value, list) and all(
        isinstance(pair, list) and len(pair) == 2 and type(pair[0]) in (int, str) for pair in value
    ):
        value = {str(token): bias for token, bias in value}
    if not isinstance(value, dict):
        return value
    return {token: -100.0 if bias is False else bias for token, bias in value.items()}


# The largest number of tokens to generate.
Limit = Annotated[
    Annotated[int, Field(ge=1)] | None,
    pydantic.BeforeValidator(read_limit),
    Field(description="-1 means no limit."),
]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=MAX_METADATA),
    limit_entries(MAX_METADATA),
]

MAX_ADAPTERS = 64  # of one request


class AdapterScale(Body):
    """An adapter by its number, and the factor of its change."""

    id: Annotated[int, Field(ge=0)]
    scale: Annotated[float, Field(ge=-100, le=100)] = 1.0


class StreamOptions(Body):
    ignored: ClassVar[Mapping[str, str]] = {"include_obfuscation": "chunks are not padded"}
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = Field(
        default=False, description="With include_usage: report usage so far in every chunk."
    )


@add_sampling_fields("openai", temperature="Values above 2 are an extension of OpenAI's API.")
class GenerationBody(SchedulingBody, ConstrainedBody):
    """Fields that all generating routes of this dialect have in common."""

    refused: ClassVar[Mapping[str, str]] = {
        "use_beam_search": "there is no beam search",
        "truncate_prompt_tokens": "prompts are never truncated",
    }

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_progress: bool | None = Field(
        default=False,
        description="In streams: report how far the prompt is, as prompt_progress.",
    )
    n: int | None = None
    stop: str | list[str] | None = None
    max_tokens: Limit = None
    n_predict: Annotated[
        Annotated[int, Field(ge=0)] | None, pydantic.BeforeValidator(read_limit)
    ] = Field(
        default=None,
        description="llama-server's name of max_tokens; 0 computes only the prompt, -1 means no "
        "limit.",
    )
    top_k: int | None = Field(
        default=None,
        description="Keep this many of the most probable tokens; 0 and -1 are off.",
    )
    repeat_penalty: float | None = Field(
        default=None, description="The name of repetition_penalty in llama-server."
    )
    lora: Annotated[list[AdapterScale], Field(max_length=MAX_ADAPTERS)] | None = Field(
        default=None,
        description="llama-server's choice of adapters, in place of those of the model; GET "
        "/lora-adapters lists them.",
    )
    logit_bias: Annotated[
        dict[str, float] | None,
        limit_entries(MAX_LOGIT_BIAS),
        pydantic.BeforeValidator(read_biases),
    ] = Field(
        default=None,
        description="Keys are token ids, or texts, whose tokens all get the bias. llama-server's "
        "list of [token id or text, bias] works too.",
    )
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKENS)] | None = None
    dry_sequence_breakers: list[str] | None = None

    @property
    def reports_prefill(self) -> bool:
        return bool(self.return_progress and self.stream)

    def num_new_tokens(self) -> int | None:
        given = self.model_fields_set
        return (
            self.n_predict
            if "n_predict" in given and "max_tokens" not in given
            else self.max_tokens
        )

    async def params(self, service: Service) -> SamplingParams:
        """Return the sampling parameters. Raises BadRequest for values out of range."""
        defaults, limit = service.sampling, self.num_new_tokens()
        if limit == LARGEST:  # no limit, not even the operator's
            limit, defaults = None, defaults.model_copy(update={"max_tokens": None})
        elif defaults.max_tokens and not self.model_fields_set & LIMITS:
            limit = None
        values = read_sampling_values(self, "openai")
        values["top_k"] = 0 if self.top_k == -1 else self.top_k  # vLLM's way to say "off"
        names: dict[str, str] = {}
        if values["repetition_penalty"] is None:
            values["repetition_penalty"] = self.repeat_penalty
            names["repetition_penalty"] = "repeat_penalty"
        if self.dry_sequence_breakers is not None or values["dry_multiplier"]:
            find = partial(service.texts.dry_breakers.ids, self.dry_sequence_breakers)
            values["dry_breakers"] = await in_thread(find)
        values |= {
            **self.logprob_fields(),
            "n": self.num_choices(),
            "stop": (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            "max_tokens": limit,
            "logit_bias": await self._biases(service),
            "stop_token_ids": tuple(self.stop_token_ids) if self.stop_token_ids else None,
        }
        with rename_parameters(names):
            return build_params(defaults, values)

    def num_choices(self) -> int | None:
        """Return how many choices to generate for each prompt."""
        return self.n

    async def _biases(self, service: Service) -> dict[int, float] | None:
        """Return the bias of each token."""
        if self.logit_bias is None:
            return None
        for key in self.logit_bias:
            if TOKEN_ID.fullmatch(key) and not (key.isdigit() and len(key) < 12):
                message = f"Invalid 'logit_bias': there is no token id {key[:40]}."
                raise BadRequest(message, param="logit_bias", code="invalid_value")
        texts = [key for key in self.logit_bias if not TOKEN_ID.fullmatch(key)]
        tokens = await service.tokenize(*[[Segment(text, False, False)] for text in texts])
        tokens_of = dict(zip(texts, tokens, strict=True))
        return {
            token: bias
            for key, bias in self.logit_bias.items()
            for token in (tokens_of[key] if key in tokens_of else [int(key)])
        }

    def logprob_fields(self) -> dict[str, int | None]:
        """Return the fields of SamplingParams that request logprobs."""
        return {}

    def check_stream(self) -> None:
        """Raise BadRequest for usage options of a stream if the answer is not streamed."""
        options = self.stream_options
        if (
            options is not None
            and (options.include_usage or options.continuous_usage_stats)
            and not self.stream
        ):
            raise self.refuse(
                "stream_options",
                "requires 'stream' to be true; without it, usage is always included",
            )

    def refuse(self, field: str, why: str) -> BadRequest:
        return BadRequest(f"'{field}' {why}.", param=field, code="unsupported_parameter")


class ReasoningBody(Body):
    """Fields that limit the reasoning in the answer, by vLLM's name and by those of llama-server.
    The first budget that is given counts.
    """

    thinking_token_budget: Annotated[int, Field(ge=0, le=LARGEST)] | None = Field(
        default=None,
        description="The most tokens of reasoning in the answer; after them, it is made to end.",
    )
    reasoning_budget_tokens: Annotated[int, Field(ge=-1, le=LARGEST)] | None = Field(
        default=None,
        description="llama-server's name of thinking_token_budget; -1 means no limit.",
    )
    thinking_budget_tokens: Annotated[int, Field(ge=-1, le=LARGEST)] | None = Field(
        default=None, description="The same."
    )
    reasoning_budget_message: Annotated[str, Field(max_length=MAX_BUDGET_MESSAGE)] | None = Field(
        default=None,
        description="Text at the end of reasoning that its budget or the client has ended.",
    )
    reasoning_control: bool | None = Field(
        default=False,
        description="Let POST /v1/chat/completions/control end the reasoning. The request then "
        "shares its computation with no other one.",
    )

    @property
    def budget_field(self) -> str:
        """The name of the field with the budget that counts; the first one if none is given."""
        given = (name for name in BUDGETS if getattr(self, name) is not None)
        return next(given, BUDGETS[0])

    @property
    def thinking_budget(self) -> int | None:
        """The number of tokens that reasoning may take; None means no limit."""
        budget: int | None = getattr(self, self.budget_field)
        return None if budget == -1 else budget


class ChatBody(GenerationBody, ReasoningBody):
    model_config = example(
        messages=[{"role": "user", "content": "What is 27 plus 45?"}],
        temperature=0,
        max_tokens=50,
        stream=False,
    )
    ignored: ClassVar[Mapping[str, str]] = {
        "store": "answers are not stored",
        "service_tier": "there is one service tier; use priority",
        "safety_identifier": "it has no use here; see user",
        "prompt_cache_key": "prefixes are matched by tokens; see cache_salt",
        "prompt_cache_retention": "prefixes are kept while there is memory",
        "prompt_cache_options": "prefixes are kept while there is memory",
        "prediction": "it never changes a text; draft tokens come from the prompt",
        "verbosity": "models have no such option; use a message",
    }
    refused: ClassVar[Mapping[str, str]] = {
        **GenerationBody.refused,
        "audio": "the answer is text",
        "moderation": "there is no moderation model",
        "web_search_options": "there is no web search",
        "functions": "it is deprecated; use tools",
        "function_call": "it is deprecated; use tool_choice",
        "chat_template": "the model's own template is used",
        "prompt_logprobs": "send the prompt to /v1/completions, with echo and logprobs",
    }

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Limit = None
    tools: Annotated[list[ChatTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    modalities: list[Literal["text"]] | None = None
    metadata: Metadata | None = None
    chat_template_kwargs: TemplateVariables | None = None
    continue_final_message: bool | None = Field(
        default=None,
        description="Continue the last message, an assistant's. The answer contains only the new "
        "text; a constraint "
        "applies to that text.",
    )
    add_generation_prompt: bool | None = Field(
        default=None, description="If given, it must be the opposite of continue_final_message."
    )

    def num_new_tokens(self) -> int | None:
        return self.max_completion_tokens or super().num_new_tokens()

    def check(self) -> None:
        """Raise BadRequest for parameters that contradict each other."""
        self.check_stream()
        if self.top_logprobs and not self.logprobs:
            raise self.refuse("top_logprobs", "requires 'logprobs' to be true")
        if self.add_generation_prompt is not None and self.add_generation_prompt == bool(
            self.continue_final_message
        ):
            raise self.refuse(
                "add_generation_prompt", "must be the opposite of 'continue_final_message'"
            )

    def logprob_fields(self) -> dict[str, int | None]:
        return {"logprobs": (self.top_logprobs or 0) if self.logprobs else None}

    def chat(self) -> Chat:
        """Return the conversation. Raises BadRequest for messages that no template can render."""
        mode, allowed = self._tool_choice()
        chat = Chat(
            [message.for_template(f"messages[{i}]") for i, message in enumerate(self.messages)],
            [tool.model_dump(exclude_none=True) for tool in self.tools or []],
            tool_choice=mode,
            allowed_tools=allowed,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            thinking_budget=self.thinking_budget,
            effort=Effort(self.reasoning_effort) if self.reasoning_effort else None,
            ends_on_request=bool(self.reasoning_control),
            budget_message=self.reasoning_budget_message or "",
            variables=drop_nulls(self.chat_template_kwargs),
        )
        return continue_chat(chat) if self.continue_final_message else chat

    def _tool_choice(self) -> tuple[Literal["none", "auto", "required"], tuple[str, ...]]:
        match self.tool_choice:
            case NamedFunction(function=function):
                return "required", (function.name,)
            case AllowedTools(allowed_tools=allowed):
                return allowed.mode, tuple(tool.function.name for tool in allowed.tools)
            case mode:
                return mode or "auto", ()


class CompletionBody(GenerationBody):
    model_config = example(prompt="27 plus 45 is", temperature=0, max_tokens=16)
    refused: ClassVar[Mapping[str, str]] = {
        **GenerationBody.refused,
        "prompt_logprobs": "use echo with logprobs",
    }

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: Annotated[
        Annotated[int, Field(ge=0)] | None, pydantic.BeforeValidator(read_limit)
    ] = Field(
        default=16,
        description="0 computes only the prompt; -1 means no limit. The operator's limit, if there "
        "is one, replaces the default.",
    )
    echo: bool | None = None
    suffix: str | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_BEST_OF)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def chooses(self) -> bool:
        """Whether more choices are generated than returned."""
        return self.best_of is not None and self.best_of > (self.n or 1)

    def check(self) -> None:
        """Raise BadRequest for parameters that cannot be combined."""
        self.check_stream()
        if self.best_of is not None and self.best_of < (self.n or 1):
            message = f"Invalid 'best_of': it must not be less than n, {self.n}."
            raise BadRequest(message, param="best_of", code="invalid_value")
        if self.chooses and self.stream:
            raise self.refuse(
                "best_of",
                "other than n cannot be streamed: the best choices are known only at the end",
            )
        if self.suffix is not None and self.echo and self.logprobs is not None:
            raise self.refuse("logprobs", "of an echoed prompt cannot be combined with 'suffix'")

    def num_choices(self) -> int | None:
        return self.n if self.best_of is None else self.best_of

    def logprob_fields(self) -> dict[str, int | None]:
        ranked = 0 if self.chooses and self.logprobs is None else self.logprobs
        return {"logprobs": ranked, "prompt_logprobs": self.logprobs if self.echo else None}


def list_prompts(prompts: Any) -> list[str] | list[list[int]]:
    """Return the field ``prompt``, one or more, as a list of texts or of lists of token ids.

    Raises BadRequest if there are none or too many.
    """
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        prompts = [prompts]
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise BadRequest(
            f"Invalid 'prompt': 1 to {MAX_PROMPTS} prompts are accepted, not {len(prompts)}.",
            param="prompt",
        )
    checked: list[str] | list[list[int]] = prompts
    return checked
