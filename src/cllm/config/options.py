"""The settings tree as a flat list of options, from which files, variables, flags and docs are
derived.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

NAMES = "names with commas between them, or a JSON list of names"
SECRET = object()  # marks the type of a secret


@dataclass(frozen=True, slots=True)
class Option:
    """One leaf of the settings tree. ``type`` excludes None. ``expects`` completes "must be ...".

    ``expects_of_entries`` does the same for each entry of a mapping. The type of a mapping is str,
    because variables and flags contain it as JSON. The type of a list is also str, because
    variables and flags separate entries by commas.
    """

    key: str
    type: Any
    nullable: bool
    default: object
    help: str
    expects: str
    expects_of_entries: str = ""
    is_list: bool = False
    is_secret: bool = False

    @property
    def variable(self) -> str:
        return "CLLM_" + self.key.replace(".", "_").upper()

    @property
    def flag(self) -> str:
        return "--" + self.key.replace("_", "-")


def list_options(model: type[BaseModel], prefix: str = "") -> Iterator[Option]:
    for name, field in model.model_fields.items():
        key = prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from list_options(field.annotation, key + ".")
        else:
            yield make_option(key, field)


def make_option(key: str, field: FieldInfo) -> Option:
    kind: Any = field.annotation
    nullable = NoneType in get_args(kind)
    if nullable:
        (kind,) = (part for part in get_args(kind) if part is not NoneType)
    is_secret = SECRET in getattr(kind, "__metadata__", ())
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    is_list, entries = get_origin(kind) is list, ""
    if is_list:
        kind, expects = str, NAMES
    elif get_origin(kind) is dict:
        entry = get_args(kind)[1]
        number, bounds = get_args(entry) if get_origin(entry) is Annotated else (entry, None)
        entries = describe(number, bounds.metadata if bounds else [])
        kind, expects = str, f"a mapping of names, each to {entries}"
    else:
        expects = "a key without spaces" if is_secret else describe(kind, field.metadata)
        expects += " or null" if nullable else ""
    about, default = field.description or "", field.get_default()
    return Option(key, kind, nullable, default, about, expects, entries, is_list, is_secret)


def describe(kind: Any, metadata: list[Any]) -> str:
    if get_origin(kind) is Literal:
        *others, last = get_args(kind)
        return f"{', '.join(others)} or {last}"
    text = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "one line of text",
    }[kind]
    for word, bound in (("from", "ge"), ("above", "gt"), ("up to", "le")):
        text += "".join(
            f" {word} {getattr(rule, bound)}" for rule in metadata if hasattr(rule, bound)
        )
    return text
