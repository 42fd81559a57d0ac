"""Turns deltas into Ollama's objects: one for the whole answer, or a stream with one object a
line.
"""

from __future__ import annotations

import datetime
import time
from typing import Any, Literal, NotRequired

from pydantic_core import to_json
from typing_extensions import TypedDict

from cllm.core.vocabulary import VocabularyTable
from cllm.server.off_loop import in_thread
from cllm.server.ollama.errors import error_line
from cllm.server.timings import build_progress
from cllm.server.token_logprobs import list_logprobs
from cllm.serving.answer import Answer, Generation
from cllm.text.alignment import TokenLogprob
from cllm.text.output_reader import Delta
from cllm.text.tools.argument_readers import parse_partial_object
from cllm.text.tools.parser import Channel

MEDIA_TYPE = "application/x-ndjson"


class Durations(TypedDict):
    total_duration: int
    load_duration: int


class OllamaEnding(TypedDict):
    """Without a prompt, ``done_reason`` is load or unload, and there are no counts and durations.
    Durations are in nanoseconds.
    """

    done: bool
    done_reason: Literal["stop", "length", "load", "unload"]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]


class CompleteFunctionCall(TypedDict):
    index: int
    name: str
    arguments: dict[str, Any]


class CompleteCall(TypedDict):
    id: str
    function: CompleteFunctionCall


class AnswerMessage(TypedDict):
    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[CompleteCall]]


class OllamaHead(TypedDict):
    model: str
    created_at: str


class GeneratedText(TypedDict):
    response: str
    thinking: NotRequired[str]
    logprobs: NotRequired[list[dict[str, Any]]]


class GeneratedMessage(TypedDict):
    message: AnswerMessage
    logprobs: NotRequired[list[dict[str, Any]]]


class OllamaGenerateAnswer(OllamaHead, GeneratedText, OllamaEnding):
    pass


class OllamaChatAnswer(OllamaHead, GeneratedMessage, OllamaEnding):
    pass


class Clock:
    """When a request arrived, was submitted and got its first token, in nanoseconds."""

    def __init__(self) -> None:
        self.came = self.submitted = self.first = time.perf_counter_ns()
        self._begun = False

    def submit(self) -> None:
        self.submitted = self.first = time.perf_counter_ns()

    def token(self) -> None:
        if not self._begun:
            self._begun, self.first = True, time.perf_counter_ns()

    def durations(self) -> Durations:
        """Return the total and the load duration.

        The model is always loaded, so loading is checking and tokenizing.
        """
        return {
            "total_duration": time.perf_counter_ns() - self.came,
            "load_duration": self.submitted - self.came,
        }

    def ending(self, generation: Generation, last: Delta) -> OllamaEnding:
        """Return the fields that end an answer.

        Time in the queue counts as evaluating the prompt.
        """
        now = time.perf_counter_ns()
        return {
            "done": True,
            "done_reason": "length" if last.finish == "length" else "stop",
            **self.durations(),
            "prompt_eval_count": generation.usage.prompt_tokens,
            "prompt_eval_duration": max(1, self.first - self.submitted),
            "eval_count": generation.usage.completion_tokens,
            "eval_duration": max(1, now - self.first),
        }


def head_object(model: str, created: float | None = None) -> OllamaHead:
    """Return the fields that begin every object. ``created`` is in seconds since 1970; by default
    it is now.
    """
    seconds = time.time() if created is None else created
    date = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return {"model": model, "created_at": date.strftime("%Y-%m-%dT%H:%M:%S.%fZ")}


def no_prompt(model: str, reason: Literal["load", "unload"], *, chat: bool) -> dict[str, Any]:
    """Return the answer to a request without a prompt, which loads or unloads the model."""
    return {**head_object(model), **text_fields("", chat=chat), "done": True, "done_reason": reason}


def text_fields(
    text: str, thinking: str = "", calls: list[CompleteCall] | None = None, *, chat: bool
) -> GeneratedText | GeneratedMessage:
    """Return generated text in the format of chat or of generate."""
    if not chat:
        return {"response": text, "thinking": thinking} if thinking else {"response": text}
    message: AnswerMessage = {"role": "assistant", "content": text}
    if thinking:
        message["thinking"] = thinking
    if calls:
        message["tool_calls"] = calls
    return {"message": message}


class CallCollector:
    """The function calls of an answer.

    Each is sent when it is complete, because its arguments are an object.
    """

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self.complete: list[CompleteCall] = []
        self._name = ""
        self._call = -1
        self._parts: list[str] = []

    def feed(self, delta: Delta) -> None:
        if delta.call != self._call:
            self.end()
            self._call, self._name = delta.call, delta.name
        self._parts.append(delta.text)

    def end(self) -> None:
        """Complete the call that has been fed, if there is one."""
        if self._name:
            function: CompleteFunctionCall = {
                "index": self._call,
                "name": self._name,
                "arguments": parse_partial_object("".join(self._parts)),
            }
            name = f"call_{self._generation.derive_id(self._call, digits=12)}"
            self.complete.append({"id": name, "function": function})
            self._name, self._parts = "", []


async def collect(
    answer: Answer, model: str, clock: Clock, vocabulary: VocabularyTable, *, chat: bool
) -> dict[str, Any]:
    """Return the whole answer."""
    token_logprobs: list[TokenLogprob] = []
    texts: dict[Channel, list[str]] = {channel: [] for channel in Channel}
    calls, last = CallCollector(answer.generation), Delta(0, "", 0)
    async for deltas in answer:
        clock.token()
        for last in deltas:
            token_logprobs += last.logprobs
            if last.channel is Channel.CALL:
                calls.feed(last)
            else:
                texts[last.channel].append(last.text)
    calls.end()
    content = text_fields(
        "".join(texts[Channel.TEXT]), "".join(texts[Channel.REASONING]), calls.complete, chat=chat
    )
    if answer.generation.params.logprobs is not None:
        content["logprobs"] = await in_thread(lambda: list_logprobs(vocabulary, token_logprobs))
    head = head_object(model, answer.generation.created)
    return {**head, **content, **clock.ending(answer.generation, last)}


class OllamaLines:
    """The lines of one stream; implements AnswerEvents."""

    def __init__(
        self,
        generation: Generation,
        model: str,
        clock: Clock,
        vocabulary: VocabularyTable,
        *,
        chat: bool,
    ) -> None:
        self._generation = generation
        self._vocabulary = vocabulary
        self._chat = chat
        self._clock = clock
        self._calls = CallCollector(generation)
        self._last = Delta(0, "", 0)
        head = to_json(head_object(model, generation.created))[:-1]
        self._head = head
        self._text = head + (
            b',"message":{"role":"assistant","content":' if chat else b',"response":'
        )
        self._thinking = (
            head
            + (b',"message":{"role":"assistant","content":""' if chat else b',"response":""')
            + b',"thinking":'
        )
        self._tail = (b"}" if chat else b"") + b',"done":false}\n'

    def begin(self) -> bytes:
        return b""

    def deltas(self, deltas: list[Delta]) -> bytes:
        self._last = deltas[-1]
        if self._last.prefill is None:
            self._clock.token()
        return b"".join(map(self._encode, deltas))

    def _encode(self, delta: Delta) -> bytes:
        if delta.channel is Channel.CALL:
            self._calls.feed(delta)
            return self._write_calls()
        if delta.prefill is not None:
            progress = {"done": False, "prompt_progress": build_progress(delta.prefill)}
            return self._line({**text_fields("", chat=self._chat), **progress})
        if not delta.text:
            return b""
        self._calls.end()
        if delta.logprobs:
            shown = {
                "logprobs": list_logprobs(self._vocabulary, delta.logprobs),
                "done": False,
            }
            return self._write_calls() + self._line(
                {**text_fields(delta.text, chat=self._chat), **shown}
            )
        head = self._text if delta.channel is Channel.TEXT else self._thinking
        return self._write_calls() + head + to_json(delta.text) + self._tail

    def _write_calls(self) -> bytes:
        """Return a line with the calls that are complete; nothing if there are none."""
        calls, self._calls.complete = self._calls.complete, []
        if not calls:
            return b""
        return self._line({**text_fields("", calls=calls, chat=self._chat), "done": False})

    def _line(self, content: dict[str, Any]) -> bytes:
        return self._head + b"," + to_json(content)[1:] + b"\n"

    def end(self) -> bytes:
        self._calls.end()
        content = {
            **text_fields("", chat=self._chat),
            **self._clock.ending(self._generation, self._last),
        }
        return self._write_calls() + self._line(content)

    def fault(self, error: Exception) -> bytes:
        return error_line(error)
