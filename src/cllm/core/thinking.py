"""Where a sequence is in its reasoning: how much of its budget is used, and the tokens that end the
reasoning, which are forced instead of sampled.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from cllm.core.lines import Lines
from cllm.core.params import ThinkingBudget
from cllm.core.vocabulary import Pieces


class Thinking:
    """The state of one sequence in its reasoning.

    It follows from the output's tokens, and from ``end``, which the client may have asked for. So
    another engine that gets the same tokens, or drafts that are accepted, lead to the same state.
    All reasoning of an output counts together. When the budget is used up, the forced tokens end
    the reasoning, and from then on none can begin.
    """

    __slots__ = (
        "_at",
        "_budget",
        "_is_inside",
        "_limit",
        "_lines",
        "_may_open",
        "_num_matched",
        "_num_used",
        "_pieces",
        "is_over",
    )

    def __init__(self, budget: ThinkingBudget, pieces: Pieces | None = None) -> None:
        """``pieces`` has the bytes of each token id. Without it, every token begins a line."""
        self._budget = budget
        self._pieces = pieces
        self._lines = Lines()  # of the output outside of reasoning
        self._limit = sys.maxsize if budget.num_tokens is None else budget.num_tokens
        self._num_used = 0  # tokens of reasoning
        self._num_matched = 0  # tokens of the mark that opens reasoning
        self._may_open = True  # whether that mark was allowed where these begin
        self._at = -1  # the position in the forced tokens; -1 if nothing is being forced
        self._is_inside = False
        self.is_over = False  # whether no further reasoning may begin
        if budget.inside:
            self._enter()

    def advance(self, token: int) -> None:
        """Take in the next token of the output."""
        budget = self._budget
        if self._at >= 0:
            # any other token is a draft token that will be rejected
            self._at = self._at + 1 if token == budget.force[self._at] else 0
            if self._at == len(budget.force):
                self._at, self._is_inside, self.is_over = -1, False, True
        elif not self._is_inside:
            self._match(token)
            if self._pieces is not None and not self._is_inside:
                self._lines.add(self._pieces[token].decode(errors="replace"))
        elif token == budget.close or token in budget.calls:
            self._is_inside = False
        else:
            self._num_used += 1
            if self._num_used >= self._limit:
                self._at = 0

    def _match(self, token: int) -> None:
        """Note whether ``token`` continues or completes the mark that opens reasoning."""
        mark = self._budget.open
        if token != mark[self._num_matched]:
            self._num_matched = 0
        if not self._num_matched:
            self._may_open = self._budget.anywhere or self._lines.allow_mark()
        if token == mark[self._num_matched]:
            self._num_matched = (self._num_matched + 1) % len(mark)
            if not self._num_matched and self._may_open:
                self._enter()

    def _enter(self) -> None:
        self._is_inside = True
        if self._num_used >= self._limit:
            self._at = 0

    def end(self, output: Sequence[int]) -> None:
        """End the reasoning now, or as soon as any begins. ``output`` has the tokens so far.

        If the reasoning ends with the first of the forced tokens, which another engine may have
        forced, the others follow.
        """
        self._limit, budget = self._num_used, self._budget
        if self._at >= 0:
            return
        force, lengths = budget.force, range(min(len(budget.force), len(output)), -1, -1)
        begun = next(n for n in lengths if (*output[len(output) - n :],) == force[:n])
        if begun < len(force) and (self._is_inside or budget.close in force[:begun]):
            self._at = begun
        else:
            self.is_over = self._num_used > 0

    def after(self, tokens: Iterable[int]) -> Thinking:
        """Return the state after further ``tokens``, without changing this one."""
        state = Thinking(self._budget)
        for name in self.__slots__:
            setattr(state, name, getattr(self, name))
        state._lines = self._lines.copy()
        for token in tokens:
            state.advance(token)
        return state

    @property
    def forced(self) -> int | None:
        """The token that comes next; None if it is sampled."""
        return None if self._at < 0 else self._budget.force[self._at]

    @property
    def forbidden(self) -> list[int]:
        """Tokens that must not come next, because the reasoning is over: those that would begin
        further reasoning, or end it once more, which models tend to do.
        """
        if not self.is_over:
            return []
        mark, may_open = self._budget.open, self._may_open
        if not self._num_matched:
            may_open = self._budget.anywhere or self._lines.allow_mark()
        opening = [mark[-1]] if may_open and self._num_matched == len(mark) - 1 else []
        return [*opening, self._budget.close] if self._budget.closes_once else opening
