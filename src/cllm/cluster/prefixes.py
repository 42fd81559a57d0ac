"""Reads from request bodies of all dialects what matters for the choice of a replica.

Bodies that are not valid have nothing that matters; the replica rejects them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import msgspec

from cllm.routing.router import RoutingRequest, name_prefixes

BLOCK_BYTES = 1024
MAX_BLOCKS = 256
BYTES_PER_TOKEN = 4  # an estimate
MAX_COUNT = 100  # of choices and prompts, which only estimate the load


class PromptFields(msgspec.Struct):
    """The fields of request bodies that make up a prompt, whatever the dialect."""

    model: Any = None
    cache_salt: Any = None
    user: Any = None
    tools: Any = None
    system: Any = None  # Anthropic, Ollama
    instructions: Any = None  # Responses
    messages: Any = None  # a list of messages
    input: Any = None  # Responses: a text or items; embeddings: texts
    prompt: Any = None  # completions: a text, token ids, or several of either
    input_prefix: Any = None  # infill
    query: Any = None  # rerank
    content: Any = None  # tokenize, embedding
    stream: Any = None
    n: Any = None


DECODER = msgspec.json.Decoder(PromptFields)
NOTHING = PromptFields()


def read_prompt_fields(body: bytes) -> PromptFields:
    """Return what a body asks."""
    if body.lstrip()[:1] != b"{":
        return NOTHING
    try:
        return DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return NOTHING


def find_model_name(fields: PromptFields) -> str | None:
    """Return the name of the model in a body, None for the default model."""
    return fields.model if isinstance(fields.model, str) and fields.model else None


def make_routing_request(
    fields: PromptFields, model: str, tenant: str, account: str
) -> RoutingRequest:
    """Return the names and lengths of the prefixes of a prompt.

    ``model`` is the model's own name, ``tenant`` the one whose cache the request uses, and
    ``account`` the one that it is scheduled for.
    """
    salt = "\0".join(text for text in (model, tenant, fields.cache_salt) if isinstance(text, str))
    parts = [part for part in list_parts(fields) if part]
    names = name_prefixes(salt.encode(errors="surrogatepass"), parts, BLOCK_BYTES, MAX_BLOCKS)
    sizes = (
        min(BLOCK_BYTES, len(part) - start)
        for part in parts
        for start in range(0, len(part), BLOCK_BYTES)
    )
    ends = [num_bytes // BYTES_PER_TOKEN for num_bytes in accumulate(sizes)]
    count = fields.n if type(fields.n) is int and 1 < fields.n <= MAX_COUNT else 1
    return RoutingRequest(
        names,
        ends[: len(names)],
        sum(map(len, parts)) // BYTES_PER_TOKEN,
        account,
        count,
    )


def list_parts(fields: PromptFields) -> Iterator[bytes]:
    """Yield the conversation, one part for each message, in the order of the prompt."""
    if fields.tools:
        yield msgspec.json.encode(fields.tools, order="sorted")
    for text in (fields.instructions, fields.system):
        if text:
            yield b"system\0" + flatten(text)
    conversation = fields.messages if fields.messages is not None else fields.input
    if isinstance(conversation, list):
        yield from map(write_message, conversation[:MAX_BLOCKS])
        if rest := conversation[MAX_BLOCKS:]:  # gets no names
            yield msgspec.json.encode(rest)
    elif conversation:
        yield b"user\0" + flatten(conversation)
    for text in (fields.prompt, fields.input_prefix, fields.query, fields.content):
        if text:
            yield flatten(text)


def write_message(message: Any) -> bytes:
    """Return a message as bytes, the same ones in all dialects if it has only text."""
    if not isinstance(message, dict):
        return flatten(message)
    role = message.get("role") or message.get("type")
    parts = [str(role).encode(errors="replace"), flatten(message.get("content"))]
    parts += [
        msgspec.json.encode(message[name])
        for name in ("tool_calls", "arguments", "output")
        if message.get(name)
    ]
    return b"\0".join(parts)


def flatten(value: Any) -> bytes:
    """Return a text, or the texts in a list of parts, as bytes; anything else as JSON."""
    if isinstance(value, str):
        return value.encode(errors="surrogatepass")
    if value is None:
        return b""
    if isinstance(value, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in value
    ):
        return b"".join(part["text"].encode(errors="surrogatepass") for part in value)
    return msgspec.json.encode(value)
