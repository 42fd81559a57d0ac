"""Drafts follow the last n-gram, or a copy and its changes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cllm.scheduler.prompt_lookup import SIZES, IndexedText

ORIGINAL = [*range(10, 40)]


def draft(tokens: list[int], count: int = 3) -> tuple[int, ...]:
    return IndexedText().draft(tokens, count)


def draft_after(prompt: list[int], written: list[int], count: int = 3) -> tuple[int, ...]:
    """Return the draft after the text has grown token by token."""
    text, tokens = IndexedText(), prompt[:]
    for token in written:
        text.draft(tokens, count)
        tokens.append(token)
    return text.draft(tokens, count)


def test_last_occurrence_counts() -> None:
    assert draft([1, 2, 3, 1, 2, 4, 1, 2]) == (4, 1, 2)
    assert draft([1, 2, 3, 4, 1, 3]) == ()


def test_longer_match_is_preferred() -> None:
    """Four matching tokens predict better than two."""
    assert draft([1, 2, 3, 4, 50, 9, 3, 4, 60, 1, 2, 3, 4], 1) == (50,)


@given(st.lists(st.integers(0, 3), min_size=2, max_size=60), st.integers(1, 5))
def test_draft_equals_search_from_end(tokens: list[int], count: int) -> None:
    expected: tuple[int, ...] = ()
    for size in SIZES:
        ends = [e for e in range(size, len(tokens)) if tokens[e - size : e] == tokens[-size:]]
        if len(tokens) >= size and ends:
            expected = tuple(tokens[ends[-1] : ends[-1] + count])
            break
    assert draft(tokens, count) == expected


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=9), min_size=1, max_size=30))
def test_any_text_can_be_drafted(parts: list[list[int]]) -> None:
    """Whatever was replaced by what, a draft has tokens of the text, and not too many."""
    text, tokens = IndexedText(), []
    for part in parts:
        tokens += part
        found = text.draft(tokens, 6)
        assert len(found) <= 6
        assert set(found) <= set(tokens)


def test_copy_goes_on_after_replaced_tokens() -> None:
    """One or two tokens of a copy are other ones; nothing is drafted after a third one, or if the
    copy has been short.
    """
    prompt = [*ORIGINAL, 1, *ORIGINAL[:2]]
    assert draft_after(prompt, [*ORIGINAL[2:8], 50]) == (19, 20, 21)
    assert draft_after(prompt, [*ORIGINAL[2:8], 50, 51]) == (20, 21, 22)
    assert draft_after(prompt, [*ORIGINAL[2:8], 50, 51, 52]) == ()
    assert draft_after(prompt, [*ORIGINAL[2:4], 50]) == ()


def test_copy_is_followed_past_later_occurrences() -> None:
    """What followed the last n-gram elsewhere, after the original, does not count in a copy."""
    prompt = [*ORIGINAL, 1, *ORIGINAL[5:9], 2, 3, *ORIGINAL[:2]]
    assert draft_after(prompt, ORIGINAL[2:9]) == (19, 20, 21)
    assert draft([*ORIGINAL, 1, *ORIGINAL[5:9], 2, 3, *ORIGINAL[5:9]]) == (2, 3, 15)


def test_replacement_is_drafted_again() -> None:
    """As for another name, also if it has more or fewer tokens."""
    for old, new in (([7], [8]), ([7], [8, 9]), ([6, 7], [8]), ([5, 6, 7], [8, 9])):
        original = [*ORIGINAL[:8], *old, *ORIGINAL[8:16], *old, *ORIGINAL[16:24], *old, 98, 99]
        copy = [*ORIGINAL[:8], *new, *ORIGINAL[8:16]]
        prompt = [*original, 1, *copy[:2]]
        assert draft_after(prompt, copy[2:], 6) == (*new, *ORIGINAL[16:24])[:6]
        # nor is the way lost within and after it
        copy += [*new, *ORIGINAL[16:24], *new]
        assert draft_after(prompt, copy[2:-1], 1) == (new[-1],)
        assert draft_after(prompt, copy[2:]) == (98, 99, 1)


def test_replacement_ends_where_the_original_is_copied() -> None:
    original = [*ORIGINAL[:8], 7, *ORIGINAL[8:16], 7, *ORIGINAL[16:24], 7, 98, 99]
    copy = [*ORIGINAL[:8], 8, *ORIGINAL[8:16], 7, *ORIGINAL[16:24]]
    assert draft_after([*original, 1, *copy[:2]], copy[2:]) == (7, 98, 99)


def test_copy_goes_on_after_inserted_and_omitted_tokens() -> None:
    prompt = [*ORIGINAL, 1, *ORIGINAL[:2]]
    inserted = [*ORIGINAL[2:8], 50, 51, 52, 53, *ORIGINAL[8:10]]
    omitted = [*ORIGINAL[2:8], *ORIGINAL[12:14]]
    assert draft_after(prompt, inserted) == (20, 21, 22)
    assert draft_after(prompt, omitted) == (24, 25, 26)
