"""The fake backend's own behaviour: it counts up, takes the time of its cost model, and fails on
request.
"""

from __future__ import annotations

import pytest

from cllm.backends.fake.backend import Costs, FailingSteps, FakeBackend
from cllm.backends.fake.vocabulary import CONTROL, END, VOCABULARY_SIZE, FakeVocabulary
from cllm.core.batch import Batch, Copy, Load, Operation, Row, Save, Trim
from cllm.core.params import SamplingParams
from cllm.core.request import Request
from cllm.core.sequence import Sequence
from cllm.errors import EngineError


def sequence(tokens: list[int], seq_id: int = 0) -> Sequence:
    seq = Sequence(Request("A", tokens, SamplingParams()), 0, 0, 1024)
    seq.seq_id = seq_id
    return seq


def test_next_token_is_the_last_one_plus_1():
    """0 follows 255, and END follows ``length`` tokens."""
    backend = FakeBackend(length=3)
    seq = sequence([7, 254])
    answers = []
    while not answers or answers[-1] != END:
        start = len(seq.tokens) - 1 if answers else 0
        logits = backend.forward(Batch([Row(seq, start, len(seq.tokens) - start, 1)], []))
        answers.append(int(logits[0].argmax()))
        seq.append(answers[-1])
    assert answers == [255, 0, 1, END]


def test_next_token_after_each_draft_token_is_it_plus_1():
    """Whether the draft token was right or wrong. END comes after ``length`` tokens, including
    draft tokens.
    """
    backend = FakeBackend(length=3)
    logits = backend.forward(Batch([Row(sequence([7]), 0, 1, 4, (8, 50, 51))], []))
    assert logits.argmax(1).tolist() == [8, 9, 51, END]


def test_step_sleeps_for_its_cost():
    """A fixed part, a part for each decoding row and each draft token, and a part for each other
    token.
    """
    spent = []
    backend = FakeBackend(costs=Costs(step=100, row=10, token=1), sleep=spent.append)
    backend.forward(Batch([Row(sequence([1] * 5), 0, 5, 1)], []))
    backend.forward(
        Batch([Row(sequence([1] * 6), 5, 1, 1), Row(sequence([1] * 7, 1), 0, 7, 1)], [])
    )
    backend.forward(Batch([Row(sequence([1] * 7), 6, 1, 3, (2, 3))], []))
    assert spent == [105, 117, 130]


def test_step_raises_at_raise_at_step():
    """No other step raises."""
    backend = FakeBackend(failing=FailingSteps(raise_at_step=2))
    batch = Batch([Row(sequence([1]), 0, 1, 1)], [Trim(0, 0)])
    backend.forward(batch)
    with pytest.raises(EngineError, match="fails as configured"):
        backend.forward(batch)
    backend.forward(batch)


def test_rows_are_checked():
    """Rows must start where the cells end, and their tokens must be in the vocabulary."""
    backend = FakeBackend()
    with pytest.raises(EngineError, match="holds 0 tokens, but the row starts at 1"):
        backend.forward(Batch([Row(sequence([1, 2]), 1, 1, 1)], []))
    with pytest.raises(EngineError, match="outside the vocabulary"):
        backend.forward(Batch([Row(sequence([VOCABULARY_SIZE]), 0, 1, 1)], []))


@pytest.mark.parametrize(
    ("operation", "complaint"),
    [
        (Copy(0, 1, 2), "cannot be copied to 1"),
        (Copy(0, 2, 6), "6 tokens of 0 cannot be copied"),
        (Load(0, 2, 6), "snapshot 0 has 5 tokens, not 6"),
    ],
    ids=["onto others", "more than there are", "more than were saved"],
)
def test_operations_are_checked(operation, complaint):
    """A copy needs an empty target, and cannot take more tokens than its source has."""
    backend = FakeBackend()
    backend.forward(
        Batch([Row(sequence([1] * 5), 0, 5, 1), Row(sequence([1] * 5, 1), 0, 5, 1)], [])
    )
    backend.forward(Batch([], [Save(0, 0)]))
    with pytest.raises(EngineError, match=complaint):
        backend.forward(Batch([], [operation]))


@pytest.mark.parametrize(
    "operation", [Trim(0, 4), Copy(0, 1, 4), Load(0, 1, 4)], ids=["trim", "copy", "load"]
)
def test_untrimmable_state_is_kept_or_lost_as_a_whole(operation: Operation):
    """With max_taken_back 0, the fake behaves like a recurrent model: it can copy a whole state, but
    no part of one.
    """
    backend = FakeBackend(max_taken_back=0)
    backend.forward(Batch([Row(sequence([1] * 5), 0, 5, 1)], [Trim(0, 0)]))
    backend.forward(Batch([], [Save(0, 0)]))
    with pytest.raises(EngineError):
        backend.forward(Batch([], [operation]))
    backend.forward(Batch([], [Trim(0, 5), Copy(0, 1, 5), Load(0, 2, 5), Trim(0, 0)]))
    rows = [
        Row(sequence([9]), 0, 1, 1),
        *[Row(sequence([1] * 6, seq_id), 5, 1, 1) for seq_id in (1, 2)],
    ]
    assert backend.forward(Batch(rows, [])).argmax(1).tolist() == [10, 2, 2]


def test_only_tokens_of_the_last_row_are_taken_back():
    """At most max_taken_back of them, and once."""
    backend = FakeBackend(max_taken_back=2)
    seq = sequence([1] * 9)
    backend.forward(Batch([Row(seq, 0, 1, 1)], []))
    backend.forward(Batch([Row(seq, 1, 1, 3, (7, 8))], []))
    backend.forward(Batch([Row(seq, 2, 1, 3, (7, 8))], [Trim(0, 2)]))
    backend.forward(Batch([], [Trim(0, 4)]))
    with pytest.raises(EngineError, match="cannot be trimmed to 3"):
        backend.forward(Batch([], [Trim(0, 3)]))
    with pytest.raises(EngineError, match="too many draft tokens"):
        backend.forward(Batch([Row(seq, 4, 1, 4, (7, 8, 9))], []))
    backend.forward(Batch([Row(seq, 4, 1, 2, (7,))], []))
    with pytest.raises(EngineError, match="cannot be trimmed to 4"):
        backend.forward(Batch([], [Trim(0, 4)]))


def test_vocabulary_has_a_token_for_each_byte():
    """Text becomes its UTF-8 bytes and back. Control tokens have no text."""
    vocabulary = FakeVocabulary()
    assert len(vocabulary.pieces) == vocabulary.size == VOCABULARY_SIZE
    tokens = vocabulary.tokenize("aß\0👍", add_special=True, parse_special=False)
    assert b"".join(vocabulary.pieces[token] for token in tokens).decode() == "aß\0👍"
    assert [vocabulary.pieces[token] for token in (END, *CONTROL)] == [b"", b"", b""]


def test_control_tokens_are_parsed_on_request_only():
    """Their names are control tokens in a template's text, and plain letters in a user's text."""
    vocabulary = FakeVocabulary()
    text = "a<|im_end|>b<|im_start|><|im_end|>"
    assert vocabulary.tokenize(text, add_special=False, parse_special=True) == [
        97,
        258,
        98,
        257,
        258,
    ]
    assert vocabulary.tokenize(text, add_special=False, parse_special=False) == list(text.encode())
