"""Turns deltas into OpenAI's chunks. The parts that do not change in a stream are encoded once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NotRequired

from pydantic_core import to_json
from typing_extensions import TypedDict

from cllm.core.output import PrefillProgress
from cllm.server.errors import error_event
from cllm.server.openai.schema import StreamOptions
from cllm.server.timings import build_progress, build_timings
from cllm.serving.answer import Generation
from cllm.text.alignment import TokenLogprob
from cllm.text.output_reader import Delta, Usage
from cllm.text.tools.parser import Channel

DONE = b"data: [DONE]\n\n"


class TokensDetails(TypedDict):
    cached_tokens: NotRequired[int]
    reasoning_tokens: NotRequired[int]


class TokenUsage(TypedDict):
    """Embeddings have only ``prompt_tokens`` and ``total_tokens``."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: NotRequired[int]
    prompt_tokens_details: NotRequired[TokensDetails]
    completion_tokens_details: NotRequired[TokensDetails]


class CalledFunction(TypedDict):
    name: str
    arguments: str


class MessageCall(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[MessageCall]]


def usage_object(usage: Usage) -> TokenUsage:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def call_id(generation: Generation, choice: int, call: int) -> str:
    """Return the id of the ``call``-th call of a choice, always the same."""
    return f"call_{generation.derive_id(choice, call)}"


class Chunks:
    """The chunks of one stream; implements AnswerEvents.

    [DONE] is always the last one, also after an error.
    """

    def __init__(
        self,
        generation: Generation,
        head: Mapping[str, Any],
        *,
        chat: bool,
        options: StreamOptions | None,
        logprobs: Callable[[Sequence[TokenLogprob]], dict[str, Any]] | None = None,
    ) -> None:
        """Every chunk repeats ``head``, which has the id, the object, the time and the model.
        ``options`` say which chunks include the usage. ``logprobs`` makes the logprobs object of a
        delta.
        """
        self._generation = generation
        self._chat = chat
        self._include_usage = include_usage = bool(options and options.include_usage)
        self._counts = bool(include_usage and options and options.continuous_usage_stats)
        self._head = b"data: " + to_json(head)[:-1] + b',"choices":['
        self._end = (b'],"usage":null}' if include_usage else b"]}") + b"\n\n"
        self._text = b'"delta":{"content":' if chat else b'"text":'
        self._close = b"}" if chat else b""
        self._num_going = len(generation.prompts) * generation.params.n
        self._going = self._close + b',"logprobs":null,"finish_reason":null}'
        self._logprobs = logprobs
        self._unopened = set(range(generation.params.n)) if chat else set()

    def _choice(self, index: int, rest: bytes) -> bytes:
        return self._head + b'{"index":%d,' % index + rest + self._end

    def _open(self, delta: Delta) -> bytes:
        """Return the first chunk of a chat's choice.

        A choice that begins with a call may have no content.
        """
        self._unopened.remove(delta.index)
        content = b'""' if delta.channel == Channel.TEXT else b"null"
        return self._choice(
            delta.index, b'"delta":{"role":"assistant","content":' + content + self._going
        )

    def text(self, index: int, text: str, logprobs: dict[str, Any] | None = None) -> bytes:
        end = self._going
        if logprobs is not None:
            end = self._close + b',"logprobs":' + to_json(logprobs) + b',"finish_reason":null}'
        return self._choice(index, self._text + to_json(text) + end)

    def finish(self, index: int, reason: str) -> bytes:
        """Return the last chunk of a choice.

        The stream's last one has the timings, unless a usage chunk follows.
        """
        self._num_going -= 1
        if not self._num_going and not self._include_usage:
            self._end = b"]," + self._timings()
        empty = b'"delta":{}' if self._chat else b'"text":""'
        return self._choice(
            index, empty + b',"logprobs":null,"finish_reason":"%s"}' % reason.encode()
        )

    def _call(self, delta: Delta) -> bytes:
        call: dict[str, Any] = {"index": delta.call}
        if delta.name:
            call |= {
                "id": call_id(self._generation, delta.index, delta.call),
                "type": "function",
                "function": {"name": delta.name, "arguments": delta.text},
            }
        else:
            call["function"] = {"arguments": delta.text}
        return self._choice(
            delta.index, b'"delta":{"tool_calls":[' + to_json(call) + b"]" + self._going
        )

    def _reasoning(self, delta: Delta) -> bytes:
        text = to_json(delta.text)
        return self._choice(
            delta.index,
            b'"delta":{"reasoning_content":' + text + b',"reasoning":' + text + self._going,
        )

    def _timings(self) -> bytes:
        return b'"timings":' + to_json(build_timings(self._generation)) + b"}\n\n"

    def _progress(self, index: int, prefill: PrefillProgress) -> bytes:
        """Return a chunk without text that tells how far the prompt of a choice is."""
        head = self._head + b'{"index":%d,' % index
        empty = b'"delta":{}' if self._chat else b'"text":""'
        progress = b'"prompt_progress":' + to_json(build_progress(prefill)) + b"}\n\n"
        return head + empty + b',"logprobs":null,"finish_reason":null}],' + progress

    def encode(self, delta: Delta) -> bytes:
        if delta.prefill is not None:
            return self._progress(delta.index, delta.prefill)
        if delta.channel != Channel.TEXT:
            data = self._call(delta) if delta.channel == Channel.CALL else self._reasoning(delta)
        elif delta.logprobs and self._logprobs is not None:
            data = self.text(delta.index, delta.text, self._logprobs(delta.logprobs))
        else:
            data = self.text(delta.index, delta.text) if delta.text else b""
        if delta.index in self._unopened and (data or delta.finish):
            data = self._open(delta) + data
        return data + self.finish(delta.index, delta.finish) if delta.finish else data

    def begin(self) -> bytes:
        return b""

    def deltas(self, deltas: list[Delta]) -> bytes:
        if self._counts:
            self._end = b'],"usage":' + to_json(usage_object(self._generation.usage)) + b"}\n\n"
        return b"".join(map(self.encode, deltas))

    def end(self) -> bytes:
        if not self._include_usage:
            return DONE
        usage = to_json(usage_object(self._generation.usage))
        return self._head + b'],"usage":' + usage + b"," + self._timings() + DONE

    def fault(self, error: Exception) -> bytes:
        return error_event(error) + DONE


class ChoiceAccumulator:
    """Collects a choice that is not streamed."""

    def __init__(self, generation: Generation, index: int) -> None:
        self._generation = generation
        self._index = index
        self.text: list[str] = []
        self.token_logprobs: list[TokenLogprob] = []
        self.finish = ""
        self._reasoning: list[str] = []
        self._calls: list[tuple[str, list[str]]] = []  # names, and the parts of the arguments

    def add(self, delta: Delta) -> None:
        self.finish = delta.finish
        self.token_logprobs += delta.logprobs
        match delta.channel:
            case Channel.TEXT:
                self.text.append(delta.text)
            case Channel.REASONING:
                self._reasoning.append(delta.text)
            case Channel.CALL:
                if delta.name:
                    self._calls.append((delta.name, []))
                self._calls[delta.call][1].append(delta.text)

    def message(self) -> AssistantMessage:
        text = "".join(self.text)
        message: AssistantMessage = {"role": "assistant", "content": text, "refusal": None}
        if self._reasoning:
            message["reasoning_content"] = message["reasoning"] = "".join(self._reasoning)
        if self._calls:
            message["content"] = text or None
            message["tool_calls"] = [
                {
                    "id": call_id(self._generation, self._index, call),
                    "type": "function",
                    "function": {"name": name, "arguments": "".join(parts)},
                }
                for call, (name, parts) in enumerate(self._calls)
            ]
        return message
