"""GET /models/sse: events about models, such as the progress of loads, as llama-server's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from fastapi import APIRouter
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from cllm.server.body import describe_route
from cllm.server.http.sse import HEARTBEAT, HEARTBEAT_BYTES
from cllm.server.resolve import served_models
from cllm.server.state import get_state
from cllm.serving.served_model import ServedModel

router = APIRouter(tags=["llama-server"])

EVENTS_PATH = "/models/sse"
INTERVAL = 0.1  # seconds between two looks at the models
STAGE = "text_model"  # llama-server's name for loading the model itself
Event = dict[str, Any]


@router.get(EVENTS_PATH, openapi_extra=describe_route(stream="text/event-stream"))
async def model_events(request: Request) -> Response:
    """Send events about the models that the API key may use: first the status of each one, then its
    changes, with the loaded share as ``data.progress.value`` while a model is loading.
    """
    events = write_events(
        lambda: describe_models(served_models(request)),
        lambda: get_state(request).registry.loaded.draining,
    )
    return StreamingResponse(events, media_type="text/event-stream")


async def write_events(
    list_states: Callable[[], dict[str, Event]],
    is_ending: Callable[[], bool],
    interval: float = INTERVAL,
) -> AsyncGenerator[bytes, None]:
    """Yield the events as server-sent events until the server ends, and heartbeats in between.
    ``list_states`` returns the present status of each model by name.
    """
    before: dict[str, Event] = {}
    written = time.monotonic()
    while not is_ending():
        now = list_states()
        if events := list_changes(before, now):
            yield b"".join(b"data: " + to_json(event) + b"\n\n" for event in events)
            written = time.monotonic()
        elif time.monotonic() - written >= HEARTBEAT:
            yield HEARTBEAT_BYTES
            written = time.monotonic()
        before = now
        await asyncio.sleep(interval)


def describe_models(models: Sequence[ServedModel]) -> dict[str, Event]:
    """Return the data of the model_status events of models, by name."""
    return {model.name: describe_status(model) for model in models}


def describe_status(model: ServedModel) -> Event:
    """Return the data of a model_status event."""
    data: Event = {"status": model.status}
    if model.status == "loading":
        share = round(model.loaded_share, 2)
        data["progress"] = {"stages": [STAGE], "current": STAGE, "value": share}
    return data


def list_changes(before: dict[str, Event], now: dict[str, Event]) -> list[Event]:
    """Return the events between two states, which have the status of each model by name."""
    events: list[Event] = []
    if before and now.keys() - before.keys():
        events.append({"model": "*", "event": "models_reload"})
    events += [{"model": name, "event": "model_remove"} for name in before if name not in now]
    return events + [
        {"model": name, "event": "model_status", "data": data}
        for name, data in now.items()
        if before.get(name) != data
    ]
