"""The limit on reasoning, as a function of the tokens and of when the client ends the reasoning."""

import pytest

from cllm.core.params import SamplingParams, ThinkingBudget
from cllm.core.request import Request, SequenceProgress
from cllm.core.sequence import Sequence
from cllm.core.thinking import Thinking
from cllm.core.vocabulary import Pieces

OPEN, CLOSE = 7, 9
FORCE = (CLOSE, 11)
LINE, WORD, CODE = 1, 5, 3
PIECES = Pieces.of([b"", b"\n", b" ", b"```", b"", b"a", b"", b"", b"", b"", b"", b"\n\n"])


def think(output=(), num_tokens=3, opening=(), force=FORCE, **options) -> Thinking:
    """Return the state after ``output``, which begins inside the reasoning unless it must open
    it.
    """
    options = {"inside": not opening, "closes_once": True, **options}
    budget = ThinkingBudget(num_tokens, opening or (OPEN,), CLOSE, force, **options)
    return Thinking(budget, PIECES).after(output)


def forced(output, num_tokens=3, opening=(), **options) -> int | None:
    return think(output, num_tokens, opening, **options).forced


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ([], None),
        ([5, 5], None),
        ([5, 5, 5], 9),
        ([5, 5, 5, 9], 11),
        ([5, 5, 5, 9, 11], None),
        ([9, 5, 5], None),  # it has ended by itself
        ([5, 5, 9], None),
    ],
)
def test_end_of_reasoning_is_forced_after_the_budget(output, expected) -> None:
    assert forced(output) == expected


def test_budget_counts_from_the_start_of_reasoning() -> None:
    opening = (OPEN,)
    assert forced([OPEN, 5, 5], opening=opening) is None
    assert forced([OPEN, 5, 5, 5], opening=opening) == 9
    assert forced([2, LINE, OPEN, 5, 5], opening=opening) is None
    assert forced([2, LINE, OPEN, 5, 5, 5], opening=opening) == 9
    assert forced([WORD, WORD, WORD, WORD], opening=opening) is None
    assert forced([OPEN], 0, opening) == 9
    assert forced([OPEN, 9], 0, opening) == 11
    assert forced([], 0) == 9


@pytest.mark.parametrize(
    ("before", "opens"),
    [
        ([], True),
        ([WORD, LINE], True),
        ([WORD, LINE, 2], True),
        ([WORD], False),
        ([WORD, LINE, WORD], False),
        ([CODE, LINE], False),
        ([CODE, WORD, LINE, WORD, LINE], False),
        ([CODE, LINE, WORD, LINE, CODE, LINE], True),
    ],
)
def test_mark_within_a_line_or_in_code_is_text(before, opens) -> None:
    """As in the parser. If the model may not reason again, it may still write that."""
    state = think([*before, OPEN, 5], 1, (OPEN,))
    assert (state.forced == CLOSE) == opens
    assert think([*before, OPEN, 5], 1, (OPEN,), anywhere=True).forced == CLOSE
    is_over = think([5, CLOSE, 11, *before], 1)
    assert is_over.is_over
    assert (OPEN in is_over.forbidden) == opens


def test_mark_that_opens_reasoning_may_have_several_tokens() -> None:
    opening = (6, 6, OPEN)
    for output in ([6, 6, 7], [1, 6, 6, 7], [6, 1, 6, 6, 7], [5, 1, 6, 6, 7]):
        state = think(output, 1, opening)
        assert (state.forced, state.after([5]).forced) == (None, 9), output
    for output in ([6, 7], [6, 6, 5, 7], [7], [6, 6], [5, 6, 6, 7]):
        assert think(output, 0, opening).forced is None, output


def test_budget_covers_all_reasoning_of_an_output() -> None:
    """Once it is used up, no reasoning begins."""
    state = think([5, CLOSE, 5, 5, 1, OPEN, 5])
    assert (state.forced, state.forbidden) == (None, [])
    state = state.after([5])
    assert state.forced == CLOSE
    state = state.after(FORCE)
    assert (state.forced, state.forbidden) == (None, [OPEN, CLOSE])


def test_reasoning_that_has_ended_by_itself_forbids_nothing() -> None:
    assert think([5, 5, CLOSE, 1]).forbidden == []


def test_call_ends_reasoning_that_was_not_closed() -> None:
    """Otherwise, the end would be forced within its arguments."""
    assert think([5, 8, 5, 5, 5], calls=(8,)).forced is None
    assert think([5, 8, 5], calls=()).forced == CLOSE


def test_only_the_last_token_of_a_mark_is_forbidden() -> None:
    """The others may begin something else, such as the channel of the answer."""
    state = think([6, OPEN, 5, CLOSE, 11], 1, (6, OPEN), closes_once=False)
    assert state.forbidden == []
    assert state.after([6]).forbidden == [OPEN]
    assert state.after([6, 5]).forbidden == []


def test_state_after_draft_tokens_leaves_the_state_unchanged() -> None:
    state = think([5])
    assert [state.after([5, 5, 9][:n]).forced for n in range(4)] == [None, None, 9, 11]
    assert state.forced is None
    assert state.after([9, 5]).forced is None
    assert state.after([5, 5, 4]).forced == 9


def test_client_ends_the_reasoning() -> None:
    state = think([5], None)
    state.end([5])
    assert state.forced == 9
    state.end([5])
    assert state.after([9]).forced == 11, "to ask twice changes nothing"
    state = state.after(FORCE)
    assert (state.forced, state.forbidden) == (None, [OPEN, CLOSE])


def test_client_may_end_the_reasoning_before_it_begins() -> None:
    state = think([], None)
    state.end([])
    assert state.forced == 9
    state = think([], None, (OPEN,))
    state.end([])
    assert (state.forced, state.forbidden) == (None, [])
    assert state.after([OPEN]).forced == 9


def test_answer_that_has_begun_does_not_think_again() -> None:
    state = think([5, 5, CLOSE, 1], None)
    state.end([5, 5, CLOSE, 1])
    assert (state.forced, state.forbidden) == (None, [OPEN, CLOSE])


MESSAGE = (21, 22, 23, CLOSE, 11)


@pytest.mark.parametrize("cut", range(len(MESSAGE) + 1))
def test_another_engine_forces_the_rest(cut) -> None:
    """It gets the delivered tokens first, and then that the reasoning is to end."""
    begun = [5, 21, 5]
    whole = [*begun, *MESSAGE]
    budget = ThinkingBudget(None, (OPEN,), CLOSE, MESSAGE, inside=True, ends_on_request=True)
    seq = Sequence(Request("r", [1, 2], SamplingParams(thinking=budget)), 0, 0, 100)
    seq.resume(SequenceProgress(whole[: len(begun) + cut]))
    seq.end_reasoning()
    while seq.thinking.forced is not None:
        seq.append(seq.thinking.forced)
    assert seq.tokens[2:] == whole
    assert seq.thinking.forbidden == [OPEN]


def test_sequences_follow_their_own_tokens() -> None:
    budget = ThinkingBudget(2, (OPEN,), CLOSE, FORCE, inside=True)
    seq = Sequence(Request("r", [1, 2], SamplingParams(thinking=budget)), 0, 0, 100)
    for token in (5, 5):
        assert seq.thinking.forced is None
        seq.append(token)
    assert seq.thinking.forced == CLOSE
