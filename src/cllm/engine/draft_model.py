"""A small model that drafts tokens for the large one to verify."""

from __future__ import annotations

import time
from collections import OrderedDict

import numpy as np

from cllm.backends.base import Backend
from cllm.core.batch import Batch, Load, Operation, Row, Save, Trim
from cllm.core.params import SamplingParams
from cllm.core.request import Request
from cllm.core.sequence import Sequence
from cllm.kv_cache.radix_tree import common_prefix


class DraftModel:
    """Greedy drafts by a second backend with the same vocabulary (Leviathan et al. 2023).

    It keeps cells for as many sequences as the backend has seq_ids: those that got drafts most
    recently. A sequence's shadow in ``_shadows`` describes these cells: some of the sequence's
    tokens, then possibly rejected draft tokens. A prompt that does not fit into one batch is
    computed in several calls of ``draft``, and gets its first draft in the last of them.

    A recurrent model cannot free the cells of rejected draft tokens. So its state is saved before
    it computes draft tokens, and loaded again if one is rejected.
    """

    def __init__(self, backend: Backend) -> None:
        self.seconds = self.token_seconds = 0.0
        self._backend = backend
        self._shadows: OrderedDict[Sequence, Sequence] = OrderedDict()
        self._free = list(range(backend.info.max_num_seqs))
        self._saved: dict[int, int] = {}  # seq_id, also the snapshot's key -> its number of tokens

    def draft(self, wanted: dict[Sequence, int]) -> dict[Sequence, tuple[int, ...]]:
        info, started = self._backend.info, time.perf_counter()
        room = {
            seq: min(count, info.context_length - seq.num_tokens) for seq, count in wanted.items()
        }
        unfinished = {
            seq: count for seq, count in list(room.items())[-info.max_num_seqs :] if count > 0
        }
        operations = [operation for seq in unfinished for operation in self._rewind(seq)]
        drafts: dict[Sequence, list[int]] = {seq: [] for seq in unfinished}
        while unfinished:
            begun = time.perf_counter()
            rows = self._make_rows(list(unfinished))
            logits = self._backend.forward(
                Batch(sorted(rows, key=lambda row: row.seq.seq_id), operations)
            )
            operations = []
            best = dict(
                zip(
                    (row.seq.seq_id for row in self._select_sampling(rows)),
                    (row.argmax() for row in logits),
                    strict=True,
                )
            )
            for row in rows:
                row.seq.num_computed_tokens += row.num_tokens
            for seq in list(unfinished):
                shadow = self._shadows[seq]
                if shadow.seq_id in best:
                    token = int(best[shadow.seq_id])
                    drafts[seq].append(token)
                    shadow.tokens.append(token)
                if shadow.seq_id not in best or len(drafts[seq]) == unfinished[seq]:
                    del unfinished[seq]
                elif len(drafts[seq]) == 1 and info.max_taken_back is not None:
                    self._saved[shadow.seq_id] = shadow.num_computed_tokens
                    operations.append(Save(shadow.seq_id, shadow.seq_id))
            self.token_seconds = time.perf_counter() - begun
        self.seconds = time.perf_counter() - started
        return {seq: tuple(draft) for seq, draft in drafts.items() if draft}

    def _rewind(self, seq: Sequence) -> list[Operation]:
        """Set the shadow's tokens to those of ``seq``, and return operations after which its cells
        have a prefix of these.
        """
        operations: list[Operation] = []
        shadow = self._shadows.get(seq)
        if shadow is None:
            if not self._free:
                self.forget(next(iter(self._shadows)))
            shadow = Sequence(
                Request("draft", [0], SamplingParams()), 0, 0, self._backend.info.context_length
            )
            shadow.seq_id, shadow.tokens = self._free.pop(), []
            self._shadows[seq] = shadow
            self._saved.pop(shadow.seq_id, None)
            operations.append(Trim(shadow.seq_id, 0))
        self._shadows.move_to_end(seq)
        computed = np.array(shadow.tokens[: shadow.num_computed_tokens], np.int32)
        keep = common_prefix(computed, np.array(seq.tokens[:-1], np.int32))
        if keep < len(computed):
            operation = self._cut(shadow.seq_id, keep)
            keep = operation.keep if isinstance(operation, Trim) else operation.num_tokens
            operations.append(operation)
        shadow.tokens, shadow.num_computed_tokens = list(seq.tokens), keep
        return operations

    def _cut(self, seq_id: int, keep: int) -> Trim | Load:
        """Return the operation that keeps as many of the first ``keep`` tokens as possible."""
        if self._backend.info.max_taken_back is None:
            return Trim(seq_id, keep)
        saved = self._saved.get(seq_id, 0)
        return Load(seq_id, seq_id, saved) if 0 < saved <= keep else Trim(seq_id, 0)

    def _make_rows(self, seqs: list[Sequence]) -> list[Row]:
        budget = self._backend.info.max_num_batched_tokens
        rows = []
        for shadow in sorted(
            (self._shadows[seq] for seq in seqs), key=lambda shadow: shadow.num_lacking_tokens
        ):
            count = min(shadow.num_lacking_tokens, budget)
            if count:
                samples = int(count == shadow.num_lacking_tokens)
                rows.append(Row(shadow, shadow.num_computed_tokens, count, samples))
                budget -= count
        return rows

    def _select_sampling(self, rows: list[Row]) -> list[Row]:
        return [row for row in sorted(rows, key=lambda row: row.seq.seq_id) if row.num_samples]

    def forget(self, seq: Sequence) -> None:
        shadow = self._shadows.pop(seq, None)
        if shadow is not None:
            self._free.append(shadow.seq_id)
