"""Draft tokens from a layer of a model that was trained to predict them (MTP, NextN).

Such a head computes a token from the embedding of the token before, and from the hidden state of
the model at the token before that, or its own. llama.cpp keeps its keys and values in a context of
its own. Only this module knows it: sequences get cells there when they get draft tokens, and lose
them to others. So reused prefixes and parked sequences need no care. A head that has not seen the
beginning of a text predicts less well, but every draft token is verified.

Gloeckle et al., "Better & Faster Large Language Models via Multi-token Prediction", 2024; DeepSeek-
AI, "DeepSeek-V3 Technical Report", 2024.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as lib
from llama_cpp import llama_cpp_ext as ext

from cllm.backends.llama_cpp.arrays import BatchArrays
from cllm.backends.llama_cpp.library import check_pointer
from cllm.backends.llama_cpp.passes import Pass
from cllm.backends.llama_cpp.threads import Threads
from cllm.core.sequence import Sequence
from cllm.errors import EngineError, StartupError
from cllm.models.gguf import read_start

NAME = "draft head"  # of the context
# whose head works as described above
ARCHITECTURES = ("qwen35", "qwen35moe", "glm4moe")
HEAD_TENSOR = ".nextn.eh_proj.weight"
MAX_SEQS = 16  # sequences with draft tokens at the same time
WINDOW = 512  # tokens of a sequence that a head attends to
MAX_DRAFT = 64  # tokens; the limit of scheduler.max_draft_tokens
MAX_TOKENS = 256  # in one call

Rows = npt.NDArray[np.float32]


def has_head(path: Path) -> bool:
    """Return whether the model of this file has a draft head that llama.cpp computes: it aborts the
    process if there are several. Raises StartupError if the file cannot be read.
    """
    from cllm.models.model_file import read_parts  # only models with a draft head need it

    # a whole header takes 0.1 s, which other models should not wait for
    if read_start(path)[0].get("general.architecture") not in ARCHITECTURES:
        return False
    parts = read_parts(path)
    return parts[0].get_number("nextn_predict_layers") == 1 and any(
        tensor.name.endswith(HEAD_TENSOR) for part in parts for tensor in part.tensors
    )


class Trail:
    """The model's last hidden states of one sequence: WINDOW or more, if there are as many.

    ``start`` is the position of the first one.
    """

    def __init__(self, width: int) -> None:
        self.start = self._count = 0
        self._rows = np.empty((2 * WINDOW, width), np.float32)

    @property
    def end(self) -> int:
        return self.start + self._count

    def add(self, position: int, rows: Rows) -> None:
        """Add hidden states from ``position`` on, instead of those that were there."""
        if len(rows) > WINDOW:
            position, rows = position + len(rows) - WINDOW, rows[-WINDOW:]
        if not self.start <= position <= self.end:
            self.start, self._count = position, 0
        self._count = position - self.start
        if self._count + len(rows) > len(self._rows):
            kept = min(self._count, WINDOW)
            self._rows[:kept] = self._rows[self._count - kept : self._count]
            self.start, self._count = position - kept, kept
        self._rows[self._count : self._count + len(rows)] = rows
        self._count += len(rows)

    def get(self, begin: int, end: int) -> Rows:
        """Return the hidden states of these positions, which must be there."""
        return self._rows[begin - self.start : end - self.start]


class Inputs(NamedTuple):
    """Tokens of one sequence from ``position`` on, each with the hidden state before it. The logits
    after the last one are wanted.
    """

    seq_id: int
    position: int
    tokens: list[int]
    hidden: Rows


class DraftHead:
    """A Drafter. One head predicts all tokens, one after the other."""

    def __init__(self, model: Any, target: Any, c_params: Any, threads: Threads) -> None:
        """``c_params`` are those of the model's context ``target``.

        Raises StartupError if llama.cpp makes no context for the head or cannot compute it.
        """
        self.seconds = self.token_seconds = 0.0
        self._threads, self._target = threads, target
        c_params.ctx_type, c_params.ctx_other = lib.LLAMA_CONTEXT_TYPE_MTP, target
        c_params.n_seq_max = c_params.n_outputs_max = MAX_SEQS
        c_params.n_ctx = MAX_SEQS * (WINDOW + 2 * MAX_DRAFT)
        c_params.n_batch = c_params.n_ubatch = MAX_TOKENS
        c_params.n_rs_seq, c_params.kv_unified = 0, True
        context = lib.llama_init_from_model(model, c_params)
        self._context = threads.keep(NAME, check_pointer(context, "no context for the draft head"))
        self._memory = lib.llama_get_memory(self._context)
        self._width = int(lib.llama_model_n_embd_out(model))
        vocabulary = lib.llama_model_get_vocab(model)
        self._vocabulary_size = int(lib.llama_vocab_n_tokens(vocabulary))
        for each in (target, self._context):  # of all tokens, because "masked" returns other ones
            ext.llama_set_embeddings_nextn(each, True, False)
        self._arrays = BatchArrays(MAX_TOKENS, MAX_SEQS)
        self._hidden = np.zeros((MAX_TOKENS, self._width), np.float32)
        self._arrays.batch.embd = self._hidden.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        self._trails: OrderedDict[Sequence, Trail] = OrderedDict()  # least recently computed first
        # sequences with cells, the least recently drafted one first, and their seq_ids
        self._seq_ids: OrderedDict[Sequence, int] = OrderedDict()
        self._free = list(range(MAX_SEQS))
        # seq_id -> the position after the last one that was computed from the model's hidden states
        self._ends: dict[int, int] = {}
        try:  # the first call takes longer
            self._decode([Inputs(0, 0, [0], self._hidden[:1])])
        except EngineError as error:
            self.close()
            raise StartupError(str(error)) from None
        lib.llama_memory_clear(self._memory, False)

    def record(self, rows: Pass) -> None:
        """Keep the hidden states of the rows that the model has just computed.

        While more than MAX_SEQS sequences are computed together, draft tokens are not worth it.
        """
        if len(rows.rows) > MAX_SEQS:
            return
        sizes = [max(row.size, rows.size) for row in rows.rows]
        hidden = self._view(ext.llama_get_embeddings_nextn(self._target), sum(sizes), self._width)
        begin = 0
        for row, size in zip(rows.rows, sizes, strict=True):
            trail = self._trails.pop(row.seq, None) or Trail(self._width)
            trail.add(row.start, hidden[begin : begin + row.size])
            self._trails[row.seq] = trail
            begin += size
        while len(self._trails) > MAX_SEQS:
            self._trails.popitem(last=False)

    def draft(self, wanted: dict[Sequence, int]) -> dict[Sequence, tuple[int, ...]]:
        begun = time.perf_counter()
        drafts: dict[Sequence, list[int]] = {}
        inputs = [each for seq in wanted if (each := self._follow(seq)) is not None]
        seqs = {self._seq_ids[seq]: seq for seq in wanted if seq in self._seq_ids}
        inputs = self._catch_up(inputs)
        self.seconds = time.perf_counter() - begun
        while inputs:
            begun = time.perf_counter()
            predicted = self._compute(inputs)
            following: list[Inputs] = []
            for each, (token, hidden) in zip(inputs, predicted, strict=True):
                seq = seqs[each.seq_id]
                draft = drafts.setdefault(seq, [])
                draft.append(token)
                if len(draft) < wanted[seq]:
                    position = each.position + len(each.tokens)
                    following.append(Inputs(each.seq_id, position, [token], hidden))
            inputs = following
            seconds = time.perf_counter() - begun
            self.seconds += seconds
            self.token_seconds = seconds
        return {seq: tuple(draft) for seq, draft in drafts.items()}

    def _follow(self, seq: Sequence) -> Inputs | None:
        """Return what the head has not computed of ``seq``; None if hidden states are missing."""
        trail, last = self._trails.get(seq), seq.num_tokens - 1
        if trail is None or not trail.start < last <= trail.end:
            return None
        seq_id = self._seq_ids.pop(seq, None)
        if seq_id is None:
            if not self._free:
                self._release(next(iter(self._seq_ids)))
            seq_id = self._free.pop()
            self._ends[seq_id] = 0
        self._seq_ids[seq] = seq_id
        first, end = last - WINDOW, min(self._ends[seq_id], last)
        if end <= max(first, trail.start):  # the cells would have a gap
            end = max(first, trail.start) + 1
            lib.llama_memory_seq_rm(self._memory, seq_id, -1, -1)
        lib.llama_memory_seq_rm(self._memory, seq_id, end, -1)
        if first > 0:
            lib.llama_memory_seq_rm(self._memory, seq_id, -1, first)
        self._ends[seq_id] = last + 1
        return Inputs(seq_id, end, seq.tokens[end : last + 1], trail.get(end - 1, last).copy())

    def _catch_up(self, inputs: list[Inputs]) -> list[Inputs]:
        """Compute all but the last tokens of long ``inputs``, and return what is left."""
        rest: list[Inputs] = []
        for each in inputs:
            left = each
            while len(left.tokens) > MAX_TOKENS // MAX_SEQS:
                count = min(len(left.tokens) - 1, MAX_TOKENS)
                self._decode([left._replace(tokens=left.tokens[:count])], logits=False)
                left = Inputs(
                    left.seq_id, left.position + count, left.tokens[count:], left.hidden[count:]
                )
            rest.append(left)
        return rest

    def _compute(self, inputs: list[Inputs]) -> list[tuple[int, Rows]]:
        """Return the likeliest next token of each input, and the head's hidden state before it."""
        self._decode(inputs)
        ends = list(itertools.accumulate(len(each.tokens) for each in inputs))
        pointer = lib.llama_get_logits(self._context)
        logits = self._view(pointer, len(inputs), self._vocabulary_size)
        hidden = self._view(ext.llama_get_embeddings_nextn(self._context), ends[-1], self._width)
        return [
            (int(row.argmax()), hidden[end - 1 : end].copy())
            for row, end in zip(logits, ends, strict=True)
        ]

    def _decode(self, inputs: list[Inputs], *, logits: bool = True) -> None:
        arrays, begin = self._arrays, 0
        for seq_id, position, tokens, hidden in inputs:
            end = begin + len(tokens)
            arrays.token[begin:end] = tokens
            arrays.position[begin:end] = range(position, position + len(tokens))
            arrays.seq_id_pointers[begin:end] = arrays.ids_address + 4 * seq_id
            arrays.wants_logits[begin:end] = 0
            arrays.wants_logits[end - 1] = logits
            self._hidden[begin:end] = hidden[: len(tokens)]
            begin = end
        arrays.batch.n_tokens = begin
        if code := self._threads.decode(self._context, arrays.batch):
            raise EngineError(f"the draft head fails: llama_decode returned {code}")

    @staticmethod
    def _view(pointer: Any, count: int, width: int) -> Rows:
        return np.ctypeslib.as_array(pointer, (count, width))

    def forget(self, seq: Sequence) -> None:
        self._trails.pop(seq, None)
        if seq in self._seq_ids:
            self._release(seq)

    def _release(self, seq: Sequence) -> None:
        seq_id = self._seq_ids.pop(seq)
        del self._ends[seq_id]
        lib.llama_memory_seq_rm(self._memory, seq_id, -1, -1)
        self._free.append(seq_id)

    def close(self) -> None:
        self._threads.forget(NAME)
        ext.llama_set_embeddings_nextn(self._target, False, False)
        lib.llama_free(self._context)
        self._context = None  # so it is not freed again
