"""How far nested repetitions expand, computed before anything is compiled: a few characters can ask for billions."""

from __future__ import annotations

import re

MAX_EXPANSION = 10_000  # what the counts of nested repetitions may multiply to
LARGEST = 10**9  # beyond that it does not matter

COUNT = r"\{(?P<low>\d*)(?:,(?P<high>\d*))?\}"
CLASS = r"\[(?:\\.|[^\]\\])*(?:\]|\Z)"  # one that is not closed goes on to the end: nothing is looked at twice
REGEX = re.compile(rf"\\.|{CLASS}|(?P<open>\()|(?P<close>\))|{COUNT}|(?P<mark>[*+?])|[^\\\[(){{*+?]+|.", re.DOTALL)
# In Lark brackets are groups, a regular expression is one item, and counts in texts and comments are none.
LARK = re.compile(
    rf'"(?:\\.|[^"\\\n])*(?:"|$)|//[^\n]*|#[^\n]*|/(?P<regex>(?:\\.|{CLASS}|[^/\\\n[])+)(?:/|$)'
    rf'|(?P<open>[(\[])|(?P<close>[)\]])|{COUNT}|(?P<mark>[*+?])|[^"/#(){{*+?\[\]]+|.',
    re.DOTALL | re.MULTILINE,
)


def expands_too_far(text: str, parts: re.Pattern[str] = REGEX) -> bool:
    """Whether the nested counted repetitions in ``text`` multiply to more than MAX_EXPANSION.

    ``parts``: REGEX for a regular expression, LARK for a grammar.
    """
    return products(text, parts)[1] > MAX_EXPANSION


def products(text: str, parts: re.Pattern[str]) -> tuple[int, int]:
    """The largest product of counts in ``text``, and the largest one of counts that are nested."""
    groups = [1]  # for each open group the largest product in it
    last = nested = 1  # ``last`` is the product of the item before, which a count would repeat
    for part in parts.finditer(text):
        match part.lastgroup:
            case "open":
                groups.append(1)
                last = 1
            case "close":
                last = groups.pop() if len(groups) > 1 else 1
            case "low" | "high":
                count = max([1, *(int(digits[:10]) for digits in part.group("low", "high") if digits)])
                nested = max(nested, last * count if last > 1 else 1)
                last = min(last * count, LARGEST)
            case "regex":
                last, inner = products(part["regex"], REGEX)
                nested = max(nested, inner)
            case None:
                last = 1
        groups[-1] = max(groups[-1], last)
    return max(groups), nested
