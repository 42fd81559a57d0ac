"""Tokenizes texts in the engine process, for the API process.

The model's vocabulary takes 40 MB, so only one process has it. llama.cpp tokenizes without the GIL,
so the engine goes on with its steps.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterator

from cllm.core.segments import Tokenizer, count_characters, tokenize_segments
from cllm.process.messages import Tokenize, Tokenized

NUM_THREADS = 2  # for short texts, and as many for long ones, so that short ones need not wait
LONG = 20_000  # characters of all texts of a request
# in a message, because decoding more would keep the event loop of the API process from its clients
MAX_TOKENS = 100_000

log = logging.getLogger("cllm.engine")


class TokenizeQueue:
    """Texts that wait to be tokenized."""

    def __init__(self) -> None:
        self._short: queue.SimpleQueue[int] = queue.SimpleQueue()  # numbers of requests
        self._long: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._waiting: dict[int, Tokenize] = {}

    def put(self, request: Tokenize) -> None:
        is_long = count_characters(request.texts) > LONG
        self._waiting[request.number] = request
        (self._long if is_long else self._short).put(request.number)

    def abandon(self, number: int) -> None:
        """Forget a request whose answer is not needed any longer."""
        self._waiting.pop(number, None)

    def take(self, *, long: bool) -> Tokenize:
        """Wait for the next request that is still wanted."""
        while True:
            number = (self._long if long else self._short).get()
            if (request := self._waiting.pop(number, None)) is not None:
                return request


def start_tokenizing(
    requests: TokenizeQueue, tokenizer: Tokenizer, send: Callable[[Tokenized], None]
) -> None:
    """Answer ``requests`` with ``send``, in threads that end with the process."""

    def answer_next(long: bool) -> None:
        request = requests.take(long=long)
        try:
            texts = [tokenize_segments(tokenizer, text) for text in request.texts]
            for answer in divide(request.number, texts):
                send(answer)
        except Exception:  # the thread must go on, and the caller gets an error
            log.exception("cannot tokenize")
            with contextlib.suppress(Exception):
                send(Tokenized(request.number, None))

    def answer_all(long: bool) -> None:
        while True:
            answer_next(long)

    for long in (False, True) * NUM_THREADS:
        threading.Thread(target=answer_all, args=(long,), daemon=True).start()


def divide(number: int, texts: list[list[int]]) -> Iterator[Tokenized]:
    """Return the answer to request ``number`` in messages of at most MAX_TOKENS tokens."""
    part: list[list[int]] = []
    room = MAX_TOKENS
    for tokens in texts:
        part.append(tokens[:room])
        for begin in range(room, len(tokens), MAX_TOKENS):
            yield Tokenized(number, part, more=True)
            part, room = [tokens[begin : begin + MAX_TOKENS]], MAX_TOKENS
        room -= len(part[-1])
    yield Tokenized(number, part)
