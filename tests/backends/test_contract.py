"""The contract of backends/base.py: one test for every backend and every layout.

Nothing here relies on a model's answers, only on logits being the same for the same tokens; in floating point that
means up to a small part of their spread, because the shape of a batch changes the order of summation.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from cllm.backends.base import Backend
from cllm.backends.fake import FakeBackend
from cllm.core.batch import Batch, Row, Trim
from cllm.core.params import SamplingParams
from cllm.core.request import Request
from cllm.core.sequence import Sequence
from cllm.errors import EngineError

NUM_SEQS = 4
BATCH = 32
CONTEXT = 256
TEXTS = [[5, 9, 33, 7, 20, 21, 40, 3, 90, 12], [64, 64, 2, 77, 30, 8], [101, 7, 5], [5, 9, 33, 7, 1, 2, 3, 4]]
TOLERANCE = 0.1  # of the standard deviation of the logits

LLAMA = pytest.mark.llama
KINDS = ["fake partitioned", "fake unified"]
KINDS += [pytest.param(f"llama.cpp {layout}", marks=LLAMA) for layout in ("partitioned", "unified")]


@pytest.fixture(scope="module", params=KINDS)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    name, layout = request.param.split()
    unified = layout == "unified"
    if name == "fake":
        made = FakeBackend(
            context_length=CONTEXT,
            max_num_seqs=NUM_SEQS,
            max_num_batched_tokens=BATCH,
            num_cells=NUM_SEQS * CONTEXT if unified else None,
        )
    else:
        path = request.getfixturevalue("builtin_path")
        from cllm.backends.llama_cpp.backend import LlamaCppBackend, LlamaCppParams

        sizes = {"context_length": CONTEXT, "max_num_seqs": NUM_SEQS, "max_num_batched_tokens": BATCH}
        made = LlamaCppBackend(path, LlamaCppParams(unified=unified, n_threads=1, n_gpu_layers=0, **sizes))
    assert made.info.layout == layout
    yield made
    made.close()


class Caller:
    """Keeps the caller's side of the contract: rows start where the cells of their seq_id end."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.seqs: dict[int, Sequence] = {}
        self.trims = [Trim(seq_id, 0) for seq_id in range(backend.info.max_num_seqs)]

    def row(self, seq_id: int, tokens: list[int], *, samples: bool = True) -> Row:
        """Compute ``tokens`` behind what ``seq_id`` holds."""
        if seq_id not in self.seqs:
            self.seqs[seq_id] = Sequence(Request("A", [0], SamplingParams()), 0, 0, CONTEXT)
            self.seqs[seq_id].seq_id = seq_id
            self.seqs[seq_id].tokens = []
        seq = self.seqs[seq_id]
        seq.tokens += tokens
        return Row(seq, len(seq.tokens) - len(tokens), len(tokens), samples)

    def trim(self, seq_id: int, keep: int) -> None:
        """Trim before the next batch."""
        del self.seqs[seq_id].tokens[keep:]
        self.trims.append(Trim(seq_id, keep))

    def forward(self, *rows: Row) -> np.ndarray:
        trims, self.trims = self.trims, []
        return self.backend.forward(Batch(list(rows), trims)).copy()


@pytest.fixture
def caller(backend: Backend) -> Caller:
    """Begins with empty cells, whatever the test before has left."""
    return Caller(backend)


def alone(backend: Backend, tokens: list[int]) -> np.ndarray:
    """The logits behind ``tokens``, computed in one go in an empty backend."""
    caller = Caller(backend)
    return caller.forward(caller.row(0, tokens))[0]


def assert_same(logits: np.ndarray, expected: np.ndarray) -> None:
    assert logits.shape == expected.shape
    assert np.abs(logits - expected).max() < TOLERANCE * expected.std()


def test_info(backend):
    """The sizes are the ones that were asked for, and the ends are tokens."""
    info = backend.info
    assert (info.context_length, info.max_num_seqs, info.max_num_batched_tokens) == (CONTEXT, NUM_SEQS, BATCH)
    assert info.num_cells == NUM_SEQS * CONTEXT
    assert info.end_tokens
    assert all(0 <= token < info.vocabulary_size for token in info.end_tokens)


def test_shape_of_logits(backend, caller):
    """float32 of shape (number of sampling rows, vocabulary), and the caller may write to them."""
    rows = [caller.row(0, TEXTS[0]), caller.row(1, TEXTS[1], samples=False), caller.row(2, TEXTS[2])]
    logits = backend.forward(Batch(rows, caller.trims))
    assert logits.shape == (2, backend.info.vocabulary_size)
    assert logits.dtype == np.float32
    assert np.isfinite(logits).all()
    logits[1, 3] = 5
    assert logits[1, 3] == 5


def test_different_texts_have_different_logits(backend):
    """Else the tests below would prove nothing."""
    logits = [alone(backend, text) for text in TEXTS]
    for i, one in enumerate(logits):
        for other in logits[:i]:
            assert np.abs(one - other).max() > 5 * TOLERANCE * one.std()


def test_in_company_as_alone(backend, caller):
    """Logits come in the order of the rows and do not depend on the other rows."""
    expected = [alone(backend, text) for text in TEXTS]
    logits = caller.forward(*[caller.row(i, text) for i, text in enumerate(TEXTS)])
    for got, wanted in zip(logits, expected, strict=True):
        assert_same(got, wanted)


def test_rows_that_sample_and_rows_that_do_not(backend, caller):
    """Rows without logits leave no gap, wherever they stand; single tokens and long rows mix."""
    expected = [alone(backend, [*text, 6, 7]) for text in TEXTS]
    caller.forward(*[caller.row(i, text, samples=False) for i, text in enumerate(TEXTS[:3])])
    rows = [
        caller.row(0, [6], samples=False),
        caller.row(1, [6, 7]),
        caller.row(2, [6, 7], samples=False),
        caller.row(3, [*TEXTS[3], 6, 7]),
    ]
    logits = caller.forward(*rows)
    assert_same(logits, np.stack([expected[1], expected[3]]))
    assert_same(caller.forward(caller.row(0, [7])), expected[0][None])


def test_no_row_samples(backend, caller):
    """A batch in which nobody samples gives no logits, and its cells are filled."""
    logits = caller.forward(caller.row(0, TEXTS[0], samples=False))
    assert logits.shape == (0, backend.info.vocabulary_size)
    assert_same(caller.forward(caller.row(0, [6]))[0], alone(backend, [*TEXTS[0], 6]))


@pytest.mark.parametrize("chunks", [[1, 9], [9, 1], [3, 3, 4], [1] * 10])
def test_in_chunks_as_whole(backend, caller, chunks):
    """A prompt computed in any chunks ends with the logits of the whole."""
    expected = alone(backend, TEXTS[0])
    caller.trims = [Trim(0, 0)]
    at = 0
    for size in chunks:
        logits = caller.forward(caller.row(0, TEXTS[0][at : at + size]))
        at += size
    assert_same(logits[0], expected)


def test_trim_to_a_prefix(backend, caller):
    """After a trim the kept tokens are there and the others are not."""
    expected = alone(backend, [*TEXTS[0][:4], 1, 2])
    caller.trims = [Trim(0, 0)]
    caller.forward(caller.row(0, TEXTS[0]), caller.row(1, TEXTS[1]))
    caller.trim(0, 4)
    logits = caller.forward(caller.row(0, [1, 2]), caller.row(1, [9]))
    assert_same(logits[0], expected)
    assert_same(logits[1], alone(backend, [*TEXTS[1], 9]))


def test_trim_to_nothing(backend, caller):
    """An emptied seq_id starts anew, one already empty stays so, and its neighbour keeps everything."""
    caller.forward(caller.row(0, TEXTS[0]), caller.row(1, TEXTS[1]))
    caller.trim(0, 0)
    caller.trims.append(Trim(3, 0))
    logits = caller.forward(caller.row(0, TEXTS[2]), caller.row(1, [9]))
    assert_same(logits[0], alone(backend, TEXTS[2]))
    caller = Caller(backend)
    caller.forward(caller.row(1, TEXTS[1]))
    assert_same(caller.forward(caller.row(1, [9]))[0], logits[1])


def test_a_full_batch_and_a_full_sequence(backend, caller):
    """As many tokens as allowed are computed in one step, and a sequence may fill its context."""
    caller.forward(*[caller.row(i, [3] * (BATCH // NUM_SEQS)) for i in range(NUM_SEQS)])
    caller.trim(0, 0)
    for _ in range(CONTEXT // BATCH):
        logits = caller.forward(caller.row(0, [5, 6, 7, 8] * (BATCH // 4)))
    assert np.isfinite(logits).all()


def too_many_tokens(caller: Caller) -> None:
    caller.forward(caller.row(0, [3] * BATCH), caller.row(1, [3]))


def a_seq_id_too_high(caller: Caller) -> None:
    caller.forward(caller.row(NUM_SEQS, [3]))


def a_negative_seq_id(caller: Caller) -> None:
    caller.forward(caller.row(0, [3]), caller.row(-1, [3]))


def a_trim_of_nobody(caller: Caller) -> None:
    caller.trims.append(Trim(NUM_SEQS, 0))
    caller.forward(caller.row(0, [3]))


def an_empty_batch(caller: Caller) -> None:
    caller.forward()


def a_gap(caller: Caller) -> None:
    caller.forward(caller.row(0, [3, 4]))
    caller.seqs[0].tokens += [3, 4]
    caller.forward(caller.row(0, [5]))


def a_token_of_no_vocabulary(caller: Caller) -> None:
    caller.forward(caller.row(0, [caller.backend.info.vocabulary_size]))


def a_negative_token(caller: Caller) -> None:
    caller.forward(caller.row(0, [3, -1]))


def more_than_all_cells(caller: Caller) -> None:
    for at in range(NUM_SEQS * CONTEXT // BATCH):
        caller.forward(caller.row(at % NUM_SEQS, [3] * BATCH))
    caller.forward(caller.row(0, [3]))


FAULTS = [
    too_many_tokens,
    a_seq_id_too_high,
    a_negative_seq_id,
    an_empty_batch,
    a_gap,
    a_token_of_no_vocabulary,
    a_negative_token,
    more_than_all_cells,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_an_error_and_no_crash(backend, caller, fault):
    """A caller who breaks the contract gets EngineError, and the batch after it is computed as ever."""
    expected = alone(backend, TEXTS[0])
    with pytest.raises(EngineError):
        fault(caller)
    assert_same(alone(backend, TEXTS[0]), expected)


def test_a_trim_of_nobody_is_an_error(backend, caller):
    """Trims of a seq_id that does not exist are refused like its rows."""
    with pytest.raises(EngineError):
        a_trim_of_nobody(caller)
    assert_same(alone(backend, TEXTS[0]), alone(backend, TEXTS[0]))


def test_an_error_costs_the_others_nothing(backend, caller):
    """Sequences that were not in the batch of an error keep their cells."""
    caller.forward(caller.row(1, TEXTS[1]))
    with pytest.raises(EngineError):
        a_gap(caller)
    logits = caller.forward(caller.row(1, [9]))
    assert_same(logits[0], alone(backend, [*TEXTS[1], 9]))
