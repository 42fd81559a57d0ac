"""How HTTP is read from a connection: by uvicorn, which would wait for ever and read without end."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

from pydantic_core import to_json
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cllm.server.errors import Fault, openai_form

HEAD_TIMEOUT = 10.0  # seconds from the first byte of a request to the end of its head
MAX_HEAD = 65_536  # bytes of a head that has no end yet
READ_TIMEOUT = 60.0  # seconds in which a client must take LEAST_READ of what waits for it, or all
LEAST_READ = 65_536  # bytes


class Protocol(HttpToolsProtocol):
    """Ends a connection whose client does not come to the end of a head or does not read its answer, and one on which
    nothing comes at all. How long a body may take is the business of its reader (body.py).
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._num_head_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None
        self._reading: asyncio.TimerHandle | None = None  # until it is looked whether the client has read
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        self._end_reading()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end_reading()

    def _await_reading(self) -> None:
        size = self.transport.get_write_buffer_size()
        self._reading = self.loop.call_later(READ_TIMEOUT, self._check_reading, size)

    def _check_reading(self, before: int) -> None:
        if self.transport.get_write_buffer_size() > before - LEAST_READ:
            self.transport.abort()
        else:
            self._await_reading()

    def _end_reading(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        is_body = before is not None and before.more_body
        super().data_received(data)
        if is_body or self.cycle is not before:
            return
        self._num_head_bytes += len(data)  # all of it belongs to a head that has not ended
        if self._num_head_bytes > MAX_HEAD:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"The head has more than {MAX_HEAD} bytes.")
        elif self._deadline is None and (before is None or before.response_complete):
            message = f"The head of the request took longer than {HEAD_TIMEOUT:g} seconds."
            self._deadline = self.loop.call_later(HEAD_TIMEOUT, self._refuse, HTTPStatus.REQUEST_TIMEOUT, message)

    def on_headers_complete(self) -> None:
        self._end_head()
        super().on_headers_complete()

    def _end_head(self) -> None:
        self._num_head_bytes = 0
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def send_400_response(self, msg: str) -> None:
        self._refuse(HTTPStatus.BAD_REQUEST, msg)

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        """Answer what is no request yet, and hang up."""
        self._end_head()
        if self.transport.is_closing():
            return
        content = to_json(openai_form(Fault(status, message, code="invalid_http"))[1])
        head: dict[str, Any] = {
            "content-type": "application/json",
            "content-length": len(content),
            "connection": "close",
        }
        lines = [f"HTTP/1.1 {status.value} {status.phrase}", *(f"{name}: {value}" for name, value in head.items())]
        self.transport.write("\r\n".join(lines).encode() + b"\r\n\r\n" + content)
        self.transport.close()
