"""Sampled tokens and the text that is shown for them."""

from __future__ import annotations

from array import array
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.core.output import Logprobs, TokenOutput
from cllm.core.params import SamplingParams
from cllm.core.vocabulary import VocabularyTable
from cllm.text.alignment import find_offsets
from cllm.text.choice import Choice

PIECES = [
    b"a",
    b"b",
    b"ab",
    b"ba ",
    b"",
    b"\xe2",
    b"\x82\xac",
    b"\xe2\x82\xac",
    b"\xff",
    "ä b".encode(),
]
tokens = st.lists(st.integers(0, len(PIECES) - 1), max_size=12)
stops = st.lists(st.sampled_from(["a", "bb", "aba", "€", "ä", " a", "\ufffd"]), max_size=2).map(
    tuple
)


def run(
    outputs: list[int], finish: str, is_text: bool, params: SamplingParams
) -> tuple[str, list, str]:
    """Return the shown text, the reported tokens and the reason; after each token, text and tokens
    must agree.
    """
    choice, shown, told = Choice(0, PIECES, params), "", []
    for i, token in enumerate(outputs):
        last = i == len(outputs) - 1
        text, ended = choice.feed(
            TokenOutput(
                "A",
                0,
                token,
                finish if last else "",
                is_text or not last,
                0,
                Logprobs(-float(i), []),
            )
        )
        shown += text
        told += choice.token_logprobs
        assert all(one.at < len(shown) or ended for one in told), "told before it is shown"
        if ended:
            break
    return shown, told, choice.finish


@given(
    tokens, stops, st.sampled_from(["", "length"]), st.booleans(), st.integers(0, 3), st.booleans()
)
def test_reported_tokens_spell_the_shown_text(outputs, stop, finish, is_text, min_tokens, include):
    """In order, each once. Only a stop string cuts the last one, and tokens after it are not
    reported.
    """
    params = SamplingParams(
        logprobs=0, stop=stop, min_tokens=min_tokens, include_stop_str_in_output=include
    )
    shown, told, reason = run(outputs, finish, is_text, params)
    assert [one.token for one in told] == outputs[: len(told)]
    assert [one.logprobs.logprob for one in told] == [-float(i) for i in range(len(told))]
    spelled = b"".join(PIECES[one.token] for one in told).decode("utf-8", "replace")
    if reason == "length" or not stop:
        expected = outputs if is_text or reason != "length" else outputs[:-1]
        text = b"".join(PIECES[token] for token in expected).decode("utf-8", "replace")
        if reason == "length":
            assert shown == spelled == text
            assert len(told) == len(expected)
        else:
            assert spelled.startswith(shown) or shown.startswith(spelled)
    elif reason == "stop":
        assert spelled.replace("\ufffd", "").startswith(
            shown.replace("\ufffd", "")
        ) or spelled.startswith(shown)
        assert all(one.at < len(shown) for one in told)


def test_tokens_of_one_character_are_reported_with_it():
    """They begin where the character does."""
    choice = Choice(0, PIECES, SamplingParams(logprobs=0))
    told = []
    for token in (0, 5, 6, 1):
        choice.feed(TokenOutput("A", 0, token, logprobs=Logprobs(0.0, [])))
        told.append([(one.token, one.at) for one in choice.token_logprobs])
    assert told == [[(0, 0)], [], [(5, 1), (6, 1)], [(1, 2)]]


def test_tokens_without_logprobs_are_not_kept():
    choice = Choice(0, PIECES, SamplingParams())
    choice.feed(TokenOutput("A", 0, 0))
    assert choice.token_logprobs == []


# texts of tokens; control tokens have no bytes and are written as their names
NAMES = {100: "<s>", 101: "<|im_end|>", 102: "<unk>"}
TEXTS = ["a", " a", " ", "b", "\n", "é", "x"]
WORDS = {text: i for i, text in enumerate(TEXTS)}
FIRST, SECOND = len(TEXTS), len(TEXTS) + 1  # the two bytes of é


def table() -> VocabularyTable:
    data = [*(text.encode() for text in TEXTS), *(bytes([byte]) for byte in "é".encode())]
    data += [b""] * (103 - len(data))
    offsets = array("I", [0, *accumulate(map(len, data))])
    return VocabularyTable(
        size=103,
        piece_data=b"".join(data),
        piece_offsets=offsets.tobytes(),
        control_tokens=sorted(NAMES.values(), key=len, reverse=True),
        infill_tokens=None,
        repository_tokens=None,
        special_tokens=NAMES,
        chat_template=None,
        special_texts={},
        rerank_template=None,
        pair_tokens=([], [], []),
    )


@pytest.mark.parametrize(
    ("text", "tokens", "offsets"),
    [
        ("<s>a<|im_end|>b", [100, "a", 101, "b"], [0, 3, 4, 14]),
        ("ab", [100, "a", "b"], [0, 0, 1]),  # a control token that was added
        ("<s>a", [100, 100, "a"], [0, 3, 3]),
        ("ab", [" a", "b"], [0, 1]),  # a space that was added
        ("éb", [" ", FIRST, SECOND, "b"], [0, 0, 0, 1]),
        ("<s>\n\n a", [100, "a"], [0, 6]),  # white space that was dropped
        ("a  <|im_end|>b", ["a", 101, "b"], [0, 3, 13]),
        ("a漢b", ["a", 102, "b"], [0, 1, 2]),  # a character that no token has
        ("<s>éb<s>é", [100, FIRST, SECOND, "b", 100, "é"], [0, 3, 3, 4, 5, 8]),
        (None, [100, "a", 101, "b"], [0, 0, 1, 1]),
        (None, [FIRST, SECOND, "b", FIRST, "a", SECOND], [0, 0, 1, 2, 3, 4]),
        ("", [], []),
        (None, [], []),
    ],
)
def test_tokens_of_a_prompt_begin_where_their_text_does(text, tokens, offsets) -> None:
    ids = [WORDS[token] if isinstance(token, str) else token for token in tokens]
    assert find_offsets(table(), ids, text) == offsets


@given(st.lists(st.sampled_from([*range(FIRST), *NAMES])))
def test_offsets_follow_from_the_texts_of_tokens(tokens) -> None:
    texts = [NAMES[token] if token in NAMES else TEXTS[token] for token in tokens]
    starts = [0, *accumulate(map(len, texts))][:-1] if texts else []
    assert find_offsets(table(), tokens, "".join(texts)) == starts
