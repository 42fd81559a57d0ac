"""Compute how far nested repetitions expand, before compiling anything: a few characters can
request billions.
"""

from __future__ import annotations

import re

MAX_EXPANSION = 10_000  # limit of the product of nested counts
LARGEST = 10**9  # larger products are capped

COUNT = r"\{(?P<low>\d*)(?:,(?P<high>\d*))?\}"
# an unclosed class extends to the end: nothing is scanned twice
CLASS = r"\[(?:\\.|[^\]\\])*(?:\]|\Z)"
REGEX = re.compile(
    rf"\\.|{CLASS}|(?P<open>\()|(?P<close>\))|{COUNT}|(?P<mark>[*+?])|[^\\\[(){{*+?]+|.", re.DOTALL
)
# In Lark, brackets are groups, a regular expression is one item, and counts in strings and comments
# are ignored.
LARK = re.compile(
    rf'"(?:\\.|[^"\\\n])*(?:"|$)|//[^\n]*|#[^\n]*|/(?P<regex>(?:\\.|{CLASS}|[^/\\\n[])+)(?:/|$)'
    rf'|(?P<open>[(\[])|(?P<close>[)\]])|{COUNT}|(?P<mark>[*+?])|[^"/#(){{*+?\[\]]+|.',
    re.DOTALL | re.MULTILINE,
)


def expands_too_far(text: str, parts: re.Pattern[str] = REGEX) -> bool:
    """Whether the nested counted repetitions in ``text`` multiply to more than MAX_EXPANSION.

    ``parts`` is REGEX for a regular expression, and LARK for a grammar.
    """
    return repetition_products(text, parts)[1] > MAX_EXPANSION


def repetition_products(text: str, parts: re.Pattern[str]) -> tuple[int, int]:
    """Return the largest product of counts in ``text``, and the largest product of nested
    counts.
    """
    groups = [1]  # the largest product in each open group
    last = nested = 1  # a count would repeat the previous item, whose product is ``last``
    for part in parts.finditer(text):
        match part.lastgroup:
            case "open":
                groups.append(1)
                last = 1
            case "close":
                last = groups.pop() if len(groups) > 1 else 1
            case "low" | "high":
                count = max(
                    [1, *(int(digits[:10]) for digits in part.group("low", "high") if digits)]
                )
                nested = max(nested, last * count if last > 1 else 1)
                last = min(last * count, LARGEST)
            case "regex":
                last, inner = repetition_products(part["regex"], REGEX)
                nested = max(nested, inner)
            case None:
                last = 1
        groups[-1] = max(groups[-1], last)
    return max(groups), nested
