"""Turns deltas into the items and events of a response.

The parts that do not change within an item are encoded once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from pydantic_core import to_json
from typing_extensions import TypedDict

from cllm.core.stored_ids import derive_id
from cllm.server.errors import describe_in_stream
from cllm.server.openai.responses.tools import ToolTarget, extract_input
from cllm.serving.answer import Generation
from cllm.text.alignment import TokenLogprob
from cllm.text.output_reader import Delta, Usage
from cllm.text.tools.parser import Channel

PREFIXES = {Channel.TEXT: "msg_", Channel.REASONING: "rs_", Channel.CALL: "fc_"}
DELTAS = {
    Channel.TEXT: "response.output_text",
    Channel.REASONING: "response.reasoning_text",
    Channel.CALL: "response.function_call_arguments",
}
CUSTOM_DELTA = "response.custom_tool_call_input"


class InputTokensDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(TypedDict):
    reasoning_tokens: int


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


def usage_object(usage: Usage) -> ResponseUsage:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


class OutputItem:
    """One item of the output as it grows: a message, reasoning or a tool call.

    The input of a custom tool is known only when the arguments of its function are complete, so it
    is one delta.
    """

    def __init__(
        self, response_id: str, channel: Channel, index: int, call: int, tool: ToolTarget
    ) -> None:
        """The item has the place ``index`` in the output of a response. If it is a call, it is the
        one with the number ``call`` in the answer, and calls ``tool``.
        """
        self.channel, self.index, self.call, self.tool = channel, index, call, tool
        self.id = derive_id("ctc_" if tool.is_custom else PREFIXES[channel], response_id, index)
        self.call_id = derive_id("call_", response_id, index)
        self._texts: list[str] = []
        self._logprobs: list[bytes] = []  # as JSON, because several events repeat them
        self.kind = CUSTOM_DELTA if tool.is_custom else DELTAS[channel]
        self.place: dict[str, Any] = {"item_id": self.id, "output_index": index}
        if channel != Channel.CALL:
            self.place["content_index"] = 0
        head = to_json({"type": f"{self.kind}.delta", **self.place})[:-1]
        self._head = b"event: %s.delta\ndata: " % self.kind.encode() + head
        self._plain = self._head + (b',"logprobs":[]' if channel == Channel.TEXT else b"")

    def add(self, text: str, logprobs: list[dict[str, Any]], sequence_number: int) -> bytes:
        """Add text and return the event for it; custom tools have no event before their end."""
        self._texts.append(text)
        if self.tool.is_custom:
            return b""
        head = self._plain
        if logprobs:
            written = to_json(logprobs)
            self._logprobs.append(written[1:-1])
            head = self._head + b',"logprobs":' + written
        return head + b',"sequence_number":%d,"delta":' % sequence_number + to_json(text) + b"}\n\n"

    @property
    def logprobs(self) -> dict[str, Any]:
        return {"logprobs": self._all_logprobs()} if self.channel == Channel.TEXT else {}

    def _all_logprobs(self) -> msgspec.Raw:
        return msgspec.Raw(b"[" + b",".join(self._logprobs) + b"]")

    @property
    def text(self) -> str:
        text = "".join(self._texts)
        return extract_input(text) if self.tool.is_custom else text

    def part(self, text: str) -> dict[str, Any]:
        if self.channel == Channel.REASONING:
            return {"type": "reasoning_text", "text": text}
        return {
            "type": "output_text",
            "text": text,
            "annotations": [],
            "logprobs": self._all_logprobs() if text else [],
        }

    def resource(self, status: str) -> dict[str, Any]:
        """Return the item with its content so far; with the status in_progress, without content."""
        begun = status != "in_progress"
        text = self.text if begun else ""
        item: dict[str, Any]
        if self.channel == Channel.CALL:
            tool = self.tool
            kind, content = (
                ("custom_tool_call", "input") if tool.is_custom else ("function_call", "arguments")
            )
            item = {"type": kind, "call_id": self.call_id, "name": tool.name, content: text}
            if tool.namespace:
                item["namespace"] = tool.namespace
        elif self.channel == Channel.REASONING:
            item = {
                "type": "reasoning",
                "summary": [],
                "content": [self.part(text)] if begun else [],
            }
        else:
            item = {
                "type": "message",
                "role": "assistant",
                "content": [self.part(text)] if begun else [],
            }
        return {"id": self.id, **item, "status": status}


class ResponseEvents:
    """The events of one response; implements AnswerEvents.

    After ``end``, ``response`` is the complete response. Its logprobs are JSON that msgspec copies.
    """

    def __init__(
        self,
        generation: Generation,
        head: Mapping[str, Any],
        on_end: Callable[[dict[str, Any]], None],
        called: Mapping[str, ToolTarget],
        logprobs: Callable[[Sequence[TokenLogprob]], dict[str, Any]] | None = None,
    ) -> None:
        """``head`` is the response before generation. ``on_end`` is called with the complete
        response. ``called`` has the tool behind each function, by the function's name. If the
        client asked for logprobs, ``logprobs`` makes the logprobs object of some tokens.
        """
        self._generation = generation
        self._logprobs = logprobs
        self._on_end = on_end
        self._called = called
        self._sequence_number = 0
        self._item: OutputItem | None = None
        self._finish = ""
        self._output: list[dict[str, Any]] = []
        self.response: dict[str, Any] = {**head}

    def _event(self, kind: str, **fields: Any) -> bytes:
        content = {"type": kind, **fields, "sequence_number": self._sequence_number}
        self._sequence_number += 1
        return b"event: %s\ndata: " % kind.encode() + msgspec.json.encode(content) + b"\n\n"

    def begin(self) -> bytes:
        created = self._event("response.created", response=self.response)
        return created + self._event("response.in_progress", response=self.response)

    def deltas(self, deltas: list[Delta]) -> bytes:
        return b"".join(map(self._encode, deltas))

    def _encode(self, delta: Delta) -> bytes:
        self._finish = delta.finish
        token_logprobs: list[dict[str, Any]] = []
        if self._logprobs is not None and delta.logprobs and delta.channel == Channel.TEXT:
            token_logprobs = self._logprobs(delta.logprobs)["content"]
        if not delta.text and not delta.name and not token_logprobs:
            return b""
        data, item = b"", self._item
        if item is None or item.channel != delta.channel or item.call != delta.call:
            data = self._close("completed") + self._open(delta.channel, delta.call, delta.name)
            item = self._item
            assert item is not None
        if (delta.text or token_logprobs) and (
            event := item.add(delta.text, token_logprobs, self._sequence_number)
        ):
            data += event
            self._sequence_number += 1
        return data

    def _open(self, channel: Channel, call: int = 0, name: str = "") -> bytes:
        self._item = item = OutputItem(
            self.response["id"],
            channel,
            len(self._output),
            call,
            self._called.get(name) or ToolTarget(name),
        )
        added = {"output_index": item.index, "item": item.resource("in_progress")}
        data = self._event("response.output_item.added", **added)
        if channel == Channel.CALL:
            return data
        return data + self._event("response.content_part.added", **item.place, part=item.part(""))

    def _close(self, status: str) -> bytes:
        """End the item that is open, if any."""
        item, self._item = self._item, None
        if item is None:
            return b""
        text, resource = item.text, item.resource(status)
        self._output.append(resource)
        if item.tool.is_custom:
            data = self._event(f"{item.kind}.delta", **item.place, delta=text)
            data += self._event(f"{item.kind}.done", **item.place, input=text)
        elif item.channel == Channel.CALL:
            data = self._event(
                f"{item.kind}.done", **item.place, name=item.tool.name, arguments=text
            )
        else:
            data = self._event(f"{item.kind}.done", **item.place, text=text, **item.logprobs)
            data += self._event("response.content_part.done", **item.place, part=item.part(text))
        return data + self._event(
            "response.output_item.done", output_index=item.index, item=resource
        )

    def end(self) -> bytes:
        status = "incomplete" if self._finish == "length" else "completed"
        data = b""
        if self._item is None and not self._output:
            # the model generated nothing: answer with an empty message
            data = self._open(Channel.TEXT)
        data += self._close(status)
        usage = usage_object(self._generation.usage)
        self.response = {**self.response, "status": status, "output": self._output, "usage": usage}
        if status == "incomplete":
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self.response["completed_at"] = int(time.time())
        self._on_end(self.response)
        return data + self._event(f"response.{status}", response=self.response)

    def fault(self, error: Exception) -> bytes:
        data = self._close("incomplete")
        fault = {"code": "server_error", "message": describe_in_stream(error).message}
        failed = {**self.response, "status": "failed", "output": self._output, "error": fault}
        return data + self._event("response.failed", response=failed)
