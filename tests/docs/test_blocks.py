"""Every code block of the documentation is parsed, and run if it can be. See doc_pages.py for the
marks.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from doctest import ELLIPSIS, NORMALIZE_WHITESPACE, OutputChecker
from functools import cache
from pathlib import Path

import pytest
import yaml
from conftest import PATIENCE
from cyclopts import CycloptsError, MissingArgumentError
from doc_pages import BLOCKS, PAGES, ROOT, Block, inline_code, name_of, split_commands
from server.conftest import Server, running

from cllm.cli.main import app
from cllm.config.file import ALIASES, NOT_NEEDED, SWITCHES
from cllm.config.settings import OPTIONS
from cllm.config.sources import load_settings

ELSEWHERE = {
    ROOT / "docs" / "python.md"
}  # tests/test_python_docs.py runs its blocks as one program
ADDRESS = "127.0.0.1:8000"  # of the server that the pages speak of
SECTIONS = {key.partition(".")[0] for key in OPTIONS} | {"models", "adapters"}
LANGUAGES = {
    "http",
    "python",
    "sh",
    "yaml",
    "json",
    "toml",
    "text",
    "ini",
    "nginx",
    "diff",
    "promql",
    "lua",
}


def by_page(is_chosen: Callable[[Block], bool]) -> list[Path]:
    return [
        page
        for page in PAGES
        if page not in ELSEWHERE
        and any(block.page == page and is_chosen(block) for block in BLOCKS)
    ]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_block_has_a_known_language_and_can_be_parsed(block, tmp_path):
    assert block.language in LANGUAGES, f"the language of the block is {block.language!r}"
    match block.language:
        case "python":
            ast.parse(block.text)
        case "sh":
            checked = subprocess.run(
                ["bash", "-n"], check=False, input=block.text, text=True, capture_output=True
            )
            assert checked.returncode == 0, checked.stderr
        case "json":
            json.loads(block.text)
        case "toml":
            tomllib.loads(block.text)
        case "yaml":
            content = yaml.safe_load(block.text)
            if isinstance(content, dict) and content.keys() <= SECTIONS:
                file = tmp_path / "cllm.yaml"
                file.write_text(block.text)
                load_settings(file, {}, {})


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.mark == "not run"], ids=str)
def test_block_that_is_not_run_says_why(block):
    assert block.language in ("python", "sh"), "only Python and shell are run"
    assert len(block.reason) > 5


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_exist_with_their_options(page):
    blocks = [block.text for block in BLOCKS if block.page == page and block.language == "sh"]
    units = re.findall(
        r"^ExecStart=(.+)$",
        "".join(block.text for block in BLOCKS if block.page == page),
        re.MULTILINE,
    )
    inline = [code for code in inline_code(page) if re.match("cllm [a-z-]", code)]
    for text in [*blocks, *units, *inline]:
        for command in split_commands(text):
            check_command(*command[1:])


@cache  # many pages have the same commands
def check_command(*words: str) -> None:
    """Fail if ``cllm`` does not know one of these words. In prose, arguments may be left out."""
    try:
        app.parse_args(words, exit_on_error=False, print_error=False)
    except MissingArgumentError:
        pass
    except CycloptsError as error:
        pytest.fail(f"cllm {' '.join(words)}: {error}")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_settings_exist(page):
    """Code such as `server.port` names a setting."""
    named = [
        code
        for code in inline_code(page)
        if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", code) and code.partition(".")[0] in SECTIONS
    ]
    known = {*OPTIONS, *ALIASES, *NOT_NEEDED, *SWITCHES}
    known |= {"backend.fake"}
    assert [code for code in named if code not in known] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_metrics_exist(page):
    def names_in(page: Path) -> set[str]:
        named = re.findall(r"\bcllm:[a-z]+_[a-z_]*[a-z](?![a-z_])", page.read_text())
        return {re.sub("_(bucket|count|sum)$", "", name) for name in named}

    assert names_in(page) - names_in(ROOT / "docs" / "public_api.md") == set()


@pytest.fixture(scope="module")
def builtin_server(builtin_path: Path) -> Iterator[Server]:
    yield from running("--max-num-seqs", "8", "--context", "4096")


class Reader:
    """Does what a page says, in a folder of its own."""

    def __init__(self, folder: Path, server: Server) -> None:
        self._folder, self._server = folder, server
        self._own: Server | None = None

    def run(self, block: Block) -> str:
        """Run a block and return what it prints."""
        if (arguments := block.server_arguments) is not None:
            self.close()
            self._own = Server(*without_port(arguments), **self._environment)
            return ""
        text = block.text.replace(ADDRESS, self._url.partition("://")[2])
        if block.language == "python":
            file = self._folder / (block.file_name or f"block_{block.line}.py")
            file.write_text(text)
            command = [sys.executable, str(file)]
        else:
            command = ["bash", "-e", "-u", "-o", "pipefail", "-c", text]
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=PATIENCE,
            env={**os.environ, **self._environment},
        )
        assert done.returncode == 0, (
            f"{block} ends with {done.returncode}\n{done.stdout}{done.stderr}"
        )
        return done.stdout

    def save(self, block: Block) -> None:
        (self._folder / block.file_name).write_text(block.text)

    def close(self) -> None:
        if self._own:
            assert self._own.stop() == 0, self._own.log
            self._own.forget()
            self._own = None

    @property
    def _url(self) -> str:
        return (self._own or self._server).url

    @property
    def _environment(self) -> dict[str, str]:
        """The environment of a user who has activated the virtual environment."""
        home = Path(os.environ["HOME"])
        return {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "CLLM_SERVER_KEYS_FILE": str(home / ".config" / "cllm" / "keys.json"),
            "CLLM_STORAGE_FOLDER": str(home / ".local" / "state" / "cllm"),
            "COLUMNS": "100",
            "CLLM_URL": self._url,
            "HF_HUB_OFFLINE": "1",
        }


def without_port(arguments: list[str]) -> list[str]:
    return re.sub(r"--port\n\d+\n?", "", "\n".join(arguments)).split("\n") if arguments else []


@pytest.mark.llama
@pytest.mark.slow
@pytest.mark.parametrize("page", by_page(lambda block: block.is_run), ids=name_of)
def test_blocks_run_and_print_what_the_page_says(page, builtin_server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    reader, printed = Reader(tmp_path, builtin_server), ""
    try:
        for block in BLOCKS:
            if block.page != page:
                continue
            if block.mark == "output":
                is_same = OutputChecker().check_output(
                    block.text, printed, ELLIPSIS | NORMALIZE_WHITESPACE
                )
                assert is_same, f"{block}: expected\n{block.text}\nbut got\n{printed}"
            elif block.is_run:
                printed = reader.run(block)
            elif block.file_name and block.language != "python":
                reader.save(block)
    finally:
        reader.close()
