"""Logprobs in OpenAI's formats: one object for each token in chats, parallel lists in
completions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cllm.core.output import Logprobs
from cllm.core.vocabulary import VocabularyTable
from cllm.server.token_logprobs import LEAST, list_logprobs
from cllm.text.alignment import TokenLogprob, find_offsets


def chat_logprobs(
    vocabulary: VocabularyTable, token_logprobs: Sequence[TokenLogprob]
) -> dict[str, Any]:
    """Return the ``logprobs`` object of a chat's choice."""
    return {"content": list_logprobs(vocabulary, token_logprobs), "refusal": None}


def completion_logprobs(
    vocabulary: VocabularyTable, token_logprobs: Sequence[TokenLogprob], offset: int
) -> dict[str, Any]:
    """Return the ``logprobs`` object of a completion's choice, whose text begins at the character
    ``offset``.
    """
    return {
        "tokens": [token_text(vocabulary, one.token) for one in token_logprobs],
        "token_logprobs": [max(one.logprobs.logprob, LEAST) for one in token_logprobs],
        "top_logprobs": [
            top_logprobs_by_text(vocabulary, one.token, one.logprobs) for one in token_logprobs
        ],
        "text_offset": [offset + one.at for one in token_logprobs],
    }


def prompt_logprobs(
    vocabulary: VocabularyTable, prompt: list[int], logprobs: list[Logprobs], text: str | None
) -> dict[str, Any]:
    """Return the ``logprobs`` object of an echoed prompt, whose first token has no logprob.
    ``text`` is the prompt as it was given; None if token ids were given.
    """
    others = list(zip(prompt[1:], logprobs, strict=True))
    return {
        "tokens": [token_text(vocabulary, token) for token in prompt],
        "token_logprobs": [None, *(max(one.logprob, LEAST) for _, one in others)],
        "top_logprobs": [
            None,
            *(top_logprobs_by_text(vocabulary, token, one) for token, one in others),
        ],
        "text_offset": find_offsets(vocabulary, prompt, text),
    }


def join_logprobs(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Return one object for two texts that follow each other."""
    return {key: first[key] + second[key] for key in first}


def top_logprobs_by_text(
    vocabulary: VocabularyTable, token: int, logprobs: Logprobs
) -> dict[str, float]:
    """Return the logprobs of the most probable tokens and of ``token``, by text.

    If several tokens have the same text, the most probable one counts.
    """
    by_text: dict[str, float] = {}
    for other, logprob in [*logprobs.top, (token, logprobs.logprob)]:
        by_text.setdefault(token_text(vocabulary, other), max(logprob, LEAST))
    return by_text


def token_text(vocabulary: VocabularyTable, token: int) -> str:
    """Return the text of a token, or its bytes as OpenAI writes them, if it is a part of a
    character.
    """
    data = vocabulary.find_text(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def plain_text(vocabulary: VocabularyTable, tokens: list[int]) -> str:
    """Return the text of tokens. Control tokens have none."""
    return b"".join(vocabulary.pieces[token] for token in tokens).decode("utf-8", "replace")
