"""Names the prefixes of the prompt in a request body, for the choice of a replica."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, islice
from typing import Any

import msgspec

from cllm.cluster.body import Fields
from cllm.routing.prefix_table import name_prefixes
from cllm.routing.router import RoutingRequest
from cllm.server.cluster.lease import MAX_BLOCKS

BLOCK_BYTES = 1024
BYTES_PER_TOKEN = 4  # an estimate
MAX_COUNT = 100  # of choices and prompts, which only estimate the load


def make_routing_request(
    fields: Fields, parts: list[bytes], model: str, tenant: str, account: str
) -> RoutingRequest:
    """Return the names and lengths of the prefixes of a prompt, which consists of ``parts``.

    ``model`` is the model's own name, ``tenant`` the one whose cache the request uses, and
    ``account`` the one that it is scheduled for.
    """
    salt = "\0".join(text for text in (model, tenant, fields.cache_salt) if isinstance(text, str))
    names = name_prefixes(salt.encode(errors="surrogatepass"), parts, BLOCK_BYTES, MAX_BLOCKS)
    sizes = (
        min(BLOCK_BYTES, len(part) - start)
        for part in parts
        for start in range(0, len(part), BLOCK_BYTES)
    )
    ends = [size // BYTES_PER_TOKEN for size in accumulate(islice(sizes, len(names)))]
    count = fields.n if type(fields.n) is int and 1 < fields.n <= MAX_COUNT else 1
    return RoutingRequest(
        names,
        ends,
        sum(map(len, parts)) // BYTES_PER_TOKEN,
        account,
        count,
    )


def list_parts(fields: Fields) -> list[bytes]:
    """Return the conversation, one part for each message, in the order of the prompt."""
    return [part for part in write_parts(fields) if part]


def write_parts(fields: Fields) -> Iterator[bytes]:
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
