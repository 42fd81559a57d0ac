"""The bytes of tokens in one string, and the table that is sent to the API process."""

from __future__ import annotations

import tracemalloc

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from cllm.backends.fake.vocabulary import CONTROL, VOCABULARY_SIZE, FakeVocabulary
from cllm.core.vocabulary import Pieces, VocabularyTable

pieces = st.lists(st.binary(max_size=4), max_size=20)


@given(pieces)
def test_pieces_are_those_of_a_list(pieces):
    made = Pieces.of(pieces)
    assert [*made] == [made[token] for token in range(len(made))] == pieces
    assert made.longest == max(map(len, pieces), default=0)
    assert made == Pieces.of(pieces)
    assert made != Pieces.of([*pieces, b"x"])


@given(pieces, st.binary(min_size=1, max_size=3))
def test_find_returns_the_tokens_that_contain_the_bytes(pieces, part):
    """Tokens that spell them only together do not count."""
    assert Pieces.of(pieces).find(part) == [i for i, piece in enumerate(pieces) if part in piece]


def test_marks_fill_in_for_tokens_without_bytes():
    made = Pieces.of([b"a", b"", b""]).with_marks({0: b"never", 1: b"<b>"})
    assert [*made] == [b"a", b"<b>", b""]


def test_table_is_the_same_after_a_transfer():
    vocabulary = FakeVocabulary()
    sent = msgspec.msgpack.encode(VocabularyTable.of(vocabulary))
    table = msgspec.msgpack.decode(sent, type=VocabularyTable)
    for name in VocabularyTable.__struct_fields__:
        if hasattr(vocabulary, name):
            assert getattr(table, name) == getattr(vocabulary, name)
    assert [*table.pieces] == [*vocabulary.pieces]
    assert [table.find_text(token) for token in (97, *CONTROL)] == [
        b"a",
        *(text.encode() for text in CONTROL.values()),
    ]
    assert table.longest_piece == max(map(len, CONTROL.values()))
    assert table.size == len(table.pieces) == VOCABULARY_SIZE


def test_received_table_takes_5_bytes_a_token_beside_the_text():
    """A list of bytes objects takes 41."""
    size, length = 150_000, 7
    vocabulary = FakeVocabulary()
    vocabulary.pieces = Pieces.of(token.to_bytes(length, "little") for token in range(size))
    sent = msgspec.msgpack.encode(VocabularyTable.of(vocabulary))
    tracemalloc.start()
    try:
        table = msgspec.msgpack.decode(sent, type=VocabularyTable)
        assert table.pieces[size - 1] == (size - 1).to_bytes(length, "little")
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used < size * (length + 5)
