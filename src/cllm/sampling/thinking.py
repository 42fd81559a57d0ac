"""The thinking budget: when it is used up, the tokens that end the reasoning are forced instead of
sampled.
"""

from __future__ import annotations

from collections.abc import Sequence as Run

from cllm.core.params import ThinkingBudget
from cllm.core.sequence import Sequence

# first tokens of a text, one of which may open the reasoning; white space may come before it
LEAD = 4


def find_forced_token(
    seq: Sequence, budget: ThinkingBudget, position: int, guesses: Run[int] = ()
) -> int | None:
    """Return the token that is forced at ``position``, or None if it is to be sampled.

    ``guesses`` are the draft tokens after those of ``seq``, at least up to ``position``. The
    function keeps no state: everything follows from the tokens, and most of them are read only near
    the end of the budget.
    """
    first = seq.num_prompt_tokens
    end = find_budget_end(seq, budget, position, guesses)
    if end is None or not 0 <= position - end < len(budget.force):
        return None
    at = position - end
    output = [*seq.tokens[first:], *guesses][: position - first]
    thoughts, written = output[: end - first], output[end - first :]
    return (
        None
        if budget.close in thoughts or tuple(written) != budget.force[:at]
        else budget.force[at]
    )


def is_closed(seq: Sequence, budget: ThinkingBudget, position: int, guesses: Run[int] = ()) -> bool:
    """Return whether ``close`` must not be sampled at ``position``, because it comes after a forced
    end, which models tend to repeat.
    """
    end = find_budget_end(seq, budget, position, guesses) if budget.closes_once else None
    if end is None or position < end + len(budget.force):
        return False
    behind = end + len(budget.force)
    guessed = guesses[max(0, end - seq.num_tokens) : max(0, behind - seq.num_tokens)]
    return (*seq.tokens[end:behind], *guessed) == budget.force


def find_budget_end(
    seq: Sequence, budget: ThinkingBudget, position: int, guesses: Run[int]
) -> int | None:
    """Return the position after the budget's last token; None if that is not reached, or if there
    is no reasoning.
    """
    first = seq.num_prompt_tokens
    if position - first < budget.num_tokens:
        return None
    end = first + budget.num_tokens
    if budget.open is not None:
        lead = [*seq.tokens[first : first + LEAD], *guesses][: min(LEAD, position - first)]
        if budget.open not in lead:
            return None
        end += lead.index(budget.open) + 1
    return end
