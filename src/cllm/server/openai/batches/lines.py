"""The lines of batches: requests in OpenAI's form, and their answers.

A request is read by the schema of the route that it names, and answered by its functions.
"""

from __future__ import annotations

import secrets
from codecs import BOM_UTF8
from collections.abc import Awaitable, Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pydantic
from pydantic_core import from_json, to_json

from cllm.errors import BadRequest
from cllm.server.batches import begin_request, recording
from cllm.server.body import Body, read_value
from cllm.server.body_limits import check_structure
from cllm.server.call import Call
from cllm.server.errors import describe, openai_error
from cllm.server.http.request_id import new_request_id
from cllm.server.http.sse import escape_line_ends
from cllm.server.openai.chat import chat_completion, chat_generation
from cllm.server.openai.completions import CompletionFormatter, completion, completion_generation
from cllm.server.openai.embeddings import EmbeddingsBody, embedding_list
from cllm.server.openai.responses.routes import complete_response, response_generation
from cllm.server.openai.responses.schema import ResponseBody
from cllm.server.openai.schema import ChatBody, CompletionBody
from cllm.server.state import ServerState
from cllm.serving.served_model import ServedModel
from cllm.serving.service import Service
from cllm.store.batches import BatchRecord

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
MAX_LINES = 50_000
MAX_ERRORS = 100  # listed for a file


class Line(pydantic.BaseModel):
    """One request of an input file."""

    model_config = pydantic.ConfigDict(strict=True)
    custom_id: str = pydantic.Field(min_length=1, max_length=512)
    method: str
    url: str
    body: dict[str, Any]


class LineBody(NamedTuple):
    """The body of a request, whose line has ``num_bytes``."""

    value: dict[str, Any]
    num_bytes: int


class BatchAnswer(NamedTuple):
    """The request id of an answer, and its JSON."""

    request_id: str
    content: bytes


async def answer_chat(call: Call, service: Service, body: ChatBody) -> BatchAnswer:
    generation = await chat_generation(call, service, body)
    with service.submit(generation) as answer:
        return BatchAnswer(generation.request_id, await chat_completion(service, body, answer))


async def answer_prompts(call: Call, service: Service, body: CompletionBody) -> BatchAnswer:
    generation = await completion_generation(call, service, body)
    with service.submit(generation) as answer:
        content = await completion(CompletionFormatter(service, body, answer))
        return BatchAnswer(generation.request_id, content)


async def answer_texts(call: Call, service: Service, body: EmbeddingsBody) -> BatchAnswer:
    return BatchAnswer(new_request_id(), await embedding_list(call, service, body))


async def answer_input(call: Call, service: Service, body: ResponseBody) -> BatchAnswer:
    generation, events, _ = await response_generation(call, service, body)
    with service.submit(generation) as answer:
        return BatchAnswer(generation.request_id, await complete_response(answer, events))


# The schema of each endpoint's bodies, and the function that computes an answer.
ENDPOINTS: dict[str, tuple[type[Body], Callable[..., Awaitable[BatchAnswer]]]] = {
    "/v1/chat/completions": (ChatBody, answer_chat),
    "/v1/completions": (CompletionBody, answer_prompts),
    "/v1/embeddings": (EmbeddingsBody, answer_texts),
    "/v1/responses": (ResponseBody, answer_input),
}


class OpenAILines:
    """Implements ``cllm.serving.batches.BatchLines``."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._max_line = state.settings.server.max_body_mb * 1_000_000  # bytes

    def check(self, path: Path, endpoint: str) -> tuple[int, list[dict[str, Any]]]:
        return check_lines(path, endpoint, self._max_line)

    def read(self, path: Path) -> Iterator[tuple[str, LineBody]]:
        for _, text in numbered_lines(path, self._max_line):
            line = from_json(text)
            yield line["custom_id"], LineBody(line["body"], len(text))

    async def answer(
        self, record: BatchRecord, custom_id: str, body: LineBody, model: ServedModel
    ) -> bytes:
        kind, compute = ENDPOINTS[record.endpoint]
        read = partial(read_value, body.value, kind)
        with recording(self._state, record, "OpenAI") as request:
            asked = await begin_request(
                self._state, request, record, custom_id, body.num_bytes, read, model.name
            )
            name, content = await compute(*asked)
        return answer_line(custom_id, 200, name, content)

    def fault(self, custom_id: str, error: Exception) -> bytes:
        status, content = openai_error(describe(error))
        return answer_line(custom_id, status, new_request_id(), to_json(content))

    def unanswered(self, custom_id: str, code: str, message: str) -> bytes:
        return encode_line(custom_id, b"null", to_json({"code": code, "message": message}))

    def identify(self, answer: bytes) -> tuple[str, dict[str, int]]:
        line = from_json(answer)
        return line["custom_id"], count_tokens(line)


def answer_line(custom_id: str, status: int, name: str, content: bytes) -> bytes:
    """Return the line of an answer, whose request id is ``name``."""
    response = b'{"status_code":%d,"request_id":%s,"body":%s}' % (status, to_json(name), content)
    return encode_line(custom_id, response, b"null")


def encode_line(custom_id: str, response: bytes, error: bytes) -> bytes:
    head = to_json({"id": f"batch_req_{secrets.token_hex(12)}", "custom_id": custom_id})[:-1]
    line = head + b',"response":' + response + b',"error":' + error + b"}\n"
    return escape_line_ends(line)


def count_tokens(line: dict[str, Any]) -> dict[str, int]:
    """Return the token counts of an answer (a chat, a completion, embeddings or a response); {} if
    it has none.
    """
    usage = ((line.get("response") or {}).get("body") or {}).get("usage") or {}
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    of_output = usage.get("completion_tokens_details") or usage.get("output_tokens_details") or {}
    tokens = {
        "input": usage.get("prompt_tokens") or usage.get("input_tokens"),
        "cached": details.get("cached_tokens"),
        "output": usage.get("completion_tokens") or usage.get("output_tokens"),
        "reasoning": of_output.get("reasoning_tokens"),
    }
    return {name: count for name, count in tokens.items() if count}


def check_lines(path: Path, endpoint: str, max_line: int) -> tuple[int, list[dict[str, Any]]]:
    """Return the number of requests in a file, and the list of errors in them, in OpenAI's
    format.
    """
    errors: list[dict[str, Any]] = []
    seen: set[str] = set()
    for number, text in numbered_lines(path, max_line):
        code, message, param = "", "", None
        try:
            if len(text) > max_line:
                code, message = "line_too_long", f"The line has more than {max_line} bytes."
            else:
                check_structure(text)
                line = Line.model_validate(from_json(text, allow_inf_nan=False))
                code, message, param = find_fault(line, endpoint, seen)
                seen.add(line.custom_id)
        except pydantic.ValidationError as error:
            first = error.errors(include_url=False)[0]
            param = ".".join(map(str, first["loc"])) or None
            code, message = "invalid_request", f"{first['msg']}."
        except BadRequest as error:
            code, message = error.code or "invalid_request", str(error)
        except ValueError as error:
            code, message = "invalid_json_line", f"The line is not valid JSON: {str(error)[:200]}"
        if code:
            errors.append({"code": code, "line": number, "message": message, "param": param})
        if len(errors) == MAX_ERRORS or len(seen) > MAX_LINES:
            break
    if not seen and not errors:
        errors.append(
            {
                "code": "empty_file",
                "line": None,
                "message": "The file has no requests.",
                "param": None,
            }
        )
    if len(seen) > MAX_LINES:
        message = f"A batch has at most {MAX_LINES} requests."
        errors.append(
            {"code": "too_many_requests", "line": None, "message": message, "param": None}
        )
    return len(seen), errors


def find_fault(line: Line, endpoint: str, seen: set[str]) -> tuple[str, str, str | None]:
    """Return the code, the message and the field of a request's error; the code is "" if there is
    none.
    """
    if line.custom_id in seen:
        return (
            "duplicate_custom_id",
            f"Another line has the same custom_id, {line.custom_id!r}.",
            "custom_id",
        )
    if line.method != "POST":
        return "invalid_method", "The method must be POST.", "method"
    if line.url != endpoint:
        return "mismatched_endpoint", f"The url must be the batch's endpoint, {endpoint}.", "url"
    if line.body.get("stream"):
        return "unsupported_parameter", "Requests of a batch cannot be streamed.", "body.stream"
    return "", "", None


def numbered_lines(path: Path, max_line: int) -> Generator[tuple[int, bytes], None, None]:
    """Yield the lines that are not blank, with their numbers from 1.

    A line that is too long is the last one, and only its first bytes are read.
    """
    with path.open("rb") as file:
        number = 0
        while text := file.readline(max_line + 2):
            number += 1
            if len(text) > max_line + 1 and not text.endswith(b"\n"):
                yield number, text
                return
            if text := text.removeprefix(BOM_UTF8).strip():
                yield number, text
