"""Deltas to OpenAI's chunks. What does not change within a stream is encoded once."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from pydantic_core import to_json

from cllm.server.errors import error_event
from cllm.service import Answer, Delta, Usage

DONE = b"data: [DONE]\n\n"


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


class Chunks:
    """The chunks of one stream, as ready bytes."""

    def __init__(self, head: dict[str, Any], *, chat: bool, include_usage: bool) -> None:
        """``head``: id, object, created and model, which every chunk repeats."""
        self._chat = chat
        self._include_usage = include_usage
        self._head = b"data: " + to_json(head)[:-1] + b',"choices":['
        self._end = (b'],"usage":null}' if include_usage else b"]}") + b"\n\n"
        self._text = b'"delta":{"content":' if chat else b'"text":'
        self._going = (b"}" if chat else b"") + b',"logprobs":null,"finish_reason":null}'

    def _choice(self, index: int, rest: bytes) -> bytes:
        return self._head + b'{"index":%d,' % index + rest + self._end

    def first(self, index: int) -> bytes:
        """The chunk that opens a choice of a chat."""
        return self._choice(index, b'"delta":{"role":"assistant","content":""' + self._going)

    def text(self, index: int, text: str) -> bytes:
        return self._choice(index, self._text + to_json(text) + self._going)

    def finish(self, index: int, reason: str) -> bytes:
        empty = b'"delta":{}' if self._chat else b'"text":""'
        return self._choice(index, empty + b',"logprobs":null,"finish_reason":"%s"}' % reason.encode())

    def usage(self, usage: Usage) -> bytes:
        return self._head + b'],"usage":' + to_json(usage_object(usage)) + b"}\n\n"

    def of(self, delta: Delta) -> bytes:
        data = self.text(delta.index, delta.text) if delta.text else b""
        return data + self.finish(delta.index, delta.finish) if delta.finish else data

    async def stream(self, answer: Answer) -> AsyncGenerator[bytes, None]:
        """The whole stream; a fault becomes an error event, and [DONE] always comes last."""
        try:
            if self._chat:
                yield b"".join(self.first(i) for i in range(answer.generation.params.n))
            async for deltas in answer:
                data = b"".join(map(self.of, deltas))
                if data:
                    yield data
            if self._include_usage:
                yield self.usage(answer.generation.usage)
        except Exception as error:  # noqa: BLE001  # the status line has gone out: it must go into the stream
            yield error_event(error)
        yield DONE
