"""A backend without a model: it says what its script says, costs what its cost model says, and breaks on request.

``cllm serve --backend.name fake`` serves it, tests and simulations run on it. The text continues the prompt by
counting: after the token t comes t + 1, and END after ``length`` tokens, so every answer can be checked.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from cllm.backends.base import Logits, ModelInfo
from cllm.core.batch import Batch
from cllm.errors import EngineError

END = 256
CONTROL = {257: "<|im_start|>", 258: "<|im_end|>"}
VOCABULARY_SIZE = 260


class Costs(msgspec.Struct, frozen=True):
    """Seconds of a step: a fixed part, a part for each decoding row and one for each other token."""

    step: float = 0.0
    row: float = 0.0
    token: float = 0.0

    def of(self, batch: Batch) -> float:
        rows = sum(row.num_tokens == 1 for row in batch.rows)
        return self.step + rows * self.row + (batch.num_tokens - rows) * self.token


class Faults(msgspec.Struct, frozen=True):
    """Steps, counted from 1, at which the backend fails; 0 is never."""

    raise_at_step: int = 0
    hang_at_step: int = 0


NO_COSTS, NO_FAULTS = Costs(), Faults()


class FakeBackend:
    """Keeps the contract of backends/base.py and checks that its caller does.

    ``sleep`` is what a step's cost is spent with: time.sleep, or a simulated clock's advance.
    """

    def __init__(
        self,
        *,
        context_length: int = 1024,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 256,
        num_cells: int | None = None,
        length: int = 16,
        costs: Costs = NO_COSTS,
        faults: Faults = NO_FAULTS,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.info = ModelInfo(
            name="fake",
            architecture="fake",
            description="counts on from the last token",
            vocabulary_size=VOCABULARY_SIZE,
            context_length=context_length,
            trained_context_length=context_length,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            num_cells=num_cells or context_length * max_num_seqs,
            layout="unified" if num_cells else "partitioned",
            end_tokens=[END],
        )
        self._length = length
        self._costs = costs
        self._faults = faults
        self._sleep = sleep
        self._cells: dict[int, list[int]] = {}
        self.num_steps = 0

    def forward(self, batch: Batch) -> Logits:
        self.num_steps += 1
        for seq_id, keep in batch.operations:
            self._check_seq_id(seq_id)
            del self._cells.setdefault(seq_id, [])[keep:]
        self._break()
        if not 0 < batch.num_tokens <= self.info.max_num_batched_tokens:
            raise EngineError(f"a batch of {batch.num_tokens} tokens")
        for row in batch.rows:
            self._store(row.seq.seq_id, row.start, row.seq.tokens[row.start : row.start + row.num_tokens])
        if sum(map(len, self._cells.values())) > self.info.num_cells:
            raise EngineError("more cells in use than there are")
        self._sleep(self._costs.of(batch))
        logits = np.zeros((batch.num_samples, VOCABULARY_SIZE), np.float32)
        for i, row in enumerate(row for row in batch.rows if row.samples):
            logits[i, self._next(row.seq.num_prompt_tokens, self._cells[row.seq.seq_id])] = 20
        return logits

    def _break(self) -> None:
        if self.num_steps == self._faults.raise_at_step:
            raise EngineError("the fake backend was told to fail")
        if self.num_steps == self._faults.hang_at_step:
            self._sleep(3600)

    def _check_seq_id(self, seq_id: int) -> None:
        if not 0 <= seq_id < self.info.max_num_seqs:
            raise EngineError(f"sequence id {seq_id} is not below {self.info.max_num_seqs}")

    def _store(self, seq_id: int, start: int, tokens: list[int]) -> None:
        self._check_seq_id(seq_id)
        cells = self._cells.setdefault(seq_id, [])
        if start != len(cells):
            raise EngineError(f"sequence {seq_id} holds {len(cells)} tokens, but the row starts at {start}")
        if not all(0 <= token < VOCABULARY_SIZE for token in tokens):
            raise EngineError("a token outside of the vocabulary")
        cells += tokens

    def _next(self, num_prompt_tokens: int, cells: list[int]) -> int:
        if len(cells) - num_prompt_tokens == self._length:
            return END
        return (cells[-1] + 1) % 256

    def close(self) -> None:
        self._cells.clear()


class FakeVocabulary:
    """One token a byte; three control tokens."""

    size = VOCABULARY_SIZE
    control_tokens = sorted(CONTROL.values(), key=len, reverse=True)
    chat_template = (
        "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>{%- endfor %}"
        "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
    )

    def __init__(self) -> None:
        self.pieces = [bytes([i]) for i in range(256)] + [b""] * (VOCABULARY_SIZE - 256)
        self.special_texts: dict[str, Any] = {"bos_token": "", "eos_token": ""}

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        if parse_special:
            for token, name in CONTROL.items():
                head, found, tail = text.partition(name)
                if found:
                    before = self.tokenize(head, add_special=False, parse_special=True)
                    return [*before, token, *self.tokenize(tail, add_special=False, parse_special=True)]
        return list(text.encode())
