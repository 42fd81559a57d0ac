"""Policies decide which request is served next. A policy only sorts, and stores no sequences.

Your own policy is a class like these, named as ``package.module:Class`` in scheduler.policy.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from cllm.core.request import Priority
from cllm.errors import StartupError

if TYPE_CHECKING:
    # importing it imports NumPy, which would delay the start of the API process
    from cllm.core.sequence import Sequence

OUTPUT_WEIGHT = 2  # a sampled token counts as two prompt tokens, as in the paper cited in Fair
MAX_COUNTERS = 4096

log = logging.getLogger("cllm.scheduler")


class Policy(Protocol):
    """Sorts waiting sequences into groups. The group with the lowest rank is served next; within a
    group, the earliest deadline and then the earliest arrival decide.

    While a group has waiting sequences, and when it gets some, its rank may rise but not fall.

    If it ``has_classes``, running requests of a lower class yield to waiting ones of a higher
    class. If it ``takes_turns``, the accounts of a class are served in turn, by weight. From these
    two the API process estimates queue positions.
    """

    has_classes: bool
    takes_turns: bool

    def group(self, seq: Sequence) -> Any:
        """Return the group of ``seq``, a hashable value."""
        ...

    def rank(self, group: Any) -> Any:
        """Return the rank of ``group``, a comparable value."""
        ...

    def arrived(self, group: Any) -> None:
        """Note that ``group`` now has a waiting sequence, after having none."""
        ...

    def effective_priority(self, seq: Sequence) -> int:
        """Return the class of ``seq`` while it runs.

        It may be parked for sequences with a lower number.
        """
        ...

    def served(self, seq: Sequence, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Note how many prompt tokens of ``seq`` will be computed, or how many output tokens were
        sampled.
        """
        ...


class FirstComeFirstServed:
    """One queue for all sequences."""

    has_classes = False
    takes_turns = False

    def __init__(self, weights: Mapping[str, float]) -> None:
        pass

    def group(self, seq: Sequence) -> Any:
        return 0

    def rank(self, group: Any) -> Any:
        return group

    def arrived(self, group: Any) -> None:
        pass

    def effective_priority(self, seq: Sequence) -> int:
        return Priority.NORMAL

    def served(self, seq: Sequence, num_prompt_tokens: int, num_output_tokens: int) -> None:
        pass


class Priorities(FirstComeFirstServed):
    """A queue for each class."""

    has_classes = True

    def group(self, seq: Sequence) -> Any:
        return seq.request.priority

    def effective_priority(self, seq: Sequence) -> int:
        return seq.request.priority


class Fair(Priorities):
    """Higher classes first; within a class, the account that has been served least, by virtual
    token counters.

    Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024. An account's counter grows
    by the tokens it is served, divided by its weight. When an account returns, its counter is
    raised to the class's floor: the counter of the account admitted last, which is the lowest of
    those waiting. So no account saves up credit while it is idle. (The paper takes the minimum over
    the waiting accounts. The floor is the virtual time of start-time fair queueing, and costs
    O(1).)
    """

    takes_turns = True

    def __init__(self, weights: Mapping[str, float]) -> None:
        """``weights`` are the relative shares of accounts; those not listed have 1."""
        self._weights = weights
        self.counters: dict[tuple[Priority, str], float] = {}
        self.floors = dict.fromkeys(Priority, 0.0)

    def group(self, seq: Sequence) -> Any:
        return seq.request.priority, seq.request.account

    def rank(self, group: Any) -> Any:
        return group[0], self._counter(group)

    def _counter(self, group: Any) -> float:
        return self.counters.get(group, self.floors[group[0]])

    def arrived(self, group: Any) -> None:
        self.counters[group] = max(self._counter(group), self.floors[group[0]])

    def served(self, seq: Sequence, num_prompt_tokens: int, num_output_tokens: int) -> None:
        if num_prompt_tokens and len(self.counters) > MAX_COUNTERS:
            self._forget_half()
        group = self.group(seq)
        counter = self._counter(group)
        if num_prompt_tokens:
            self.floors[group[0]] = max(self.floors[group[0]], counter)
        cost = num_prompt_tokens + OUTPUT_WEIGHT * num_output_tokens
        self.counters[group] = counter + cost / self._weights.get(seq.request.account, 1.0)

    def _forget_half(self) -> None:
        """Forget the lower half of the counters.

        The floors rise to the forgotten values, so no rank falls.
        """
        by_size = sorted(self.counters.items(), key=lambda item: item[1])
        half = len(by_size) // 2
        for (priority, _), counter in by_size[:half]:
            self.floors[priority] = max(self.floors[priority], counter)
        self.counters = dict(by_size[half:])


def split_prefill_budget(
    lacking: list[Sequence], budget: int, efficient_tokens: float, undivided: int = 0
) -> Iterator[tuple[Sequence, int]]:
    """Yield each sequence with its share of ``budget``; 0 once the budget is used up.

    They are served in the order of ``lacking``, which ``PromptOrder`` has sorted. But up to half of
    the budget first goes to sequences of the head's class that lack less than half of its tokens.
    So shorter prompts do not wait for a longer one, and cannot delay it forever. Once
    ``efficient_tokens`` have been assigned, no further prompt starts. Prompts that are computed
    together all get their first tokens when the last one does. If they are computed one after the
    other, all except the last get theirs sooner. A prompt of at most ``undivided`` tokens that does
    not fit into the rest of the budget waits for the next step, because each part of a prompt costs
    a pass over the weights.
    """
    if not lacking:
        return
    first = lacking[0]
    left = budget - min(first.num_lacking_tokens, (budget + 1) // 2)
    short: set[Sequence] = set()
    for seq in lacking[1:]:
        lacks = seq.num_lacking_tokens
        is_short = 2 * lacks < first.num_lacking_tokens
        if is_short and lacks <= left and seq.effective_priority == first.effective_priority:
            left -= lacks
            budget -= lacks
            short.add(seq)
            yield seq, lacks
    for seq in lacking:
        if seq not in short:
            lacks = seq.num_lacking_tokens
            share = min(lacks, budget) if efficient_tokens > 0 else 0
            if share < lacks <= undivided and seq is not first:
                share = budget = 0
            budget -= share
            efficient_tokens -= share
            yield seq, share


POLICIES = {"fair": Fair, "priority": Priorities, "fcfs": FirstComeFirstServed}


def make_policy(name: str, weights: Mapping[str, float]) -> Policy:
    """Return the policy named ``name``, also as ``package.module:Class``.

    Raises StartupError if there is none.
    """
    if name in POLICIES:
        return cast("Policy", POLICIES[name](weights))
    module, _, class_name = name.partition(":")
    # for the user's own module; a console script does not look there
    sys.path.append(str(Path.cwd()))
    try:
        policy = cast("Policy", getattr(import_module(module), class_name)(weights))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise StartupError(
            f"scheduler.policy must be {', '.join(POLICIES)} or package.module:Class, not {name} "
            f"({error})"
        ) from None
    finally:
        sys.path.pop()
    accept_urgency(policy)
    return policy


def accept_urgency(policy: Any) -> None:
    """Use the method ``urgency`` of a policy as its ``effective_priority``, whose old name it is,
    and log a warning.

    Does nothing if its class, or the nearest base class that defines one of the two, defines
    ``effective_priority``.
    """
    for owner in type(policy).__mro__:
        if "effective_priority" in vars(owner):
            return
        if "urgency" in vars(owner):
            log.warning(
                "scheduler.policy: %s.urgency is deprecated; rename it to effective_priority",
                owner.__name__,
            )
            policy.effective_priority = policy.urgency
            return
