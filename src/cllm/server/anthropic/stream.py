"""Turns deltas into Anthropic's messages: a list of content blocks, whole or event by event."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from pydantic_core import to_json
from typing_extensions import TypedDict

from cllm.server.anthropic.errors import error_event
from cllm.serving.answer import Answer, Generation
from cllm.text.output_reader import Delta, Usage
from cllm.text.tools.argument_readers import parse_partial_object
from cllm.text.tools.parser import Channel

PING = b'event: ping\ndata: {"type":"ping"}\n\n'
STOPPED = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'

SIGNATURE = "cllm"
"""The signature of every thinking block. Blocks that clients send back may have any signature."""

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
REASONS: dict[str, StopReason] = {"length": "max_tokens", "tool_calls": "tool_use"}
# For each channel: the type of its block's deltas and the field that has their text.
DELTAS = {
    Channel.TEXT: (b"text_delta", b"text"),
    Channel.REASONING: (b"thinking_delta", b"thinking"),
    Channel.CALL: (b"input_json_delta", b"partial_json"),
}


class ContentBlock(TypedDict):
    """text, thinking (with a signature) or tool_use (with id, name and input)."""

    type: Literal["text", "thinking", "tool_use"]
    text: NotRequired[str]
    thinking: NotRequired[str]
    signature: NotRequired[str]
    id: NotRequired[str]
    name: NotRequired[str]
    input: NotRequired[dict[str, Any]]


class OutputDetails(TypedDict):
    thinking_tokens: int


class MessageUsage(TypedDict):
    """``input_tokens`` does not include the tokens from the cache."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputDetails
    service_tier: NotRequired[Literal["standard"]]


class MessageEnding(TypedDict):
    """Both are null until a streamed message ends."""

    stop_reason: StopReason | None
    stop_sequence: str | None


class MessageAnswer(MessageEnding):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    usage: MessageUsage


def usage_object(usage: Usage) -> MessageUsage:
    cached = min(usage.cached_tokens, usage.prompt_tokens)
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


def message_object(generation: Generation, model: str) -> MessageAnswer:
    """Return a message that has not ended, without content."""
    return {
        "id": generation.request_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {**usage_object(generation.usage), "service_tier": "standard"},
    }


def make_ending(last: Delta) -> MessageEnding:
    reason: StopReason
    reason = "stop_sequence" if last.stop else REASONS.get(last.finish, "end_turn")
    return {"stop_reason": reason, "stop_sequence": last.stop or None}


def make_empty_block(generation: Generation, delta: Delta) -> ContentBlock:
    """Return the block that ``delta`` begins, without content."""
    if delta.channel is Channel.CALL:
        return {
            "type": "tool_use",
            "id": f"toolu_{generation.derive_id(delta.call)}",
            "name": delta.name,
            "input": {},
        }
    if delta.channel is Channel.REASONING:
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


async def collect(answer: Answer, model: str, *, shows_thinking: bool = True) -> MessageAnswer:
    """Return the whole message. Without ``shows_thinking``, its thinking blocks are empty."""
    blocks: list[ContentBlock] = []
    texts: list[list[str]] = []
    where, last = None, Delta(0, "", 0)
    async for deltas in answer:
        for last in deltas:
            if last.text or last.name:
                if where != (last.channel, last.call):
                    where = (last.channel, last.call)
                    blocks.append(make_empty_block(answer.generation, last))
                    texts.append([])
                if shows_thinking or last.channel is not Channel.REASONING:
                    texts[-1].append(last.text)
    for block, parts in zip(blocks, texts, strict=True):
        text = "".join(parts)
        if block["type"] == "tool_use":
            block["input"] = parse_partial_object(text)
        else:
            block[block["type"]] = text
        if block["type"] == "thinking":
            block["signature"] = SIGNATURE
    return {**message_object(answer.generation, model), "content": blocks, **make_ending(last)}


class MessageEvents:
    """The events of one stream; implements AnswerEvents. One block is open at a time."""

    def __init__(
        self, generation: Generation, model: str, request_id: str, *, shows_thinking: bool = True
    ) -> None:
        """Without ``shows_thinking``, thinking blocks are empty."""
        self._generation = generation
        self._model = model
        self._request_id = request_id
        self._shows_thinking = shows_thinking
        self._index = -1
        # the open block's channel, and the number of its call
        self._where: tuple[Channel, int] | None = None
        self._head = b""  # beginning of the open block's deltas
        self._last = Delta(0, "", 0)

    def begin(self) -> bytes:
        message = to_json(
            {"type": "message_start", "message": message_object(self._generation, self._model)}
        )
        return b"event: message_start\ndata: " + message + b"\n\n"

    def deltas(self, deltas: list[Delta]) -> bytes:
        self._last = deltas[-1]
        return b"".join(map(self._encode, deltas))

    def _encode(self, delta: Delta) -> bytes:
        data = b""
        if (delta.text or delta.name) and self._where != (delta.channel, delta.call):
            data = self._close() + self._open(delta)
        if delta.text and (self._shows_thinking or delta.channel is not Channel.REASONING):
            data += self._head + to_json(delta.text) + b"}}\n\n"
        return data

    def _open(self, delta: Delta) -> bytes:
        self._index += 1
        self._where = (delta.channel, delta.call)
        kind, field = DELTAS[delta.channel]
        self._head = self._delta_head(kind, field)
        block = self._index, to_json(make_empty_block(self._generation, delta))
        return b"event: content_block_start\ndata: " + (
            b'{"type":"content_block_start","index":%d,"content_block":%s}\n\n' % block
        )

    def _close(self) -> bytes:
        if self._where is None:
            return b""
        data = (
            b'event: content_block_stop\ndata: {"type":"content_block_stop","index":%d}\n\n'
            % self._index
        )
        if self._where[0] is Channel.REASONING:
            data = (
                self._delta_head(b"signature_delta", b"signature")
                + to_json(SIGNATURE)
                + b"}}\n\n"
                + data
            )
        self._where = None
        return data

    def _delta_head(self, kind: bytes, field: bytes) -> bytes:
        head = b'{"type":"content_block_delta","index":%d,"delta":{"type":"%s","%s":' % (
            self._index,
            kind,
            field,
        )
        return b"event: content_block_delta\ndata: " + head

    def end(self) -> bytes:
        usage = usage_object(self._generation.usage)
        event = to_json({"type": "message_delta", "delta": make_ending(self._last), "usage": usage})
        return self._close() + b"event: message_delta\ndata: " + event + b"\n\n" + STOPPED

    def fault(self, error: Exception) -> bytes:
        return error_event(error, self._request_id)
