"""Models of Ollama's answers, for the OpenAPI document. Durations are in nanoseconds."""

from __future__ import annotations

from typing import Any, Literal

from cllm.server.body import ResponseModel, example


class Error(ResponseModel):
    error: str


class Figures(ResponseModel):
    """Without a prompt, ``done_reason`` is load or unload, and there are no counts and
    durations.
    """

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load", "unload"]
    total_duration: int = 0
    load_duration: int = 0
    prompt_eval_count: int = 0
    prompt_eval_duration: int = 0
    eval_count: int = 0
    eval_duration: int = 0
    logprobs: list[dict[str, Any]] | None = None


class GenerateAnswer(Figures):
    response: str
    thinking: str = ""


class CalledFunction(ResponseModel):
    index: int
    name: str
    arguments: dict[str, Any]


class ToolCall(ResponseModel):
    id: str
    function: CalledFunction


class AnswerMessage(ResponseModel):
    role: Literal["assistant"]
    content: str
    thinking: str = ""
    tool_calls: list[ToolCall] = []  # noqa: RUF012  # pydantic copies it


class ChatAnswer(Figures):
    message: AnswerMessage


class EmbedAnswer(ResponseModel):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class EmbeddingsAnswer(ResponseModel):
    embedding: list[float]


class Details(ResponseModel):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class ModelEntry(ResponseModel):
    """size: in bytes. digest: 64 hex digits that identify the content of the file."""

    name: str
    model: str
    size: int
    digest: str
    details: Details


class ListedModel(ModelEntry):
    modified_at: str


class TagsAnswer(ResponseModel):
    models: list[ListedModel]


class LoadedModel(ModelEntry):
    """size: the most that it takes, of which size_used is in use. engines: that share its
    requests. shares_cores: whether it leaves a part of
    the cores to other models while these compute.
    """

    size_used: int
    size_vram: int
    expires_at: str
    context_length: int
    engines: int
    shares_cores: bool


class PsAnswer(ResponseModel):
    models: list[LoadedModel]


class ShowAnswer(ResponseModel):
    license: str
    modelfile: str
    parameters: str
    template: str
    system: str
    details: Details
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class Version(ResponseModel):
    model_config = example(version="0.12.11")

    version: str


class PullStatus(ResponseModel):
    model_config = example(status="success")

    status: str
