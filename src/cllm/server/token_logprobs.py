"""Logprobs as one object for each token, the format of OpenAI's chats and of Ollama."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cllm.core.vocabulary import VocabularyTable
from cllm.text.alignment import TokenLogprob

LEAST = -9999.0  # JSON has no infinity


def list_logprobs(
    vocabulary: VocabularyTable, token_logprobs: Sequence[TokenLogprob]
) -> list[dict[str, Any]]:
    """Return an object for each token. Joining all ``bytes`` gives the text. ``token`` is for
    display, and shows part of a character as U+FFFD.
    """

    def entry(token: int, logprob: float) -> dict[str, Any]:
        data = vocabulary.find_text(token)
        return {
            "token": data.decode("utf-8", "replace"),
            "logprob": max(logprob, LEAST),
            "bytes": list(data),
        }

    return [
        {
            **entry(one.token, one.logprobs.logprob),
            "top_logprobs": [entry(*other) for other in one.logprobs.top],
        }
        for one in token_logprobs
    ]
