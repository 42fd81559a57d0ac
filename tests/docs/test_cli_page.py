"""docs/cli.md describes the commands that exist, and its examples are right."""

from __future__ import annotations

import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from cyclopts import App
from rich.console import Console

from cllm.cli import peer_flags
from cllm.cli.conversation.reader import state_folder
from cllm.cli.main import ALIASES, COMMANDS, app
from tools.cli_page import EXAMPLES, render_page

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"


def test_page_is_up_to_date() -> None:
    """If this fails, run: make docs."""
    assert PAGE.read_text("utf-8") == render_page()


def test_page_has_the_commands_that_exist() -> None:
    table = render_page().partition("## ")[0]
    described = re.findall(r"^\| ((?:`[\w-]+` ?)+) \|", table, re.MULTILINE)
    names = [name for cell in described for name in re.findall(r"`([\w-]+)`", cell)]
    assert sorted(names) == sorted([*COMMANDS, *(one for more in ALIASES.values() for one in more)])
    assert set(names) == {name for name in app if not name.startswith("-")}


@pytest.mark.parametrize("example", EXAMPLES.values())
def test_examples_can_be_parsed(example: str) -> None:
    words = shlex.split(example)[1:]
    if "--help" not in words:
        app.parse_args(words, exit_on_error=False, print_error=False)


def test_commands_have_examples() -> None:
    assert set(EXAMPLES) == set(COMMANDS)
    assert all(example.startswith(f"cllm {name}") for name, example in EXAMPLES.items())


def list_commands(group: App, name: str = "") -> Iterator[str]:
    for word in group:
        if not word.startswith("-"):
            yield f"{name} {word}".strip()
            yield from list_commands(group[word], f"{name} {word}".strip())


@pytest.mark.slow
def test_help_explains_each_option_and_names_one_default() -> None:
    """Every line of a help page has a name, what it means, and at most one default."""
    for command in list_commands(app):
        text = io.StringIO()
        app.help_print(command.split(), console=Console(file=text, width=4000))
        for line in text.getvalue().splitlines():
            assert line.count("[default: ") <= 1, (command, line.strip())
            if re.match("\u2502 [-*A-Z]", line):
                assert re.search(r"\S {2,}[^ \u2502\[]", line), (command, line.strip())


def test_files_of_chats_are_where_the_page_says(home: Path) -> None:
    folder = f"~/{state_folder().relative_to(home)}/"
    assert folder == "~/.local/state/cllm/"
    assert f"`{folder}chats/`" in render_page()


def test_flags_have_either_a_meaning_or_a_hint() -> None:
    names = [
        *(name for names in peer_flags.OTHER_NAMES.values() for name in names),
        *(name for names in peer_flags.HINTS for name in names),
    ]
    assert len(names) == len(set(names))
