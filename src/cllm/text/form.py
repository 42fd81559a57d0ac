"""How a family of models writes reasoning and calls: data files, of which the chat template's text chooses one."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

MAX_HEAD = 2048  # characters in which it must be clear whether something is a call

HEADS = {
    # A JSON object up to its arguments.
    "json": (
        r'\s*\[?\s*\{\s*(?:"(?:id|type)"\s*:\s*"[^"]*"\s*,\s*)*(?:"function"\s*:\s*\{\s*)?'
        r'"name"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*'
    ),
    # A function in Python up to its arguments.
    "python": r"\s*\[?\s*(?P<name>[A-Za-z_][\w.-]*)",
}


class Reasoning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """skip: marks that are dropped where they stand in what is said. anywhere: it may also begin behind text, as its
    mark is none that a text could be about.
    """

    open: str
    close: str
    skip: tuple[str, ...] = ()
    anywhere: bool = False


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Messages that begin with a header (harmony). What it says, by regular expressions, and what ends a message.

    call: finds the ``name`` of the function that the message is for. ``final`` is the header of plain text.
    """

    open: tuple[str, ...]
    close: str
    end: tuple[str, ...]
    reasoning: str
    call: str
    final: str


class Tags(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments as keys and values. trim: a line break after the opening and before the closing tag of a value.
    wrapped: what opens and closes a value otherwise.
    """

    key_open: str
    key_close: str
    value_close: str
    value_open: str = ""
    trim: bool = False
    wrapped: tuple[str, str] = ("", "")


class Calls(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a call looks: a mark of ``open``, one of ``head``, the arguments, and then perhaps marks of ``close``.

    head: regular expressions with the group ``name``, for what lies between the mark and the arguments; "json" is an
    object with name and arguments, "python" a function's name, whose arguments are keywords in brackets; inner: marks
    that occur in them. bare: a message may also begin with that. quote: arguments are written without quotes around
    keys and with this mark around strings. tags: they are keys and values. skip: other marks, which are dropped.
    separators: stand before a further call in place of ``open``. ends_reasoning: models of this family forget to close
    their reasoning before they call. begin, write, between, end: how calls are to be written, with $name and $arguments
    (tags: $pairs, each as ``pair`` with $key, $value, and $string, whether it is one; Python: $keywords).
    """

    write: str
    open: tuple[str, ...] = ()
    head: tuple[str, ...] = ("json",)
    inner: tuple[str, ...] = ()
    close: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    separators: tuple[str, ...] = ()
    bare: bool = False
    ends_reasoning: bool = False
    quote: str = ""
    tags: Tags | None = None
    begin: str = ""
    between: str = ""
    end: str = ""
    pair: str = ""

    @property
    def writes_json(self) -> bool:
        return "$arguments" in self.write and not self.quote


class Form(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A family; ``signs`` are texts that its chat templates have in common, () if it is not chosen by them."""

    signs: tuple[str, ...]
    calls: Calls | None = None
    reasoning: Reasoning | None = None
    header: Header | None = None

    @property
    def marks(self) -> set[str]:
        """All that may be a control token."""
        marks: set[str] = set()
        if self.reasoning:
            marks |= {self.reasoning.open, self.reasoning.close, *self.reasoning.skip}
        if self.header:
            marks |= {*self.header.open, self.header.close, *self.header.end}
        if self.calls:
            marks |= {*self.calls.open, *self.calls.inner, *self.calls.close, *self.calls.skip, self.calls.quote}
            if self.calls.tags:
                tags = self.calls.tags
                marks |= {tags.key_open, tags.key_close, tags.value_open, tags.value_close}
        return marks - {""}


class Marks(NamedTuple):
    """``whole`` finds one of some marks, ``begun`` the beginning of one at the end of a text."""

    whole: re.Pattern[str]
    begun: re.Pattern[str]


@cache
def marks_of(marks: tuple[str, ...]) -> Marks:
    begun = {mark[:length] for mark in marks for length in range(1, len(mark))}
    return Marks(re.compile(any_of(set(marks))), re.compile(f"(?:{any_of(begun)})\\Z"))


def any_of(texts: set[str]) -> str:
    """A regular expression for one of them, the longest first; for none, one that never matches."""
    return "|".join(map(re.escape, sorted(texts, key=lambda text: (-len(text), text)))) or "(?!)"


@cache
def pattern(source: str) -> re.Pattern[str]:
    return re.compile(HEADS.get(source, source))


@cache
def forms() -> dict[str, Form]:
    """All there are, by name."""
    folder = Path(__file__).with_name("forms")
    return {
        path.stem: msgspec.yaml.decode(path.read_bytes(), type=Form, strict=True) for path in sorted(folder.iterdir())
    }


def form_of(template: str) -> Form:
    """The form that a chat template tells of: calls and reasoning are recognised each by themselves."""

    def chosen(part: str) -> Any:
        fits = [
            form
            for form in forms().values()
            if form.signs and getattr(form, part) is not None and all(sign in template for sign in form.signs)
        ]
        return max(fits, key=lambda form: len(form.signs), default=Form(()))

    calls, reasoning, header = (chosen(part) for part in ("calls", "reasoning", "header"))
    return Form((), calls.calls, reasoning.reasoning, header.header)
