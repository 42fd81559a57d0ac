"""Every block of docs/python.md runs, in the order of the page."""

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[1] / "docs" / "python.md").read_text("utf-8")


@pytest.mark.llama
@pytest.mark.slow
def test_blocks_run_one_after_the_other(builtin_path, capsys):
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 14
    names = {"__name__": "page"}
    for block in blocks:
        line = PAGE[: PAGE.index(block)].count("\n")
        exec(compile("\n" * line + block, "docs/python.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "72 stop" in printed
    assert "3 4 5 6 7 8 9" in printed
    assert "The product is 408." in printed
    assert "prompts[0] This model's maximum context length is 2048 tokens" in printed


def test_every_block_is_python():
    """No other language is on the page, so nothing is left out."""
    assert set(re.findall(r"^```(\w*)$", PAGE, re.MULTILINE)) == {"python", ""}
