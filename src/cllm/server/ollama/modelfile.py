"""Reads Modelfiles: Ollama's descriptions of models that are made from others."""

from __future__ import annotations

import re
from typing import Any

from cllm.errors import BadRequest

WORDS = ("FROM", "PARAMETER", "TEMPLATE", "SYSTEM", "ADAPTER", "LICENSE", "MESSAGE", "REQUIRES")
INSTRUCTION = re.compile(r"[ \t]*(?P<word>[A-Za-z]+)(?:[ \t]+|$)", re.MULTILINE)
END_OF_LINE = re.compile(r"[ \t\r]*(?:\n|$)")


def read_modelfile(text: str) -> dict[str, Any]:
    """Return the fields of POST /api/create that a Modelfile stands for. Raises BadRequest."""
    text = text.removeprefix("\ufeff")
    fields: dict[str, Any] = {}
    parameters: dict[str, Any] = {}
    at = 0
    while at < len(text):
        line_end = text.find("\n", at) + 1 or len(text)
        line = text[at:line_end].strip()
        if not line or line.startswith("#"):
            at = line_end
            continue
        match = INSTRUCTION.match(text, at)
        word = match["word"].upper() if match else ""
        if match is None or word not in WORDS:
            raise invalid(f"{line[:40]!r} is not an instruction")
        value, at = read_value(text, match.end())
        if word == "PARAMETER":
            name, _, given = value.partition(" ")
            add_parameter(parameters, name.lower(), unquote(given.strip()))
        elif word in ("FROM", "TEMPLATE", "SYSTEM", "LICENSE"):
            fields[word.lower()] = value
        elif word != "REQUIRES":
            fields[f"{word.lower()}s"] = [value]  # refused, like the field
    if "from" not in fields:
        raise invalid("it has no FROM")
    return {**fields, "parameters": parameters}


def read_value(text: str, at: int) -> tuple[str, int]:
    """Return the value of an instruction that begins at ``at``, and where the next one begins."""
    mark = next((mark for mark in ('"""', '"') if text.startswith(mark, at)), "")
    if mark:
        begin = at + len(mark)
        close = text.find(mark, begin)
        rest = END_OF_LINE.match(text, close + len(mark)) if close >= 0 else None
        if rest is not None:
            return text[begin:close], rest.end()
        if mark == '"""':
            line = text[at:].partition("\n")[0]
            raise invalid(f"{line[:40]!r} is not closed with three quotes at the end of a line")
    end = text.find("\n", at) + 1 or len(text)
    return text[at:end].strip(), end


def unquote(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] == '"' else value


def add_parameter(parameters: dict[str, Any], name: str, value: str) -> None:
    """Add a parameter with the type that its text has; stop may be given several times."""
    if name == "stop":
        parameters.setdefault(name, []).append(value)
        return
    typed: Any = value
    for kind in (int, float):
        try:
            typed = kind(value)
            break
        except ValueError:
            continue
    parameters[name] = {"true": True, "false": False}.get(value.lower(), typed)


def invalid(reason: str) -> BadRequest:
    return BadRequest(f"Invalid 'modelfile': {reason}.", param="modelfile", code="invalid_value")
