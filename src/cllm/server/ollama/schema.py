"""Ollama's request bodies, and their translation."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import BeforeValidator, Field

from cllm.config.settings import Sampling
from cllm.core.params import MAX_LOGPROBS, PARAMETERS, SamplingParams
from cllm.errors import BadRequest
from cllm.server.body import Body, example, rename_parameters
from cllm.server.queueing import SchedulingBody
from cllm.server.sampling import add_sampling_fields, build_params, read_sampling_values
from cllm.text.chat import Chat, Effort
from cllm.text.grammar import Constraint

MAX_TOOLS = 512
MAX_TEXTS = 2048  # of one request for embeddings

NAMES = {  # of sampling parameters, in errors
    "max_tokens": "options.num_predict",
    "stop": "options.stop",
    **{
        name: f"options.{parameter.name_in('ollama')}"
        for name, parameter in PARAMETERS.items()
        if "ollama" in parameter.dialects
    },
}
EFFORTS = {"low": Effort.LOW, "medium": Effort.MEDIUM, "high": Effort.HIGH, "max": Effort.MAX}
AT_START = "the model has been loaded by the server's settings"
NO_IMAGES = "this model accepts text only"

ModelName = Annotated[str, Field(min_length=1)]


def truncate(value: Any) -> Any:
    """Return a number with a decimal point as an integer, as Ollama reads options."""
    return int(value) if isinstance(value, float) and math.isfinite(value) else value


Integer = Annotated[int, BeforeValidator(truncate)]


@add_sampling_fields("ollama", integer=Integer)
class OllamaOptions(Body):
    """Sampling parameters. Those that are left out get the operator's defaults."""

    ignored: ClassVar = {
        **dict.fromkeys(
            (
                "f16_kv",
                "logits_all",
                "low_vram",
                "main_gpu",
                "num_batch",
                "num_gpu",
                "num_thread",
                "numa",
            ),
            AT_START,
        ),
        **dict.fromkeys(("embedding_only", "use_mlock", "use_mmap", "vocab_only"), AT_START),
        "num_ctx": "the server's settings decide the context length; a prompt that does not fit "
        "gets 400",
        "num_keep": "prompts are never truncated",
        "draft_num_predict": "speculation is automatic and never changes the text",
        "penalize_newline": "it has no effect in Ollama either",
        "tfs_z": "it has no effect in Ollama either",
    }

    num_predict: Annotated[Integer, Field(ge=-2)] | None = Field(
        default=None,
        description="Largest number of tokens to generate; 0 and below: up to the end of the "
        "context.",
    )
    top_k: Annotated[Integer, Field(ge=-1)] | None = Field(
        default=None,
        description="Keep this many of the most probable tokens; 0 and -1 are off.",
    )
    stop: str | list[str] | None = None
    repeat_last_n: Annotated[Integer, Field(ge=-1)] | None = Field(
        default=None,
        description="0: no repeat_penalty; otherwise it covers the whole prompt and the whole "
        "answer.",
    )

    def params(self, defaults: Sampling, logprobs: int | None) -> SamplingParams:
        """Return the sampling parameters. Raises BadRequest for values out of range."""
        limit = self.num_predict if self.num_predict is not None and self.num_predict > 0 else None
        # the operator's default limit does not apply
        if self.num_predict is not None and limit is None:
            defaults = defaults.model_copy(update={"max_tokens": None})
        values = read_sampling_values(self, "ollama")
        values["top_k"] = None if self.top_k is None else max(0, self.top_k)
        if self.repeat_last_n == 0:
            values["repetition_penalty"] = 1.0
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        with rename_parameters(NAMES):
            return build_params(
                defaults, {**values, "max_tokens": limit, "stop": stop, "logprobs": logprobs}
            )


# The possessive quantifiers keep the time of long digits without a unit linear.
PART = r"(\d++(?:\.\d*+)?|\.\d++)(ns|us|µs|μs|ms|s|m|h)"
DURATION = re.compile(f"(?:{PART})+")
FOR_EVER = 1e9  # seconds, 31 years
UNITS = {
    "ns": 1e-9,
    "us": 1e-6,
    "µs": 1e-6,
    "μs": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "h": 3600.0,
}


def parse_duration(value: float | str) -> float:
    """Return the seconds of a number of seconds, or of a text such as 5m. Raises ValueError."""
    if not isinstance(value, str):
        return value
    text, sign = value.strip().lstrip("+-"), -1 if value.strip().startswith("-") else 1
    if text[-1:].isdigit():
        text += "s"
    if not DURATION.fullmatch(text):
        raise ValueError(f"{value[:40]!r} is not a duration such as 5m")
    return sign * sum(float(number) * UNITS[unit] for number, unit in re.findall(PART, text))


class LoadingBody(SchedulingBody):
    """Fields of requests that load a model."""

    model: ModelName
    keep_alive: float | str | None = Field(
        default=None,
        description='How long the model stays loaded after the request, in seconds or as "5m"; '
        "0 unloads it, a negative number keeps it for ever. It has no effect unless "
        "server.allow_model_changes is set.",
    )

    @pydantic.field_validator("keep_alive")
    @classmethod
    def check_duration(cls, value: float | str | None) -> float | str | None:
        if value is not None:
            parse_duration(value)
        return value

    @property
    def stay(self) -> float | None:
        """``keep_alive`` in seconds; None for ever, or if it is not given."""
        seconds = -1.0 if self.keep_alive is None else parse_duration(self.keep_alive)
        return None if seconds < 0 or seconds > FOR_EVER else seconds


class OllamaGenerationBody(LoadingBody):
    """Fields that /api/generate and /api/chat have in common. ``prompt_field`` has the prompt."""

    prompt_field: ClassVar[str]
    ignored: ClassVar = {
        "truncate": "prompts are never truncated; one that does not fit gets 400",
        "shift": "the context never shifts; a text ends at the end of the context",
    }
    refused: ClassVar = {"_debug_render_only": "prompts are not shown"}

    stream: bool | None = None
    return_progress: bool | None = Field(
        default=False,
        description="In streams: report how far the prompt is, as prompt_progress.",
    )
    format: str | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    think: bool | str | None = Field(
        default=None, description="Whether to think, or how much: low, medium, high, max."
    )

    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def reports_prefill(self) -> bool:
        return bool(self.return_progress and self.stream is not False)

    def params(self, defaults: Sampling) -> SamplingParams:
        """Return the sampling parameters. Raises BadRequest for values out of range."""
        if self.top_logprobs and not self.logprobs:
            message = "Invalid 'top_logprobs': it requires 'logprobs' to be true."
            raise BadRequest(message, param="top_logprobs", code="invalid_value")
        return (self.options or OllamaOptions()).params(
            defaults, (self.top_logprobs or 0) if self.logprobs else None
        )

    def constraint(self) -> Constraint | None:
        """Return the constraint on the answer.

        Raises BadRequest for a format that does not exist.
        """
        if self.format in (None, ""):
            return None
        if isinstance(self.format, dict):
            return Constraint("json_schema", self.format, strict=False)
        if self.format != "json":
            message = "Invalid 'format': it must be \"json\" or a JSON schema."
            raise BadRequest(message, param="format", code="invalid_value")
        return Constraint("json_object")

    @property
    def has_prompt(self) -> bool:
        return bool(getattr(self, self.prompt_field))

    @property
    def is_chat(self) -> bool:
        """Whether the answer is a message, not a text."""
        return self.prompt_field == "messages"

    def chat(self) -> Chat:
        """Return the conversation, or the one that a prompt begins. Raises BadRequest."""
        raise NotImplementedError

    def make_chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Chat:
        """Return a chat that thinks as ``think`` says.

        Raises BadRequest for an effort that does not exist.
        """
        effort = EFFORTS.get(self.think) if isinstance(self.think, str) else None
        if isinstance(self.think, str) and effort is None:
            message = "Invalid 'think': it must be true, false, low, medium, high or max."
            raise BadRequest(message, param="think", code="invalid_value")
        return Chat(
            messages,
            tools,
            thinking=None if self.think is None else bool(self.think),
            effort=effort,
        )


class OllamaGenerateBody(OllamaGenerationBody):
    """POST /api/generate."""

    prompt_field = "prompt"
    model_config = example(model="cllm-builtin", prompt="What is 27 plus 45?", stream=False)

    refused: ClassVar = {
        **OllamaGenerationBody.refused,
        "context": "send the conversation to /api/chat; its cached prefix is not computed again",
        "template": "the model's own template is used; use raw to send a prompt without it",
        "images": NO_IMAGES,
        **dict.fromkeys(("width", "height", "steps"), "this model generates text only"),
    }

    prompt: str | None = None
    suffix: str | None = Field(default=None, description="The text after the one to fill in.")
    system: str | None = None
    raw: bool | None = False

    def chat(self) -> Chat:
        if self.raw and self.system:
            raise BadRequest(
                "Invalid 'system': it cannot be combined with 'raw'; write it into the prompt.",
                param="system",
            )
        messages = [{"role": "user", "content": self.prompt or ""}]
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        return self.make_chat(messages, [])


class OllamaFunctionCall(Body):
    name: str
    arguments: dict[str, Any] | None = None


class OllamaToolCall(Body):
    id: str | None = None
    function: OllamaFunctionCall

    def for_template(self) -> dict[str, Any]:
        """Return the call in the format of chat templates."""
        function = {"name": self.function.name, "arguments": self.function.arguments or {}}
        return {"id": self.id, "type": "function", "function": function}


class OllamaMessage(Body):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaFunction(Body):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class OllamaTool(Body):
    type: Literal["function"] = "function"
    function: OllamaFunction


class OllamaChatBody(OllamaGenerationBody):
    """POST /api/chat."""

    prompt_field = "messages"
    model_config = example(
        model="cllm-builtin",
        messages=[{"role": "user", "content": "What is 27 plus 45?"}],
        options={"temperature": 0},
    )

    messages: list[OllamaMessage] | None = None
    tools: Annotated[list[OllamaTool], Field(max_length=MAX_TOOLS)] | None = None

    def chat(self) -> Chat:
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools or []]
        chat = self.make_chat(self._messages(), tools)
        is_begun = (
            chat.messages
            and chat.messages[-1]["role"] == "assistant"
            and "tool_calls" not in chat.messages[-1]
        )
        return chat.continuing() if is_begun else chat

    def _messages(self) -> list[dict[str, Any]]:
        messages = []
        for i, given in enumerate(self.messages or []):
            if given.images:
                path = f"messages[{i}].images"
                message = f"Unsupported parameter: '{path}': {NO_IMAGES}."
                raise BadRequest(message, param=path, code="unsupported_value")
            turn: dict[str, Any] = {"role": given.role, "content": given.content or ""}
            if given.thinking:
                turn["reasoning_content"] = given.thinking
            if given.tool_calls:
                turn["tool_calls"] = [call.for_template() for call in given.tool_calls]
            if given.role == "tool":
                turn["tool_call_id"] = given.tool_call_id
                turn["name"] = given.tool_name
            messages.append({key: value for key, value in turn.items() if value is not None})
        return messages


class OllamaEmbedBody(LoadingBody):
    """POST /api/embed."""

    model_config = example(
        model="cllm-builtin", input=["What is 27 plus 45?", "Paris is in France."]
    )

    ignored: ClassVar = {
        "options": "they concern generated text and loading the model",
    }

    input: str | list[str] | None = Field(
        default=None, description="Without texts, the answer has no vectors."
    )
    truncate: bool | None = Field(
        default=None, description="Truncate texts that are too long (default)."
    )
    dimensions: Annotated[int, Field(ge=1)] | None = None


class OllamaEmbeddingsBody(LoadingBody):
    """POST /api/embeddings, the earlier form of /api/embed."""

    model_config = example(model="cllm-builtin", prompt="What is 27 plus 45?")

    ignored: ClassVar = OllamaEmbedBody.ignored

    prompt: str


class NameBody(Body):
    """A request about a model."""

    model: str | None = None
    name: str | None = Field(default=None, description="The earlier name of model.")

    def wanted(self) -> str:
        """Return the name of the model. Raises BadRequest if there is none."""
        name = self.model or self.name
        if not name:
            raise BadRequest(
                "Missing required parameter: 'model'.",
                param="model",
                code="missing_required_parameter",
            )
        return name


class ShowBody(NameBody):
    model_config = example(model="cllm-builtin")

    ignored: ClassVar = {"verbose": "the vocabulary is never included"}


class PullBody(NameBody):
    model_config = example(model="hf.co/Qwen/Qwen3-0.6B-GGUF:Q8_0")

    ignored: ClassVar = {
        "insecure": "HF_ENDPOINT names the hub",
        "username": "HF_TOKEN gives access to the hub",
        "password": "HF_TOKEN gives access to the hub",
    }

    stream: bool | None = None


MAX_MODELFILE = 65_536  # characters


class CreateBody(NameBody):
    """POST /api/create: a model made from another one of this server."""

    model_config = example(
        model="pirate", **{"from": "cllm-builtin", "system": "You are a pirate."}
    )

    ignored: ClassVar = {"license": "the license in the model's file is shown"}
    refused: ClassVar = {
        **dict.fromkeys(
            ("files", "adapters", "quantize"), "models are made from models that the server has"
        ),
        "messages": "a created model has a system message only",
    }

    source: str = Field(default="", alias="from", description="The model that computes.")
    modelfile: Annotated[str, Field(max_length=MAX_MODELFILE)] | None = Field(
        default=None, description="The same fields as lines; the earlier form of this request."
    )
    system: Annotated[str, Field(max_length=MAX_MODELFILE)] | None = Field(
        default=None, description="System message of conversations that have none."
    )
    template: str | None = Field(default=None, description="Only the model's own is accepted.")
    parameters: dict[str, Any] | None = Field(
        default=None, description="Defaults of sampling parameters; others have no effect."
    )
    stream: bool | None = None

    def check(self) -> None:
        """Raise BadRequest if something is missing."""
        self.wanted()
        if not self.source:
            raise BadRequest(
                "Missing required parameter: 'from'.",
                param="from",
                code="missing_required_parameter",
            )


class CopyBody(Body):
    model_config = example(source="cllm-builtin", destination="mine")

    source: ModelName
    destination: ModelName


class DeleteBody(NameBody):
    model_config = example(model="mine")
