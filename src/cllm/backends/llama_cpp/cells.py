"""The cells of a context: carries out the operations of a batch on them, and keeps snapshots."""

from __future__ import annotations

from collections.abc import Sequence as Run
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as lib

from cllm.backends.base import StateBuffer
from cllm.backends.llama_cpp.fit import Fit, pad_context
from cllm.backends.llama_cpp.paged_memory import NotPaged, PagedMemory
from cllm.backends.llama_cpp.states import Bytes, PagedStates, States
from cllm.core.batch import Copy, Drop, Load, Operation, Save, Swap, Trim
from cllm.errors import EngineError

NOTHING = np.zeros(0, np.uint8)
# libllama's limit; in the unified layout, ids from n_seq_max on can hold tokens, too
MAX_SEQ_IDS = 256
SCRATCH_ID = MAX_SEQ_IDS - 1  # hidden from the caller


class Cells:
    """The cells and the snapshots of one context.

    ``num_ids``: seq_ids that can hold tokens. ``can_trim``: whether a sequence can free some of its
    last cells. ``plain``: the model's only memory is attention to all tokens.
    """

    def __init__(self, context: Any, sizes: Fit, pages: PagedMemory | None, *, plain: bool) -> None:
        self._memory = lib.llama_get_memory(context)
        self._num_seqs = self.num_ids = sizes.max_num_seqs
        self._is_unified = sizes.layout == "unified"
        self._pages = pages
        self._snapshots: dict[int, Bytes] = {}
        self.can_trim = True
        if self._is_unified and plain:
            self.num_ids = max(self.num_ids, SCRATCH_ID)
        self._states = States(context, sizes.max_num_seqs, sizes.layout, portable=plain)
        if pages:
            max_tokens = pad_context(sizes.context_length)
            self._paged_states = PagedStates(context, self._states, pages, max_tokens)

    def check_paged(self) -> None:
        """Raises NotPaged if libllama's state of one token is not the one read from its pages."""
        if self._pages is None:
            return
        self._pages.save(0, 0, 1)
        is_same = np.array_equal(self._paged_states.make(0), self._states.save(0))
        self._pages.drop(0)
        if not is_same:
            raise NotPaged("this model's state has another form")

    def operate(self, operations: Run[Operation]) -> None:
        """Carry out ``operations``. Raises EngineError for what would abort the process."""
        copied: tuple[int, Bytes] = (-1, NOTHING)
        for operation in operations:
            copied = self._operate(operation, copied)

    def _operate(self, operation: Operation, copied: tuple[int, Bytes]) -> tuple[int, Bytes]:
        """Carry out one operation.

        If it copies a saved state, return the source's seq_id and state, which the next call gets
        as ``copied``.
        """
        match operation:
            case Trim(seq_id, keep):
                self.trim(seq_id, keep)
            case Swap(first, second):
                self._swap(first, second)
            case Copy(source, target, count) if self._pages:
                self.check_seq_id(target, self.num_ids)
                self._check_count(count, self._count_tokens(source))
                self._pages.share(source, target, count)
                self._set_positions(target, count)
            case Save(seq_id, key) if self._pages:
                self._pages.save(seq_id, key, self._count_tokens(seq_id))
            case Load(key, seq_id, count) if self._pages and (
                (length := self._pages.count_saved(key)) is not None
            ):
                self.check_seq_id(seq_id, self.num_ids)
                self._check_count(count, length)
                self._pages.load(key, seq_id, count)
                self._set_positions(seq_id, count)
            case Copy(source, target, count) if self._is_unified:
                self.check_seq_id(source, self.num_ids)
                self.trim(target, 0)
                lib.llama_memory_seq_cp(self._memory, source, target, 0, count)
            case Copy(source, target, count):
                # seq_cp would copy whole streams in the next decode, which costs more
                self.check_seq_id(source, self.num_ids)
                state = copied[1] if copied[0] == source else self._state(source)
                self._restore(target, state, count)
                return source, state
            case Save(seq_id, key):
                self._snapshots[key] = self._state(seq_id)
            case Load(key, seq_id, count):
                if key not in self._snapshots:
                    raise EngineError(f"there is no snapshot {key}")
                self._restore(seq_id, self._snapshots[key], count)
            case Drop(key):
                self._snapshots.pop(key, None)
                if self._pages:
                    self._pages.drop(key)
        return -1, NOTHING

    def _count_tokens(self, seq_id: int) -> int:
        self.check_seq_id(seq_id, self.num_ids)
        return int(lib.llama_memory_seq_pos_max(self._memory, seq_id)) + 1

    def _set_positions(self, seq_id: int, num_tokens: int) -> None:
        """Make ``seq_id`` have ``num_tokens`` tokens, those in its memory."""
        if num_tokens <= self._count_tokens(seq_id):
            lib.llama_memory_seq_rm(self._memory, seq_id, num_tokens, -1)
        else:
            self._paged_states.set_positions(seq_id, num_tokens)

    def _swap(self, first: int, second: int) -> None:
        if not self._pages:
            raise EngineError("only paged memory can be swapped")
        counts = self._count_tokens(first), self._count_tokens(second)
        self._pages.swap(first, second)
        self._set_positions(first, counts[1])
        self._set_positions(second, counts[0])

    def trim(self, seq_id: int, keep: int) -> None:
        self.check_seq_id(seq_id, self.num_ids)
        length = self._count_tokens(seq_id) if self._pages else 0
        if not lib.llama_memory_seq_rm(self._memory, seq_id, keep, -1):
            raise EngineError(f"sequence id {seq_id} cannot be trimmed to {keep} tokens")
        if self._pages:
            self._pages.trim(seq_id, keep, length)

    def _state(self, seq_id: int) -> Bytes:
        """Return the state of ``seq_id``."""
        self.check_seq_id(seq_id, self.num_ids)
        # libllama saves no owners for these ids, so 0 owns the cells meanwhile
        if seq_id >= self._num_seqs:
            self._move(0, SCRATCH_ID)
            lib.llama_memory_seq_cp(self._memory, seq_id, 0, -1, -1)
            try:
                return self._state(0)
            finally:
                self.trim(0, 0)
                self._move(SCRATCH_ID, 0)
        return self._states.save(seq_id)

    def _move(self, source: int, target: int) -> None:
        lib.llama_memory_seq_cp(self._memory, source, target, -1, -1)
        lib.llama_memory_seq_rm(self._memory, source, -1, -1)

    def _restore(self, seq_id: int, state: Bytes, count: int) -> None:
        self.trim(seq_id, 0)
        try:
            self._states.load(seq_id, state)
        except EngineError:
            self.trim(seq_id, 0)
            raise
        if self.can_trim:
            self.trim(seq_id, count)

    def snapshot(self, key: int) -> memoryview:
        state = self._snapshots.get(key)
        if state is None and self._pages and self._pages.count_saved(key) is not None:
            state = self._paged_states.make(key)
        if state is None:
            raise KeyError(key)
        return self._states.saved_part(state)

    def new_state_buffer(self, num_bytes: int) -> StateBuffer:
        state = self._states.new_state_buffer(num_bytes)
        return StateBuffer(self._states.saved_part(state), state)

    def install_snapshot(self, key: int, filled: StateBuffer) -> None:
        if self._pages:
            self._pages.drop(key)
        self._snapshots[key] = filled.state

    def _check_count(self, wanted: int, num_tokens: int) -> None:
        if wanted > num_tokens:
            raise EngineError(f"there are {num_tokens} tokens, not {wanted}")

    def check_seq_id(self, seq_id: int, limit: int) -> None:
        """Raises EngineError unless 0 <= ``seq_id`` < ``limit``."""
        if not 0 <= seq_id < limit:
            raise EngineError(f"sequence id {seq_id} is not below {limit}")
