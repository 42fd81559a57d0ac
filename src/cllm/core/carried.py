"""What a front of a cluster tells a replica about a request."""

from __future__ import annotations

import base64
import binascii

import msgspec

from cllm.core.account import Account


class Carried(msgspec.Struct, frozen=True, omit_defaults=True):
    """The account of a request, which the front has found by the request's credentials.

    The request is scheduled as one of the account ``scheduled``, which also depends on the user
    that the body names and on the client's address, with the share ``weight``. ``replica`` is the
    replica's name, which becomes a part of the ids of what the request stores. The front called
    ``front``, whose clients reach it at ``base_url``, asks for the usage of the request under the
    id ``request``. ``prefixes`` has names of the prompt's prefixes, which other fronts learn.
    """

    account: Account
    scheduled: Account
    weight: float = 1.0
    replica: str = ""
    front: str = ""
    request: str = ""
    base_url: str = ""
    prefixes: list[int] = msgspec.field(default_factory=list)


class Computed(msgspec.Struct, frozen=True, array_like=True):
    """What a replica tells its front about an answer that is no stream, for the front's records.
    The first token came ``ttft`` seconds after the request.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft: float | None
    finish_reasons: list[str]


def encode_carried(carried: Carried) -> str:
    """Return the value of the header that carries an account."""
    return base64.b64encode(msgspec.json.encode(carried)).decode()


def decode_carried(value: str) -> Carried:
    """Return what ``encode_carried`` has written. Raises ValueError."""
    try:
        return msgspec.json.decode(base64.b64decode(value, validate=True), type=Carried)
    except (binascii.Error, msgspec.DecodeError) as error:
        raise ValueError(str(error)) from None
