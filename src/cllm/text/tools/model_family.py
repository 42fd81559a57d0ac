"""How model families write reasoning and calls: one data file each, selected by the chat template's
text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

MAX_HEAD = 2048  # characters after which a text that has not become a call is text

HEADS = {
    # A JSON object up to its arguments.
    "json": (
        r'\s*\[?\s*\{\s*(?:"(?:id|type)"\s*:\s*"[^"]*"\s*,\s*)*(?:"function"\s*:\s*\{\s*)?'
        r'"name"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*'
    ),
    # A Python call up to its arguments.
    "python": r"\s*\[?\s*(?P<name>[A-Za-z_][\w.-]*)",
}


class Reasoning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The marks around reasoning.

    The marks ``skip`` are dropped from the text. If ``anywhere``, reasoning may also begin after
    text, because ordinary text never mentions its mark.
    """

    open: str
    close: str
    skip: tuple[str, ...] = ()
    anywhere: bool = False


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The format of messages that begin with a header (harmony).

    ``open`` begins a header, ``close`` ends it, and ``end`` ends a message. ``reasoning`` and
    ``call`` are regular expressions for headers; ``call`` finds the ``name`` of the function that
    the message is for. ``final`` is the header of plain text.
    """

    open: tuple[str, ...]
    close: str
    end: tuple[str, ...]
    reasoning: str
    call: str
    final: str


class Tags(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments as keys and values between tags.

    If ``trim``, a value does not include the line break after its opening tag and the one before
    its closing tag. ``wrapped`` is a mark that may follow the opening tag, and the mark that then
    ends the value.
    """

    key_open: str
    key_close: str
    value_close: str
    value_open: str = ""
    trim: bool = False
    wrapped: tuple[str, str] = ("", "")


class Calls(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The format of a call: a mark of ``open``, one of ``head``, the arguments, and possibly marks
    of ``close``.

    ``head`` has regular expressions with the group ``name``, for the text between the mark and the
    arguments. "json" is an object with name and arguments; "python" is a function's name, followed
    by keyword arguments in parentheses. The marks ``inner`` occur in heads. If ``bare``, a message
    may also begin with a head. With a ``quote``, keys are written without quotes, and strings
    between this mark. With ``tags``, arguments are keys and values. The marks ``skip`` are dropped.
    The marks ``separators`` come before a further call, instead of ``open``. If ``ends_reasoning``,
    models of this family forget to close their reasoning before they call. ``begin``, ``write``,
    ``between`` and ``end`` say how to write calls, with $name in quotes or $word without, and
    $arguments (Python: $keywords; tags: $pairs, each written as ``pair`` with $key, $value and
    $string, which is whether the value is a string).
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


class ModelFamily(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model family, whose chat templates all contain ``signs``; () if templates do not select
    it.
    """

    signs: tuple[str, ...]
    calls: Calls | None = None
    reasoning: Reasoning | None = None
    header: Header | None = None

    @property
    def marks(self) -> set[str]:
        """All marks that may be control tokens."""
        marks: set[str] = set()
        if self.reasoning:
            marks |= {self.reasoning.open, self.reasoning.close, *self.reasoning.skip}
        if self.header:
            marks |= {*self.header.open, self.header.close, *self.header.end}
        if self.calls:
            marks |= {
                *self.calls.open,
                *self.calls.inner,
                *self.calls.close,
                *self.calls.skip,
                self.calls.quote,
            }
            if self.calls.tags:
                tags = self.calls.tags
                marks |= {tags.key_open, tags.key_close, tags.value_open, tags.value_close}
        return marks - {""}


class Marks(NamedTuple):
    """Patterns for some marks.

    ``whole`` finds a mark, ``begun`` the beginning of a mark at the end of a text, and ``cut`` such
    a beginning that no control token would have completed.
    """

    whole: re.Pattern[str]
    begun: re.Pattern[str]
    cut: re.Pattern[str]


@cache
def compile_marks(marks: tuple[str, ...], control: frozenset[str] = frozenset()) -> Marks:
    """Compile patterns for ``marks``. Models never write the texts of ``control`` in parts."""
    begun = {mark[:length] for mark in marks for length in range(1, len(mark))}
    parts = {
        mark[:length]
        for mark in marks
        for start, end in pairwise(sorted({0, len(mark), *find_control_edges(mark, control)}))
        for length in ([end] if mark[start:end] in control else range(start + 1, end + 1))
        if length < len(mark)
    }
    return Marks(re.compile(one_of_texts(set(marks))), at_end(begun), at_end(parts))


def find_control_edges(mark: str, control: Collection[str]) -> Iterator[int]:
    """Yield where the control tokens in ``mark`` begin and end, the longest first."""
    if control:
        for match in re.finditer(one_of_texts(set(control)), mark):
            yield from match.span()


def at_end(texts: set[str]) -> re.Pattern[str]:
    return re.compile(f"(?:{one_of_texts(texts)})\\Z")


def one_of_texts(texts: set[str]) -> str:
    """Return a regular expression for one of ``texts``, the longest first; for none, one that never
    matches.
    """
    return "|".join(map(re.escape, sorted(texts, key=lambda text: (-len(text), text)))) or "(?!)"


@cache
def compile_head(source: str) -> re.Pattern[str]:
    return re.compile(HEADS.get(source, source))


@cache
def load_families() -> dict[str, ModelFamily]:
    """Return all families, by name."""
    folder = Path(__file__).with_name("families")
    return {
        path.stem: msgspec.yaml.decode(path.read_bytes(), type=ModelFamily, strict=True)
        for path in sorted(folder.iterdir())
    }


def find_family(template: str) -> ModelFamily:
    """Return the family of a chat template.

    Its calls, reasoning and header are each recognised separately.
    """

    def chosen(part: str) -> Any:
        fits = [
            family
            for family in load_families().values()
            if family.signs
            and getattr(family, part) is not None
            and all(sign in template for sign in family.signs)
        ]
        return max(fits, key=lambda family: len(family.signs), default=ModelFamily(()))

    calls, reasoning, header = (chosen(part) for part in ("calls", "reasoning", "header"))
    return ModelFamily((), calls.calls, reasoning.reasoning, header.header)
