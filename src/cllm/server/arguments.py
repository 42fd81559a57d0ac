"""Calls of functions where a dialect wants their arguments as an object, not as text."""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json


def object_of(text: str) -> dict[str, Any]:
    """The arguments that a call has; of a text that was cut, what is there."""
    try:
        value = from_json(text, allow_partial="trailing-strings")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
