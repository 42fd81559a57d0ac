"""The contract of a backend and its vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from cllm.core.batch import Batch, Chunk
from cllm.core.model_info import ModelInfo

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

    def install_snapshot(self, key: int, filled: StateBuffer) -> None:
        """Store the content of a filled blank as the snapshot ``key``."""
        ...

    def close(self) -> None:
        """Free everything. The object must not be used afterwards."""
        ...


class Vocabulary(Protocol):
    """Converts text to token ids, and token ids to bytes."""

    @property
    def size(self) -> int: ...

    @property
    def pieces(self) -> list[bytes]:
        """The bytes that each token id adds to the text; control tokens add none."""
        ...

    @property
    def control_tokens(self) -> list[str]:
        """The texts that become one control token when special tokens are parsed, longest first."""
        ...

    @property
    def infill_tokens(self) -> tuple[int, int, int] | None:
        """The tokens that mark the prefix, the suffix and the middle to be written; None if the
        model has none.
        """
        ...

    @property
    def repository_tokens(self) -> tuple[int, int] | None:
        """The tokens before the name of a repository and before each of its files; None if the
        model has none.
        """
        ...

    @property
    def special_tokens(self) -> dict[int, str]:
        """The names of tokens that mean more than their text, by id.

        A grammar allows them only by name.
        """
        ...

    @property
    def chat_template(self) -> str | None: ...

    @property
    def special_texts(self) -> dict[str, Any]:
        """The variables that templates use: ``bos_token``, ``eos_token``."""
        ...

    @property
    def rerank_template(self) -> str | None:
        """The template of a reranker's input, with {query} and {document}; None if it uses
        ``pair_tokens`` instead.
        """
        ...

    @property
    def pair_tokens(self) -> tuple[list[int], list[int], list[int]]:
        """The tokens before, between and after the two texts of a pair."""
        ...

    def text_of(self, token: int) -> bytes:
        """Return the bytes of a token id of the vocabulary; for a control token, its name."""
        ...

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Return the token ids of ``text``.

        ``add_special`` adds the model's begin and end tokens. ``parse_special`` recognizes control
        tokens in the text.
        """
        ...

    def grammar_tokenizer(self, end_tokens: list[int]) -> LLTokenizer:
        """Return the tokenizer for compiling grammars; this takes up to a second.

        Any of ``end_tokens`` ends a text.
        """
        ...
