"""Fences around control tokens that a user has written."""

from __future__ import annotations

import re
import string
import time
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.core.vocabulary import VocabularyFacts
from cllm.text.templates.fences import CLOSE, OPEN, Fences

TEKKEN = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "<pad>"]
TEKKEN += [f"<SPECIAL_{i}>" for i in range(20, 1000)]
WORDS = [f"{letter}{i}{end}" for letter in "abcdefghij" for i in range(50) for end in ("x", "yz")]
NESTED = ["<" * n for n in range(1, 500)]
ENDINGS = ["a" * n + "b" for n in range(1, 500)]
LETTERS = [f"{letter}{i}" for letter in string.ascii_letters for i in range(20)]
HAN = [chr(0x4E00 + i) for i in range(1000)]
VOCABULARIES = {
    "tekken": TEKKEN,
    "words": WORDS,
    "nested": NESTED,
    "one": ["<" * 300 + ">"],
    "endings": ENDINGS,
    "nested with endings": [*ENDINGS, *("a" * n for n in range(1, 500))],
    "letters": LETTERS,
    "han": [char + "x" for char in HAN],
}
TEXTS = {
    "plain": "The quick brown fox. ",
    "angles": "<",
    "brackets": "[",
    "beginnings": "<SPECIAL_99",
    "other beginnings": "[AVAILABLE_TOOLS",
    "tokens": "<SPECIAL_999>",
    "letters": "abcdefghij",
    "digits": "a4b4",
    "spaces": "<            ",
    "short tokens": "<s>",
    "one letter": "a",
    "all letters": string.ascii_letters,
    "han": "".join(HAN),
}


def fences(tokens: list[str]) -> Fences:
    facts = SimpleNamespace(
        control_tokens=sorted(tokens, key=len, reverse=True), special_texts={"bos_token": "<s>"}
    )
    return Fences(cast("VocabularyFacts", facts))


def enclose_slowly(tokens: list[str], text: str) -> str:
    """Fence what one plain pattern finds: the longest token, or else a beginning at the end."""
    tokens = sorted(tokens, key=len, reverse=True)
    beginnings = {token[:length] for token in tokens for length in range(1, len(token))}
    whole = "|".join(map(re.escape, tokens))
    partial = "|".join(map(re.escape, sorted(beginnings, key=len, reverse=True))) or "(?!)"
    pattern = f"{whole}|(?:{partial})\\s*\\Z" if tokens else "(?!)"
    return re.sub(pattern, f"{OPEN}\\g<0>{CLOSE}", text)


@pytest.mark.slow
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("vocabulary", VOCABULARIES.values(), ids=VOCABULARIES)
def test_long_text_is_fenced_in_milliseconds(vocabulary: list[str], text: str) -> None:
    """100 KB take a few milliseconds; a regular expression took up to nine seconds."""
    fence = fences(vocabulary)
    long = text * (100_000 // len(text))
    times = []
    for _ in range(5):
        begin = time.process_time()
        fence.enclose(long)
        times.append(time.process_time() - begin)
    assert min(times) < 0.05  # on a busy machine


SMALL = st.text(st.sampled_from("<s> \n[/"), min_size=1, max_size=5)


@given(st.lists(SMALL, max_size=8), st.text(st.sampled_from("<s> \n[/x"), max_size=20))
def test_same_tokens_are_fenced_as_with_one_plain_pattern(tokens: list[str], text: str) -> None:
    assert fences(tokens).enclose(text) == enclose_slowly(tokens, text)


@given(
    st.lists(st.sampled_from([*TEKKEN[:30], "<", " ", "[", "SPECIAL_2", "INST", "é", "\U0001f600"]))
)
def test_same_tokens_of_a_large_vocabulary_are_fenced(parts: list[str]) -> None:
    text = "".join(parts)
    assert fences(TEKKEN[:40]).enclose(text) == enclose_slowly(TEKKEN[:40], text)


@given(st.lists(st.text("ab", min_size=1, max_size=9), max_size=9), st.text("abé", max_size=40))
def test_same_tokens_that_contain_each_other_are_fenced(tokens: list[str], text: str) -> None:
    assert fences(tokens).enclose(text) == enclose_slowly(tokens, text)


@given(st.text(st.sampled_from("<s> \ud800\udfff?"), max_size=20))
def test_tokens_beside_lone_surrogates_are_fenced(text: str) -> None:
    """Rendering keeps the surrogates, so that the request is refused for them."""
    assert fences(["<s>", "<", "s?"]).enclose(text) == enclose_slowly(["<s>", "<", "s?"], text)


def test_long_tokens_are_fenced_whole() -> None:
    tokens = ["a" * n + end for n in range(1, 200) for end in ("", "b")]
    for text in ("a" * 150, "a" * 150 + "b", "a" * 64 + "c", "a" * 199 + "ab"):
        assert fences(tokens).enclose(text) == enclose_slowly(tokens, text)


def test_adjacent_fenced_tokens_are_one_segment() -> None:
    fence = fences(["<s>", "</s>"])
    text = "<s>" + fence.enclose("a<s></s><s>b") + "</s>"
    segments = fence.split(text, add_special=False)
    assert [segment.text for segment in segments] == ["<s>a", "<s></s><s>", "b</s>"]
    assert [segment.parse_special for segment in segments] == [True, False, True]


@pytest.mark.parametrize(
    ("taken", "expected"),
    [(0, [("<s>a", True), ("\n<s>c", True)]), (1, [("<s>", True), ("b\n<s>c", True)])],
)
def test_template_that_splits_a_text_at_a_control_token_still_writes_control_tokens(
    taken: int, expected: list[tuple[str, bool]]
) -> None:
    """One fence of the token is left."""
    fence = fences(["<s>", "</s>"])
    half = fence.enclose("a</s>b").split("</s>")[taken]
    segments = fence.split(f"<s>{half}\n<s>c", add_special=False)
    assert [(s.text, s.parse_special) for s in segments if s.text] == expected
