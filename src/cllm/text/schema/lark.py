"""Parts of grammars in llguidance's dialect of Lark.

Only llguidance runs clients' regular expressions.
"""

from __future__ import annotations

import json
import re
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# the most repetitions at the end of a pattern, which do not matter if any text may follow
MORE = re.compile(r"(?<!\\)((?:\\\\)*)\{(\d+),\d*\}\Z")


class Rules:
    """The rules and terminals of a grammar. Equal ones are written once."""

    def __init__(self, *, careful: bool = False) -> None:
        """If ``careful``, each leaf is compiled separately, which takes milliseconds, to find the
        one at fault.
        """
        self.careful = careful
        self._bodies: dict[str, str] = {}  # by name
        self._names: dict[str, str] = {}  # by kind, options and body

    def __str__(self) -> str:
        return "\n".join(f"{head}: {body}" for head, body in self._bodies.items())

    def rule(self, body: str, options: str = "") -> str:
        """Return the name of a rule with this body."""
        return self._name("r", body, options)

    def terminal(self, body: str) -> str:
        """Return the name of a terminal with this body, which may contain ``&`` and ``~``."""
        return self._name("T", body, "")

    def _name(self, kind: str, body: str, options: str) -> str:
        key = f"{kind}{options}: {body}"
        if key not in self._names:
            name = self._names[key] = f"{kind}{len(self._names)}"
            self._bodies[name + options] = body
        return self._names[key]

    def reserve(self) -> str:
        """Return the name of a rule that is defined later. Its own body may use it."""
        name = f"d{len(self._names)}"
        self._names[name] = name
        return name

    def define(self, name: str, body: str) -> None:
        self._bodies[name] = body


def text_term(text: str) -> str:
    """Return a term for exactly ``text``."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def regex_term(pattern: str) -> str:
    """Return a term for the texts that match ``pattern`` as a whole.

    Only ASCII digits count as digits.
    """
    from llguidance import regex_to_lark

    return "/" + regex_to_lark(pattern, "d") + "/"


def search_term(pattern: str) -> str:
    """Return a term for the texts in which the ECMAScript ``pattern`` is found.

    It may have anchors at its ends.
    """
    from llguidance import regex_to_lark

    options = []
    for option in top_level_options(pattern):
        body = option.removeprefix("^")
        is_end = re.search(r"(?<!\\)(?:\\\\)*\$\Z", body)
        body = body[:-1] if is_end else MORE.sub(r"\1{\2}", body)
        before, after = "" if option.startswith("^") else "(?s:.*)", "" if is_end else "(?s:.*)"
        options.append(f"{before}(?:{body}){after}")
    return "/" + regex_to_lark("|".join(options), "dw") + "/"


def top_level_options(pattern: str) -> list[str]:
    """Split a regular expression at the bars outside of parentheses, without parentheses around a
    whole option.
    """
    options, depth, groups = [""], 0, [0]  # ``groups`` counts those that have ended in each option
    for part in re.findall(r"\\.|\[(?:\\.|[^\]\\])*\]|.", pattern, re.DOTALL):
        depth += {"(": 1, ")": -1}.get(part, 0)
        if part == "|" and not depth:
            options.append("")
            groups.append(0)
        else:
            options[-1] += part
            groups[-1] += part == ")" and not depth
    alternatives = []
    for option, num_groups in zip(options, groups, strict=True):
        inner = re.fullmatch(r"\((?:\?:|(?!\?))(.*)\)", option, re.DOTALL)
        alternatives += top_level_options(inner[1]) if inner and num_groups == 1 else [option]
    return alternatives


def json_leaf(schema: dict[str, Any]) -> str:
    """Return a term for a schema of strings or numbers, which llguidance compiles."""
    return "%json " + json.dumps(schema).replace("\x7f", r"\u007f")


def find_term_fault(term: str) -> str:
    """Return why llguidance cannot compile a term, or ""."""
    from llguidance import LLMatcher

    return str(LLMatcher.validate_grammar(f"start: {term}"))


def finds(pattern: str, text: str) -> bool:
    """Whether the ECMAScript ``pattern`` is found in ``text``."""
    matcher = search_matcher(pattern).deep_copy()
    tokens = list(text.encode())
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@lru_cache(maxsize=1000)
def search_matcher(pattern: str) -> LLMatcher:
    """Return a matcher for texts in which ``pattern`` is found, which takes milliseconds."""
    from llguidance import LLMatcher

    return LLMatcher(byte_tokenizer(), f"start: {search_term(pattern)}", log_level=0)


@cache
def byte_tokenizer() -> LLTokenizer:
    """Return a tokenizer whose tokens are the bytes, which takes milliseconds."""
    from llguidance import LLTokenizer

    return LLTokenizer("byte", slices=[])


def explain_error(error: str) -> str:
    """Return llguidance's reason, without its position in a grammar that the client did not
    write.
    """
    if "NoExtension" in error:
        return "it allows no text"
    lines = error.strip().splitlines()
    # of a regular expression
    said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return re.sub(
        r"^(?:at )?\d+\(\d+\): (?:failed to compile JSON schema: )?", "", (said or lines)[0]
    )
