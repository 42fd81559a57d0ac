"""The contract of a backend, and of the vocabulary that belongs to it."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from cllm.core.batch import Batch

Logits = npt.NDArray[np.float32]


class ModelInfo(msgspec.Struct, frozen=True):
    """What is known of a loaded model.

    context_length: the most tokens one sequence may hold. num_cells: tokens the KV cache holds in all.
    can_trim: whether a sequence can give back some of its cells; recurrent state is kept or lost as a whole.
    kv_bytes_per_token (0 if unknown) and model_bytes are sizes in bytes.
    """

    name: str
    architecture: str
    description: str
    vocabulary_size: int
    context_length: int
    trained_context_length: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_cells: int
    layout: str
    end_tokens: list[int]
    can_trim: bool = True
    model_bytes: int = 0
    kv_bytes_per_token: int = 0
    system: str = ""


class Backend(Protocol):
    """Holds a model and its KV cells. One thread calls it.

    The caller guarantees: ``batch.num_tokens`` <= max_num_batched_tokens; every token id is in the vocabulary; every
    seq_id is below max_num_seqs; a row starts at the number of cells its seq_id holds after the batch's operations.
    """

    @property
    def info(self) -> ModelInfo: ...

    def forward(self, batch: Batch) -> Logits:
        """Carry out the operations, compute the rows.

        Returns logits of the sampling rows in the order of the batch, shape (num_samples, vocabulary_size), a view
        that holds until the next call and that the caller may write to. Raises EngineError if the backend fails;
        what the cells of the batch's sequences hold, and which operations were carried out, is then unknown.
        """
        ...

    def close(self) -> None:
        """Free everything; the object is dead afterwards."""
        ...


class Vocabulary(Protocol):
    """Text to token ids and token ids to bytes."""

    @property
    def size(self) -> int: ...

    @property
    def pieces(self) -> list[bytes]:
        """The bytes each token id adds to the text; control tokens add none."""
        ...

    @property
    def control_tokens(self) -> list[str]:
        """The texts that become one control token when special tokens are parsed, longest first."""
        ...

    @property
    def chat_template(self) -> str | None: ...

    @property
    def special_texts(self) -> dict[str, Any]:
        """The names templates use: ``bos_token``, ``eos_token``."""
        ...

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """``add_special``: the model's begin and end tokens; ``parse_special``: control tokens written in the text."""
        ...
