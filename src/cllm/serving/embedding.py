"""Embeds texts, and scores documents for a query, for all dialects."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from cllm.core.request import EmbeddingRequest
from cllm.core.segments import Segment
from cllm.errors import BadRequest
from cllm.observe.request_record import RequestRecord
from cllm.process.embeddings import Waiter
from cllm.serving.answer import RequestTimeout, SchedulingOptions, list_limits
from cllm.serving.service import Service
from cllm.text.output_reader import Usage
from cllm.text.pairs import PairFormat, name_texts, read_scores

if TYPE_CHECKING:  # most servers compute no embeddings; NumPy takes 10 MB and 0.2 s
    import numpy as np
    import numpy.typing as npt

    Vectors = npt.NDArray[np.float32]

MAX_TOKENS = 300_000  # of one request, as in OpenAI's API

_numpy: Any = None


@dataclass(frozen=True, slots=True)
class Embedding:
    """The ``vectors`` of some texts, which have ``num_tokens`` tokens together.

    The shape is (number of texts, embedding_size), and each vector has the length 1.
    """

    vectors: Vectors
    num_tokens: int


def shorten(vectors: Vectors, dimensions: int | None) -> Vectors:
    """Return the first ``dimensions`` of each vector, normalized to length 1 again."""
    if dimensions is None or dimensions == vectors.shape[1]:
        return vectors
    import numpy as np

    cut = vectors[:, :dimensions]
    norms = np.linalg.norm(cut, axis=1, keepdims=True)
    return (cut / np.where(norms > 0, norms, 1)).astype(np.float32)


async def encode_texts(
    service: Service,
    texts: Sequence[str | list[int]],
    params: Iterable[str],
    scheduling: SchedulingOptions | None = None,
    *,
    truncate: bool = False,
) -> list[list[int]]:
    """Return the tokens of each text, with the model's begin and end tokens.

    Control tokens in texts are not parsed.

    Token ids are used as they are. Errors call the texts ``params``. With ``truncate``, texts are
    cut to the limit; without it, BadRequest is raised for a text whose number of characters alone
    shows that it is too long.
    """
    limit, longest = service.info.max_embedding_tokens, service.vocabulary.longest_piece
    for text, param in zip(texts, params, strict=True):
        if isinstance(text, str) and len(text) > limit * longest and not truncate:
            raise too_long(param, len(text) // longest, limit, at_least=True)

    segments = (
        [Segment(text[: limit * longest], add_special=True)]
        for text in texts
        if isinstance(text, str)
    )
    tokenized = iter(await service.tokenize(*segments, scheduling=scheduling))
    encoded = [next(tokenized) if isinstance(text, str) else text for text in texts]
    return [tokens[:limit] for tokens in encoded] if truncate else encoded


async def embed(
    service: Service, texts: list[list[int]], params: Iterable[str], scheduling: SchedulingOptions
) -> Embedding:
    """Return the vectors of ``texts`` (token ids), computed alongside generation.

    Raises BadRequest for a text that can never be computed, naming it by its entry in ``params``,
    and for a model without embeddings. Also raises QueueFull, EngineError and RequestTimeout. If
    the call is cancelled, the engine aborts the request.
    """
    if service.adapter_use.adapters:
        raise unfit("has an adapter, with which no embeddings are computed")
    if service.info.pooling == "rank":
        raise unfit("ranks documents (/v1/rerank); it does not compute embeddings")
    rows, num_tokens = await compute(service, texts, params, scheduling)
    return Embedding(rows, num_tokens)


@dataclass(frozen=True, slots=True)
class Ranking:
    """How well documents fit a query.

    ``scores`` has a number for each document, in order; higher is better. ``by_model`` says that a
    reranker computed them; otherwise they are the cosines of the vectors. All texts together have
    ``num_tokens`` input tokens.
    """

    scores: list[float]
    by_model: bool
    num_tokens: int


async def rank(
    service: Service,
    query: str,
    documents: list[str],
    scheduling: SchedulingOptions,
    param: str = "documents",
) -> Ranking:
    """Score each document for ``query``.

    Raises what ``embed`` raises, naming the query or an entry of ``param``.
    """
    params = name_texts(param, len(documents))
    is_reranker = service.info.pooling == "rank"
    if is_reranker:
        texts = await encode_pairs(service, query, documents, params, scheduling)
    else:
        params = ["query", *params]
        texts = await encode_texts(service, [query, *documents], params, scheduling)
    rows, num_tokens = await compute(service, texts, params, scheduling)
    return Ranking(read_scores(rows, service.info), is_reranker, num_tokens)


async def encode_pairs(
    service: Service,
    query: str,
    documents: list[str],
    params: list[str],
    scheduling: SchedulingOptions | None = None,
) -> list[list[int]]:
    """Return the tokens of each document with the query, in the form on which the model was
    trained.

    Raises BadRequest.
    """
    [asked] = await encode_texts(service, [query], ["query"], scheduling)
    check(service, [asked], ["query"])
    if len(asked) * len(documents) > MAX_TOKENS:  # the query is repeated for each document
        raise too_many(params[0].partition("[")[0], len(asked) * len(documents))
    limit, longest = service.info.max_embedding_tokens, service.vocabulary.longest_piece
    for document, param in zip(documents, params, strict=True):
        if len(document) > limit * longest:
            raise too_long(param, len(document) // longest, limit, at_least=True)

    form = PairFormat(service.vocabulary, service.texts.fences)
    split = form.split(query, documents)
    return form.join(await service.tokenize(*split, scheduling=scheduling))


async def compute(
    service: Service, texts: list[list[int]], params: Iterable[str], scheduling: SchedulingOptions
) -> tuple[Vectors, int]:
    """Return the model's vector or score for each text, and the number of tokens.

    Raises what ``embed`` raises.
    """
    check(service, texts, list(params))
    np = await load_numpy()
    if not texts:
        with service.admission():
            service.engine.check_available()
            return np.zeros((0, service.info.embedding_size), np.float32), 0
    name = f"embd-{secrets.token_hex(12)}"
    request = EmbeddingRequest(name, texts, scheduling.account.name, scheduling.priority)
    num_tokens = sum(map(len, texts))
    begun, outcome = time.monotonic(), "abort"
    account, charge = scheduling.account, None
    with service.admission():
        if account.has_key:
            counts = Usage(prompt_tokens=num_tokens)
            charge = service.ledger.admit(account, num_tokens, 0, counts, service.model_name)
        try:
            waiter = service.engine.embed(request)
        except BaseException:
            if charge is not None:
                charge.settle(failed=True)
            raise
    if charge is not None:
        charge.end = waiter.fail
    service.metrics.count_embedding_request(len(texts), num_tokens)
    record = scheduling.record or RequestRecord()
    record.submitted, record.prompt_tokens = begun, num_tokens
    record.account, record.priority = account.name, scheduling.priority.name.lower()
    record.model = service.model_name
    try:
        vectors = await wait(waiter, scheduling, service.request_timeout)
        outcome = "finished"
    except Exception as error:
        outcome = "timeout" if isinstance(error, RequestTimeout) else "error"
        raise
    finally:
        service.engine.forget(waiter)
        if charge is not None:
            charge.settle(finished=outcome == "finished", failed=outcome == "error")
        record.outcome = outcome
        service.metrics.observe_request(record)
    return np.frombuffer(b"".join(vectors), "<f4").reshape(len(texts), -1), num_tokens


async def load_numpy() -> Any:
    """Return the NumPy module. The first call imports it in another thread."""
    global _numpy  # noqa: PLW0603  # not sys.modules, where it is while a thread still imports it
    if _numpy is None:
        _numpy = await asyncio.to_thread(import_module, "numpy")
    return _numpy


def check(service: Service, texts: list[list[int]], params: list[str]) -> None:
    """Raise BadRequest for texts that can never be computed."""
    info = service.info
    if not info.embedding_size:
        raise unfit("does not compute embeddings")
    if (num_tokens := sum(map(len, texts))) > MAX_TOKENS:
        raise too_many(params[0].partition("[")[0], num_tokens)
    for tokens, param in zip(texts, params, strict=True):
        if not tokens:
            raise BadRequest(
                f"Invalid '{param}': the text is empty.", param=param, code="invalid_value"
            )
        if min(tokens) < 0 or max(tokens) >= info.vocabulary_size:
            message = (
                f"Invalid '{param}': token ids must be between 0 and {info.vocabulary_size - 1}."
            )
            raise BadRequest(message, param=param, code="invalid_value")
        if len(tokens) > info.max_embedding_tokens:
            raise too_long(param, len(tokens), info.max_embedding_tokens)


async def wait(
    waiter: Waiter, scheduling: SchedulingOptions, request_timeout: float | None
) -> list[bytes]:
    """Return all vectors of a request.

    Raises RequestTimeout for the limit that expires first, and EngineError.
    """
    limits = list_limits(request_timeout, scheduling)
    for limit in sorted(limits, key=attrgetter("at")):
        awaited: set[asyncio.Future[Any]] = {waiter.done}
        if limit.is_for_start:
            awaited.add(waiter.started)
        seconds = max(0.0, limit.at - time.monotonic())
        done, _ = await asyncio.wait(awaited, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            raise limit.error
        if waiter.done in done:
            break
    return await waiter.done


def too_long(param: str, num_tokens: int, limit: int, *, at_least: bool = False) -> BadRequest:
    return BadRequest(
        f"Invalid '{param}': this model embeds texts of up to {limit} tokens, "
        f"but this one has {'at least ' if at_least else ''}{num_tokens} tokens.",
        param=param,
        code="context_length_exceeded",
    )


def too_many(param: str, num_tokens: int) -> BadRequest:
    message = (
        f"Invalid '{param}': the texts have {num_tokens} tokens together, {MAX_TOKENS} are allowed."
    )
    return BadRequest(message, param=param, code="max_tokens_per_request")


def unfit(what: str) -> BadRequest:
    return BadRequest(f"The model {what}.", param="model", code="unsupported_model")
