"""Convert the arguments of a call, as a model writes them, to JSON text while they stream, without
scanning twice.

A reader has two methods. ``feed(text)`` returns the JSON text that ``text`` adds, and the part of
``text`` after the arguments, None while they continue. ``close()`` returns what completes them if
no more text follows; with ``is_cut``, without the beginning of a mark.
"""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any, Protocol

from pydantic_core import from_json

from cllm.text.tools.model_family import MAX_HEAD, Tags, compile_marks, one_of_texts

INSIDE = re.compile(r'["\\]')
WORD = re.compile(r"[^\s{}\[\],:]+")
PYTHON = {"True": "true", "False": "false", "None": "null"}
# what some models write after the key of a string
STRING_PAIR = re.compile(r'string="true|type="string')
PYTHON_WORD = re.compile(r"""[^\s()\[\]{},:='"]+""")
PYTHON_STRING = re.compile(r"""["']|\\""")
ESCAPE = re.compile(
    r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|[^xuU0-7])", re.DOTALL
)
ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "\n": ""}
ESCAPE_BEGUN = re.compile(r"\\(?:x[0-9a-fA-F]?|u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7}|[0-7]{1,2})?")


class ArgumentReader(Protocol):
    def feed(self, text: str) -> tuple[str, str | None]: ...
    def close(self, *, is_cut: bool = False) -> str: ...


class Object:
    """A JSON object, passed on unchanged.

    If a mark ends the call before the object is closed, it is closed there.
    """

    def __init__(self, depth: int = 0, ends: tuple[str, ...] = ()) -> None:
        """``depth`` objects are already open. The marks ``ends`` end the call."""
        self._closes = ["}"] * depth
        self._outside, self._begun = structure_pattern(ends), compile_marks(ends).begun
        self._held = ""
        self._in_string = False
        self._escaped = False

    def feed(self, text: str) -> tuple[str, str | None]:
        text, self._held = self._held + text, ""
        at = 0
        if self._escaped and text:
            at, self._escaped = 1, False
        while match := (INSIDE if self._in_string else self._outside).search(text, at):
            at = match.end()
            if self._in_string:
                if match[0] == '"':
                    self._in_string = False
                elif at == len(text):
                    self._escaped = True
                else:
                    at += 1
            elif match[0] == '"':
                self._in_string = True
            elif match[0] in "{[":
                self._closes.append("}" if match[0] == "{" else "]")
            elif match[0] in "}]":
                self._closes.pop()
                if not self._closes:
                    return text[:at], text[at:]
            else:
                return text[: match.start()] + "".join(reversed(self._closes)), text[
                    match.start() :
                ]
        if not self._in_string and (begun := self._begun.search(text, at)):
            text, self._held = text[: begun.start()], text[begun.start() :]
        return text, None

    def close(self, *, is_cut: bool = False) -> str:
        held, self._held = self._held, ""
        return "" if is_cut else held


@cache
def structure_pattern(ends: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern for what matters in JSON outside of strings."""
    return re.compile(f'["{{}}\\[\\]]|{one_of_texts(set(ends))}')


class Bare:
    """An object whose keys are bare words and whose strings are enclosed in a special mark (Gemma
    4).
    """

    def __init__(self, quote: str) -> None:
        self._quote = quote
        self._buffer = ""
        self._in_string = False
        self._depth = 0

    def feed(self, text: str) -> tuple[str, str | None]:
        self._buffer += text
        written: list[str] = []
        while self._buffer and (self._string(written) if self._in_string else self._token(written)):
            if not self._depth:
                rest, self._buffer = self._buffer, ""
                return "".join(written), rest
        return "".join(written), None

    def _string(self, written: list[str]) -> bool:
        body, closing, rest = self._buffer.partition(self._quote)
        if not closing:
            keep = count_begun(body, self._quote)
            body, rest = body[: len(body) - keep], body[len(body) - keep :]
        written.append(escape(body) + ('"' if closing else ""))
        self._buffer, self._in_string = rest, not closing
        return bool(closing)

    def _token(self, written: list[str]) -> bool:
        buffer, size = self._buffer, 1
        if buffer.startswith(self._quote):
            written.append('"')
            self._in_string, size = True, len(self._quote)
        elif self._quote.startswith(buffer):
            return False
        elif match := WORD.match(buffer[:MAX_HEAD]):
            size = match.end()
            if size == len(buffer) < MAX_HEAD:
                return False
            is_key = buffer[size : size + 1] == ":"
            written.append(json.dumps(match[0]) if is_key else write_value(match[0], set()))
        else:
            written.append(buffer[0])
            self._depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(buffer[0], 0)
        self._buffer = buffer[size:]
        return True

    def close(self, *, is_cut: bool = False) -> str:
        held, self._buffer = self._buffer, ""
        if is_cut and self._quote.startswith(held):
            held = ""
        return escape(held) + '"' if self._in_string else held


class Keywords:
    """A function's keyword arguments in Python, with their parentheses.

    Values are literals or words.
    """

    def __init__(self) -> None:
        self._buffer = ""
        self._quote = ""  # of the current string, "" outside of strings
        self._closes: list[str] = []  # for each open bracket, what closes it in JSON
        self._is_key = False
        self._lead = ""  # the comma before the next value, if any

    def feed(self, text: str) -> tuple[str, str | None]:
        self._buffer += text
        written: list[str] = []
        while self._buffer and (self._string(written) if self._quote else self._token(written)):
            if not self._closes:
                rest, self._buffer = self._buffer, ""
                return "".join(written), rest
        return "".join(written), None

    def _token(self, written: list[str]) -> bool:
        buffer, size = self._buffer, 1
        first = buffer[0]
        if first in "\"'":
            if len(buffer) < 3 and buffer == first * len(buffer):
                return False  # it may be an empty string, or a triple quote
            self._quote = first * 3 if buffer.startswith(first * 3) else first
            self._begin(written, '"')
            size = len(self._quote)
        elif first in "([{":
            self._begin(written, "{" if first == "{" or not self._closes else "[")
            self._is_key = not self._closes
            self._closes.append("}" if first == "{" or self._is_key else "]")
        elif first in ")]}":
            written.append(self._closes.pop())
            self._lead = ""
        elif first == ",":
            self._lead, self._is_key = ", ", len(self._closes) == 1
        elif first in "=:":
            written.append(": ")
            self._is_key = False
        elif match := PYTHON_WORD.match(buffer[:MAX_HEAD]):
            size = match.end()
            if size == len(buffer) < MAX_HEAD:
                return False
            self._begin(
                written, json.dumps(match[0]) if self._is_key else write_value(match[0], set())
            )
        self._buffer = buffer[size:]
        return True

    def _begin(self, written: list[str], value: str) -> None:
        written.append(self._lead + value)
        self._lead = ""

    def _string(self, written: list[str]) -> bool:
        """Consume the string through its next escape, or to its end."""
        buffer = self._buffer
        match = PYTHON_STRING.search(buffer)
        at = match.start() if match else len(buffer)
        written.append(escape(buffer[:at]))
        self._buffer = buffer = buffer[at:]
        if buffer.startswith("\\"):
            if ESCAPE_BEGUN.fullmatch(buffer):
                return False
            sequence = ESCAPE.match(buffer)
            written.append(unescape(sequence[0]) if sequence else escape("\\"))
            self._buffer = buffer[sequence.end() if sequence else 1 :]
        elif buffer.startswith(self._quote):
            written.append('"')
            self._buffer, self._quote = buffer[len(self._quote) :], ""
        elif self._quote.startswith(buffer):
            return False
        else:  # the other quote, or one of three
            written.append(escape(buffer[0]))
            self._buffer = buffer[1:]
        return True

    def close(self, *, is_cut: bool = False) -> str:
        held, self._buffer = self._buffer, ""
        return escape(held) if self._quote else ""


def unescape(text: str) -> str:
    """Convert a Python escape to the inside of a JSON string."""
    kind, digits = text[1], text[2:]
    if kind == "u":
        return text
    if kind in "xU" and int(digits, 16) < 0x110000:
        return json.dumps(chr(int(digits, 16)))[1:-1]
    if kind.isdecimal():
        return escape(chr(int(text[1:], 8)))
    return escape(ESCAPED.get(kind, kind if kind in "\\'\"" else text))


class Pairs:
    """Keys and values between tags.

    Values that the schema calls strings are streamed; others wait for their end.
    """

    def __init__(self, tags: Tags, schema: dict[str, Any]) -> None:
        self._tags = tags
        properties = schema.get("properties")
        self._properties = properties if isinstance(properties, dict) else {}
        self._buffer = ""
        self._step = self._key
        self._lead = "{"  # written before the next key
        self._types: set[str] = set()
        self._value: list[str] = []
        self._is_first = False
        self._value_close = tags.value_close

    def feed(self, text: str) -> tuple[str, str | None]:
        self._buffer += text
        written: list[str] = []
        while self._step(written):
            pass
        if self._step == self._end:
            rest, self._buffer = self._buffer, ""
            return "".join(written), rest
        return "".join(written), None

    def _end(self, written: list[str]) -> bool:
        return False

    def _key(self, written: list[str]) -> bool:
        """Consume the text between two pairs, up to the beginning of a value."""
        tags, buffer = self._tags, self._buffer.lstrip()
        self._buffer = buffer
        if tags.key_open.startswith(buffer) and len(buffer) < len(tags.key_open):
            return False
        key, closing, rest = buffer[len(tags.key_open) :].partition(tags.key_close)
        rest = rest.lstrip() if tags.value_open else rest
        is_pair = buffer.startswith(tags.key_open) and len(key) < MAX_HEAD
        if is_pair and (
            not closing or (tags.value_open.startswith(rest) and len(rest) < len(tags.value_open))
        ):
            return False
        if not is_pair or not rest.startswith(tags.value_open):
            written.append("{}" if self._lead == "{" else "}")
            self._step = self._end
            return False
        rest = rest[len(tags.value_open) :]
        wrap, unwrap = tags.wrapped
        if wrap.startswith(rest) and len(rest) < len(wrap):
            return False
        is_wrapped = bool(wrap) and rest.startswith(wrap)
        self._buffer, self._value_close = (
            (rest[len(wrap) :], unwrap) if is_wrapped else (rest, tags.value_close)
        )
        name, _, attribute = key.strip().partition('"')
        written.append(f"{self._lead}{json.dumps(name, ensure_ascii=False)}: ")
        self._types = list_types(self._properties.get(name)) or (
            {"string"} if STRING_PAIR.search(attribute) else set()
        )
        self._is_first, self._step = True, self._text if self._types == {"string"} else self._whole
        if self._step == self._text:
            written.append('"')
        return True

    def _piece(self) -> tuple[str, bool]:
        """Return the part of the value that is certain, and whether the value ends there."""
        body, closing, rest = self._buffer.partition(self._value_close)
        if not closing:
            keep = count_begun(body, self._value_close)
            if self._tags.trim and body[: len(body) - keep].endswith("\n"):
                keep += 1
            body, rest = body[: len(body) - keep], body[len(body) - keep :]
        elif self._tags.trim:
            body = body.removesuffix("\n")
        self._buffer = rest
        if self._is_first and (body or closing):
            self._is_first = False
            body = body.removeprefix("\n") if self._tags.trim else body
        return body, bool(closing)

    def _text(self, written: list[str]) -> bool:
        body, is_end = self._piece()
        written.append(escape(body) + ('"' if is_end else ""))
        if is_end:
            self._lead, self._step = ", ", self._key
        return is_end

    def _whole(self, written: list[str]) -> bool:
        body, is_end = self._piece()
        self._value.append(body)
        if is_end:
            written.append(write_value("".join(self._value), self._types))
            self._value, self._lead, self._step = [], ", ", self._key
        return is_end

    def close(self, *, is_cut: bool = False) -> str:
        held = "" if is_cut else self._buffer
        if self._step == self._text:
            return escape(held) + '"}'
        if self._step == self._whole:
            return write_value("".join(self._value) + held, self._types) + "}"
        return "{}" if self._lead == "{" else "}"


def count_begun(text: str, mark: str) -> int:
    """Return how many characters at the end of ``text`` may be the beginning of ``mark``."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0


def escape(text: str) -> str:
    """Return ``text`` as the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def list_types(schema: Any) -> set[str]:
    """Return the JSON types that a schema allows; none if it does not say, or is not a schema."""
    if not isinstance(schema, dict):
        return set()
    kind = schema.get("type", [])
    if (
        not kind
        and isinstance(values := schema.get("enum"), list)
        and all(isinstance(value, str) for value in values)
    ):
        return {"string"}
    return {item for item in (kind if isinstance(kind, list) else [kind]) if isinstance(item, str)}


def write_value(text: str, types: set[str]) -> str:
    """Return the JSON of a value that was written without quotes."""
    stripped = text.strip()
    if "string" in types:
        return (
            "null"
            if stripped in ("null", "None") and "null" in types
            else json.dumps(text, ensure_ascii=False)
        )
    stripped = PYTHON.get(stripped, stripped)
    try:
        json.loads(stripped, parse_constant=int)  # int raises ValueError for NaN and Infinity
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return stripped


def parse_partial_object(text: str) -> dict[str, Any]:
    """Return the arguments of a call; if their text was cut off, those that are complete or
    begun.
    """
    try:
        value = from_json(text, allow_partial="trailing-strings")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
