"""A backend without a model, with simulated costs and faults, for tests and simulations.

``cllm serve --backend.name fake`` serves it. The text continues the prompt by counting: after token
t comes t + 1, and END after ``length`` tokens, so every answer can be checked. An adapter adds its
scale to each token. The vector of a text
is the mean of its tokens' vectors, so texts are similar to the extent that they share tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Run
from pathlib import Path

import msgspec
import numpy as np

from cllm.backends.base import Logits, StateBuffer, Vectors
from cllm.backends.fake.vocabulary import END, VOCABULARY_SIZE, FakeVocabulary
from cllm.core.batch import (
    MAX_CHUNKS,
    Batch,
    Chunk,
    Copy,
    Drop,
    Load,
    Operation,
    Row,
    Save,
    Swap,
    Trim,
)
from cllm.core.drafter import Drafter
from cllm.core.model_info import ModelInfo
from cllm.core.request import Adapters
from cllm.core.sequence import Sequence
from cllm.errors import EngineError, StartupError

TOKEN_VECTORS = np.random.default_rng(0).normal(size=(VOCABULARY_SIZE, 32)).astype(np.float32)


class Costs(msgspec.Struct, frozen=True):
    """Seconds of a step: a fixed part, a part for each position of decoding rows, a part for each
    other token, a part for each token before a decoding row (its attention), and the change to
    other adapters.
    """

    step: float = 0.0
    row: float = 0.0
    token: float = 0.0
    context: float = 0.0
    switch: float = 0.0

    def compute_seconds(self, batch: Batch) -> float:
        rows = sum(row.size for row in batch.rows if row.num_tokens == 1)
        before = sum(row.start for row in batch.rows if row.num_tokens == 1) if self.context else 0
        others = batch.num_tokens - rows
        return self.step + rows * self.row + others * self.token + before * self.context


class FailingSteps(msgspec.Struct, frozen=True):
    """The first step, counted from 1, that fails (0: none), and the number of consecutive steps
    that fail.
    """

    raise_at_step: int = 0
    raise_times: int = 1


NO_COSTS, NONE_FAIL = Costs(), FailingSteps()


class Cell:
    """One cell; sequences that share it reference the same object."""

    __slots__ = ("adapters", "token")

    def __init__(self, token: int, adapters: Adapters = ()) -> None:
        self.token = token
        self.adapters = adapters


def check_drafts(rows: Run[Row], max_taken_back: int, layout: str) -> dict[int, int]:
    """Return how many tokens of each row can be taken back. Raises EngineError if draft tokens
    cannot.
    """
    drafting = [row.seq.seq_id for row in rows if row.draft]
    if any(len(row.draft) > max_taken_back for row in rows):
        raise EngineError("too many draft tokens")
    between = {*range(min(drafting), max(drafting))} if drafting and layout != "unified" else {*()}
    if not between <= {row.seq.seq_id for row in rows}:
        raise EngineError("the seq_ids of rows with draft tokens are not consecutive")
    return {row.seq.seq_id: len(row.draft) for row in rows}


class FakeBackend:
    """Implements the contract of backends/base.py and checks that its caller keeps it, too.

    Without a ``layout``, it is unified if ``num_cells`` is set and partitioned otherwise. ``sleep``
    spends the cost of a step: time.sleep, or the advance of a simulated clock.
    """

    drafter: Drafter | None = None

    def __init__(
        self,
        *,
        context_length: int = 1024,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 256,
        layout: str = "",
        num_cells: int | None = None,
        num_spare_ids: int = 0,
        max_taken_back: int | None = None,
        checkpoint_bytes: int = 0,
        length: int = 16,
        costs: Costs = NO_COSTS,
        failing: FailingSteps = NONE_FAIL,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.vocabulary = FakeVocabulary()
        self.info = ModelInfo(
            name="fake",
            architecture="fake",
            description="counts on from the last token",
            vocabulary_size=VOCABULARY_SIZE,
            context_length=context_length,
            trained_context_length=context_length,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_samples=max_num_batched_tokens,
            num_cells=num_cells or context_length * max_num_seqs,
            layout=layout or ("unified" if num_cells else "partitioned"),
            end_tokens=self.vocabulary.end_tokens,
            max_taken_back=max_taken_back,
            checkpoint_bytes=checkpoint_bytes,
            num_spare_ids=num_spare_ids,
            state_bytes_per_token=1,
            checks_states=True,
            fingerprint="fake",
            embedding_size=TOKEN_VECTORS.shape[1],
            max_embedding_tokens=context_length,
        )
        self._length = length
        self._costs = costs
        self._failing = failing
        self._sleep = sleep
        self._cells: dict[int, list[Cell]] = {}
        # the tokens that each seq_id can take back, if that is limited
        self._takeable: dict[int, int] = {}
        self._snapshots: dict[int, bytes] = {}
        # by seq_id, the number of tokens after which it has the state of a hybrid
        self._states: dict[int, int] = {}
        self._embedded = 0, 0  # of the last text of ``embed``, the tokens computed and the length
        self._adapters: Adapters = ()
        self._uses_adapters = False  # whether a batch had any
        self.num_steps = 0

    def share_cores(self, num_engines: int) -> None:
        self.num_engines = num_engines

    def load_adapter(self, name: str, path: str) -> None:
        if not Path(path).is_file():
            raise StartupError(f"the adapter {name}: there is no file {path}")

    def forward(self, batch: Batch) -> Logits:
        """Raises EngineError for invalid batches, as llama.cpp does."""
        self.num_steps += 1
        for operation in batch.operations:
            self._operate(operation)
        self._takeable = {}
        self._break()
        if not batch.rows:
            return np.zeros((0, VOCABULARY_SIZE), np.float32)
        if not 0 < batch.num_tokens <= self.info.max_num_batched_tokens:
            raise EngineError(f"a batch of {batch.num_tokens} tokens")
        if batch.num_samples > self.info.max_num_samples:
            raise EngineError(f"a batch of {batch.num_samples} samples")
        if self.info.max_taken_back is not None:
            self._takeable = check_drafts(batch.rows, self.info.max_taken_back, self.info.layout)
        for row in batch.rows:
            self._store(row.seq.seq_id, row.start, row.tokens, batch.adapters)
            self._uses_adapters |= bool(batch.adapters)
            if self._uses_adapters:
                self._check_adapters(row.seq, batch.adapters)
        self._check_num_cells()
        switch = self._costs.switch if batch.adapters != self._adapters else 0.0
        self._adapters = batch.adapters
        self._sleep(self._costs.compute_seconds(batch) + switch)
        logits = np.zeros((batch.num_samples, VOCABULARY_SIZE), np.float32)
        at, shift = 0, round(sum(scale for _, scale in batch.adapters))
        for row in batch.rows:
            cells = self._cells[row.seq.seq_id]
            for length in range(len(cells) - row.num_samples + 1, len(cells) + 1):
                token = self._next(row.seq.num_prompt_tokens, length, cells[length - 1].token)
                logits[at, token if token == END else (token + shift) % 256] = 20
                at += 1
        return logits

    def embed(self, chunks: list[Chunk]) -> Vectors:
        """Raises EngineError for invalid batches."""
        self.num_steps += 1
        before, self._embedded = self._embedded, (0, 0)
        self._break()
        num_tokens = sum(len(chunk.tokens) for chunk in chunks)
        if not 0 < num_tokens <= self.info.max_embedding_batch_tokens or len(chunks) > MAX_CHUNKS:
            raise EngineError(f"a batch of {num_tokens} tokens in {len(chunks)} chunks")
        for i, (tokens, start, length) in enumerate(chunks):
            if not all(0 <= token < VOCABULARY_SIZE for token in tokens):
                raise EngineError("a token outside the vocabulary")
            if (start, length) != (before if start and i == 0 else (0, length)):
                raise EngineError(f"a chunk from {start} of {length} after {before}")
            if not tokens or length > self.info.max_embedding_tokens:
                raise EngineError(f"{len(tokens)} tokens of a text of {length}")
            if start + len(tokens) > length or (
                start + len(tokens) < length and i + 1 < len(chunks)
            ):
                raise EngineError(f"a chunk from {start} to {start + len(tokens)} of {length}")
        last = chunks[-1]
        self._embedded = last.start + len(last.tokens), last.length
        self._sleep(self._costs.step + num_tokens * self._costs.token)
        return np.array([TOKEN_VECTORS[chunk.tokens].sum(axis=0) for chunk in chunks])

    def _operate(self, operation: Operation) -> None:
        match operation:
            case Trim(seq_id, keep):
                cells = self._get_cells(seq_id)
                if (
                    self.info.max_taken_back is not None
                    and 0 < keep < len(cells)
                    and len(cells) - keep > self._takeable.pop(seq_id, 0)
                ):
                    raise EngineError(f"sequence {seq_id} cannot be trimmed to {keep} tokens")
                del cells[keep:]
                self._states[seq_id] = len(cells)
            case Copy(source, target, count):
                if self._get_cells(target) or len(self._get_cells(source)) < count:
                    raise EngineError(f"{count} tokens of {source} cannot be copied to {target}")
                self._check_part(len(self._get_cells(source)), count)
                self._states[target] = len(self._get_cells(source))
                cells = self._get_cells(source)[:count]
                if self.info.layout == "partitioned":
                    cells = [Cell(cell.token, cell.adapters) for cell in cells]
                self._cells[target] = cells
                self._takeable.pop(target, None)
            case Swap(first, second):
                if self.info.layout != "paged":
                    raise EngineError("only paged cells can be swapped")
                self._cells[first], self._cells[second] = (
                    self._get_cells(second),
                    self._get_cells(first),
                )
            case Load(key, seq_id, count, is_checkpoint=True):
                cells = self._get_cells(seq_id)
                if [cell.token for cell in cells[:count]] != self._saved(key)[0]:
                    raise EngineError(f"{key} is no checkpoint of the tokens of {seq_id}")
                del cells[count:]
                self._states[seq_id] = count
                self._takeable.pop(seq_id, None)
            case Save(seq_id, key):
                cells = self._get_cells(seq_id)
                changed = [cell.adapters for cell in cells] if self._uses_adapters else []
                saved = [cell.token for cell in cells], changed
                self._snapshots[key] = msgspec.msgpack.encode(saved)
            case Load(key, seq_id, count):
                tokens, changed = self._saved(key)
                if len(tokens) < count:
                    raise EngineError(f"snapshot {key} has {len(tokens)} tokens, not {count}")
                self._check_part(len(tokens), count)
                self._states[seq_id] = len(tokens)
                self._takeable.pop(seq_id, None)
                cells = self._get_cells(seq_id)
                cells[:] = map(Cell, tokens, changed or [()] * len(tokens))
                if self.info.layout == "paged":
                    del cells[count:]
                self._check_num_cells()
                del cells[count:]
            case Drop(key):
                self._snapshots.pop(key, None)

    def _check_part(self, num_tokens: int, count: int) -> None:
        """Raise EngineError if only a part of ``num_tokens`` is to be reused, and cannot be."""
        if count < num_tokens and not self.info.checkpoint_bytes and self.info.needs_checkpoints:
            raise EngineError(f"part of a state of {num_tokens} tokens cannot be reused")

    def _saved(self, key: int) -> tuple[list[int], list[Adapters]]:
        """Return the tokens of a snapshot, and the adapters of each, if there were any."""
        try:
            return msgspec.msgpack.decode(
                self._snapshots[key], type=tuple[list[int], list[Adapters]]
            )
        except (KeyError, msgspec.MsgspecError):
            raise EngineError(f"there is no snapshot {key}") from None

    def _check_num_cells(self) -> None:
        if (
            len({id(cell) for cells in self._cells.values() for cell in cells})
            > self.info.num_cells
        ):
            raise EngineError("more cells in use than exist")

    def _break(self) -> None:
        if (
            0
            < self._failing.raise_at_step
            <= self.num_steps
            < self._failing.raise_at_step + self._failing.raise_times
        ):
            raise EngineError("the fake backend fails as configured")

    def _get_cells(self, seq_id: int) -> list[Cell]:
        if not 0 <= seq_id < self.info.max_num_seqs + self.info.num_spare_ids:
            raise EngineError(f"there is no sequence id {seq_id}")
        return self._cells.setdefault(seq_id, [])

    def _check_adapters(self, seq: Sequence, adapters: Adapters) -> None:
        """Raise EngineError if a cell of ``seq`` was computed with other adapters than it is to
        be.
        """
        cells, request = self._cells[seq.seq_id], seq.request
        base = request.num_base_tokens if adapters else len(cells)
        before, after = ({cell.adapters for cell in part} for part in (cells[:base], cells[base:]))
        if not (before <= {()} and after <= {request.adapters}):
            raise EngineError(f"{seq.name} has cells of {before, after}")

    def _store(self, seq_id: int, start: int, tokens: list[int], adapters: Adapters) -> None:
        cells = self._get_cells(seq_id)
        if seq_id >= self.info.max_num_seqs:
            raise EngineError(f"sequence id {seq_id} is not below {self.info.max_num_seqs}")
        if start != len(cells):
            raise EngineError(
                f"sequence {seq_id} holds {len(cells)} tokens, but the row starts at {start}"
            )
        if self.info.layout != "unified" and len(cells) + len(tokens) > self.info.context_length:
            raise EngineError(f"sequence {seq_id} outgrows its {self.info.context_length} cells")
        if not all(0 <= token < VOCABULARY_SIZE for token in tokens):
            raise EngineError("a token outside the vocabulary")
        if self.info.needs_checkpoints and start != self._states.get(seq_id, 0):
            raise EngineError(f"the state of sequence {seq_id} is not that after {start} tokens")
        cells += (Cell(token, adapters) for token in tokens)
        self._states[seq_id] = len(cells)

    def _next(self, num_prompt_tokens: int, length: int, last: int) -> int:
        if length - num_prompt_tokens == self._length:
            return END
        return (last + 1) % 256

    def snapshot(self, key: int) -> memoryview:
        return memoryview(self._snapshots[key])

    def new_state_buffer(self, num_bytes: int) -> StateBuffer:
        data = bytearray(num_bytes)
        return StateBuffer(memoryview(data), data)

    def install_snapshot(self, key: int, filled: StateBuffer, num_tokens: int) -> None:
        self._snapshots[key] = bytes(filled.state)
        if len(self._saved(key)[0]) != num_tokens:
            raise EngineError(f"snapshot {key} has other tokens than {num_tokens}")

    def close(self) -> None:
        self._cells.clear()
        self._snapshots.clear()
