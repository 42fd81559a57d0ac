"""A limit of reasoning, as a function of the tokens alone."""

import pytest

from cllm.core.params import SamplingParams, ThinkingBudget
from cllm.core.request import Request
from cllm.core.sequence import Sequence
from cllm.sampling.thinking import forced_token

OPEN, CLOSE = (7, 8), (9, 10)


def forced(output, position, guesses=(), begin=(), num_tokens=3) -> int | None:
    """What must stand at ``position`` of the output, of which ``guesses`` are not certain."""
    seq = Sequence(Request("r", [1, 2], SamplingParams()), 0, 0, 100)
    for token in output:
        seq.append(token)
    budget = ThinkingBudget(num_tokens, begin, CLOSE, (*CLOSE, 11))
    return forced_token(seq, budget, 2 + position, guesses)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ([], None),
        ([5, 5], None),
        ([5, 5, 5], 9),
        ([5, 5, 5, 9], 10),
        ([5, 5, 5, 9, 10], 11),
        ([5, 5, 5, 9, 10, 11], None),
        ([9, 10, 5], None),  # it has ended by itself
        ([9, 5, 10], 9),
        ([5, 9, 9], 9),
        ([5, 5, 5, 5], None),  # whoever wrote that was not asked
    ],
)
def test_the_end_is_written_when_the_budget_is_used_up(output, expected) -> None:
    assert forced(output, len(output)) == expected


def test_it_counts_from_where_reasoning_begins() -> None:
    """And only if it does."""
    assert forced([7, 8, 5, 5], 4, begin=OPEN) is None
    assert forced([7, 8, 5, 5, 5], 5, begin=OPEN) == 9
    assert forced([7, 5, 5, 5, 5], 5, begin=OPEN) is None
    assert forced([7, 8], 2, begin=OPEN, num_tokens=0) == 9
    assert forced([], 0, num_tokens=0) == 9


def test_guesses_count_as_far_as_they_stand_before() -> None:
    assert forced([5], 3, guesses=(5, 5, 9)) == 9
    assert forced([5], 4, guesses=(5, 5, 9)) == 10
    assert forced([5], 3, guesses=(9, 10)) is None
    assert forced([5, 5, 5], 3, guesses=(4, 4)) == 9
