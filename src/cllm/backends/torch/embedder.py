"""Vectors of texts: what the decoder says of their tokens, in cells of their own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from cllm.backends.base import Vectors
from cllm.backends.torch.cells import Cells
from cllm.backends.torch.decoder import AnyDecoder
from cllm.backends.torch.step import make_step
from cllm.backends.torch.threads import Threads
from cllm.core.batch import MAX_CHUNKS, Chunk
from cllm.errors import EngineError

MAX_BATCH_TOKENS = 512
LEAST_ROOM = 512


class Embedder:
    """Implements Backend.embed for decoders, whose texts may come in parts."""

    def __init__(
        self, decoder: AnyDecoder, pooling: str, max_tokens: int, threads: Threads
    ) -> None:
        """A text has at most ``max_tokens``. ``pooling`` is used unless the model scores texts, by
        their last tokens. Nothing is allocated yet.
        """
        self._decoder = decoder
        self.pooling = "rank" if decoder.architecture.ranks else pooling
        self.max_tokens = max_tokens
        self._threads = threads
        self.max_batch_tokens = MAX_BATCH_TOKENS
        self._cells: Cells | None = None
        self._room = 0  # length of the longest text for which there are cells
        self._going = (-1, 0, 0)  # the unfinished text: its seq_id, tokens computed, and length

    def embed(self, chunks: list[Chunk]) -> Vectors:
        """Raises EngineError for chunks that break the contract."""
        going, self._going = self._going, (-1, 0, 0)
        self._check(chunks, going)
        cells = self._make_room(chunks[0].length)
        continues = chunks[0].start > 0
        free = iter(seq_id for seq_id in range(MAX_CHUNKS + 1) if seq_id != going[0])
        seq_ids = [going[0] if continues and i == 0 else next(free) for i in range(len(chunks))]
        for seq_id in range(MAX_CHUNKS + 1):
            if not (continues and seq_id == going[0]):
                cells.trim(seq_id, 0)
        rows = [
            (seq_id, chunk.start, chunk.tokens)
            for seq_id, chunk in zip(seq_ids, chunks, strict=True)
        ]
        step = make_step(self._decoder, cells, rows)
        hidden = self._threads.run(self._decoder.compute, step, cells)
        if self._decoder.score is not None:
            hidden = self._decoder.score(hidden)
        last = chunks[-1]
        done = last.start + len(last.tokens)
        if done < last.length:
            self._going = seq_ids[-1], done, last.length
        return pool(hidden, [len(chunk.tokens) for chunk in chunks], self.pooling)

    def _make_room(self, length: int) -> Cells:
        """Return cells for a text of ``length`` tokens beside a batch; new ones if no text was as
        long before. Then no text continues, see Backend.embed.
        """
        if self._cells is None or length > self._room:
            a = self._decoder.architecture
            self._room = min(max(LEAST_ROOM, 1 << (length - 1).bit_length()), self.max_tokens)
            shape = (len(a.layers), a.num_kv_heads, a.head_size)
            dtype, device = self._decoder.embeddings.dtype, self._decoder.device
            num_cells = self._room + self.max_batch_tokens
            self._cells = None  # its memory may be needed
            self._cells = Cells(shape, num_cells, MAX_CHUNKS + 1, dtype, device)
        return self._cells

    def _check(self, chunks: list[Chunk], going: tuple[int, int, int]) -> None:
        num_tokens = sum(len(chunk.tokens) for chunk in chunks)
        if not 0 < len(chunks) <= MAX_CHUNKS or num_tokens > self.max_batch_tokens:
            raise EngineError(f"a batch of {num_tokens} tokens in {len(chunks)} chunks")
        size = self._decoder.architecture.vocabulary_size
        for i, (tokens, start, length) in enumerate(chunks):
            end = start + len(tokens)
            check_tokens(tokens, size)
            if (start, length) != (going[1:] if start and i == 0 else (0, length)):
                raise EngineError(f"a chunk from {start} of {length} after {going[1:]}")
            if end > length or length > self.max_tokens or (end < length and i + 1 < len(chunks)):
                raise EngineError(f"a chunk from {start} to {end} of {length}")
            if length > max(self._room, chunks[0].length):
                raise EngineError(f"a text of {length}, the longest so far, is not the first")


def check_tokens(tokens: list[int], vocabulary_size: int) -> None:
    """Raise EngineError for a text that is empty or has unknown tokens."""
    if not tokens or min(tokens) < 0 or max(tokens) >= vocabulary_size:
        raise EngineError("a token outside the vocabulary, or no token")


def pool(hidden: Tensor, sizes: Sequence[int], pooling: str) -> Vectors:
    """Return a vector for each text; ``hidden`` has those of the tokens of all texts, whose lengths
    are ``sizes``.
    """
    parts = hidden.float().split(list(sizes))
    match pooling:
        case "mean":
            vectors = [part.sum(dim=0) for part in parts]
        case "cls":
            vectors = [part[0] for part in parts]
        case _:
            vectors = [part[-1] for part in parts]
    return np.array(torch.stack(vectors).cpu().numpy())
