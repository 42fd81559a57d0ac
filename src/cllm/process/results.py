"""The result cache: finished answers, reused for requests that would compute the same answer
again.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import msgspec

from cllm.core.output import TokenOutput
from cllm.core.request import Request

OVERHEAD = 300  # bytes of an entry besides its tokens

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[TokenOutput])


def digest(request: Request) -> bytes | None:
    """Return a key that is equal for requests that must have the same answer, or None if the answer
    is random, or depends on when the client ends the reasoning.
    """
    params, budget = request.params, request.params.thinking
    if not params.is_greedy and params.seed is None:
        return None
    if budget is not None and budget.ends_on_request:
        return None
    if params.is_greedy:  # these parameters do not affect a greedy choice
        params = params.replace_unchecked(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=None)
    if params.logit_bias:
        params = params.replace_unchecked(logit_bias=dict(sorted(params.logit_bias.items())))
    changes = request.adapters, request.num_base_tokens, request.cache_salt
    content = request.prompt, params, changes, request.reports_prefill, request.reading
    return hashlib.sha256(_encoder.encode(content)).digest()


class ResultCache:
    """Evicts the least recently used results when there are too many, or when they take too much
    memory.
    """

    def __init__(self, max_results: int = 0, max_bytes: int = 0) -> None:
        self.num_bytes = 0
        self._max_results = max_results
        self._max_bytes = max_bytes
        self._results: OrderedDict[bytes, bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._results)

    def __contains__(self, key: bytes | None) -> bool:
        return key in self._results

    @property
    def is_on(self) -> bool:
        return self._max_results > 0

    def store(self, key: bytes, outputs: list[TokenOutput]) -> None:
        """Store all outputs of a request under its digest."""
        if not self.is_on:
            return
        self._forget(key)
        self._results[key] = _encoder.encode([rename_output(one, "") for one in outputs])
        self.num_bytes += len(self._results[key]) + OVERHEAD
        while len(self._results) > self._max_results or self.num_bytes > self._max_bytes:
            self._forget(next(iter(self._results)))

    def _forget(self, key: bytes) -> None:
        result = self._results.pop(key, None)
        if result is not None:
            self.num_bytes -= len(result) + OVERHEAD

    def recall(self, key: bytes, request_id: str) -> list[TokenOutput]:
        """Return the stored outputs under the id ``request_id``.

        Raises KeyError if there are none under ``key``.
        """
        self._results.move_to_end(key)
        return [rename_output(output, request_id) for output in _decoder.decode(self._results[key])]


def rename_output(output: TokenOutput, request_id: str) -> TokenOutput:
    """Return ``output`` under the request id of another reader.

    OutputStream.num_reused_tokens counts its prompt, so num_cached_tokens is 0. The times are those
    of the first reader.
    """
    return msgspec.structs.replace(output, request_id=request_id, num_cached_tokens=0, times=None)
