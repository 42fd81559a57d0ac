"""Tokenizes texts in the engine process, for the API process.

The model's vocabulary takes 40 MB, so only one process has it. llama.cpp tokenizes without the GIL,
so the engine goes on with its steps.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator

from cllm.core.segments import Tokenizer, tokenize_segments
from cllm.process.messages import Tokenize, Tokenized

NUM_THREADS = 4  # so that short texts need not wait for a few long ones
# of a message: decoding more would keep the event loop of the API process from its clients
MAX_TOKENS = 100_000

log = logging.getLogger("cllm.engine")


def start_tokenizing(
    questions: queue.SimpleQueue[Tokenize],
    tokenizer: Tokenizer,
    send: Callable[[Tokenized], None],
) -> None:
    """Answer ``questions`` with ``send``, in threads that end with the process."""

    def answer() -> None:
        while True:
            asked = questions.get()
            for answer in divide(asked.number, tokenize_texts(tokenizer, asked)):
                send(answer)

    for _ in range(NUM_THREADS):
        threading.Thread(target=answer, daemon=True).start()


def tokenize_texts(tokenizer: Tokenizer, asked: Tokenize) -> list[list[int]] | None:
    """Return the token ids of each text, or None if that fails."""
    try:
        return [tokenize_segments(tokenizer, text) for text in asked.texts]
    except Exception:  # the thread must go on, and the caller gets an error
        log.exception("cannot tokenize")
        return None


def divide(number: int, texts: list[list[int]] | None) -> Iterator[Tokenized]:
    """Return the answer to question ``number`` in messages of at most MAX_TOKENS tokens."""
    part: list[list[int]] = []
    room = MAX_TOKENS
    for tokens in texts or ():
        part.append(tokens[:room])
        for begin in range(room, len(tokens), MAX_TOKENS):
            yield Tokenized(number, part, more=True)
            part, room = [tokens[begin : begin + MAX_TOKENS]], MAX_TOKENS
        room -= len(part[-1])
    yield Tokenized(number, part if texts is not None else None)
