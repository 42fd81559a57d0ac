"""What a load client asks for, made before the clock starts and the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import msgspec

from cllm.errors import StartupError
from cllm.models.builtin.questions import KINDS, held_out_questions

SYLLABLES = [consonant + vowel for consonant in "bcdfghjklmnprstvwz" for vowel in "aeiou"]
LONGEST_WORD = 4  # syllables

# A call of a tool comes as structure and not as text, and every dialect has its own.
QUESTION_KINDS = [kind for kind in KINDS if kind != "tools"]


class Task(msgspec.Struct, frozen=True):
    """One request: the body of a chat completion, and what makes the answer to it a success."""

    body: bytes
    num_tokens: int | None = None
    """The answer has exactly so many tokens; None: any number but 0."""
    answer: str | None = None
    """The answer is exactly this text; None: any."""


def word_tasks(
    count: int, *, model: str, prompt_words: int, shared_words: int, max_tokens: int, temperature: float, seed: int
) -> list[Task]:
    """Prompts of ``prompt_words`` random words, of which the first ``shared_words`` are the same in all.

    Each answer is to have ``max_tokens`` tokens, which takes a server that knows ``ignore_eos``. Raises StartupError if
    there are more shared words than words.
    """
    if shared_words > prompt_words:
        raise StartupError(f"--shared-words {shared_words} is more than --prompt-words {prompt_words}")
    words = _words(random.Random(seed))
    shared = list(islice(words, shared_words))
    options = {"max_tokens": max_tokens, "ignore_eos": True, "temperature": temperature}
    return [
        Task(_body(model, " ".join([*shared, *islice(words, prompt_words - shared_words)]), options), max_tokens)
        for _ in range(count)
    ]


def question_tasks(count: int, *, model: str, max_tokens: int, seed: int) -> list[Task]:
    """Questions that the built-in model was not trained on and answers nevertheless; the kinds in turn."""
    options = {"max_tokens": max_tokens, "temperature": 0}
    questions = islice(held_out_questions(seed, QUESTION_KINDS), count)
    return [Task(_body(model, question.messages, options), answer=question.answer) for question in questions]


def _words(rng: random.Random) -> Iterator[str]:
    while True:
        yield "".join(rng.choices(SYLLABLES, k=rng.randint(1, LONGEST_WORD)))


def _body(model: str, content: str | list[dict[str, Any]], options: dict[str, Any]) -> bytes:
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    return msgspec.json.encode({"model": model, "messages": messages, **stream, **options})
