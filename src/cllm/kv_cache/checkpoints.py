"""Saved states of hybrids, at positions where other prompts are expected to continue.

The memory of a hybrid has two parts: keys and values of each token, which can be cut anywhere, and
recurrent states, which cannot. A checkpoint has only the latter, so it is small, and it can be used
while a seq_id or a snapshot has the keys and values of the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cllm.core.batch import Drop, Load, Operation, Save
from cllm.kv_cache.radix_tree import RadixTree, Tokens, common_prefix
from cllm.kv_cache.snapshots import MIN_SAVED_TOKENS


class Checkpoint:
    """The state after ``tokens``. The one with the lowest ``priority`` is evicted first."""

    __slots__ = ("key", "num_uses", "priority", "salt", "tokens")

    def __init__(self, key: int, tokens: Tokens, salt: str) -> None:
        self.key = key
        self.tokens = tokens
        self.salt = salt
        self.num_uses = 0
        self.priority = 0

    @property
    def num_computed(self) -> int:
        return len(self.tokens)

    def load(self, seq_id: int) -> Load:
        """Return the operation that trims ``seq_id``, which has the tokens, to them."""
        return Load(self.key, seq_id, len(self.tokens), is_checkpoint=True)

    def __repr__(self) -> str:
        return f"<Checkpoint {self.key} {len(self.tokens)} tokens>"


class Checkpoints:
    """All checkpoints, and their paths in the prefix tree.

    Those are kept that save the most tokens and are used the most, and of these the latest ones:
    GreedyDual-Size with Frequency (Cherkasova 1998), with equal sizes.
    """

    def __init__(self, max_bytes: int = 0, bytes_each: int = 0) -> None:
        """``bytes_each`` is 0 if the model's states are not saved apart."""
        self._max_num = max_bytes // bytes_each if bytes_each else 0
        self._bytes_each = bytes_each
        self._by_key: dict[int, Checkpoint] = {}
        self._clock = 0  # the priority of the last one that was evicted
        # the prompts that continued after an answer, minus those that went back to the checkpoint
        # before it
        self._num_continued = 0
        self._tree: RadixTree[Any] = RadixTree()

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def num_bytes(self) -> int:
        return len(self) * self._bytes_each

    def enter(self, tree: RadixTree[Any]) -> None:
        """Add all checkpoints to ``tree``, and from now on keep them there."""
        self._tree = tree
        for checkpoint in self._by_key.values():
            tree.insert(checkpoint.tokens, checkpoint, checkpoint.salt)

    def can_hold(self, num_tokens: int) -> bool:
        """Return whether a checkpoint after ``num_tokens`` is worth its memory."""
        return self._max_num > 0 and num_tokens >= MIN_SAVED_TOKENS

    def add(self, key: int, tokens: Tokens, salt: str, seq_id: int) -> list[Operation]:
        """Return operations that save the state of ``seq_id``, which has ``tokens``, under ``key``;
        [] if there is such a checkpoint.
        """
        if (same := self.find(tokens, salt)) is not None:
            self.note_use(same)
            return []
        operations: list[Operation] = []
        if len(self) == self._max_num:
            least = min(self._by_key.values(), key=lambda checkpoint: checkpoint.priority)
            self._clock = least.priority
            operations += self.drop(least.key)
        checkpoint = self._by_key[key] = Checkpoint(key, tokens, salt)
        self._tree.insert(tokens, checkpoint, salt)
        self.note_use(checkpoint)
        return [*operations, Save(seq_id, key, is_checkpoint=True)]

    def find(self, tokens: Tokens, salt: str) -> Checkpoint | None:
        """Return the checkpoint after exactly ``tokens``."""
        for owner, shared in self._tree.match(tokens, salt) if self._by_key else ():
            if shared < len(tokens):
                break
            if isinstance(owner, Checkpoint) and len(owner.tokens) == shared:
                return owner
        return None

    def find_last(self, tokens: Tokens, salt: str) -> Checkpoint | None:
        """Return the last checkpoint within ``tokens``."""
        for owner, shared in self._tree.match(tokens, salt) if self._by_key else ():
            if isinstance(owner, Checkpoint) and len(owner.tokens) == shared:
                return owner
        return None

    def note_prompt(self, prompt: Tokens, count: int, path: Tokens, salt: str) -> None:
        """Learn where prompts continue, from one that reuses ``count`` tokens of an idle prefix."""
        last = self.find_last(path, salt)
        if last is not None and last.num_computed <= min(count, len(path) - 1):
            continues = common_prefix(path, prompt) == len(path)
            self._num_continued += 1 if continues else -1

    def find_return(self, tokens: Tokens, salt: str) -> Checkpoint | None:
        """Return the last checkpoint within ``tokens`` if most prompts go back to such ones."""
        return self.find_last(tokens, salt) if self._num_continued <= 0 else None

    def has_later(self, tokens: Tokens, num_tokens: int, salt: str) -> bool:
        """Return whether there is a checkpoint within ``tokens`` and after ``num_tokens``."""
        last = self.find_last(tokens, salt)
        return last is not None and last.num_computed > num_tokens

    def note_use(self, checkpoint: Checkpoint) -> None:
        checkpoint.num_uses += 1
        checkpoint.priority = self._clock + checkpoint.num_uses * len(checkpoint.tokens)

    def drop(self, key: int) -> list[Operation]:
        """Forget a checkpoint, if there is one with this ``key``."""
        checkpoint = self._by_key.pop(key, None)
        if checkpoint is None:
            return []
        self._tree.remove(checkpoint)
        return [Drop(key)]

    def invalidate(self, operations: Iterable[Operation]) -> list[Operation]:
        """Forget the checkpoints that ``operations``, which may not have run, save or load; return
        operations that free their memory.
        """
        return [
            drop
            for operation in operations
            if isinstance(operation, (Save, Load)) and operation.is_checkpoint
            for drop in self.drop(operation.snapshot)
        ]

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        assert len(self) <= self._max_num, "more checkpoints than the budget allows"
        for key, checkpoint in self._by_key.items():
            assert checkpoint.key == key, repr(checkpoint)
            assert self.find(checkpoint.tokens, checkpoint.salt) is checkpoint, repr(checkpoint)
