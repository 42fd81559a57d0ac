"""A limit of reasoning: when it is used up, the tokens that end it are written in place of sampled ones."""

from __future__ import annotations

from collections.abc import Sequence as Run

from cllm.core.params import ThinkingBudget
from cllm.core.sequence import Sequence


def forced_token(seq: Sequence, budget: ThinkingBudget, position: int, guesses: Run[int] = ()) -> int | None:
    """The token that must stand at ``position``, or None if it is to be sampled.

    ``guesses`` are the tokens behind those of ``seq``, up to ``position`` at least. Without state of its own: what
    has to be known stands in the tokens, which are looked at only around the position where the budget ends.
    """
    begin = len(budget.open)
    end = begin + budget.num_tokens
    at = position - seq.num_prompt_tokens - end
    if not 0 <= at < len(budget.force):
        return None
    output = [*seq.tokens[seq.num_prompt_tokens :], *guesses]
    thoughts, written = output[begin:end], output[end : end + at]
    begun = tuple(output[:begin]) == budget.open
    if not begun or contains(thoughts, budget.close) or tuple(written) != budget.force[:at]:
        return None
    return budget.force[at]


def contains(tokens: list[int], part: tuple[int, ...]) -> bool:
    start = 0
    while part[0] in tokens[start:]:
        start = tokens.index(part[0], start) + 1
        if tuple(tokens[start - 1 : start - 1 + len(part)]) == part:
            return True
    return False
