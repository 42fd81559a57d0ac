"""A second context over the same weights, which computes vectors instead of logits.

It is opened for the first text and has cells for the longest text so far. It computes token
vectors, and the engine pools them, because llama.cpp pools within one call, and a long text takes
several calls. If attention is not causal, or the model ranks, a text must be in one call. Then
llama.cpp's own limits apply: an ``n_ubatch`` smaller than the text would abort the process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from llama_cpp import llama_cpp as lib

from cllm.backends.base import Vectors
from cllm.backends.llama_cpp.arrays import BatchArrays
from cllm.backends.llama_cpp.library import last_error
from cllm.backends.llama_cpp.threads import Threads
from cllm.core.batch import MAX_CHUNKS, Chunk
from cllm.errors import EngineError

POOLINGS = {
    lib.LLAMA_POOLING_TYPE_MEAN: "mean",
    lib.LLAMA_POOLING_TYPE_CLS: "cls",
    lib.LLAMA_POOLING_TYPE_LAST: "last",
    lib.LLAMA_POOLING_TYPE_RANK: "rank",
}
LOGITS_BYTES = 64 << 20  # limit for the logits, which llama.cpp computes for every token, too
LARGEST_LOGITS_BYTES = 2 << 30  # the same if a text must be in one call
LEAST_BATCH_TOKENS, LARGEST_BATCH_TOKENS = 64, 512  # tokens of one call
LEAST_CELLS = 512
PADDING = 256  # llama.cpp rounds the number of cells up to a multiple of this


class EmbeddingFacts(NamedTuple):
    """See the fields of ModelInfo; max_tokens is the longest text that llama.cpp's buffers
    allow.
    """

    size: int
    pooling: str
    max_batch_tokens: int
    whole: bool
    max_tokens: int


def read_embedding_facts(model: Any, context: Any, vocabulary_size: int) -> EmbeddingFacts:
    """Return the facts about embeddings of ``model``; ``context`` is any context of it."""
    pooling = POOLINGS.get(lib.llama_pooling_type(context), "mean")
    whole = pooling == "rank" or not lib.llama_get_causal_attn(context)
    size = 1 if pooling == "rank" else int(lib.llama_model_n_embd_out(model))
    max_batch_tokens = max(
        LEAST_BATCH_TOKENS,
        min(
            LARGEST_BATCH_TOKENS,
            LOGITS_BYTES // (4 * vocabulary_size) // LEAST_BATCH_TOKENS * LEAST_BATCH_TOKENS,
        ),
    )
    max_tokens = LARGEST_LOGITS_BYTES // (4 * vocabulary_size) if whole else 1 << 31
    return EmbeddingFacts(size, pooling, max_batch_tokens, whole, max_tokens)


class Embedder:
    """Implements Backend.embed."""

    def __init__(
        self,
        model: Any,
        facts: EmbeddingFacts,
        max_tokens: int,
        threads: Threads,
        scale_positions: Callable[[Any], None],
    ) -> None:
        """A text has at most ``max_tokens``. ``scale_positions`` sets the parameters of a context.
        Nothing is allocated yet.
        """
        self._model = model
        self._facts = facts
        self._max_tokens = max_tokens
        self._threads = threads
        self._scale_positions = scale_positions
        self._context: Any = None
        self._room = 0  # length of the longest text for which there are cells
        self._going = (-1, 0, 0)  # the unfinished text: its seq_id, tokens computed, and length

    def embed(self, chunks: list[Chunk]) -> Vectors:
        """Raises EngineError if llama_decode fails."""
        going, self._going = self._going, (-1, 0, 0)
        self._check(chunks, going)
        if max(chunk.length for chunk in chunks) > self._room:
            self._open(max(chunk.length for chunk in chunks))
        seq_ids = self._fill(chunks, going[0])
        code = self._threads.decode(self._context, self._arrays.batch)
        if code != 0:
            raise EngineError(f"llama_decode returned {code}: {last_error('no reason given')}")
        rows = self._read(chunks, seq_ids)
        last = chunks[-1]
        done = last.start + len(last.tokens)
        if done < last.length:
            self._going = seq_ids[-1], done, last.length
        return rows

    def _check(self, chunks: list[Chunk], going: tuple[int, int, int]) -> None:
        """Raise EngineError for chunks that would abort the process or mix up texts."""
        num_tokens = sum(len(chunk.tokens) for chunk in chunks)
        single = len(chunks) == 1 and self._facts.whole
        if not 0 < len(chunks) <= MAX_CHUNKS or (
            num_tokens > self._facts.max_batch_tokens and not single
        ):
            raise EngineError(f"a batch of {num_tokens} tokens in {len(chunks)} chunks")
        size = int(lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model)))
        for i, (tokens, start, length) in enumerate(chunks):
            end = start + len(tokens)
            if not tokens or min(tokens) < 0 or max(tokens) >= size:
                raise EngineError("a token outside the vocabulary, or no token")
            if (start, length) != (going[1:] if start and i == 0 else (0, length)):
                raise EngineError(f"a chunk from {start} of {length} after {going[1:]}")
            if (
                end > length
                or length > self._max_tokens
                or (end < length and (i + 1 < len(chunks) or single))
            ):
                raise EngineError(f"a chunk from {start} to {end} of {length}")
            if length > max(self._room, chunks[0].length):
                raise EngineError(
                    f"a text of {length} tokens, longer than all before it, must be the first of a "
                    "batch"
                )

    def _open(self, length: int) -> None:
        """Replace the context with one for texts of ``length`` tokens, rounded up."""
        self.close()
        facts = self._facts
        room = min(max(LEAST_CELLS, 1 << (length - 1).bit_length()), max(self._max_tokens, length))
        num_tokens = max(room, facts.max_batch_tokens) if facts.whole else facts.max_batch_tokens
        c_params = lib.llama_context_default_params()
        c_params.n_ctx = -(-(room + num_tokens) // PADDING) * PADDING
        c_params.n_batch = c_params.n_ubatch = num_tokens
        c_params.n_seq_max = MAX_CHUNKS
        self._threads.set(c_params)
        self._scale_positions(c_params)
        c_params.embeddings = True
        rank = lib.LLAMA_POOLING_TYPE_RANK
        c_params.pooling_type = rank if facts.pooling == "rank" else lib.LLAMA_POOLING_TYPE_NONE
        c_params.kv_unified = True
        c_params.no_perf = True
        self._context = lib.llama_init_from_model(self._model, c_params) or None
        if self._context is None:
            raise EngineError(
                f"cannot create a context for texts of {room} tokens: "
                f"{last_error('no reason given')}"
            )
        self._threads.keep("embeddings", self._context)
        self._room = room
        self._memory = lib.llama_get_memory(self._context)
        self._arrays = BatchArrays(num_tokens, MAX_CHUNKS)
        self._arrays.wants_logits[:] = 1

    def _fill(self, chunks: list[Chunk], going: int) -> list[int]:
        """Release all cells except those of the text that is continued, write the batch, and return
        the chunks' seq_ids.
        """
        goes_on = chunks[0].start > 0
        if self._memory:
            for seq_id in range(MAX_CHUNKS):
                if not (goes_on and seq_id == going):
                    lib.llama_memory_seq_rm(self._memory, seq_id, -1, -1)
        free = [seq_id for seq_id in range(MAX_CHUNKS) if not (goes_on and seq_id == going)]
        seq_ids = ([going] if goes_on else []) + free
        arrays, at = self._arrays, 0
        for (tokens, start, _), seq_id in zip(chunks, seq_ids, strict=False):
            end = at + len(tokens)
            arrays.token[at:end] = tokens
            arrays.position[at:end] = range(start, start + len(tokens))
            arrays.seq_id_pointers[at:end] = arrays.ids_address + 4 * seq_id
            at = end
        arrays.batch.n_tokens = at
        return seq_ids[: len(chunks)]

    def _read(self, chunks: list[Chunk], seq_ids: list[int]) -> Vectors:
        result = np.empty((len(chunks), self._facts.size), np.float32)
        if self._facts.pooling == "rank":
            for i, seq_id in enumerate(seq_ids):
                result[i, 0] = not_null(lib.llama_get_embeddings_seq(self._context, seq_id))[0]
            return result
        pointer = not_null(lib.llama_get_embeddings(self._context))
        rows = np.ctypeslib.as_array(pointer, (self._arrays.batch.n_tokens, self._facts.size))
        at = 0
        for i, chunk in enumerate(chunks):
            of_text = rows[at : at + len(chunk.tokens)]
            at += len(chunk.tokens)
            result[i] = {"mean": of_text.sum(axis=0), "cls": of_text[0]}.get(
                self._facts.pooling, of_text[-1]
            )
        return result

    def close(self) -> None:
        """Free the context. The embedder may be used again."""
        context, self._context, self._room = self._context, None, 0
        self._threads.forget("embeddings")
        if context is not None:
            lib.llama_free(context)


def not_null(pointer: Any) -> Any:
    """Return ``pointer``. Raises EngineError if it is null."""
    if not pointer:
        raise EngineError("llama.cpp returned no embeddings")
    return pointer
