"""POST /api/pull: downloads a model from the hub into the local cache, where ``cllm serve`` finds
it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, NotRequired

from pydantic import with_config
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from typing_extensions import TypedDict

from cllm.errors import BadRequest, StartupError
from cllm.models import catalog
from cllm.server.body import example
from cllm.server.call import get_call
from cllm.server.http.sse import escape_line_ends, until_disconnect
from cllm.server.ollama.schema import CreateBody, PullBody
from cllm.server.ollama.stream import MEDIA_TYPE
from cllm.server.state import get_state

INTERVAL = 0.25  # seconds between two progress reports
PULLING = asyncio.Lock()  # one download at a time


@with_config(example(status="success"))
class PullStatus(TypedDict):
    """The progress of a file has its name as ``digest``, and numbers of bytes."""

    status: str
    digest: NotRequired[str]
    total: NotRequired[int]
    completed: NotRequired[int]


class Abandoned(Exception):
    """The client no longer waits for the download."""


class Download:
    """A download in a thread, and its progress for each file, which may be read while it runs."""

    def __init__(self, name: str, on_done: Callable[[], Awaitable[None]]) -> None:
        """``on_done`` is called when the model is in the cache."""
        self.name = name
        self._on_done = on_done
        self.files: dict[str, tuple[int, int]] = {}
        self.abandoned = False

    def report(self, file: str, done: int, total: int) -> None:
        if self.abandoned:
            raise Abandoned
        self.files[file] = (done, total)

    async def lines(self) -> AsyncGenerator[PullStatus, None]:
        """Yield Ollama's status objects for the download.

        Raises StartupError. Closing it early ends the download.
        """
        async with PULLING:
            yield {"status": "pulling manifest"}
            async with contextlib.aclosing(self._progress()) as progress:
                async for line in progress:
                    yield line
            await self._on_done()
            yield {"status": "success"}

    async def _progress(self) -> AsyncGenerator[PullStatus, None]:
        task = asyncio.ensure_future(
            asyncio.to_thread(catalog.resolve, self.name, None, self.report)
        )
        reported: dict[str, tuple[int, int]] = {}
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=INTERVAL)
                for file, (done, total) in self.files.copy().items():
                    if reported.get(file) != (done, total):
                        reported[file] = (done, total)
                        yield {
                            "status": f"pulling {file}",
                            "digest": file,
                            "total": total,
                            "completed": done,
                        }
            task.result()
        finally:
            self.abandoned = True
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())


def answer_success(body: PullBody | CreateBody, *steps: str) -> Response:
    """Return the answer for work that is done: unless it is not streamed, with its steps."""
    if body.stream is False:
        return JSONResponse({"status": "success"})
    lines = b"".join(to_json({"status": status}) + b"\n" for status in (*steps, "success"))
    return Response(lines, media_type=MEDIA_TYPE)


async def pull(request: Request, body: PullBody) -> Response:
    """Download a model.

    Raises BadRequest if that is not possible. Later errors become a line of the stream.
    """
    if not get_state(request).settings.server.allow_pull:
        message = (
            "Pulling models is disabled on this server; the option server.allow_pull enables it."
        )
        raise BadRequest(message, status=403, code="forbidden")
    name = body.wanted()
    if not catalog.HUB.fullmatch(name):
        message = (
            f"Cannot pull {name[:100]!r}: only models of the Hugging Face hub, "
            f"hf.co/owner/repo[:quantization]."
        )
        raise BadRequest(message, param="model", code="invalid_value")
    if PULLING.locked():
        raise BadRequest(
            "Another model is being pulled; try again later.", status=409, code="conflict"
        )
    get_call(request).audit("pull", model=name)
    lines = Download(name, get_state(request).registry.rescan).lines()
    if body.stream is not False:
        return StreamingResponse(encode_lines(lines), media_type=MEDIA_TYPE)
    try:
        return JSONResponse(await until_disconnect(request, last_line(lines)))
    except StartupError as error:
        raise BadRequest(str(error), param="model", code="model_not_found", status=404) from None


async def last_line(lines: AsyncGenerator[PullStatus, None]) -> PullStatus:
    line: PullStatus = {"status": ""}
    async with contextlib.aclosing(lines):
        async for line in lines:  # noqa: B007
            pass
    return line


async def encode_lines(lines: AsyncGenerator[PullStatus, None]) -> AsyncIterator[bytes]:
    try:
        async with contextlib.aclosing(lines):
            async for line in lines:
                yield encode_line(line)
    except StartupError as error:
        yield encode_line({"error": str(error)})


def encode_line(content: Mapping[str, Any]) -> bytes:
    return escape_line_ends(to_json(content)) + b"\n"
