"""Who is served next. A policy sorts; it computes nothing and holds nobody.

A policy of your own is a class like these, named as ``package.module:Class`` in scheduler.policy.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from cllm.core.request import Priority
from cllm.errors import StartupError

if TYPE_CHECKING:
    from cllm.core.sequence import Sequence  # it imports NumPy, which would delay the API process's start

OUTPUT_WEIGHT = 2  # a sampled token counts as two tokens of a prompt, as in the paper
MAX_COUNTERS = 4096


class Policy(Protocol):
    """Sorts the waiting into groups: within one, deadlines and arrivals decide; among them, the least rank.

    While somebody of a group waits, its rank may grow but not fall.

    ``has_classes``: requests of a lower class yield to those of a higher one. ``takes_turns``: within a class, each
    account is served in turn, by its weight. By these two the API process computes what is ahead of a new request.
    """

    has_classes: bool
    takes_turns: bool

    def group(self, seq: Sequence) -> Any:
        """Something hashable."""
        ...

    def rank(self, group: Any) -> Any:
        """Something comparable."""
        ...

    def arrived(self, group: Any) -> None:
        """Somebody of ``group`` waits now; before, nobody did."""
        ...

    def urgency(self, seq: Sequence) -> int:
        """The class in which ``seq`` is served once it runs; it may be parked for those of a lesser number."""
        ...

    def served(self, seq: Sequence, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """So many tokens of ``seq``'s prompt are going to be computed, or so many of its output were sampled."""
        ...


class FirstComeFirstServed:
    """One queue for all."""

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

    def urgency(self, seq: Sequence) -> int:
        return Priority.NORMAL

    def served(self, seq: Sequence, num_prompt_tokens: int, num_output_tokens: int) -> None:
        pass


class Priorities(FirstComeFirstServed):
    """A queue for each class."""

    has_classes = True

    def group(self, seq: Sequence) -> Any:
        return seq.request.priority

    def urgency(self, seq: Sequence) -> int:
        return seq.request.priority


class Fair(Priorities):
    """Classes first; within a class the key that has been served least, by virtual token counters.

    Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024. A key's counter grows by the tokens it is
    served, divided by its weight. A key that comes back is lifted to ``floor``, the counter of the key admitted last,
    which is the least of those who wait: nobody saves up, nobody has to catch up. (The paper takes the minimum over
    the waiting; the floor is the virtual time of start-time fair queueing, and costs O(1).)
    """

    takes_turns = True

    def __init__(self, weights: Mapping[str, float]) -> None:
        """``weights``: the share of a key against the others; 1 where it is not named."""
        self._weights = weights
        self.counters: dict[tuple[Priority, str], float] = {}
        self.floors = dict.fromkeys(Priority, 0.0)

    def group(self, seq: Sequence) -> Any:
        return seq.request.priority, seq.request.key

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
        self.counters[group] = counter + cost / self._weights.get(seq.request.key, 1.0)

    def _forget_half(self) -> None:
        """Forget the smaller half of the counters. The floors rise to what is forgotten, so no rank falls."""
        by_size = sorted(self.counters.items(), key=lambda item: item[1])
        half = len(by_size) // 2
        for (priority, _), counter in by_size[:half]:
            self.floors[priority] = max(self.floors[priority], counter)
        self.counters = dict(by_size[half:])


def split_prefill_budget(lacking: list[Sequence], budget: int, enough: float) -> Iterator[tuple[Sequence, int]]:
    """Who of those that lack tokens gets how many of ``budget``; 0 where it has run out.

    In the order of class and arrival, but up to half of them first go to those whose rest is less than half as long as
    that of the first: they need not wait for a long prompt, nor can they hold it up for ever. Once ``enough`` tokens
    have been given, no further prompt is begun: those that are computed together have their first tokens together, when
    the last of them could have it; one after the other, all but that one have theirs sooner.
    """
    lacking = sorted(lacking, key=lambda seq: (seq.urgency, seq.order))
    if not lacking:
        return
    first = lacking[0]
    left = budget - min(first.num_lacking_tokens, (budget + 1) // 2)
    short = set()
    for seq in lacking[1:]:
        lacks = seq.num_lacking_tokens
        if seq.urgency == first.urgency and 2 * lacks < first.num_lacking_tokens and lacks <= left:
            left -= lacks
            budget -= lacks
            short.add(seq)
            yield seq, lacks
    for seq in lacking:
        if seq not in short:
            share = min(seq.num_lacking_tokens, budget) if enough > 0 else 0
            budget -= share
            enough -= share
            yield seq, share


POLICIES = {"fair": Fair, "priority": Priorities, "fcfs": FirstComeFirstServed}


def make_policy(name: str, weights: Mapping[str, float]) -> Policy:
    """The policy called ``name``, or the class at ``package.module:Class``. Raises StartupError if there is none."""
    if name in POLICIES:
        return cast("Policy", POLICIES[name](weights))
    module, _, class_name = name.partition(":")
    sys.path.append(str(Path.cwd()))  # where one's own module usually lies; a console script does not look there
    try:
        return cast("Policy", getattr(import_module(module), class_name)(weights))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise StartupError(
            f"scheduler.policy must be {', '.join(POLICIES)} or package.module:Class, not {name} ({error})"
        ) from None
    finally:
        sys.path.pop()
