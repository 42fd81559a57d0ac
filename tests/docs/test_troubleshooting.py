"""The messages on the page of troubleshooting are those of the code."""

from __future__ import annotations

import ast
import re

import pytest
from doc_pages import ROOT


def texts_of_the_code() -> str:
    """Return all texts in the sources; a value in a text is written as "…"."""
    texts = []
    for file in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                texts.append(
                    "".join(
                        str(part.value) if isinstance(part, ast.Constant) else "…"
                        for part in node.values
                    )
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


@pytest.mark.slow
def test_messages_occur_in_the_code():
    page = (ROOT / "docs" / "howto" / "troubleshooting.md").read_text()
    rows = re.findall(r"^\| (?:\d+ )?`([^`]+)`", page, re.MULTILINE)
    code = texts_of_the_code()
    pieces = [piece.strip() for row in rows for piece in row.split("…")]
    assert len(rows) > 20
    assert [piece for piece in pieces if piece not in code] == []
