"""The contract of backends/base.py: each test runs for every backend and layout.

The tests do not rely on a model's answers, only on equal logits for equal tokens. In floating
point, equal means up to a small part of the logits' spread, because the shape of a batch changes
the order of summation.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import repeat

from cllm.backends.base import Backend
from cllm.backends.fake.backend import FakeBackend
from cllm.backends.params import BackendParams
from cllm.core.batch import Batch, Copy, Drop, Load, Operation, Row, Save, Swap, Trim
from cllm.core.params import SamplingParams
from cllm.core.request import Request
from cllm.core.sequence import Sequence
from cllm.errors import EngineError
from cllm.kv_cache.layouts import LAYOUTS
from cllm.models.gguf import read_header
from cllm.models.sequence_memory import compute_kv_bytes_per_token
from cllm.sampling.grammar import Grammar

NUM_SEQS = 4
BATCH = 32
CONTEXT = 256
NUM_CELLS = NUM_SEQS * CONTEXT
NUM_KEYS = 4  # of snapshots
TAKEN_BACK = 4  # tokens that recurrent models are asked to take back
TEXTS = [
    [5, 9, 33, 7, 20, 21, 40, 3, 90, 12],
    [64, 64, 2, 77, 30, 8],
    [101, 7, 5],
    [5, 9, 33, 7, 1, 2, 3, 4],
]
LONG = [(7 * i * i + i) % 100 + 5 for i in range(120)]  # several times longer than tiny windows
TOLERANCE = 0.1  # of the standard deviation of the logits

LLAMA = pytest.mark.llama
# State that cannot be trimmed, alone and beside attention, and sliding windows.
SHARING = "_sharing"  # hybrids whose sequences share cells
HYBRIDS = ("lfm2", "qwen35", "qwen35_mtp", "nemotron_h", f"lfm2{SHARING}", f"qwen35{SHARING}")
RECURRENT = ("mamba", *HYBRIDS)
WINDOWED = {"gemma3": "paged", "gpt-oss": "paged", "gpt-oss_partitioned": "partitioned"}
TINY = (*RECURRENT, *WINDOWED)
WHICH = ("partitioned", "unified", "paged", "q8_0", *TINY)
LLAMA_KINDS = [pytest.param(f"llama.cpp {which}", marks=LLAMA) for which in WHICH]
TORCH = pytest.param("torch unified", marks=pytest.mark.torch)
UNIFIED = ["fake unified", LLAMA_KINDS[1], TORCH]
PAGED = ["fake paged", LLAMA_KINDS[2], pytest.param("llama.cpp gpt-oss", marks=LLAMA)]
FAKE_KINDS = ["fake partitioned", "fake unified", "fake paged", "fake hybrid"]
KINDS = [*FAKE_KINDS, *LLAMA_KINDS, TORCH]
WITH_FILES = [["partitioned", "unified", "paged"], ["gpt-oss", "gpt-oss_partitioned"]]


@pytest.fixture(scope="module")
def make_backend(request: pytest.FixtureRequest) -> Callable[[str], Backend]:
    """Return ``make_backend(kind)``; all backends of one kind are alike."""

    def make(kind: str) -> Backend:
        name, layout = kind.split()
        unified = layout == "unified"
        sizes: dict[str, Any] = {
            "context_length": CONTEXT,
            "max_num_seqs": NUM_SEQS,
            "max_num_batched_tokens": BATCH,
        }
        if layout == "hybrid":
            return FakeBackend(max_taken_back=TAKEN_BACK, checkpoint_bytes=8, **sizes)
        if name == "fake":
            return FakeBackend(layout=layout, num_spare_ids=6 if unified else 0, **sizes)
        path = request.getfixturevalue("builtin_path")
        if name == "torch":
            return make_torch_backend(request.getfixturevalue("builtin_checkpoint"), **sizes)
        from cllm.backends.llama_cpp.backend import LlamaCppBackend
        from cllm.backends.llama_cpp.fit import POSITION_BYTES
        from cllm.backends.llama_cpp.options import Options

        num_caches = 2 if layout in WINDOWED else 1
        if layout in TINY:
            name = layout.removesuffix(SHARING).removesuffix("_partitioned")
            path = request.getfixturevalue("tiny_model")(name)
            sizes["max_taken_back"] = TAKEN_BACK
        is_recurrent = layout in RECURRENT
        if layout in TINY:  # those with windows cannot be unified
            has_own = layout == name if is_recurrent else layout != name
            layout = "partitioned" if has_own else "unified"
        if layout == "q8_0":
            layout, sizes["kv_type"] = "partitioned", "q8_0"
        per_token = compute_kv_bytes_per_token(read_header(path), "f16")
        if per_token and "kv_type" not in sizes and not is_recurrent:
            sizes |= {"kv_bytes_per_token": per_token, "kv_memory": NUM_CELLS * per_token}
            if layout == "paged" or num_caches > 1:
                sizes["kv_memory"] += NUM_SEQS * CONTEXT * POSITION_BYTES * num_caches
        options = Options(n_threads=1, n_gpu_layers=0).model_dump()
        return LlamaCppBackend(
            BackendParams(path=str(path), layout=layout, options=options, draft_head=True, **sizes)
        )

    return make


def make_torch_backend(path: Path, **sizes: Any) -> Backend:
    from cllm.backends.torch.backend import TorchBackend
    from cllm.backends.torch.options import Options

    options = Options(device="cpu", n_threads=1, dtype="float32").model_dump()
    backend = TorchBackend(BackendParams(path=str(path), options=options, **sizes))
    per_token = backend.info.kv_bytes_per_token
    backend.close()
    sizes["kv_memory"] = NUM_CELLS * per_token
    return TorchBackend(BackendParams(path=str(path), options=options, **sizes))


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """The name of the backend and its layout."""
    return request.param


@pytest.fixture(scope="module")
def backend(kind: str, make_backend: Callable[[str], Backend]) -> Iterator[Backend]:
    made = make_backend(kind)
    yield made
    made.close()


def num_ids(backend: Backend) -> int:
    """Return how many seq_ids can hold tokens."""
    return backend.info.max_num_seqs + backend.info.num_spare_ids


class Caller:
    """Keeps the caller's side of the contract: rows start where the cells of their seq_id end."""

    def __init__(self, backend: Backend) -> None:
        """Begins with empty cells and without snapshots, whatever was there before."""
        self.backend = backend
        self.seqs: dict[int, Sequence] = {}
        self.saved: dict[int, int] = {}  # key -> tokens
        self.fresh: dict[int, int] = {}  # seq_id -> tokens that a recurrent model could take back
        self.operations: list[Operation] = [Trim(seq_id, 0) for seq_id in range(num_ids(backend))]
        self.operations += [Drop(key) for key in range(NUM_KEYS)]

    def seq(self, seq_id: int) -> Sequence:
        """Return the sequence of ``seq_id``; its tokens are what the cells hold after the next
        batch.
        """
        if seq_id not in self.seqs:
            self.seqs[seq_id] = Sequence(Request("A", [0], SamplingParams()), 0, 0, CONTEXT)
            self.seqs[seq_id].seq_id = seq_id
            self.seqs[seq_id].tokens = []
        return self.seqs[seq_id]

    def row(
        self,
        seq_id: int,
        tokens: list[int],
        draft: list[int] | None = None,
        *,
        samples: bool = True,
    ) -> Row:
        """Return a row of ``tokens`` and draft tokens that continues ``seq_id``."""
        seq, guesses = self.seq(seq_id), tuple(draft or ())
        start = len(seq.tokens)
        seq.tokens += tokens
        return Row(seq, start, len(tokens), 1 + len(guesses) if samples else 0, guesses)

    def whole(self, num_tokens: int, part: int) -> None:
        """Skip the test if it needs part of a state that the backend cannot trim."""
        if 0 < part < num_tokens and self.backend.info.max_taken_back is not None:
            pytest.skip("its state is kept or lost as a whole")

    def trim(self, seq_id: int, keep: int) -> None:
        """Trim before the next batch."""
        length = len(self.seq(seq_id).tokens)
        if length - keep > min(self.fresh.pop(seq_id, 0), self.backend.info.max_taken_back or 0):
            self.whole(length, keep)
        del self.seq(seq_id).tokens[keep:]
        self.operations.append(Trim(seq_id, keep))

    def copy(self, source: int, target: int, count: int) -> None:
        """Copy before the next batch."""
        self.whole(len(self.seq(source).tokens), count)
        self.seq(target).tokens = self.seq(source).tokens[:count]
        self.operations.append(Copy(source, target, count))

    def swap(self, first: int, second: int) -> None:
        """Swap before the next batch."""
        tokens = self.seq(first).tokens, self.seq(second).tokens
        self.seq(second).tokens, self.seq(first).tokens = tokens
        self.operations.append(Swap(first, second))

    def save(self, seq_id: int, key: int) -> None:
        """Save before the next batch."""
        self.saved[key] = len(self.seq(seq_id).tokens)
        self.operations.append(Save(seq_id, key))

    def load(self, key: int, seq_id: int, tokens: list[int]) -> None:
        """Load before the next batch; ``tokens`` are what the snapshot, or a part of it, holds."""
        self.whole(self.saved.get(key, 0), len(tokens))
        self.seq(seq_id).tokens = list(tokens)
        self.operations.append(Load(key, seq_id, len(tokens)))

    def forward(self, *rows: Row) -> np.ndarray:
        operations, self.operations = self.operations, []
        self.fresh = {row.seq.seq_id: len(row.draft) for row in rows}
        return np.array(self.backend.forward(Batch(list(rows), operations)))

    def extend(self, seq_id: int, tokens: list[int]) -> None:
        """Compute ``tokens``, which may be more than a batch."""
        for at in range(0, len(tokens), BATCH):
            self.forward(self.row(seq_id, tokens[at : at + BATCH]))

    def fill(self, seq_id: int, count: int) -> None:
        """Compute ``count`` tokens, whatever they are."""
        self.extend(seq_id, [3] * count)


@pytest.fixture
def caller(backend: Backend) -> Caller:
    return Caller(backend)


def alone(backend: Backend, tokens: list[int]) -> np.ndarray:
    """Return the logits after ``tokens``, computed in an empty backend, in one step if they are not
    too many.
    """
    caller = Caller(backend)
    for at in range(0, len(tokens), BATCH):
        logits = caller.forward(caller.row(0, tokens[at : at + BATCH]))
    return logits[0]


def assert_same(logits: np.ndarray, expected: np.ndarray) -> None:
    assert logits.shape == expected.shape
    assert np.abs(logits - expected).max() < TOLERANCE * expected.std()


def test_info_has_the_requested_sizes(kind, backend):
    """End tokens are in the vocabulary."""
    info = backend.info
    assert (info.context_length, info.max_num_seqs, info.max_num_batched_tokens) == (
        CONTEXT,
        NUM_SEQS,
        BATCH,
    )
    assert info.num_cells == NUM_CELLS
    assert NUM_SEQS <= info.max_num_samples <= BATCH
    named = kind.split()[1]
    layout = "unified" if named.endswith(SHARING) else WINDOWED.get(named, "partitioned")
    assert info.layout == (named if named in LAYOUTS else layout)
    assert (info.num_spare_ids > 0) == (named == "unified")
    assert bool(info.checkpoint_bytes) == (named in ("hybrid", *HYBRIDS))
    limit = TAKEN_BACK if info.checkpoint_bytes else 0
    assert info.max_taken_back == (limit if named in ("hybrid", *RECURRENT) else None)
    assert info.end_tokens
    assert all(0 <= token < info.vocabulary_size for token in info.end_tokens)


def test_vocabulary_matches_the_logits(backend):
    """A grammar allows its end tokens, and special tokens where it names them."""
    vocabulary, ends = backend.vocabulary, backend.info.end_tokens
    assert vocabulary.size == len(vocabulary.pieces) == backend.info.vocabulary_size
    tokenizer = vocabulary.grammar_tokenizer(ends)

    def allowed(text: str, written: str = "") -> set[int]:
        matcher = Grammar(text, tokenizer).matcher()
        for token in vocabulary.tokenize(written, add_special=False, parse_special=False):
            matcher.consume(token)
        return set(np.unpackbits(matcher.compute_mask(), bitorder="little").nonzero()[0].tolist())

    token, text = max(vocabulary.special_tokens.items(), key=lambda entry: entry[1])
    assert allowed(f"start: <[{token}]>") == allowed(f"start: {text}") == {token}
    anything = allowed("start: /(?s:.*)/", "a")
    assert anything >= set(ends)
    assert not anything & (vocabulary.special_tokens.keys() - set(ends))
    assert all(
        vocabulary.pieces[token] == b"ab"[: len(vocabulary.pieces[token])]
        for token in allowed('start: "ab"')
    )


def test_logits_have_one_row_per_sample(backend, caller):
    """float32, (number of samples, vocabulary size). The caller may write to them."""
    rows = [
        caller.row(0, TEXTS[0]),
        caller.row(1, TEXTS[1], samples=False),
        caller.row(2, TEXTS[2]),
    ]
    logits = backend.forward(Batch(rows, caller.operations))
    assert len(logits) == 2
    assert all(row.shape == (backend.info.vocabulary_size,) for row in logits)
    assert all(row.dtype == np.float32 for row in logits)
    assert np.isfinite(logits).all()
    logits[1][3] = 5
    assert logits[1][3] == 5


def test_different_texts_have_different_logits(backend):
    """Otherwise the tests below would prove nothing."""
    logits = [alone(backend, text) for text in TEXTS]
    for i, one in enumerate(logits):
        for other in logits[:i]:
            assert np.abs(one - other).max() > 5 * TOLERANCE * one.std()


def test_in_company_as_alone(backend, caller):
    """They are in the order of the rows."""
    expected = [alone(backend, text) for text in TEXTS]
    logits = caller.forward(*[caller.row(i, text) for i, text in enumerate(TEXTS)])
    for got, wanted in zip(logits, expected, strict=True):
        assert_same(got, wanted)


def test_rows_without_samples_leave_no_gap_in_the_logits(backend, caller):
    """Single tokens and long rows mix in any order."""
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


def test_batch_without_samples_fills_cells(backend, caller):
    """It returns no logits."""
    logits = caller.forward(caller.row(0, TEXTS[0], samples=False))
    assert len(logits) == 0
    assert_same(caller.forward(caller.row(0, [6]))[0], alone(backend, [*TEXTS[0], 6]))


@pytest.mark.parametrize("chunks", [[1, 9], [9, 1], [3, 3, 4], [1] * 10])
def test_in_chunks_as_whole(backend, caller, chunks):
    expected = alone(backend, TEXTS[0])
    at = 0
    for size in chunks:
        logits = caller.forward(caller.row(0, TEXTS[0][at : at + size]))
        at += size
    assert_same(logits[0], expected)


def test_trim_keeps_the_prefix_only(backend, caller):
    expected = alone(backend, [*TEXTS[0][:4], 1, 2])
    caller.forward(caller.row(0, TEXTS[0]), caller.row(1, TEXTS[1]))
    caller.trim(0, 4)
    logits = caller.forward(caller.row(0, [1, 2]), caller.row(1, [9]))
    assert_same(logits[0], expected)
    assert_same(logits[1], alone(backend, [*TEXTS[1], 9]))


def test_trim_to_nothing_empties_only_that_seq_id(backend, caller):
    """An empty seq_id can be trimmed again."""
    caller.forward(caller.row(0, TEXTS[0]), caller.row(1, TEXTS[1]))
    caller.trim(0, 0)
    caller.operations.append(Trim(3, 0))
    logits = caller.forward(caller.row(0, TEXTS[2]), caller.row(1, [9]))
    assert_same(logits[0], alone(backend, TEXTS[2]))
    caller = Caller(backend)
    caller.forward(caller.row(1, TEXTS[1]))
    assert_same(caller.forward(caller.row(1, [9]))[0], logits[1])


def test_largest_batch_and_longest_sequence_are_computed(backend, caller):
    caller.forward(*[caller.row(i, [3] * (BATCH // NUM_SEQS)) for i in range(NUM_SEQS)])
    caller.trim(0, 0)
    for _ in range(CONTEXT // BATCH):
        logits = caller.forward(caller.row(0, [5, 6, 7, 8] * (BATCH // 4)))
    assert np.isfinite(logits).all()


# --- guesses ------------------------------------------------------------------------------------


def test_every_draft_token_has_logits(backend, caller):
    """They follow those of the row's last token, in the order of the batch."""
    token, *draft = TEXTS[1][:3]
    guessed = [alone(backend, [*TEXTS[0], *TEXTS[1][:count]]) for count in (1, 2, 3)]
    before, behind = alone(backend, [*TEXTS[1], 9]), alone(backend, [*TEXTS[2], 9])
    caller.forward(*[caller.row(i, TEXTS[n], samples=False) for i, n in enumerate([1, 0, 2])])
    logits = caller.forward(caller.row(0, [9]), caller.row(1, [token], draft), caller.row(2, [9]))
    assert_same(logits, np.stack([before, *guessed, behind]))


@pytest.mark.parametrize("num_right", [0, 1, 3])
def test_rejected_draft_tokens_leave_no_trace_after_a_trim(backend, caller, num_right):
    """Accepted ones stay."""
    draft = [7, 90, 91]
    expected = alone(backend, [*TEXTS[0], 6, *draft[:num_right], 8])
    caller.forward(caller.row(0, TEXTS[0]))
    caller.forward(caller.row(0, [6], draft))
    caller.seq(0).tokens += draft
    caller.trim(0, len(TEXTS[0]) + 1 + num_right)
    assert_same(caller.forward(caller.row(0, [8]))[0], expected)


def test_max_num_samples_can_be_used_by_one_row_or_several(backend, caller):
    count = backend.info.max_num_samples
    if backend.info.max_taken_back is None:
        logits = caller.forward(caller.row(0, [3], [3] * (count - 1)))
        assert len(logits) == count
        assert np.isfinite(logits).all()
    caller = Caller(backend)
    share = min(count // NUM_SEQS, 1 + (backend.info.max_taken_back or count))
    logits = caller.forward(*[caller.row(i, [3], [3] * (share - 1)) for i in range(NUM_SEQS)])
    assert len(logits) == NUM_SEQS * share
    assert np.isfinite(logits).all()


@pytest.mark.parametrize("seed", range(repeat(6, 2)))
def test_drafts_of_several_sequences_leave_no_trace(backend, caller, seed):
    """Sequences with and without draft tokens come and go, are saved and loaded, and are computed
    next to each other or with gaps. Their last logits are those of their tokens alone.
    """
    chance = random.Random(seed)
    if backend.info.max_taken_back == 0:
        pytest.skip("it cannot take back any tokens")

    def choose(count: int) -> list[int]:
        return [chance.randrange(200) for _ in range(count)]

    for _ in range(80):
        ids = [i for i in range(NUM_SEQS) if chance.random() < 0.7] or [0]
        run = [i for i in ids if all(j in ids for j in range(i, ids[-1]))]  # with drafts
        run = ids if backend.info.layout == "unified" else run
        rows, kept = [], {}
        for seq_id in ids:
            length = len(caller.seq(seq_id).tokens)
            if length and chance.random() < 0.15:
                caller.trim(seq_id, 0)
                length = 0
            if length and seq_id in run:
                most = min(TAKEN_BACK, backend.info.max_num_samples // NUM_SEQS - 1)
                draft = choose(chance.randint(0, most))
                kept[seq_id] = length + 1 + chance.randint(0, len(draft))
                rows.append(caller.row(seq_id, choose(1), draft))
                caller.seq(seq_id).tokens += draft
            else:
                rows.append(caller.row(seq_id, choose(chance.choice([1, 1, 5]))))
        caller.forward(*rows)
        for seq_id, keep in kept.items():
            if keep < len(caller.seq(seq_id).tokens):
                caller.trim(seq_id, keep)
        seq_id, other = chance.choice(ids), chance.randrange(NUM_SEQS)
        if chance.random() < 0.4:
            caller.save(seq_id, 0)
            caller.load(0, other, caller.seq(seq_id).tokens)
        elif chance.random() < 0.3 and other != seq_id:
            caller.trim(other, 0)
            caller.copy(seq_id, other, len(caller.seq(seq_id).tokens))
    texts = {i: [*caller.seq(i).tokens, 9] for i in range(NUM_SEQS)}
    logits = caller.forward(*(caller.row(i, [9]) for i in range(NUM_SEQS)))
    caller.forward()
    for got, text in zip(logits, texts.values(), strict=True):
        assert_same(got, alone(backend, text))


@pytest.mark.parametrize(("drafts", "others"), [(3, (0, 1)), (0, (2, 3))])
def test_draft_is_taken_back_after_other_sequences_were_computed(backend, caller, drafts, others):
    """They began in any order, and are not next to the one with draft tokens. llama.cpp moves the
    recurrent states of sequences that it computes together next to each other.
    """
    if backend.info.max_taken_back == 0:
        pytest.skip("it cannot take back any tokens")
    expected = alone(backend, [*TEXTS[0], 11, 12, 20])
    for order in permutations((drafts, *others)):
        caller.forward()
        for seq_id in order:
            caller.forward(caller.row(seq_id, TEXTS[0] if seq_id == drafts else [seq_id]))
        rows = [caller.row(seq_id, [4]) for seq_id in others]
        rows.append(caller.row(drafts, [11], [12, 13, 14]))
        caller.forward(*sorted(rows, key=lambda row: row.seq.seq_id))
        caller.seq(drafts).tokens += [12, 13, 14]
        caller.trim(drafts, len(TEXTS[0]) + 2)
        assert_same(caller.forward(caller.row(drafts, [20]))[0], expected)
        for seq_id in order:
            caller.trim(seq_id, 0)


@pytest.mark.llama
@pytest.mark.parametrize("kind", [f"llama.cpp {kind}" for kind in HYBRIDS], indirect=True)
def test_past_states_are_kept_after_an_equal_step_without_draft(backend, caller):
    """Both have five tokens with logits. llama.cpp must not compute the second one like the first,
    for which no past states are kept.
    """
    assert backend._cells.past_states._start is not None
    seq = caller.seq(0)
    caller.forward(caller.row(0, [3]))
    seq.tokens += TEXTS[0][:5]
    caller.forward(Row(seq, 1, 5, 5, (), 4))
    caller.forward(caller.row(0, [6], [7, 8, 9, 10]))
    seq.tokens += [7, 8, 9, 10]
    caller.trim(0, 8)
    logits = caller.forward(caller.row(0, [20]))
    assert_same(logits[0], alone(backend, [3, *TEXTS[0][:5], 6, 7, 20]))


# --- copies -------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 4, 10])
def test_copy_and_source_continue_independently(backend, caller, count):
    """The target continues after the copied tokens, the source after all of its own."""
    expected = [alone(backend, [*TEXTS[0], 6]), alone(backend, [*TEXTS[0][:count], 7, 8])]
    caller.forward(caller.row(0, TEXTS[0]))
    caller.copy(0, 2, count)
    assert_same(caller.forward(caller.row(0, [6]), caller.row(2, [7, 8])), np.stack(expected))


@pytest.mark.parametrize(("goes", "stays"), [(0, 1), (1, 0)])
def test_copy_and_source_outlive_each_other(backend, caller, goes, stays):
    """Later computations in one seq_id do not change the other one."""
    expected = [alone(backend, TEXTS[1]), alone(backend, [*TEXTS[0], 6])]
    caller.forward(caller.row(0, TEXTS[0]))
    caller.copy(0, 1, 10)
    caller.trim(goes, 0)
    assert_same(caller.forward(caller.row(goes, TEXTS[1]))[0], expected[0])
    assert_same(caller.forward(caller.row(stays, [6]))[0], expected[1])


def test_operations_run_in_order_before_the_rows(backend, caller):
    left = [TEXTS[0][:7], TEXTS[1][:2], TEXTS[1], TEXTS[1][:5]]
    expected = [alone(backend, [*tokens, 9]) for tokens in left]
    caller.forward(caller.row(0, TEXTS[0]), caller.row(1, TEXTS[1]))
    caller.copy(0, 3, 7)
    caller.copy(1, 2, 4)
    caller.trim(0, 0)
    caller.copy(3, 0, 7)
    caller.trim(3, 0)
    caller.save(1, 0)
    caller.trim(1, 0)
    caller.copy(2, 1, 2)
    caller.load(0, 2, TEXTS[1])
    caller.copy(2, 3, 5)
    assert [caller.seq(i).tokens for i in range(NUM_SEQS)] == left
    assert_same(caller.forward(*[caller.row(i, [9]) for i in range(NUM_SEQS)]), np.stack(expected))


def test_batch_of_operations_returns_no_logits(backend, caller):
    expected = alone(backend, [*TEXTS[0][:4], 9])
    caller.forward(caller.row(0, TEXTS[0]))
    caller.copy(0, 1, 4)
    assert len(caller.forward()) == 0
    assert_same(caller.forward(caller.row(1, [9]))[0], expected)


@pytest.mark.parametrize("kind", UNIFIED, indirect=True)
def test_shared_cells_count_once(backend, caller):
    """In the unified layout a copy takes no cells. A cell is free once no seq_id uses it."""
    spare = range(NUM_SEQS, NUM_SEQS + 6)
    caller.fill(0, 200)
    for seq_id in spare:
        caller.copy(0, seq_id, 200)
    for seq_id in (1, 2, 3):
        caller.fill(seq_id, CONTEXT)
    caller.trim(0, 0)
    caller.fill(0, 56)
    with pytest.raises(EngineError):
        caller.forward(caller.row(0, [3]))
    caller.trim(0, 0)
    for seq_id in spare:
        caller.trim(seq_id, 150)
    caller.fill(0, 106)
    for seq_id in spare:
        caller.trim(seq_id, 0)
    caller.fill(0, 150)
    assert sum(len(caller.seq(i).tokens) for i in range(NUM_SEQS)) == NUM_CELLS


@pytest.mark.parametrize("kind", UNIFIED, indirect=True)
def test_spare_seq_ids_keep_prefixes(backend, caller):
    """They can be copied there and back, as a whole or in part."""
    expected = [alone(backend, [*TEXTS[0][:count], 9]) for count in (10, 4, 3)]
    caller.forward(caller.row(0, TEXTS[0]))
    first, last = NUM_SEQS, num_ids(backend) - 1
    caller.copy(0, first, 10)
    caller.copy(first, last, 7)
    caller.trim(0, 0)
    caller.forward(caller.row(0, TEXTS[1]))
    caller.trim(last, 4)
    caller.copy(first, 1, 10)
    caller.copy(last, 2, 4)
    caller.copy(last, 3, 3)
    assert_same(caller.forward(*[caller.row(i, [9]) for i in (1, 2, 3)]), np.stack(expected))


# --- snapshots ----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 4, 10])
def test_snapshot_is_loaded_as_a_whole_or_in_part(backend, caller, count):
    """Under any seq_id, in place of its tokens, any number of times."""
    expected = [alone(backend, [*TEXTS[0][:count], 9]), alone(backend, [*TEXTS[0], 9])]
    caller.forward(caller.row(2, TEXTS[0]), caller.row(1, TEXTS[1]))
    caller.save(2, 0)
    caller.trim(2, 0)
    caller.forward(caller.row(2, TEXTS[2]))
    caller.load(0, 1, TEXTS[0][:count])
    caller.load(0, 3, TEXTS[0])
    assert_same(caller.forward(caller.row(1, [9]), caller.row(3, [9])), np.stack(expected))


@pytest.mark.parametrize("source", ["itself", "running", "snapshot"])
def test_checkpoint_goes_back_to_where_it_was_saved(backend, caller, source):
    """Under any seq_id that has the keys and values of its tokens, and perhaps of more."""
    if not backend.info.checkpoint_bytes:
        pytest.skip("its memory is kept in one part")
    expected = [alone(backend, [*TEXTS[0], 9, 9, 6]), alone(backend, [*TEXTS[0], 7, 8])]
    count = len(TEXTS[0])
    caller.forward(caller.row(0, TEXTS[0]), caller.row(3, TEXTS[1]))
    caller.operations.append(Save(0, 0, is_checkpoint=True))
    caller.forward(caller.row(0, [9, 9]))
    if source == "itself":
        assert_same(caller.forward(caller.row(0, [6]))[0], expected[0])
    elif source == "running":
        caller.operations.append(Copy(0, 2, count))
    else:
        caller.operations += [Save(0, 1), Trim(2, 0), Load(1, 2, count)]
    target = 0 if source == "itself" else 2
    caller.operations.append(Load(0, target, count, is_checkpoint=True))
    caller.seq(target).tokens = [*TEXTS[0]]
    assert_same(caller.forward(caller.row(target, [7, 8]))[0], expected[1])
    if source != "itself":
        assert_same(caller.forward(caller.row(0, [6]))[0], expected[0])


def test_checkpoint_can_be_loaded_again(backend, caller):
    """It is small, and its size is known."""
    if not backend.info.checkpoint_bytes:
        pytest.skip("its memory is kept in one part")
    expected = alone(backend, [*TEXTS[0], 7, 8])
    caller.forward(caller.row(1, TEXTS[0]))
    caller.operations.append(Save(1, 0, is_checkpoint=True))
    for tokens in ([5], [7, 8], [3, 3, 3], [7, 8]):
        logits = caller.forward(caller.row(1, tokens))[0]
        caller.operations.append(Load(0, 1, len(TEXTS[0]), is_checkpoint=True))
        caller.seq(1).tokens = [*TEXTS[0]]
    assert_same(logits, expected)
    if not isinstance(backend, FakeBackend):
        assert len(backend.snapshot(0)) == backend.info.checkpoint_bytes


@pytest.mark.parametrize("count", [20, 60, 119])
def test_part_of_a_long_prefix_is_that_prefix(backend, caller, count):
    """However it comes to a seq_id, also if a window has passed its tokens.

    The sequence that it comes from continues.
    """
    part = LONG[:count]
    caller.extend(0, part)
    expected = caller.forward(caller.row(0, [9]))[0]
    caller.extend(1, LONG)
    whole = caller.forward(caller.row(1, [9]))[0]
    caller.trim(1, len(LONG))
    caller.copy(1, 2, count)
    assert_same(caller.forward(caller.row(2, [9]))[0], expected)
    assert_same(caller.forward(caller.row(1, [9]))[0], whole)
    caller.trim(1, len(LONG))
    caller.save(1, 0)
    caller.load(0, 3, part)
    assert_same(caller.forward(caller.row(3, [9]))[0], expected)
    caller.load(0, 0, LONG)
    assert_same(caller.forward(caller.row(0, [9]))[0], whole)
    for seq_id in (0, 1):
        caller.trim(seq_id, count)
        assert_same(caller.forward(caller.row(seq_id, [9]))[0], expected)


def test_saving_does_not_change_the_sequence(backend, caller):
    """The sequence continues, and its snapshot stays the same."""
    expected = [alone(backend, [*TEXTS[0], 6]), alone(backend, [*TEXTS[0], 9])]
    caller.forward(caller.row(0, TEXTS[0]))
    caller.save(0, 1)
    assert_same(caller.forward(caller.row(0, [6]))[0], expected[0])
    caller.load(1, 1, TEXTS[0])
    assert_same(caller.forward(caller.row(1, [9]))[0], expected[1])


def test_drop_deletes_only_that_snapshot(backend, caller):
    """Dropping a snapshot that does not exist has no effect."""
    expected = alone(backend, [*TEXTS[1], 9])
    caller.forward(caller.row(0, TEXTS[0]), caller.row(1, TEXTS[1]))
    caller.save(0, 0)
    caller.save(1, 1)
    caller.operations += [Drop(0), Drop(0), Drop(77)]
    caller.load(1, 0, TEXTS[1])
    assert_same(caller.forward(caller.row(0, [9]))[0], expected)
    with pytest.raises(KeyError):
        backend.snapshot(0)
    caller.load(0, 2, TEXTS[0])
    with pytest.raises(EngineError):
        caller.forward(caller.row(2, [9]))


@pytest.mark.parametrize("kind", UNIFIED, indirect=True)
def test_spare_seq_ids_can_be_saved_and_loaded(backend, caller):
    """Other sequences are not affected."""
    expected = [alone(backend, [*tokens, 9]) for tokens in (TEXTS[1], TEXTS[0], TEXTS[0][:5])]
    caller.forward(caller.row(0, TEXTS[0]))
    first, last = NUM_SEQS, num_ids(backend) - 1
    caller.copy(0, last, 10)
    caller.trim(0, 0)
    caller.forward(caller.row(0, TEXTS[1]))
    caller.save(last, 2)
    caller.trim(last, 0)
    caller.load(2, 1, TEXTS[0])
    caller.load(2, first, TEXTS[0])
    caller.copy(first, 2, 5)
    assert_same(caller.forward(*[caller.row(i, [9]) for i in range(3)]), np.stack(expected))


def test_snapshot_bytes_do_not_change(backend, caller):
    """They do not depend on what the sequence does next. An unknown snapshot has no bytes."""
    caller.forward(caller.row(0, TEXTS[0]))
    caller.save(0, 3)
    caller.forward()
    view = backend.snapshot(3)
    assert isinstance(view, memoryview)
    before = bytes(view)
    caller.forward(caller.row(0, [6, 7]))
    caller.load(3, 1, TEXTS[0])
    caller.trim(0, 0)
    caller.forward(caller.row(0, TEXTS[1]), caller.row(1, [6]))
    assert bytes(view) == bytes(backend.snapshot(3)) == before
    with pytest.raises(KeyError):
        backend.snapshot(77)


@pytest.mark.parametrize("kind", LLAMA_KINDS, indirect=True)
def test_size_of_a_state_is_known_before_saving(backend, caller):
    """A fixed part, and a part for each token, up to a few bytes of headers."""
    info = backend.info
    for count in (1, 5, 10):
        caller.trim(1, 0)
        caller.forward(caller.row(1, TEXTS[0][:count]))
        caller.save(1, 0)
        caller.forward()
        told = info.state_bytes + count * info.state_bytes_per_token
        assert told - 64 <= len(backend.snapshot(0)) <= told


def install_snapshot(
    backend: Backend, key: int, data: bytes, num_tokens: int = len(TEXTS[0])
) -> None:
    buffer = backend.new_state_buffer(len(data))
    buffer.data[:] = data
    backend.install_snapshot(key, buffer, num_tokens)


def test_snapshot_is_loaded_by_another_backend_with_the_same_fingerprint(
    kind, backend, make_backend, caller
):
    """Its bytes are the same there."""
    part = TEXTS[0][: 7 if backend.info.max_taken_back is None else None]
    expected = alone(backend, [*part, 9])
    other = make_backend(kind)
    assert other.info.fingerprint == backend.info.fingerprint != ""
    there = Caller(other)
    there.forward(there.row(2, TEXTS[0]))
    there.save(2, 0)
    there.forward()
    data = bytes(other.snapshot(0))
    other.close()
    caller.forward()
    install_snapshot(backend, 1, data)
    caller.load(1, 3, part)
    assert_same(caller.forward(caller.row(3, [9]))[0], expected)
    assert bytes(backend.snapshot(1)) == data


@pytest.mark.parametrize("damage", ["cut off", "too long", "no state", "other tokens"])
def test_invalid_snapshot_is_an_error_on_load(backend, caller, damage):
    """Or before, if states are checked. Other sequences keep their cells."""
    expected = alone(backend, [*TEXTS[1], 9])
    caller.forward(caller.row(0, TEXTS[0]), caller.row(1, TEXTS[1]))
    caller.save(0, 0)
    caller.forward()
    data = bytes(backend.snapshot(0))
    damaged = {"cut off": data[:-3], "too long": data + b"123", "no state": b"123"}.get(
        damage, data
    )
    num_tokens = len(TEXTS[0]) + (damage == "other tokens")
    if backend.info.checks_states:
        with pytest.raises(EngineError):
            install_snapshot(backend, 1, damaged, num_tokens)
    elif damage != "other tokens":
        install_snapshot(backend, 1, damaged)
        caller.load(1, 2, TEXTS[0])
        with pytest.raises(EngineError):
            caller.forward()
    assert_same(caller.forward(caller.row(1, [9]))[0], expected)


# --- swapping -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", PAGED, indirect=True)
def test_swapped_seq_ids_have_each_others_tokens(backend, caller):
    """Also one that is empty, and seq_ids that share a prefix with others."""
    expected = [alone(backend, [*tokens, 9]) for tokens in (TEXTS[0], TEXTS[1], TEXTS[0][:4])]
    caller = Caller(backend)
    caller.forward(caller.row(0, TEXTS[0]), caller.row(1, TEXTS[1]))
    caller.copy(0, 2, 4)
    for first, second in ((0, 1), (2, 3), (3, 0)):
        caller.swap(first, second)
    assert [len(caller.seq(i).tokens) for i in range(NUM_SEQS)] == [4, 10, 0, 6]
    logits = caller.forward(*[caller.row(i, [9]) for i in (0, 1, 3)])
    for got, wanted in zip(logits, (expected[2], expected[0], expected[1]), strict=True):
        assert_same(got, wanted)


@pytest.mark.parametrize(
    "kind", ["fake partitioned", LLAMA_KINDS[0], LLAMA_KINDS[1]], indirect=True
)
def test_other_layouts_do_not_swap(backend, caller):
    caller.forward(caller.row(0, TEXTS[0]))
    caller.operations.append(Swap(0, 1))
    with pytest.raises(EngineError):
        caller.forward()


# --- snapshots of other layouts -------------------------------------------------------------------


@pytest.mark.llama
@pytest.mark.parametrize("kinds", WITH_FILES)
def test_snapshots_can_be_loaded_into_any_layout(make_backend, kinds):
    """They are the same bytes, whatever the seq_id and the layout."""
    backends = [make_backend(f"llama.cpp {kind}") for kind in kinds]
    assert len({backend.info.layout for backend in backends}) == len(backends)
    assert len({backend.info.fingerprint for backend in backends}) == 1
    caller = Caller(backends[0])
    caller.extend(0, [*LONG, 9])
    expected = caller.forward(caller.row(0, [8]))[0]
    saved = []
    for backend in backends:
        caller = Caller(backend)
        caller.forward(caller.row(0, TEXTS[1]))
        caller.extend(3, LONG)
        caller.save(3, 1)
        caller.forward()
        saved.append(bytes(backend.snapshot(1)))
    for backend in backends:
        for data in saved:
            caller = Caller(backend)
            caller.forward()
            install_snapshot(backend, 0, data, len(LONG))
            caller.saved[0] = len(LONG)
            caller.load(0, 2, LONG)
            assert_same(caller.forward(caller.row(2, [9, 8]))[0], expected)
        backend.close()


# --- faults -------------------------------------------------------------------------------------


def exceed_max_num_batched_tokens(caller: Caller) -> None:
    caller.forward(caller.row(0, [3] * BATCH), caller.row(1, [3]))


def use_too_high_seq_id(caller: Caller) -> None:
    caller.forward(caller.row(NUM_SEQS, [3]))


def use_negative_seq_id(caller: Caller) -> None:
    caller.forward(caller.row(0, [3]), caller.row(-1, [3]))


def exceed_max_num_samples(caller: Caller) -> None:
    caller.forward(caller.row(0, [3], [3] * caller.backend.info.max_num_samples))


def add_row_without_tokens(caller: Caller) -> None:
    caller.forward(caller.row(0, [], samples=False))


def copy_more_tokens_than_exist(caller: Caller) -> None:
    caller.forward(caller.row(0, [3, 4]))
    caller.copy(0, 1, 3)
    caller.seq(1).tokens.append(3)
    caller.forward(caller.row(1, [3]))


def load_more_tokens_than_exist(caller: Caller) -> None:
    caller.forward(caller.row(0, [3, 4]))
    caller.save(0, 0)
    caller.load(0, 1, [3, 4, 5])
    caller.forward(caller.row(1, [3]))


def leave_gap(caller: Caller) -> None:
    caller.forward(caller.row(0, [3, 4]))
    caller.seqs[0].tokens += [3, 4]
    caller.forward(caller.row(0, [5]))


def use_token_outside_the_vocabulary(caller: Caller) -> None:
    caller.forward(caller.row(0, [caller.backend.info.vocabulary_size]))


def use_negative_token(caller: Caller) -> None:
    caller.forward(caller.row(0, [3, -1]))


def exceed_num_cells(caller: Caller) -> None:
    if (
        caller.backend.info.state_bytes_per_token == 0
        and caller.backend.info.max_taken_back is not None
    ):
        pytest.skip("a state that does not grow has no cells")
    for at in range(NUM_SEQS * CONTEXT // BATCH):
        caller.forward(caller.row(at % NUM_SEQS, [3] * BATCH))
    caller.forward(caller.row(0, [3]))


FAULTS = [
    exceed_max_num_batched_tokens,
    use_too_high_seq_id,
    use_negative_seq_id,
    exceed_max_num_samples,
    add_row_without_tokens,
    copy_more_tokens_than_exist,
    load_more_tokens_than_exist,
    leave_gap,
    use_token_outside_the_vocabulary,
    use_negative_token,
    exceed_num_cells,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_contract_violation_raises_engine_error(backend, caller, fault):
    """The next batch is computed as usual."""
    expected = alone(backend, TEXTS[0])
    with pytest.raises(EngineError):
        fault(caller)
    assert_same(alone(backend, TEXTS[0]), expected)


@pytest.mark.parametrize(
    "operation",
    [
        lambda nobody: Trim(nobody, 0),
        lambda nobody: Copy(nobody, 0, 1),
        lambda nobody: Copy(0, nobody, 1),
        lambda nobody: Save(nobody, 0),
        lambda nobody: Load(0, nobody, 1),
        lambda nobody: Load(77, 0, 1),
    ],
    ids=["trim", "copy from", "copy to", "save", "load", "no snapshot"],
)
@pytest.mark.parametrize("negative", [False, True])
def test_operation_on_an_unknown_seq_id_or_snapshot_is_an_error(
    backend, caller, operation, negative
):
    """All others keep their cells."""
    expected = alone(backend, [*TEXTS[1], 9])
    caller.forward(caller.row(1, TEXTS[1]), caller.row(2, TEXTS[2]))
    caller.save(2, 0)
    caller.forward()
    with pytest.raises(EngineError):
        backend.forward(Batch([], [operation(-1 if negative else num_ids(backend))]))
    assert_same(caller.forward(caller.row(1, [9]))[0], expected)


@pytest.mark.parametrize("kind", UNIFIED, indirect=True)
def test_load_needs_room_for_the_whole_snapshot(backend, caller):
    """It is an error even if the wanted part would fit. Afterwards, only that part occupies cells."""
    caller.fill(0, 200)
    caller.save(0, 0)
    for seq_id in (1, 2, 3):
        caller.fill(seq_id, CONTEXT)
    caller.load(0, NUM_SEQS, [3] * 50)
    with pytest.raises(EngineError):
        caller.forward()
    caller.trim(3, 0)
    caller.load(0, NUM_SEQS, [3] * 50)
    caller.fill(3, CONTEXT)
    caller.fill(0, 6)
    with pytest.raises(EngineError):
        caller.forward(caller.row(0, [3]))


def test_error_in_one_batch_keeps_the_cells_of_other_sequences(backend, caller):
    caller.forward(caller.row(1, TEXTS[1]))
    with pytest.raises(EngineError):
        leave_gap(caller)
    logits = caller.forward(caller.row(1, [9]))
    assert_same(logits[0], alone(backend, [*TEXTS[1], 9]))
