"""The limit on reasoning, as a function of the tokens alone."""

import pytest

from cllm.core.params import SamplingParams, ThinkingBudget
from cllm.core.request import Request
from cllm.core.sequence import Sequence
from cllm.sampling.thinking import find_forced_token, is_closed

OPEN, CLOSE = 7, 9


def forced(output, guesses=(), begin=None, num_tokens=3, ahead=0) -> int | None:
    """Return the token that is forced after ``output`` and the first ``ahead`` draft tokens."""
    seq = Sequence(Request("r", [1, 2], SamplingParams()), 0, 0, 100)
    for token in output:
        seq.append(token)
    budget = ThinkingBudget(num_tokens, begin, CLOSE, (CLOSE, 11))
    return find_forced_token(seq, budget, seq.num_tokens + ahead, guesses)


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
        ([5, 5, 5, 5], None),  # whoever wrote that was not asked
        ([5, 5, 5, 5, 9], None),
    ],
)
def test_end_of_reasoning_is_forced_after_the_budget(output, expected) -> None:
    assert forced(output) == expected


def test_budget_counts_from_the_start_of_reasoning() -> None:
    """It counts only if reasoning starts with one of the first tokens."""
    assert forced([7, 5, 5], begin=OPEN) is None
    assert forced([7, 5, 5, 5], begin=OPEN) == 9
    assert forced([5, 5, 7, 5, 5], begin=OPEN) is None
    assert forced([5, 5, 7, 5, 5, 5], begin=OPEN) == 9
    assert forced([5, 5, 5, 5, 7, 5, 5, 5], begin=OPEN) is None
    assert forced([5, 5, 5, 5, 5], begin=OPEN) is None
    assert forced([7], begin=OPEN, num_tokens=0) == 9
    assert forced([7, 9], begin=OPEN, num_tokens=0) == 11
    assert forced([], num_tokens=0) == 9


def test_draft_tokens_before_the_position_count() -> None:
    assert forced([5], guesses=(5, 5, 9), ahead=2) == 9
    assert forced([5], guesses=(5, 5, 9), ahead=3) == 11
    assert forced([5], guesses=(5, 9, 5), ahead=2) is None
    assert forced([5, 5, 5], guesses=(9, 4), ahead=0) == 9
    assert forced([], guesses=(7, 5, 5, 5), begin=OPEN, ahead=4) == 9
    assert forced([], guesses=(5, 7, 5, 5, 5), begin=OPEN, num_tokens=1, ahead=1) is None


@pytest.mark.parametrize("begin", [None, OPEN])
def test_end_of_reasoning_is_not_sampled_again(begin) -> None:
    def closed(output, guesses=(), *, once=True) -> bool:
        seq = Sequence(Request("r", [1, 2], SamplingParams()), 0, 0, 100)
        for token in [*([OPEN] if begin else []), *output]:
            seq.append(token)
        budget = ThinkingBudget(2, begin, CLOSE, (CLOSE, 11), once)
        return is_closed(seq, budget, seq.num_tokens + len(guesses), guesses)

    assert [closed([5, 5, CLOSE, 11, 5][:n]) for n in range(6)] == [False] * 4 + [True] * 2
    assert closed([5, 5, CLOSE], guesses=(11, 5))
    assert closed([5], guesses=(5, CLOSE, 11, 5))
    assert not closed([5], guesses=(CLOSE, 11, 5, 5))
    assert not closed([5, 5, CLOSE, 11, 5], once=False)
    assert not closed([5, CLOSE, 11, 5, 5]), "it has ended by itself"
    assert not closed([5, 5, 5, CLOSE, 11])
