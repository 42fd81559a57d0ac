"""Models of OpenAI's answers, for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

import pydantic

from cllm.server.body import ResponseModel, example
from cllm.server.timings import Timings

TIMINGS = {
    "cache_n": 0,
    "prompt_n": 17,
    "prompt_ms": 34.0,
    "prompt_per_token_ms": 2.0,
    "prompt_per_second": 500.0,
    "predicted_n": 3,
    "predicted_ms": 60.0,
    "predicted_per_token_ms": 20.0,
    "predicted_per_second": 50.0,
}


class TokensDetails(ResponseModel):
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class Usage(ResponseModel):
    """Embeddings have only ``prompt_tokens`` and ``total_tokens``."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: TokensDetails | None = None
    completion_tokens_details: TokensDetails | None = None


class CalledFunction(ResponseModel):
    name: str
    arguments: str


class ToolCall(ResponseModel):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(ResponseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(ResponseModel):
    index: int
    message: AssistantMessage
    logprobs: dict[str, Any] | None = None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(ResponseModel):
    model_config = example(
        id="chatcmpl-1",
        object="chat.completion",
        created=1735689600,
        model="cllm-builtin",
        choices=[
            {"index": 0, "message": {"role": "assistant", "content": "72"}, "finish_reason": "stop"}
        ],
        usage={"prompt_tokens": 17, "completion_tokens": 3, "total_tokens": 20},
        timings=TIMINGS,
    )

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    timings: Timings


class CompletionChoice(ResponseModel):
    index: int
    text: str
    logprobs: dict[str, Any] | None = None
    finish_reason: Literal["stop", "length"]


class Completion(ResponseModel):
    model_config = example(
        id="cmpl-1",
        object="text_completion",
        created=1735689600,
        model="cllm-builtin",
        choices=[{"index": 0, "text": " 72", "finish_reason": "stop"}],
        usage={"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12},
        timings=TIMINGS,
    )

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    timings: Timings


class ModelStatus(ResponseModel):
    value: Literal["loaded", "loading", "unloaded"]


class ModelObject(ResponseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    loaded: bool
    task: Literal["chat", "completion", "embedding"]
    status: ModelStatus
    context_length: int | None
    max_model_len: int | None


class ModelList(ResponseModel):
    object: Literal["list"]
    data: list[ModelObject]


class EmbeddingObject(ResponseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(ResponseModel):
    model_config = example(
        object="list",
        model="cllm-builtin",
        data=[{"object": "embedding", "index": 0, "embedding": [0.6, -0.8]}],
        usage={"prompt_tokens": 5, "total_tokens": 5},
    )

    object: Literal["list"]
    model: str
    data: list[EmbeddingObject]
    usage: Usage


class TokenPiece(ResponseModel):
    id: int
    piece: str | list[int]


class TokenizeAnswer(ResponseModel):
    model_config = example(tokens=[72, 105], count=2, max_model_len=4096)

    tokens: list[int] | list[TokenPiece]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class DetokenizeAnswer(ResponseModel):
    model_config = example(content="Hi", prompt="Hi")

    content: str
    prompt: str


class TemplateAnswer(ResponseModel):
    model_config = example(prompt="<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")

    prompt: str


class SamplingSettings(ResponseModel):
    n_predict: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float


class PlainSettings(SamplingSettings):
    n_ctx: int


class PlainAnswer(ResponseModel):
    """Of /completion and /infill. Has all fields, or those that ``response_fields`` names."""

    content: str = ""
    stop: bool = True
    model: str = ""
    stop_type: Literal["eos", "limit", "word"] = "eos"
    stopping_word: str = ""
    has_new_line: bool = False
    tokens_evaluated: int = 0
    tokens_predicted: int = 0
    tokens_cached: int = 0
    truncated: bool = False
    generation_settings: PlainSettings | None = None
    timings: Timings | None = None


class AdapterEntry(ResponseModel):
    """path: the adapter's name. alora_invocation_tokens: of an activated LoRA."""

    id: int
    path: str
    scale: float
    alora_invocation_tokens: list[int] | None = None


class AdapterList(pydantic.RootModel[list[AdapterEntry]]):
    pass


class Done(ResponseModel):
    success: Literal[True]


class PropsSettings(ResponseModel):
    n_ctx: int
    params: SamplingSettings


class Modalities(ResponseModel):
    vision: bool
    audio: bool


class Props(ResponseModel):
    default_generation_settings: PropsSettings
    total_slots: int
    model_alias: str
    modalities: Modalities
    chat_template: str
    bos_token: str
    eos_token: str
    build_info: str
