"""The tokens that a seq_id has in its cells."""

from __future__ import annotations

from cllm.core.sequence import Sequence
from cllm.kv_cache.cell_counts import Chain
from cllm.kv_cache.radix_tree import Tokens


class Holding:
    """Tokens in the cells of a seq_id.

    ``seq`` is the running sequence they belong to, or None while they are idle.

    ``path`` has the tokens in the tree. These are all tokens if idle, else the shareable tokens
    that the sequence had when it was admitted, some of which may not be computed yet.
    """

    __slots__ = ("chain", "path", "salt", "saved", "seq", "seq_id", "whole_path")

    def __init__(self, seq_id: int, chain: Chain, path: Tokens, seq: Sequence) -> None:
        self.seq_id = seq_id
        self.chain = chain
        self.path = path
        self.seq: Sequence | None = seq
        self.salt = seq.request.cache_salt
        # set by save_one_idle, so that it saves a prefix only once, even if the copy is evicted
        self.saved = False
        # the tokens before an idle prefix was cut at its last checkpoint
        self.whole_path: Tokens | None = None

    @property
    def num_computed(self) -> int:
        return self.chain.length if self.seq is None else self.seq.num_computed_tokens

    @property
    def last_path(self) -> Tokens | None:
        """The tokens of an idle prefix, before it was cut at its last checkpoint."""
        if self.seq is not None:
            return None
        return self.path if self.whole_path is None else self.whole_path

    @property
    def is_final(self) -> bool:
        return self.seq is None

    def __repr__(self) -> str:
        return f"<Holding {self.seq_id} {self.chain.length}{'' if self.seq is None else ' leased'}>"
