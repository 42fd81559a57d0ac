"""Reads from request bodies of all dialects what matters to a front.

Bodies that are not valid have nothing that matters; the replica rejects them.
"""

from __future__ import annotations

from typing import Any

import msgspec

from cllm.errors import BadRequest
from cllm.server.body_limits import check_structure
from cllm.store.usage import EXPECTED_OUTPUT


class Fields(msgspec.Struct):
    """The fields of request bodies that matter, whatever the dialect."""

    model: Any = None
    stream: Any = None
    n: Any = None
    # the prompt
    cache_salt: Any = None
    tools: Any = None
    system: Any = None  # Anthropic, Ollama
    instructions: Any = None  # Responses
    messages: Any = None  # a list of messages
    input: Any = None  # Responses: a text or items; embeddings: texts
    prompt: Any = None  # completions: a text, token ids, or several of either
    input_prefix: Any = None  # infill
    query: Any = None  # rerank
    content: Any = None  # tokenize, embedding
    # who asks, and for how many tokens
    user: Any = None
    metadata: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    n_predict: Any = None
    options: Any = None
    # names of stored data
    previous_response_id: Any = None
    input_file_id: Any = None

    def find_model_name(self) -> str | None:
        """Return the name of the model in a body, None for the default model."""
        return self.model if isinstance(self.model, str) and self.model else None

    def find_user(self) -> str | None:
        """Return the user that the body names."""
        user = self.user
        if user is None and isinstance(self.metadata, dict):
            user = self.metadata.get("user_id")
        return user if isinstance(user, str) and user else None

    def estimate_output(self) -> int:
        """Return about how many tokens the answer may have."""
        limits = [self.max_tokens, self.max_completion_tokens, self.max_output_tokens]
        limits.append(self.n_predict)
        if isinstance(self.options, dict):
            limits.append(self.options.get("num_predict"))
        counts = [limit for limit in limits if type(limit) is int and limit > 0]
        n = self.n if type(self.n) is int and 1 <= self.n <= EXPECTED_OUTPUT else 1
        return min([*counts, EXPECTED_OUTPUT]) * n


DECODER = msgspec.json.Decoder(Fields)
NOTHING = Fields()


def read_fields(body: bytes) -> Fields:
    """Return what a body asks."""
    if body.lstrip()[:1] != b"{":
        return NOTHING
    try:
        check_structure(body)
        return DECODER.decode(body)
    except (BadRequest, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return NOTHING
