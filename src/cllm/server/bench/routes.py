"""The page /bench, and what it asks for: load runs on this server, and their reports."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from typing_extensions import TypedDict

from cllm.errors import BadRequest, describe_os_error
from cllm.server.bench.messages import Check, Compare, Comparison, LoadPlan, Workload
from cllm.server.bench.process import Refused, carry_out
from cllm.server.bench.runs import LoadRun, LoadRuns
from cllm.server.body import Body, check_type, describe_route, example, read_body, read_bytes
from cllm.server.call import get_call
from cllm.server.http.sse import HEARTBEAT_BYTES, escape_line_ends, until_disconnect
from cllm.server.page import answer_file
from cllm.server.resolve import check_enabled, model_for, service_for
from cllm.server.state import get_state
from cllm.store.reports import DAMAGED, KeptReport, KeptReports

T = TypeVar("T")

router = APIRouter(tags=["cLLM"])

MAX_SECONDS = 600
MAX_REQUESTS = 5000
MAX_CLIENTS = 64
MAX_WORDS = 1_000_000  # of all prompts of a run; they are made before it begins
MAX_PROMPT_WORDS = 8192
MAX_TOKENS = 4096
MAX_SEED = 2**31 - 1
MAX_REPORT_MB = 1
JSON = "application/json"
EVENTS = "text/event-stream"


class LoadRunBody(Body):
    """A load run. It ends when all requests have ended, or begins none after ``seconds``."""

    model_config = example(workload="chat", requests=100, concurrency=8)

    model: str | None = None
    workload: Workload = Field(
        default="words", description="What is sent; see --workload of `cllm bench load`."
    )
    requests: Annotated[int, Field(ge=1, le=MAX_REQUESTS)] | None = Field(
        default=None,
        description="Requests to measure; by default as many as the workload has, or as the "
        "seconds allow.",
    )
    seconds: Annotated[float, Field(gt=0, le=MAX_SECONDS)] | None = Field(
        default=None, description=f"No further request begins after them; {MAX_SECONDS} by default."
    )
    concurrency: Annotated[int, Field(ge=1, le=MAX_CLIENTS)] | None = Field(
        default=None,
        description="Concurrent requests; when one ends, the next one starts. 8 in most workloads.",
    )
    prompt_words: Annotated[int, Field(ge=1, le=MAX_PROMPT_WORDS)] = 64
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = Field(
        default=None, description="Tokens of an answer; 64 in most workloads."
    )
    scale: Annotated[float, Field(ge=0.01, le=1)] = Field(
        default=1.0,
        description="Factor for the numbers of prompt tokens of the workloads from agents to "
        "phases.",
    )
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = Field(
        default=None,
        description="The same seed gives the same prompts, which the server may still have in its "
        "cache; a new one by default.",
    )
    note: Annotated[str, Field(max_length=100, pattern=r"^[^\x00-\x1f\x7f]*$")] = Field(
        default="", description="A few words for the report, such as 'with 8 threads'."
    )

    def plan(self) -> LoadPlan:
        """Raises BadRequest for more words than a run may send."""
        requests, most = self.requests, MAX_WORDS // self.prompt_words
        if requests is None and self.seconds is not None:
            requests = min(MAX_REQUESTS, most)
        if requests is not None and requests > most:
            raise BadRequest(
                f"Invalid 'requests': with prompts of {self.prompt_words} words, at most {most} "
                f"requests are possible, not {requests}.",
                param="requests",
                code="integer_above_max_value",
            )
        return LoadPlan(
            workload=self.workload,
            requests=requests,
            seconds=self.seconds or MAX_SECONDS,
            concurrency=self.concurrency,
            prompt_words=self.prompt_words,
            max_tokens=self.max_tokens,
            scale=self.scale,
            seed=secrets.randbelow(MAX_SEED) if self.seed is None else self.seed,
            note=self.note,
        )


class ReportBody(Body):
    """A report, with all fields that ``cllm bench load --out`` writes."""

    model_config = example(model="m", settings={}, num_requests=1, num_succeeded=1)

    model: str
    settings: dict[str, Any]
    num_requests: int
    num_succeeded: int


class LastRun(msgspec.Struct, frozen=True):
    """The load run that is running or has ended last since the start of the server."""

    run: LoadRun | None


class ReportList(msgspec.Struct, frozen=True):
    """The kept reports, the latest first."""

    data: list[KeptReport]
    object: Literal["list"] = "list"


class DeletedReport(TypedDict):
    id: str
    deleted: bool


@router.get("/bench", include_in_schema=False)
async def page(request: Request) -> Response:
    """Return the page, which contains no data and asks for the key."""
    return answer_file(request, "bench/index.html", "text/html")


# --- the run -------------------------------------------------------------------------------------


@router.post("/bench/run", openapi_extra=describe_route(LoadRunBody, LoadRun))
async def start(request: Request) -> Response:
    """Start a load run on this server, and return it. Its requests have the lowest priority.

    Rejected unless ``server.benchmark`` is set (403), and while another one runs (409).
    """
    runs, _ = open_runs(request)
    body = await read_body(request, LoadRunBody)
    model = model_for(request, body.model)
    service = await service_for(request, body.model)
    with service.admission():
        service.engine.check_available()
    run = runs.start(model, body.plan())
    get_call(request).audit("load run", model=model.name, workload=body.workload)
    return answer(run)


@router.get("/bench/run", openapi_extra=describe_route(answer=LastRun))
async def show(request: Request) -> Response:
    """Return the load run that is running, or has ended last."""
    runs, _ = open_runs(request)
    return answer(LastRun(runs.last))


@router.get("/bench/run/events", openapi_extra=describe_route(stream=EVENTS))
async def follow(request: Request) -> Response:
    """Stream the load run whenever it has changed, until it has ended."""
    runs, _ = open_runs(request)
    if runs.last is None:
        message = "There has been no load run since the start of the server."
        raise BadRequest(message, code="load_run_not_found", status=404)
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(write_events(runs), headers=headers, media_type=EVENTS)


async def write_events(runs: LoadRuns) -> AsyncGenerator[bytes, None]:
    async with aclosing(runs.watch()) as changes:
        async for run in changes:
            data = b"" if run is None else escape_line_ends(msgspec.json.encode(run))
            yield b"data: " + data + b"\n\n" if data else HEARTBEAT_BYTES


@router.delete("/bench/run", openapi_extra=describe_route(answer=LastRun))
async def cancel(request: Request) -> Response:
    """End the load run, if one is running, without a report."""
    runs, _ = open_runs(request)
    return answer(LastRun(await runs.cancel()))


# --- reports -------------------------------------------------------------------------------------


@router.get("/bench/reports", openapi_extra=describe_route(answer=ReportList))
async def list_reports(request: Request) -> Response:
    """Return what lists show of the kept reports, the latest first."""
    _, reports = open_runs(request)
    return answer(ReportList(await use(reports.list_all)))


@router.post("/bench/reports", openapi_extra=describe_route(ReportBody, KeptReport))
async def add_report(request: Request) -> Response:
    """Keep a report that ``cllm bench load --out`` has written."""
    _, reports = open_runs(request)
    check_type(request.headers.get("content-type", ""))
    content = await read_bytes(request, MAX_REPORT_MB)
    try:
        raw = as_line(content)
    except DAMAGED as error:
        raise BadRequest(f"The body is not valid JSON: {error}", code="invalid_json") from None
    return answer(await use(reports.add, await ask(request, Check(raw))))


@router.get("/bench/reports/{report_id}", openapi_extra=describe_route(answer=dict))
async def read_report(request: Request, report_id: str) -> Response:
    """Return a report as ``cllm bench load --out`` writes it."""
    _, reports = open_runs(request)
    return Response(await use(reports.read, report_id), media_type=JSON)


@router.delete("/bench/reports/{report_id}")
async def remove_report(request: Request, report_id: str) -> DeletedReport:
    """Delete a report."""
    _, reports = open_runs(request)
    await use(reports.remove, report_id)
    return {"id": report_id, "deleted": True}


@router.get(
    "/bench/reports/{before}/compare/{after}", openapi_extra=describe_route(answer=Comparison)
)
async def compare(request: Request, before: str, after: str) -> Response:
    """Compare two reports, whose ids are given, figure by figure."""
    _, reports = open_runs(request)
    old, new = [as_line(await use(reports.read, one)) for one in (before, after)]
    return Response(await ask(request, Compare(old, new)), media_type=JSON)


def open_runs(request: Request) -> tuple[LoadRuns, KeptReports]:
    """Return the load runs and their reports.

    Raises BadRequest: 403 if the operator or the key does not allow them, 404 if there is no folder
    for reports.
    """
    check_enabled(request, "benchmark", "bench")
    runs = get_state(request).load_runs
    if runs.reports is None:
        message = "Load runs are off on this server, because it has no storage.folder."
        raise BadRequest(message, code="storage_off", status=404)
    return runs, runs.reports


async def use(method: Callable[..., T], *arguments: Any) -> T:
    """Return the result of a method of the reports. Raises BadRequest."""
    try:
        return await asyncio.to_thread(method, *arguments)
    except OSError as error:
        message = f"The reports cannot be read or written: {describe_os_error(error)}."
        raise BadRequest(message, code="storage_unavailable", status=503) from None


async def ask(request: Request, order: Check | Compare) -> bytes:
    """Return what a process makes of reports, one request at a time. Raises BadRequest."""
    try:
        async with get_state(request).load_runs.reading:
            return await until_disconnect(request, carry_out(order))
    except Refused as error:
        raise BadRequest(str(error), code="invalid_report") from None


def as_line(report: bytes) -> msgspec.Raw:
    """Return JSON in one line. Raises one of DAMAGED if it is not valid."""
    return msgspec.Raw(msgspec.json.format(report, indent=-1))


def answer(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type=JSON)
