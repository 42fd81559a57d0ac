"""Streams of an application in this process, as frames, and what clients read of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from cllm.config.settings import Settings
from cllm.engine.params import EngineParams
from cllm.observe.metrics import Metrics
from cllm.process.pool import Pool
from cllm.server.app import create_app
from cllm.server.call import DELIVERED
from cllm.server.http.sse import WANTS_FRAMES
from cllm.serving.delivered import LENGTH, Delivered
from cllm.serving.model_texts import ModelTexts
from cllm.serving.registry import Registry
from cllm.serving.served_model import ServedModel
from cllm.serving.service import Service

# what depends on the clock
UNSTABLE = {
    "timings",
    "total_duration",
    "load_duration",
    "prompt_eval_duration",
    "eval_duration",
    "completed_at",
}
# the parts of events that clients join
JOINED = {
    "content",
    "text",
    "reasoning",
    "reasoning_content",
    "arguments",
    "delta",
    "partial_json",
    "thinking",
    "response",
    "token",
    "tokens",
    "token_logprobs",
    "top_logprobs",
    "text_offset",
    "logprobs",
}


class Frame(NamedTuple):
    progress: bytes
    data: bytes


@asynccontextmanager
async def make_app(**params: Any) -> AsyncIterator[Any]:
    """Yield the application with one model, whose engine runs in another process."""
    engine = Pool(EngineParams(**params))
    service = Service(ModelTexts(engine, Metrics("m")), "m")
    app = create_app(Registry([ServedModel(name="m", service=service)]), Settings())
    await engine.start()
    try:
        yield app
    finally:
        await engine.close()


async def stream(
    app: Any, path: str, body: dict[str, Any], delivered: Delivered | None = None
) -> list[Frame]:
    """Return the frames of an answer. If there is something ``delivered``, the answer continues."""
    headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": headers,
        "scheme": "http",
        "server": ("localhost", 80),
        "client": ("127.0.0.1", 1),
        "root_path": "",
        "state": {},
        WANTS_FRAMES: True,
    }
    if delivered is not None:
        scope[DELIVERED] = delivered
    return read_frames(await request(app, scope, json.dumps(body).encode()))


async def request(app: Any, scope: dict[str, Any], body: bytes) -> bytes:
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    data, status = [], []

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            status.append(message["status"])
        else:
            data.append(message.get("body", b""))

    await app(scope, receive, send)
    assert status == [200], b"".join(data)
    return b"".join(data)


def read_frames(data: bytes) -> list[Frame]:
    frames = []
    while data:
        (length,), (size,) = LENGTH.unpack_from(data), LENGTH.unpack_from(data, LENGTH.size)
        begin = 2 * LENGTH.size
        assert len(data) >= begin + length + size
        frames.append(Frame(data[begin : begin + length], data[begin + length :][:size]))
        data = data[begin + length + size :]
    return frames


def join_progress(frames: list[Frame]) -> bytes:
    return b"".join(LENGTH.pack(len(frame.progress)) + frame.progress for frame in frames)


def read_events(data: bytes) -> list[Any]:
    """Return what a client reads in a stream of any dialect: the events, without what depends on
    the clock. Neighbours that a client joins are one event, and those of a choice are together.
    """
    events: list[Any] = [
        event if event == "[DONE]" else json.loads(event)
        for line in data.decode().splitlines()
        if (event := line.removeprefix("data: ").strip()) and not line.startswith(("event:", ":"))
    ]
    events = [part for event in events for part in split_call(event)]
    numbers = [event["sequence_number"] for event in events if "sequence_number" in event]
    assert numbers == [*range(len(numbers))]
    events.sort(key=choice_of)
    joined: list[tuple[Any, Any]] = []
    for event in events:
        key, texts = split(event)
        if joined and joined[-1][0] == key and texts:
            before = joined[-1][1]
            joined[-1] = key, [one + more for one, more in zip(before, texts, strict=True)]
        else:
            joined.append((key, texts))
    return joined


def split_call(event: Any) -> list[Any]:
    """Return the beginning of a call in a chat and its first arguments, which come in one event if
    they were read together, as two events.
    """
    try:
        [choice] = event["choices"]
        [call] = choice["delta"]["tool_calls"]
        begun = {**call, "function": {**call["function"], "arguments": ""}}
        more = {"index": call["index"], "function": {"arguments": call["function"]["arguments"]}}
        if "name" not in call["function"] or not more["function"]["arguments"]:
            return [event]
    except (KeyError, TypeError, ValueError):
        return [event]
    return [
        {**event, "choices": [{**choice, "delta": {**choice["delta"], "tool_calls": [one]}}]}
        for one in (begun, more)
    ]


def choice_of(event: Any) -> int:
    choices = event.get("choices") if isinstance(event, dict) else None
    return choices[0]["index"] if choices else 1000


def split(value: Any, name: str = "") -> tuple[Any, list[Any]]:
    """Return ``value`` without the parts that clients join, and these parts."""
    if isinstance(value, dict):
        has_choices = bool(value.get("choices"))
        is_final = (
            value.get("type", "").startswith(("response.", "message")) or value.get("done") is True
        )
        keys, texts = [], []
        for field, part in value.items():
            if (
                field in UNSTABLE
                or field == "sequence_number"
                or (has_choices and field == "usage")
            ):
                continue
            key, own = split(part, "" if is_final and field == "response" else field)
            keys.append((field, key))
            texts += own
        return keys, texts
    if name in JOINED and isinstance(value, str | list):
        return type(value).__name__, [value]
    if isinstance(value, list):
        parts = [split(part) for part in value]
        return [key for key, _ in parts], [text for _, own in parts for text in own]
    return value, []
