"""The contract of a backend and its vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from cllm.core.batch import Batch, Chunk
from cllm.core.drafter import Drafter
from cllm.core.model_info import ModelInfo
from cllm.core.segments import Tokenizer
from cllm.core.vocabulary import VocabularyFacts

if TYPE_CHECKING:  # importing it takes 0.1 s
    from llguidance import LLTokenizer

Logits = npt.NDArray[np.float32] | list[npt.NDArray[np.float32]]
Vectors = npt.NDArray[np.float32]


class StateBuffer(NamedTuple):
    """Memory for a snapshot. The caller fills ``data``; ``state`` is private to the backend."""

    data: memoryview
    state: Any


class Backend(Protocol):
    """Holds a model and its KV cells. One thread calls it.

    The caller guarantees that ``batch.num_tokens`` <= max_num_batched_tokens and
    ``batch.num_samples`` <= max_num_samples. Every token id is in the vocabulary. The seq_id of a
    row is below max_num_seqs, that of an operation below max_num_seqs + num_spare_ids. A row starts
    at the number of cells that its seq_id has after the batch's operations. For a Load, there are
    free cells for the whole snapshot, although it keeps only num_tokens.
    """

    @property
    def info(self) -> ModelInfo: ...

    @property
    def drafter(self) -> Drafter | None:
        """Predicts tokens with the model's own head, of sequences that ``forward`` has computed;
        None if it has no head, or if that cannot or shall not be used.
        """
        ...

    @property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary of the loaded model; other threads may read it."""
        ...

    def forward(self, batch: Batch) -> Logits:
        """Carry out the operations, then compute the rows.

        Returns the logits of the sampled positions in batch order: num_samples rows of
        vocabulary_size, which are valid until the next call and which the caller may modify.
        Raises EngineError if the backend fails. It is then unknown which operations were carried
        out, and what the seq_ids of the batch contain.
        """
        ...

    def share_cores(self, num_engines: int) -> None:
        """Use only one in ``num_engines`` of the cores from now on, because others are busy too."""
        ...

    def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter, so that batches can name it, in place of one with the same name.

        Raises StartupError for a file that is not an adapter of this model; a damaged one may abort
        the process.
        """
        ...

    def embed(self, chunks: list[Chunk]) -> Vectors:
        """Return a vector for each chunk, shape (len(chunks), embedding_size), float32, owned by
        the caller.

        By ``info.pooling`` it is the sum of the chunk's token vectors (mean), the last (last) or
        first (cls) of them, or the score (rank). The call does not affect what ``forward``
        computes.

        The caller keeps the limits of ModelInfo and MAX_CHUNKS. A text longer than all texts before
        it is the first in its call. All chunks but the last end their texts, and all but the first
        begin theirs. If the first chunk does not begin a text, it continues the last chunk of the
        previous call. Raises EngineError; after that, no text can be continued.
        """
        ...

    def snapshot(self, key: int) -> memoryview:
        """Return the bytes that Save stored under ``key``; they never change.

        Raises KeyError if there are none.
        """
        ...

    def new_state_buffer(self, num_bytes: int) -> StateBuffer:
        """Return memory for bytes that ``snapshot`` returned, maybe in another process with the
        same fingerprint.
        """
        ...

    def install_snapshot(self, key: int, filled: StateBuffer, num_tokens: int) -> None:
        """Store the content of a filled buffer, a state of ``num_tokens``, as the snapshot ``key``.

        With ``info.checks_states``, raises EngineError if it is not such a state of this model.
        Otherwise ``forward`` does, when it loads the state.
        """
        ...

    def close(self) -> None:
        """Free everything. The object must not be used afterwards."""
        ...


class Vocabulary(VocabularyFacts, Tokenizer, Protocol):
    """Converts text to token ids, and token ids to bytes. Several threads may call it."""

    @property
    def end_tokens(self) -> list[int]:
        """The tokens that end an answer, in order."""
        ...

    def grammar_tokenizer(self, end_tokens: list[int]) -> LLTokenizer:
        """Return the tokenizer for compiling grammars; this takes up to a second.

        Any of ``end_tokens`` ends a text.
        """
        ...
