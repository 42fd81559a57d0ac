"""Tokenizes texts in the engine process, for the API process.

The model's vocabulary takes 40 MB, so only one process has it. llama.cpp tokenizes without the GIL,
so the engine goes on with its steps.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from cllm.core.segments import Tokenizer, tokenize_segments
from cllm.process.messages import Tokenize, Tokenized

NUM_THREADS = 4  # so that short texts need not wait for a few long ones

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
            send(Tokenized(asked.number, tokenize_texts(tokenizer, asked)))

    for _ in range(NUM_THREADS):
        threading.Thread(target=answer, daemon=True).start()


def tokenize_texts(tokenizer: Tokenizer, asked: Tokenize) -> list[list[int]] | None:
    """Return the token ids of each text, or None if that fails."""
    try:
        return [tokenize_segments(tokenizer, text) for text in asked.texts]
    except Exception:  # the thread must go on, and the caller gets an error
        log.exception("cannot tokenize")
        return None
