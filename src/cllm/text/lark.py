"""Parts of grammars in llguidance's dialect of Lark. No regular expression of a client is run by anything else."""

from __future__ import annotations

import json
import re
from typing import Any


class Rules:
    """The rules and terminals of a grammar. What reads alike is written once."""

    def __init__(self, *, careful: bool = False) -> None:
        """``careful``: each leaf is to be compiled by itself, which takes milliseconds, to find one at fault."""
        self.careful = careful
        self._bodies: dict[str, str] = {}  # by name
        self._names: dict[str, str] = {}  # by what begins the name, options and body

    def __str__(self) -> str:
        return "\n".join(f"{head}: {body}" for head, body in self._bodies.items())

    def rule(self, body: str, options: str = "") -> str:
        """The name of a rule with this body."""
        return self._named("r", body, options)

    def terminal(self, body: str) -> str:
        """The name of a terminal, in whose body ``&`` and ``~`` may stand."""
        return self._named("T", body, "")

    def _named(self, kind: str, body: str, options: str) -> str:
        key = f"{kind}{options}: {body}"
        if key not in self._names:
            name = self._names[key] = f"{kind}{len(self._names)}"
            self._bodies[name + options] = body
        return self._names[key]

    def reserve(self) -> str:
        """The name of a rule whose body is going to be defined: it may be used in it."""
        name = f"d{len(self._names)}"
        self._names[name] = name
        return name

    def define(self, name: str, body: str) -> None:
        self._bodies[name] = body


def text_term(text: str) -> str:
    """A term for ``text``."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def regex_term(pattern: str) -> str:
    """A term for the texts that match ``pattern`` as a whole; digits are those of ASCII."""
    from llguidance import regex_to_lark

    return "/" + regex_to_lark(pattern, "d") + "/"


def search_term(pattern: str) -> str:
    """A term for the texts in which ``pattern``, as ECMAScript has it, is found; its anchors may stand at its ends."""
    from llguidance import regex_to_lark

    options = []
    for option in top_level_options(pattern):
        body = option.removeprefix("^")
        ends = re.search(r"(?<!\\)(?:\\\\)*\$\Z", body)
        before = "" if option.startswith("^") else "(?s:.*)"
        options.append(f"{before}(?:{body[:-1]})" if ends else f"{before}(?:{body})(?s:.*)")
    return "/" + regex_to_lark("|".join(options), "dw") + "/"


def top_level_options(pattern: str) -> list[str]:
    """The parts of a regular expression between the bars that stand in no parentheses."""
    options, depth = [""], 0
    for part in re.findall(r"\\.|\[(?:\\.|[^\]\\])*\]|.", pattern, re.DOTALL):
        depth += {"(": 1, ")": -1}.get(part, 0)
        if part == "|" and not depth:
            options.append("")
        else:
            options[-1] += part
    return options


def json_leaf(schema: dict[str, Any]) -> str:
    """A term for the strings or numbers of a schema that llguidance compiles."""
    return "%json " + json.dumps(schema).replace("\x7f", r"\u007f")


def fault_of(term: str) -> str:
    """Why llguidance cannot compile a term, or ""."""
    from llguidance import LLMatcher

    return str(LLMatcher.validate_grammar(f"start: {term}"))


def matches(term: str, text: str) -> bool:
    """Whether ``text`` is one of those that the term of a terminal allows."""
    from llguidance import LLMatcher, LLTokenizer

    matcher = LLMatcher(LLTokenizer("byte"), f"start: {term}", log_level=0)
    tokens = list(text.encode())
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def reason(error: str) -> str:
    """llguidance's, without where that is in a grammar which the client has not written."""
    if "NoExtension" in error:
        return "it allows no text"
    lines = error.strip().splitlines()
    said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]  # of a regular expression
    return re.sub(r"^(?:at )?\d+\(\d+\): (?:failed to compile JSON schema: )?", "", (said or lines)[0])
