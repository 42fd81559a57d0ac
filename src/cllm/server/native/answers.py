"""Models of the answers of cLLM's own routes, for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

import pydantic
from pydantic import Field

from cllm.server.body import ResponseModel, example


class Root(ResponseModel):
    """model and paths are missing without a valid API key, if the server needs one."""

    name: Literal["cLLM"]
    version: str
    docs: str
    model: str = ""
    paths: list[str] = Field(default=[])


class EngineHealth(ResponseModel):
    """One engine of a model. cpus: the numbers of the CPUs that it is bound to, [] for all.
    devices: the variables that name its GPUs.
    """

    number: int
    ready: bool
    restarts: int
    num_running: int
    num_waiting: int
    num_seq_ids: int
    num_cells: int
    num_cells_held: int
    num_cells_idle: int
    cpus: list[int]
    devices: dict[str, str]


class ModelHealth(ResponseModel):
    name: str
    status: Literal["loaded", "loading", "unloaded"]
    engines: list[EngineHealth]


class Health(ResponseModel):
    """models: with level=full."""

    status: Literal["healthy", "degraded"]
    model_loaded: bool
    models: list[ModelHealth] | None = None


class Version(ResponseModel):
    version: str


class AccountUsage(ResponseModel):
    """left: of the limits per minute, for requests and tokens."""

    name: str
    limits: dict[str, int]
    tokens_of_month: int
    left: dict[str, int]


class DayUsage(ResponseModel):
    account: str
    day: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class UsageAnswer(ResponseModel):
    object: Literal["usage"]
    accounts: list[AccountUsage]
    days: list[DayUsage]


class Ready(ResponseModel):
    status: Literal["ready", "loading", "draining"]


class ModelInformation(ResponseModel):
    """The model and the sizes in use. The answer has more fields than these."""

    model_name: str
    name: str
    architecture: str
    vocabulary_size: int
    context_length: int
    max_num_seqs: int
    num_cells: int
    layout: str
    generates: bool
    embedding_size: int
    stats: dict[str, float]


class SchedulerAnswer(ResponseModel):
    """What the last steps did, which requests run, and what others wait for."""

    steps: list[dict[str, Any]]


class EncodeAnswer(ResponseModel):
    model_config = example(tokens=[72, 105], length=2)

    tokens: list[int]
    length: int


class DecodeAnswer(ResponseModel):
    model_config = example(text="Hi", length=2)

    text: str
    length: int


class GenerateAnswer(ResponseModel):
    """The answer to one prompt.

    For several, ``results`` has the answer to each, and the numbers are totals.
    """

    model_config = example(
        id="1",
        text=" 72",
        response_time=0.05,
        tokens_per_second=60.0,
        generated_tokens=3,
        prompt_tokens=9,
        max_tokens=100,
        finish_reason="stop",
    )

    id: str
    text: str | None = None
    response_time: float
    tokens_per_second: float
    generated_tokens: int
    prompt_tokens: int
    max_tokens: int
    finish_reason: Literal["stop", "length"] | None = None
    results: list[TextAnswer] | None = None


class TextAnswer(ResponseModel):
    text: str
    generated_tokens: int
    finish_reason: Literal["stop", "length"]


class RankedDocument(ResponseModel):
    text: str


class RankedResult(ResponseModel):
    index: int
    relevance_score: float
    document: RankedDocument | None = None


class RankedUsage(ResponseModel):
    prompt_tokens: int
    total_tokens: int


class Ranking(ResponseModel):
    model_config = example(
        id="rerank-1",
        object="list",
        model="cllm-builtin",
        method="cosine_similarity",
        results=[{"index": 1, "relevance_score": 0.93}, {"index": 0, "relevance_score": 0.41}],
        usage={"prompt_tokens": 19, "total_tokens": 19},
    )

    id: str
    object: Literal["list"]
    model: str
    method: Literal["reranker", "cosine_similarity"]
    results: list[RankedResult]
    usage: RankedUsage


class RankedText(ResponseModel):
    index: int
    score: float
    text: str | None = None


class RerankAnswer(pydantic.RootModel[Ranking | list[RankedText]]):
    """A list if the documents were given as ``texts``."""


class Benchmark(ResponseModel):
    """Times are in seconds. ``throughput`` is in tokens per second, of all requests together."""

    total_requests: int
    successful_requests: int
    failed_requests: int
    success_rate: float
    total_time: float
    average_response_time: float
    minimum_response_time: float
    maximum_response_time: float
    average_time_to_first_token: float
    throughput: float
    average_tokens_per_second: float
    total_prompt_tokens: int
    total_generated_tokens: int
    average_generated_tokens: float
    steps: int
    average_batch_size: float
