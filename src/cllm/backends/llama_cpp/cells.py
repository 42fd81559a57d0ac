"""The cells of a context: carries out the operations of a batch on them, and keeps snapshots."""

from __future__ import annotations

from collections.abc import Sequence as Run
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as lib

from cllm.backends.base import StateBuffer
from cllm.backends.llama_cpp.cell_memory import release_unused
from cllm.backends.llama_cpp.fit import KVSizes, pad_context
from cllm.backends.llama_cpp.ggml_memory import StateRows
from cllm.backends.llama_cpp.paged_memory import NotPaged, PagedMemory
from cllm.backends.llama_cpp.past_states import PastStates
from cllm.backends.llama_cpp.state_format import DAMAGED, Bytes, Form, get_form
from cllm.backends.llama_cpp.states import PagedStates, States
from cllm.core.batch import Copy, Drop, Load, Operation, Row, Save, Swap, Trim
from cllm.errors import EngineError

# libllama's limit; in the unified layout, ids from n_seq_max on can hold tokens, too
MAX_SEQ_IDS = 256
SCRATCH_ID = MAX_SEQ_IDS - 1  # hidden from the caller


class Cells:
    """The cells and the snapshots of one context.

    ``num_ids`` counts the seq_ids that can hold tokens. ``max_taken_back`` is that of ModelInfo.
    ``portable`` says whether the model's only memory is attention. ``states`` are the tensors of
    recurrent states whose memory is taken when it is used. ``form`` is that of every saved state;
    None if states of this model are not checked. ``cache_bytes`` are the sizes of a token's keys
    and values in each cache, if they are known.
    """

    def __init__(
        self, context: Any, sizes: KVSizes, *, portable: bool, states: Run[StateRows] = ()
    ) -> None:
        self._memory = lib.llama_get_memory(context)
        self._num_seqs = self.num_ids = sizes.max_num_seqs
        self._is_unified = sizes.layout == "unified"
        self._snapshots: dict[int, Bytes] = {}
        self._copied: tuple[int, Bytes] | None = None  # the source of the last copy, and its state
        self.max_taken_back: int | None = None
        # seq_ids with padding after their draft tokens, and how many tokens they have without it
        self._padded: dict[int, int] = {}
        self.past_states = PastStates(context, states)
        self.form: Form | None = None
        self.cache_bytes: list[int] = []
        if self._is_unified and portable:
            self.num_ids = max(self.num_ids, SCRATCH_ID)
        self._states = States(context, sizes.max_num_seqs, sizes.layout, portable=portable)

    def check_states(self, *, windowed: bool) -> None:
        """Learn the form of states from seq_id 0, which has one token. ``windowed`` says whether
        there are sliding windows. Raises NotPaged if the form is new.
        """
        caches = self._states.learn(windowed=windowed)
        self.form = get_form(caches) if caches else None
        self.cache_bytes = [cache.row_bytes for cache in caches]

    def clear(self) -> None:
        """Empty all cells. Only the backend calls it, before there are sequences."""
        lib.llama_memory_clear(self._memory, False)

    def operate(self, operations: Run[Operation]) -> None:
        """Carry out ``operations``. Raises EngineError for what would abort the process."""
        if self._padded:
            self._take_back_padding(operations)
        for operation in operations:
            if not isinstance(operation, Copy):
                self._copied = None
            match operation:
                case Trim(seq_id, keep):
                    self.trim(seq_id, keep)
                case Swap(first, second):
                    self._swap(first, second)
                case Copy(source, target, count):
                    self.check_seq_id(source, self.num_ids)
                    self.check_seq_id(target, self.num_ids)
                    self._copy(source, target, count)
                case Save(seq_id, key, is_checkpoint=True):
                    self.check_row(seq_id)
                    self._snapshots[key] = self._states.save_checkpoint(seq_id)
                case Load(key, seq_id, count, is_checkpoint=True):
                    self.check_row(seq_id)
                    self._load_checkpoint(key, seq_id, count)
                case Save(seq_id, key):
                    self.check_seq_id(seq_id, self.num_ids)
                    self._save(seq_id, key)
                case Load(key, seq_id, count):
                    self.check_seq_id(seq_id, self.num_ids)
                    self._load(key, seq_id, count)
                case Drop(key):
                    self._drop(key)
        self._copied = None
        if self.past_states.is_too_large:
            self._free_past_states()

    def trim(self, seq_id: int, keep: int) -> None:
        self.check_seq_id(seq_id, self.num_ids)
        if not lib.llama_memory_seq_rm(self._memory, seq_id, keep, -1):
            raise EngineError(f"sequence id {seq_id} cannot be trimmed to {keep} tokens")
        if keep and self.max_taken_back:
            self.past_states.went_back.add(seq_id)
        else:
            self.past_states.went_back.discard(seq_id)

    def _free_past_states(self) -> None:
        for seq_id in self.past_states.went_back:  # loading makes a past state the current one
            self._states.load_checkpoint(seq_id, self._states.save_checkpoint(seq_id))
        self.past_states.free()

    def free_padding(self, row: Row) -> None:
        """Free the padding of a row.

        Recurrent models take back tokens only once, so the padding after draft tokens is taken back
        together with rejected ones.
        """
        seq_id, length = row.seq.seq_id, row.start + row.size
        if row.draft and self.max_taken_back is not None:
            self._padded[seq_id] = length
        else:
            lib.llama_memory_seq_rm(self._memory, seq_id, length, -1)

    def _take_back_padding(self, operations: Run[Operation]) -> None:
        """Trim each padded seq_id to the length that it should have, or that it gets in
        ``operations`` before anything else.
        """
        first: dict[int, Operation] = {}
        for operation in operations:
            match operation:
                case Copy(source, target):
                    first.setdefault(source, operation)
                    first.setdefault(target, operation)
                case Trim(seq_id) | Save(seq_id) | Load(_, seq_id):
                    first.setdefault(seq_id, operation)
        padded, self._padded = self._padded, {}
        for seq_id, length in padded.items():
            next_one = first.get(seq_id)
            keep = next_one.keep if isinstance(next_one, Trim) else length
            self.trim(seq_id, min(keep, length))

    def _swap(self, first: int, second: int) -> None:
        raise EngineError("only paged memory can be swapped")

    def _copy(self, source: int, target: int, count: int) -> None:
        if self._is_unified:
            self.trim(target, 0)
            lib.llama_memory_seq_cp(self._memory, source, target, 0, count)
            if self.max_taken_back:  # seq_cp forgets that tokens were taken back
                self._states.load_checkpoint(target, self._states.save_checkpoint(source))
            return
        # seq_cp would copy whole streams in the next decode, which costs more
        if self._copied is None or self._copied[0] != source:
            self._copied = source, self._state(source)
        self._restore(target, self._copied[1], count)

    def _save(self, seq_id: int, key: int) -> None:
        self._snapshots[key] = self._state(seq_id)

    def _load(self, key: int, seq_id: int, count: int) -> None:
        if key not in self._snapshots:
            raise EngineError(f"there is no snapshot {key}")
        self._restore(seq_id, self._snapshots[key], count)

    def _load_checkpoint(self, key: int, seq_id: int, count: int) -> None:
        if key not in self._snapshots:
            raise EngineError(f"there is no checkpoint {key}")
        self._states.load_checkpoint(seq_id, self._snapshots[key])
        self.trim(seq_id, count)

    def measure_checkpoint(self) -> int:
        """Return the size of a checkpoint of seq_id 0, which has tokens, in bytes."""
        return self._states.measure_checkpoint()

    def _drop(self, key: int) -> None:
        self._snapshots.pop(key, None)

    def _state(self, seq_id: int) -> Bytes:
        """Return the state of ``seq_id``."""
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
        if self.max_taken_back is None:
            self.trim(seq_id, count)

    def snapshot(self, key: int) -> memoryview:
        return self._states.saved_part(self._snapshots[key])

    def new_state_buffer(self, num_bytes: int) -> StateBuffer:
        state = self._states.new_state_buffer(num_bytes)
        return StateBuffer(self._states.saved_part(state), state)

    def install_snapshot(self, key: int, filled: StateBuffer, num_tokens: int) -> None:
        """Raises EngineError unless it is a state of ``num_tokens`` of this context, if states are
        checked.
        """
        if self.form is not None:
            caches = self._states.read(filled.state)
            is_whole = all(cache.has_positions(num_tokens) for cache in caches)
            if not is_whole or get_form(caches) != self.form:
                raise EngineError(DAMAGED)
        self._drop(key)
        self._snapshots[key] = filled.state

    def check_row(self, seq_id: int) -> None:
        """Raises EngineError unless tokens can be computed for ``seq_id``."""
        self.check_seq_id(seq_id, self._num_seqs)

    def check_start(self, seq_id: int, start: int) -> None:
        """Raises EngineError unless the next token of ``seq_id`` has the position ``start``."""
        if (length := self._count_tokens(seq_id)) != start:
            raise EngineError(f"sequence id {seq_id} has {length} tokens, not {start}")

    def _count_tokens(self, seq_id: int) -> int:
        self.check_seq_id(seq_id, self.num_ids)
        return int(lib.llama_memory_seq_pos_max(self._memory, seq_id)) + 1

    def check_seq_id(self, seq_id: int, limit: int) -> None:
        """Raises EngineError unless 0 <= ``seq_id`` < ``limit``."""
        if not 0 <= seq_id < limit:
            raise EngineError(f"sequence id {seq_id} is not below {limit}")


class PagedCells(Cells):
    """Cells in paged memory, which moves and shares prefixes; libllama gets only their positions.

    Snapshots are in paged memory, too, except those that were installed and not yet loaded.
    """

    def __init__(self, context: Any, sizes: KVSizes, pages: PagedMemory) -> None:
        """Raises NotPaged if the system refuses the addresses."""
        super().__init__(context, sizes, portable=True)
        self._pages = pages
        self._max_tokens = pad_context(sizes.context_length)
        self._paged_states = PagedStates(context, self._states, pages, self._max_tokens)

    def check_states(self, *, windowed: bool) -> None:
        super().check_states(windowed=windowed)
        self._pages.save(0, 0, 1)
        is_same = np.array_equal(self._paged_states.make(0), self._states.save(0))
        self._pages.drop(0)
        if self.form is None or not is_same:
            raise NotPaged("this model's state has another form")

    def clear(self) -> None:
        super().clear()
        num_caches = len(self.cache_bytes)
        release_unused(self._memory, num_caches, self._num_seqs, self._max_tokens)

    def trim(self, seq_id: int, keep: int) -> None:
        length = self._count_tokens(seq_id)
        super().trim(seq_id, keep)
        self._pages.trim(seq_id, keep, length)

    def _swap(self, first: int, second: int) -> None:
        counts = self._count_tokens(first), self._count_tokens(second)
        self._pages.swap(first, second)
        self._set_positions(first, counts[1])
        self._set_positions(second, counts[0])

    def _copy(self, source: int, target: int, count: int) -> None:
        self._check_count(count, self._count_tokens(source))
        self.trim(target, 0)
        self._pages.share(source, target, count)
        self._set_positions(target, count)

    def _save(self, seq_id: int, key: int) -> None:
        self._drop(key)
        self._pages.save(seq_id, key, self._count_tokens(seq_id))

    def _load(self, key: int, seq_id: int, count: int) -> None:
        if (state := self._snapshots.get(key)) is not None:
            self._paged_states.install(key, state)
            del self._snapshots[key]
        if (length := self._pages.count_saved(key)) is None:
            raise EngineError(f"there is no snapshot {key}")
        self._check_count(count, length)
        self.trim(seq_id, 0)
        self._pages.load(key, seq_id, count)
        self._set_positions(seq_id, count)

    def _drop(self, key: int) -> None:
        super()._drop(key)
        self._pages.drop(key)

    def _set_positions(self, seq_id: int, num_tokens: int) -> None:
        """Make ``seq_id`` have ``num_tokens`` tokens, those in its memory."""
        if num_tokens <= self._count_tokens(seq_id):
            lib.llama_memory_seq_rm(self._memory, seq_id, num_tokens, -1)
        else:
            self._paged_states.set_positions(seq_id, num_tokens)

    def _check_count(self, wanted: int, num_tokens: int) -> None:
        if wanted > num_tokens:
            raise EngineError(f"there are {num_tokens} tokens, not {wanted}")

    def snapshot(self, key: int) -> memoryview:
        if key in self._snapshots:
            return super().snapshot(key)
        if self._pages.count_saved(key) is None:
            raise KeyError(key)
        return self._states.saved_part(self._paged_states.make(key))

    def check_row(self, seq_id: int) -> None:
        super().check_row(seq_id)
        self._pages.check_mapped(seq_id)
