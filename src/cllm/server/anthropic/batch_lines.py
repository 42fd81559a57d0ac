"""The requests of message batches and their results, one line of JSON for each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from pydantic_core import from_json, to_json

from cllm.errors import BadRequest
from cllm.server.anthropic.errors import anthropic_error
from cllm.server.anthropic.routes import message_generation
from cllm.server.anthropic.schema import MessagesBody
from cllm.server.anthropic.stream import collect
from cllm.server.batches import begin_request, recording
from cllm.server.body import parse_json, read_value
from cllm.server.body_limits import check_structure
from cllm.server.call import Call
from cllm.server.errors import describe
from cllm.server.http.request_id import new_request_id
from cllm.server.http.sse import escape_line_ends
from cllm.server.state import ServerState
from cllm.serving.served_model import ServedModel
from cllm.store.batches import BatchRecord

ENDPOINT = "/v1/messages"
MAX_REQUESTS = 100_000
CUSTOM_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")
UNANSWERED = {"batch_expired": "expired", "batch_cancelled": "canceled"}


class BatchRequest(msgspec.Struct):
    """A request of a batch. Its parameters are not parsed before it is computed."""

    custom_id: str
    params: msgspec.Raw


class Requests(msgspec.Struct):
    requests: list[BatchRequest]


def read_requests(data: bytes) -> list[BatchRequest]:
    """Return the requests in the body of a new batch. Raises BadRequest."""
    try:
        data.decode()
        requests = msgspec.json.decode(data, type=Requests).requests
    except msgspec.ValidationError as error:
        raise BadRequest(f"{error}.", param="requests", code="invalid_type") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        message = f"The body is not valid JSON: {str(error)[:200]}"
        raise BadRequest(message, code="invalid_json") from None
    if not 1 <= len(requests) <= MAX_REQUESTS:
        message = f"Invalid 'requests': a batch has 1 to {MAX_REQUESTS} requests."
        raise BadRequest(message, param="requests", code="invalid_value")
    seen: set[str] = set()
    for i, request in enumerate(requests):
        fault = find_fault(request, seen)
        if fault:
            param = f"requests[{i}].custom_id"
            raise BadRequest(f"Invalid '{param}': {fault}.", param=param, code="invalid_value")
        seen.add(request.custom_id)
    return requests


def find_fault(request: BatchRequest, seen: set[str]) -> str:
    """Return what is wrong with the id of a request, "" if nothing is."""
    if not CUSTOM_ID.fullmatch(request.custom_id):
        return "it must have 1 to 64 letters, digits, _ and -"
    return "another request has it too" if request.custom_id in seen else ""


def write_requests(requests: Iterable[BatchRequest]) -> bytes:
    """Return the input file of a batch, which ``MessageLines.read`` reads."""
    return b"".join(
        b'{"custom_id":"%s","params":%s}\n'
        % (request.custom_id.encode(), bytes(request.params).translate(SPACES))
        for request in requests
    )


# line breaks between tokens become spaces, and JSON has none within strings
SPACES = bytes.maketrans(b"\r\n", b"  ")


class MessageLines:
    """Implements ``cllm.serving.batches.BatchLines``."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    def check(self, path: Path, endpoint: str) -> tuple[int, list[dict[str, Any]]]:
        """Return the number of requests. Faults become results of their requests."""
        with path.open("rb") as file:
            return sum(1 for _ in file), []

    def read(self, path: Path) -> Iterator[tuple[str, bytes]]:
        with path.open("rb") as file:
            for line in file:
                request = msgspec.json.decode(line, type=BatchRequest)
                yield request.custom_id, bytes(request.params)

    async def answer(
        self, record: BatchRecord, custom_id: str, body: bytes, model: ServedModel
    ) -> bytes:
        del model  # each request names its own
        read = partial(read_params, body)
        with recording(self._state, record, "Anthropic") as request:
            call, service, asked = await begin_request(
                self._state, request, record, custom_id, len(body), read
            )
            generation = await message_generation(call, service, asked)
            with service.submit(generation) as answer:
                message = await collect(
                    answer, service.model_name, shows_thinking=asked.shows_thinking
                )
        return result_line(custom_id, {"type": "succeeded", "message": message})

    def fault(self, custom_id: str, error: Exception) -> bytes:
        _, content = anthropic_error(describe(error), new_request_id())
        return result_line(custom_id, {"type": "errored", "error": content})

    def unanswered(self, custom_id: str, code: str, message: str) -> bytes:
        return result_line(custom_id, {"type": UNANSWERED[code]})

    def identify(self, answer: bytes) -> tuple[str, dict[str, int]]:
        line = from_json(answer)
        usage = line["result"].get("message", {}).get("usage", {})
        cached = usage.get("cache_read_input_tokens", 0)
        tokens = {
            "input": usage.get("input_tokens", 0) + cached,
            "cached": cached,
            "output": usage.get("output_tokens", 0),
            "reasoning": usage.get("output_tokens_details", {}).get("thinking_tokens", 0),
        }
        return line["custom_id"], {name: count for name, count in tokens.items() if count}


def read_params(data: bytes, call: Call) -> MessagesBody:
    """Return the parameters of a request. Raises BadRequest."""
    check_structure(data)
    body = read_value(parse_json(data), MessagesBody, call)
    if body.stream:
        message = "Requests of a batch cannot be streamed."
        raise BadRequest(message, param="stream", code="unsupported_parameter")
    return body


def result_line(custom_id: str, result: dict[str, Any]) -> bytes:
    return escape_line_ends(to_json({"custom_id": custom_id, "result": result})) + b"\n"
