"""Write the grammar of a chat message, in llguidance's Lark, for a model family and tools.

The grammar contains the form of calls, and the reasoning that may precede a constrained text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any, NamedTuple

import msgspec

from cllm.errors import BadRequest
from cllm.text.schema.faults import find_argument_fault
from cllm.text.schema.json_schema import invalid_schema
from cllm.text.schema.lark import Rules
from cllm.text.schema.repair import repair
from cllm.text.tools.argument_grammar import SPACE, ArgumentGrammar, LarkTerms, loose_regex
from cllm.text.tools.model_family import Calls, Header, ModelFamily

PLACES = re.compile(r"\$(name|word|ordinal|arguments|keywords|pairs)")
TEXT = "/(?s:.*)/"
FUNCTION = r"(?s:.*)to=functions\."  # in a header
NO_NAME = r"/[^\w.-](?s:.*)/"


class CallableTool(NamedTuple):
    """A function that may be called.

    If ``strict``, its whole schema is enforced, or the request is refused.
    """

    schema: dict[str, Any]
    strict: bool = False


class BoundMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """The constraints on a chat's next message.

    ``tools`` has the functions that may be called, by name, and ``control`` the ids of the control
    tokens in the family's marks. ``answer`` is the grammar of the message's text; if "", no text is
    allowed. If ``calls``, the message may be calls instead of text. If ``is_loose``, its text is
    free, and only the calls in it are constrained. A message without text may have ``max_calls``
    calls; None is no limit. If ``thinks``, it may begin with reasoning; if ``inside``, it begins in
    the middle of reasoning; if ``begun``, in the middle of its text. If ``names_only``, arguments
    of functions that are not strict may be any JSON object.
    """

    family: ModelFamily
    tools: dict[str, CallableTool]
    control: dict[str, int] = {}
    answer: str = ""
    calls: bool = False
    is_loose: bool = False
    max_calls: int | None = None
    thinks: bool = False
    inside: bool = False
    begun: bool = False
    names_only: bool = False

    def enforces(self, tool: CallableTool) -> bool:
        """Whether the message is rejected if the schema of ``tool`` cannot be enforced.

        Clients set strict by default, with schemas that families without JSON cannot follow.
        With such families, strict only counts where the whole message is constrained.
        """
        assert self.family.calls
        return tool.strict and (self.family.calls.writes_json or not self.is_loose)


def message_grammar(
    message: BoundMessage,
    special: Collection[int] = (),
    unenforced: set[str] | None = None,
    *,
    careful: bool = False,
) -> str:
    """Return the grammar of a message, not compiled yet.

    ``special`` has the ids of all special tokens.

    For tools that are not strict, keywords that cannot be enforced are added to ``unenforced``.
    Raises BadRequest (tools) for other schemas that cannot be enforced.
    """
    writer = LooseGrammar if message.is_loose else CallGrammar
    return writer(
        message, special, set() if unenforced is None else unenforced, Rules(careful=careful)
    ).write()


class CallGrammar:
    """Writes the grammar of a message that is constrained as a whole."""

    def __init__(
        self, message: BoundMessage, special: Collection[int], unenforced: set[str], rules: Rules
    ) -> None:
        self._message = message
        self._special = frozenset(special)
        self._unenforced = unenforced
        self._rules = rules
        self._terms = LarkTerms(rules, message.control)
        self._arguments: dict[tuple[str, str], str | None] = {}

    def write(self) -> str:
        message, header = self._message, self._message.family.header
        options = []
        if message.answer:
            options.append((self._terms.text(header.final) + " " if header else "") + "@answer")
        if message.calls:
            options.append(self._calls())
        thoughts = self._thoughts() + " " if message.thinks or message.inside else ""
        lark = f"start: {thoughts}({' | '.join(options)})\n{self._rules}"
        answer = message.answer
        if not answer:
            return lark
        parts = (
            json.loads(answer)["grammars"]
            if answer.lstrip().startswith("{")
            else [{"lark_grammar": answer}]
        )
        return json.dumps(
            {"grammars": [{"lark_grammar": lark}, parts[0] | {"name": "answer"}, *parts[1:]]}
        )

    def _thoughts(self) -> str:
        family, terms = self._message.family, self._terms
        if family.header:
            begin = f'{terms.text("<|channel|>")} "analysis" {terms.text(family.header.close)}'
            return (
                f"({begin} {terms.until(family.header.end[0])} "
                f'{terms.text(family.header.open[0])} "assistant")?'
            )
        assert family.reasoning
        space = self._rules.rule(r"/[ \n]{1,4}/")
        if self._message.inside:
            return f"{terms.until(family.reasoning.close)} {space}?"
        return (
            f"({terms.text(family.reasoning.open)} {terms.until(family.reasoning.close)} {space}?)?"
        )

    def _calls(self) -> str:
        """Return a term for calls and nothing else, exactly as the family writes them."""
        calls, text = self._family_calls, self._terms.text
        call = self._options(calls.write)
        most = 1 if self._message.family.header else self._message.max_calls
        count = "*" if most is None else f"{{0,{most - 1}}}"
        further = "" if most == 1 else f"({text(calls.between)} {call}){count}"
        return f"{text(calls.begin)} {call} {further} {text(calls.end)}"

    @property
    def _family_calls(self) -> Calls:
        assert self._message.family.calls
        return self._message.family.calls

    def _options(self, write: str) -> str:
        """Return a rule for a call of any of the tools, in the form of the template ``write``."""
        return self._rules.rule(
            " | ".join(self._rules.rule(self._call(name, write)) for name in self._message.tools)
        )

    def _call(self, name: str, write: str) -> str:
        terms: list[str] = []
        pieces = PLACES.split(write)  # every second piece is a variable
        for i, piece in enumerate(pieces):
            match piece if i % 2 else "":
                case "name":
                    terms.append(self._terms.text(json.dumps(name)))
                case "word":
                    terms.append(self._terms.text(name))
                case "ordinal":
                    terms.append("/[0-9]{1,4}/")
                case "":
                    terms.append(self._marks(piece))
                case place:
                    term, pieces[i + 1] = self._arguments_term(name, place, pieces[i + 1])
                    terms.append(term)
        return " ".join(filter(None, terms))

    def _marks(self, text: str) -> str:
        """Return a term for what the family writes around names and arguments."""
        return self._terms.text(text)

    def _arguments_term(self, name: str, place: str, tail: str) -> tuple[str, str]:
        """Return a term for the arguments, and the part of the ``tail`` after them that the term
        does not include.
        """
        if (name, place) not in self._arguments:
            self._arguments[name, place] = self._write_arguments(name, place)
        term = self._arguments[name, place]
        if term is not None:
            return term, tail
        end, rest = self._terms.first_part(tail)
        return self._terms.until(end), rest

    def _write_arguments(self, name: str, place: str) -> str | None:
        """Return a rule for the arguments of a function; None if only the text after them ends
        them.
        """
        message, tool = self._message, self._message.tools[name]
        strict = message.enforces(tool)
        try:
            if strict or not message.names_only:
                if fault := find_argument_fault(tool.schema):
                    raise invalid_schema("tools", "", fault)
                return self._term(
                    tool.schema | {"type": "object"}, None if strict else self._unenforced, place
                )
        except BadRequest as error:
            if strict:
                raise BadRequest(
                    f"Function '{name[:64]}': {error}", param=error.param, code=error.code
                ) from None
            if not message.is_loose:
                return self._write_repaired(tool.schema, place)
        self._unenforced.add("parameters")
        return self._term({"type": "object"}, set(), place)

    def _write_repaired(self, schema: dict[str, Any], place: str) -> str | None:
        """Return a rule for forced arguments with an invalid schema: for its valid parts, or else
        for any object.
        """
        unenforced: set[str] = set()
        repaired = repair(schema, unenforced)
        if repaired.get("type", "object") != "object":
            unenforced.add("type")
        try:
            term = self._term(repaired | {"type": "object"}, unenforced, place)
        except BadRequest:
            term, unenforced = self._term({"type": "object"}, set(), place), {"parameters"}
        self._unenforced |= unenforced
        return term

    def _term(self, schema: dict[str, Any], unenforced: set[str] | None, place: str) -> str | None:
        term = ArgumentGrammar(self._family_calls, self._terms, schema, unenforced).term(place)
        return None if term is None else self._rules.rule(term)


class LooseGrammar(CallGrammar):
    """Writes the grammar of a free text in which only calls are constrained.

    A call begins with its head: what the family writes before the first variable, such as
    ``<tool_call>`` and ``{"name":``. White space in it may differ. Text without a head is free, so
    it may mention marks. Where calls have no mark, the head includes the name of a declared
    function. Lazy terminals find heads: as soon as they match, they win over further text.
    """

    def write(self) -> str:
        message, family = self._message, self._message.family
        self._text = self._rules.rule(TEXT)
        self._body = self._rules.reserve()
        if family.header:
            header = self._with_headers(family.header)
            start = self._body if message.begun or message.inside else header
        else:
            thoughts = self._thoughts() if family.reasoning else ""
            self._rules.define(self._body, self._text_with_calls(thoughts))
            start = thoughts if message.inside else self._body
        return f"start: {start}\n{self._rules}"

    def _marks(self, text: str) -> str:
        return self._terms.loose(text)

    def _lazy(self, regex: str) -> str:
        return self._rules.rule(f"/{regex}/", "[lazy]")

    def _up_to(self, mark: str) -> str:
        """Return a term for text up to the end of ``mark``."""
        control, rest = self._terms.behind_control(mark)
        if control is None:
            return self._lazy(f"(?s:.*){loose_regex(mark)}")
        return (
            f"{self._text} <[{control}]> "
            f"{self._lazy(SPACE + loose_regex(rest)) if rest.strip() else ''}"
        )

    def _parts_without(self, *marks: str) -> list[str]:
        """Return terms for text up to a special token that completes none of ``marks``.

        A token that only begins a mark has its own term: llguidance cannot distinguish two sets
        that share a token.
        """
        used = dict(map(self._terms.behind_control, marks))
        other = self._terms.one_of(self._special - used.keys())
        begun = [
            f"{self._text} <[{control}]>"
            for control, rest in used.items()
            if control is not None and rest.strip()
        ]
        return [f"{self._text} {other}", *begun] if other else begun

    def _text_with_calls(self, thoughts: str) -> str:
        """Return a term for text, calls, and reasoning that begins in the text and continues with
        ``thoughts``.
        """
        calls, reasoning = self._family_calls, self._message.family.reasoning
        whole = calls.write if calls.write.startswith(calls.open) else calls.begin + calls.write
        is_marked = whole.startswith(calls.open)
        further = ""
        if whole != calls.write or not is_marked:  # in a list, further calls have no head
            further = f"({self._options(calls.between + calls.write)})* {self._marks(calls.end)}"
        parts, ends, marks = [], [self._text], []
        if is_marked:
            head = PLACES.split(whole, maxsplit=1)[0].rstrip()
            parts.append(f"{self._up_to(head)} {self._options(whole.removeprefix(head))} {further}")
            marks.append(head)
        if reasoning:
            ends.append(f"{self._up_to(reasoning.open)} {thoughts}")
            marks.append(reasoning.open)
        parts += self._parts_without(*marks)
        bare = (
            []
            if is_marked
            else [f"{self._unmarked(name, whole)} {further}" for name in self._message.tools]
        )
        return f"{choice_term(bare, '*')} {choice_term(parts, '*')} {choice_term(ends)}"

    def _unmarked(self, name: str, whole: str) -> str:
        """Return a term for a call without a mark: any text that begins like it, up to the
        arguments, is a call.
        """
        lead, variable, between, place, tail = PLACES.split(whole)
        head = lead + (json.dumps(name) if variable == "name" else name) + between
        arguments, rest = self._arguments_term(name, place, tail)
        space = self._marks(head[len(head.rstrip()) :])
        return (
            f"{self._lazy(SPACE + loose_regex(head.rstrip()))} {space} {arguments} "
            f"{self._marks(rest)}"
        )

    def _thoughts(self) -> str:
        """Return a rule for reasoning from its middle on. The message may end in it."""
        assert self._message.family.reasoning
        close = self._message.family.reasoning.close
        before = choice_term(self._parts_without(close), "*")
        return self._rules.rule(f"{before} ({self._text} | {self._up_to(close)} {self._body})")

    def _with_headers(self, header: Header) -> str:
        """Return a rule for messages from the middle of a header on.

        A header may name a function to call.
        """
        start, close = self._rules.reserve(), self._terms.ids([header.close])
        opening = f"{self._terms.one_of(self._terms.ids(header.open))} {start}"
        other = self._terms.one_of(self._special - self._terms.ids(header.open))
        # of a header
        rest = (
            f"({self._terms.one_of(self._special - close)} {self._text})* "
            f"{self._marks(header.close)}"
        )
        calls = []
        for name in self._message.tools:
            arguments, _ = self._arguments_term(name, "arguments", "")
            head = f"{self._terms.text(name)} {self._rules.terminal(NO_NAME)}? {rest}"
            calls.append(
                self._rules.rule(f"{head} {arguments} ({opening} | {other} {self._body})?")
            )
        options = [self._text, f"{self._text} {self._terms.one_of(close)} {self._body}"]
        options.append(f"{self._lazy(FUNCTION)} {choice_term(calls)}")
        self._rules.define(
            start, f"{choice_term(self._parts_without(header.close), '*')} {choice_term(options)}"
        )
        self._rules.define(
            self._body, f"({self._text} {other})* ({self._text} | {self._text} {opening})"
        )
        return start


def choice_term(options: Collection[str], many: str = "") -> str:
    """Return a term for one of ``options``, followed by the repetition ``many`` ("?" or "*"); "" if
    there are none.
    """
    return f"({' | '.join(options)}){many}" if options else ""
