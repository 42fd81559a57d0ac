"""The properties of a loaded model."""

from __future__ import annotations

import msgspec

# of the memory for the KV cache of a hybrid; the rest is for cells and the states of sequences
CHECKPOINT_SHARE = 0.1


class ModelInfo(msgspec.Struct, frozen=True):
    """The properties of a loaded model.

    A sequence has at most ``context_length`` tokens, and the KV cache ``num_cells``. With the
    ``layout`` "paged", sequences can share cells, and each has a stream of its own, whose memory is
    taken page by page. With "unified", all sequences share one pool and can share cells. With
    "partitioned", each has its own cells.

    A sequence can free any number of its last cells if ``max_taken_back`` is None. Otherwise (with
    recurrent state) its tokens are kept or lost as a whole. Only the next batch can free draft
    tokens of the last row, once, if there were at most ``max_taken_back``. If the layout is not
    unified, seq_ids are then consecutive from the first to the last row with draft tokens. If a
    recurrent state is saved without the keys and values of a hybrid, it takes ``checkpoint_bytes``;
    0 if that is not possible.

    ``num_spare_ids`` seq_ids from ``max_num_seqs`` on can keep tokens but not be computed.
    ``kv_bytes_per_token`` (0 if unknown) and ``model_bytes`` are sizes in bytes. A saved state of n
    tokens takes ``state_bytes + n * state_bytes_per_token``. The ``fingerprint`` is a hash of the
    file, and of everything else that its saved states depend on. If the model ``checks_states``,
    saved states that another machine has sent can do no harm. ``on_gpu`` says that the weights
    are on a GPU, and ``drafts`` that the model's own head drafts tokens. A step with one row, and
    few tokens before it, took ``row_seconds`` at load; 0 if unknown. ``attention`` names the
    instructions that cLLM's attention kernel uses; "" if it is not in use.

    A model that only embeds does not have ``generates``. An embedding has ``embedding_size``
    dimensions, 0 without embeddings. ``pooling`` says how token embeddings become one vector:
    "mean", "last", "cls" (the first), or "rank" (one number, the relevance of a document to a
    query, both in one text). A text has at most ``max_embedding_tokens``, and a call of ``embed``
    at most ``max_embedding_batch_tokens``. If ``embeds_whole``, texts must not be split, and a
    longer text is allowed if it is the only one in the call.
    """

    name: str
    architecture: str
    description: str
    vocabulary_size: int
    context_length: int
    trained_context_length: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_samples: int
    num_cells: int
    layout: str
    end_tokens: list[int]
    max_taken_back: int | None = None
    checkpoint_bytes: int = 0
    num_spare_ids: int = 0
    model_bytes: int = 0
    kv_bytes_per_token: int = 0
    state_bytes: int = 0
    state_bytes_per_token: int = 0
    checks_states: bool = False
    fingerprint: str = ""
    system: str = ""
    on_gpu: bool = False
    row_seconds: float = 0.0
    attention: str = ""
    drafts: bool = False
    generates: bool = True
    embedding_size: int = 0
    pooling: str = "mean"
    max_embedding_tokens: int = 0
    max_embedding_batch_tokens: int = 64
    embeds_whole: bool = False

    @property
    def needs_checkpoints(self) -> bool:
        """Whether a prefix can be reused only where its state was saved."""
        return self.max_taken_back is not None
