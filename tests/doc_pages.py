"""The pages of the documentation, and the code blocks in them.

How a code block is tested is written in the Markdown, in a comment above it:

    <!-- not run: why -->   it is parsed but not run
    <!-- output -->         it is what the block before it prints; "..." stands for any text

Without a comment, a block of Python or shell is run. Blocks of one page are run in their order, in a
folder of their own. A block of Python that begins with a comment such as ``# mine.py`` is saved
under that name. So is a block of YAML, JSON or TOML, and then it is parsed. A shell block that
consists of ``cllm serve`` starts a server, with which the later blocks of the page speak; on other
pages a server with the built-in model runs at the address http://127.0.0.1:8000.
"""

from __future__ import annotations

import itertools
import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OTHERS = [ROOT / name for name in ("ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md")]

FENCE = re.compile(r"^( *)(```+)(.*)$")
COMMENT = re.compile(r"<!-- (not run|output)(?:: (.+))? -->")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced code block; ``line`` is that of its fence. mark: "not run", "output" or ""."""

    page: Path
    line: int
    language: str
    text: str
    mark: str = ""
    reason: str = ""

    @property
    def is_run(self) -> bool:
        return self.language in ("python", "sh") and not self.mark

    @property
    def file_name(self) -> str:
        """The name in a comment in its first line, or ""."""
        match = re.match(r"# ([\w./-]+\.(?:py|ya?ml|toml))\b", self.text)
        return match[1] if match else ""

    @property
    def server_arguments(self) -> list[str] | None:
        """The arguments of ``cllm serve``, if the block starts a server and does nothing else."""
        commands = list(split_commands(self.text)) if self.language == "sh" else []
        if len(commands) == 1 and commands[0][:2] == ["cllm", "serve"]:
            return commands[0][2:]
        return None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def read_blocks(page: Path) -> list[Block]:
    blocks, lines = [], page.read_text().splitlines()
    number = 0
    while number < len(lines):
        if fence := FENCE.match(lines[number]):
            end = number + 1
            while not lines[end].strip().startswith(fence[2]):
                end += 1
            above = next((line.strip() for line in lines[number - 1 :: -1] if line.strip()), "")
            mark = COMMENT.fullmatch(above) if number else None
            text = textwrap.dedent("\n".join(lines[number + 1 : end])) + "\n"
            marks = (mark[1], mark[2] or "") if mark else ("", "")
            blocks.append(Block(page, number + 1, fence[3].strip(), text, *marks))
            number = end
        number += 1
    return blocks


BLOCKS = [block for page in [*PAGES, *OTHERS] for block in read_blocks(page)]


def without_blocks(page: Path) -> str:
    """Return the text of a page without its code blocks."""
    lines, is_code = [], False
    for line in page.read_text().splitlines():
        if FENCE.match(line):
            is_code = not is_code
        elif not is_code:
            lines.append(line)
    return "\n".join(lines)


def inline_code(page: Path) -> list[str]:
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", without_blocks(page))]


def split_commands(text: str) -> Iterator[list[str]]:
    """Return the words of each ``cllm`` command in a shell script, with "cllm" in front.

    ``make serve ARGS="..."`` counts as ``cllm serve ...``.
    """
    for command in split_words(text):
        words = [*itertools.dropwhile(is_before_command, command)]
        if words[:2] == ["make", "serve"]:
            given = [word.removeprefix("ARGS=") for word in words[2:]]
            yield ["cllm", "serve", *(part for word in given for part in shlex.split(word))]
        elif words and words[0].rpartition("/")[2] == "cllm":
            yield ["cllm", *words[1:]]


def is_before_command(word: str) -> bool:
    return bool(re.match(r"\w+=", word)) or word in ("sudo", "exec", "nohup", "uv", "run")


def split_words(text: str) -> Iterator[list[str]]:
    """Return the words of each simple command of a shell script, without redirections."""
    for line in whole_lines(text):
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        is_target = False
        for word in lexer:
            if set(word) <= set("<>"):
                is_target = True
            elif set(word) <= set("|;&()"):
                yield words
                words = []
            elif is_target:
                is_target = False
            else:
                words.append(word)
        yield words


def whole_lines(text: str) -> Iterator[str]:
    """Return lines with the lines that continue them, and without here-documents."""
    text = re.sub(r"<<'?(\w+)'?(.*?)\n.*?\n\1\n", r"\2\n", text, flags=re.DOTALL)
    line = ""
    for part in text.replace("\\\n", "").splitlines():
        line += part + "\n"
        try:
            shlex.split(line, comments=True)
        except ValueError:  # a quotation is open
            continue
        yield line
        line = ""
