"""Vectors of texts: what the decoder says of their tokens, in cells of their own."""

from __future__ import annotations

import numpy as np
import torch

from cllm.backends.base import Vectors
from cllm.backends.torch.cells import Cells
from cllm.backends.torch.decoder import Decoder
from cllm.backends.torch.step import make_step
from cllm.core.batch import MAX_CHUNKS, Chunk
from cllm.errors import EngineError

MAX_BATCH_TOKENS = 512


class Embedder:
    """Implements Backend.embed for decoders, whose texts may come in parts."""

    def __init__(self, decoder: Decoder, pooling: str, max_tokens: int) -> None:
        """A text has at most ``max_tokens``. Nothing is allocated yet."""
        self._decoder = decoder
        self.pooling, self.max_tokens = pooling, max_tokens
        self.max_batch_tokens = MAX_BATCH_TOKENS
        self._cells: Cells | None = None
        self._going = (-1, 0, 0)  # the unfinished text: its seq_id, tokens computed, and length

    def embed(self, chunks: list[Chunk]) -> Vectors:
        """Raises EngineError for chunks that break the contract."""
        going, self._going = self._going, (-1, 0, 0)
        self._check(chunks, going)
        cells = self._make_room(max(chunk.length for chunk in chunks), keeps=chunks[0].start > 0)
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
        hidden = self._decoder.compute(make_step(self._decoder, cells, rows), cells).float()
        result, at = [], 0
        for chunk in chunks:
            part = hidden[at : at + len(chunk.tokens)]
            at += len(chunk.tokens)
            match self.pooling:
                case "mean":
                    result.append(part.sum(dim=0))
                case "cls":
                    result.append(part[0])
                case _:
                    result.append(part[-1])
        last = chunks[-1]
        done = last.start + len(last.tokens)
        if done < last.length:
            self._going = seq_ids[-1], done, last.length
        return np.array(torch.stack(result).cpu().numpy())

    def _make_room(self, length: int, *, keeps: bool) -> Cells:
        """Return cells for a text of ``length`` tokens and a batch; new ones if it is the longest
        so far, unless they are to keep what they have.
        """
        a, needed = self._decoder.architecture, length + self.max_batch_tokens
        if self._cells is None or (self._cells.num_cells < needed and not keeps):
            shape = (len(a.layers), a.num_kv_heads, a.head_size)
            dtype, device = self._decoder.embeddings.dtype, self._decoder.device
            self._cells = Cells(shape, needed, MAX_CHUNKS + 1, dtype, device)
        return self._cells

    def _check(self, chunks: list[Chunk], going: tuple[int, int, int]) -> None:
        num_tokens = sum(len(chunk.tokens) for chunk in chunks)
        if not 0 < len(chunks) <= MAX_CHUNKS or num_tokens > self.max_batch_tokens:
            raise EngineError(f"a batch of {num_tokens} tokens in {len(chunks)} chunks")
        size = self._decoder.architecture.vocabulary_size
        for i, (tokens, start, length) in enumerate(chunks):
            end = start + len(tokens)
            if not tokens or min(tokens) < 0 or max(tokens) >= size:
                raise EngineError("a token outside the vocabulary, or no token")
            if (start, length) != (going[1:] if start and i == 0 else (0, length)):
                raise EngineError(f"a chunk from {start} of {length} after {going[1:]}")
            if end > length or length > self.max_tokens or (end < length and i + 1 < len(chunks)):
                raise EngineError(f"a chunk from {start} to {end} of {length}")
