"""String formats: texts of their patterns are valid, and rewriting look-aheads keeps their meaning."""

from __future__ import annotations

import base64
import datetime
import re
import uuid
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schema_texts import allows, check

from cllm.text.schema.string_formats import FORMATS, split_lookaheads


def read_time(text: str) -> None:
    datetime.time.fromisoformat(re.sub(r"(\.\d{1,6})\d*", r"\1", text))


def read_uuid(version: int, text: str) -> None:
    if uuid.UUID(text).version != version:
        raise ValueError(text)


READERS: dict[str, Callable[[str], object]] = {
    "date": datetime.date.fromisoformat,
    "time": read_time,
    "date-time": lambda text: (datetime.date.fromisoformat(text[:10]), read_time(text[11:])),
    "uuid": uuid.UUID,
    **{f"uuid{n}": partial(read_uuid, n) for n in range(1, 9)},
    "base64": lambda text: base64.b64decode(text, validate=True),
    "byte": lambda text: base64.b64decode(text, validate=True),
    "base64url": base64.urlsafe_b64decode,
    "hostname": lambda text: text.encode("idna"),
}


@pytest.mark.parametrize("name", FORMATS)
def test_texts_of_each_format_are_valid(name):
    texts = check({"type": "string", "format": name}, 60)
    assert len(texts) > 20
    for text in texts:
        READERS.get(name, str)(text)


RIGHT = {
    "date": ["2024-02-29", "2000-02-29", "2023-12-31", "0001-01-01"],
    "time": ["00:00:00Z", "23:59:59.123456789+23:59"],
    "date-time": ["1998-12-31T23:59:59-08:00"],
    "duration": ["P4DT12H30M5S", "P1Y2M", "PT36H", "P4W"],
    "hostname": ["a-b.example.com", "localhost", "a" * 63],
    "uri-reference": ["http://a.b:80/c?d=e&f#g", "/a//b", "a/b:c", "?a=/b", "#x", ""],
    "uri-template": ["http://a.b/{c}{?d,e*}/{f:3}", ""],
    "json-pointer": ["", "/", "/a~0/~1b"],
    "relative-json-pointer": ["0", "1/a", "2#"],
    "uuid": ["2EB8AA08-aa98-11EA-b4aa-73b441d16380"],
    "password": ["anything goes"],
}
WRONG = {
    "date": ["2023-02-29", "1900-02-29", "2100-02-29", "2024-04-31", "0000-01-01", "2024-1-1"],
    "time": ["24:00:00Z", "23:59:60Z", "22:59:60Z", "12:00:00", "12:00:00z"],
    "date-time": ["1998-12-31T23:58:60Z", "2023-02-29T00:00:00Z", "1998-12-31 00:00:00Z"],
    "duration": ["P", "PT", "P1YT", "P1Y1W", "4D", "P1D2H"],
    "hostname": ["-a", "a-", "a..b", "a_b", "xn--X", "a" * 64, ".".join(["a" * 63] * 4)],
    "uri-reference": ["a b", "\\", "//a:b", "%zz"],
    "uri-template": ["{", "{a", "{a b}"],
    "json-pointer": ["a", "/~2", "/~"],
    "relative-json-pointer": ["01", "/a", "0##"],
    "uuid": ["2eb8aa08-aa98-11ea-b4aa-73b441d1638", "2eb8aa08aa9811eab4aa73b441d16380"],
}


@pytest.mark.parametrize("name", WRONG)
def test_limits_of_each_format(name):
    schema = {"type": "string", "format": name}
    quoted = [text.replace("\\", "\\\\") for text in WRONG[name]]
    assert [text for text in RIGHT[name] if not allows(schema, f'"{text}"')] == []
    assert [text for text in quoted if allows(schema, f'"{text}"')] == []


@pytest.mark.parametrize(
    "pattern",
    [
        r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$",
        r"^(?!\.)(?!.*\.\.)[a-z.]*$",
        r"^(?=.*[a-c])(?=.*\d)\S{2,4}$",
        r"^(?=(?:a|b\))[)c])[abc)]+$",
        r"^(?!-)a?-",
    ],
)
@given(text=st.text("abc019.-+()", max_size=6))
def test_look_aheads_of_names_are_rewritten(pattern, text):
    parts = split_lookaheads(pattern)
    assert not any("(?=" in part or "(?!" in part for part in parts)
    assert bool(re.search(pattern, text)) == all(re.search(part, text) for part in parts)


@pytest.mark.parametrize("pattern", ["a(?=b)", "^(?!abc)", "^(?<=a)b", "a", "^(?=", "^(?!.*ab)"])
def test_other_look_arounds_are_unchanged(pattern):
    assert split_lookaheads(pattern)[0] == pattern if not pattern.startswith("^(?=") else "^"
