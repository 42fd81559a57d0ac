"""Formats Markdown as models write it for a terminal. HTML, LaTeX, types such as vector<int> and
line breaks are shown as written.
"""

from __future__ import annotations

import re
from typing import ClassVar

from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock
from markdown_it.rules_block.table import escapedSplit, table
from markdown_it.rules_inline import StateInline
from markdown_it.token import Token
from rich.markdown import Markdown, MarkdownElement, Paragraph

# they would hide <br>, the marks of <std::string>, and [1]: followed by a word
HIDING = ("html_inline", "autolink", "reference")
BLOCK_MATH = re.compile(r"\$\$|\\\[|\\begin\{\w+\*?\}")
DOLLARS = re.compile(r"\$(?![\s$])[^$\n]*(?<![\s\\])\$(?!\d)")
UNDIVIDED = re.compile(r"(?<!`)(`+)(?!`)[^\n]{1,500}?(?<!`)\1(?!`)|\\\([^\n]{1,500}?\\\)")
PIPE = "\ue000"  # no character: it is for private use
CLOSING = {"$$": "$$", "\\[": "\\]", "\\(": "\\)"}
MAX_FORMULA = 2000  # characters of a formula inside a line
ESCAPED = "*_`~<$#"  # other backslashes belong to LaTeX, paths or regular expressions


def make_parser() -> MarkdownIt:
    """Return a parser that hides nothing but the marks of Markdown."""
    parser = MarkdownIt().enable("strikethrough").disable(HIDING)
    parser.block.ruler.before("table", "math", read_block, {"alt": ["paragraph", "blockquote"]})
    parser.block.ruler.at("table", read_table, {"alt": ["paragraph", "reference"]})
    parser.enable("table")
    parser.inline.ruler.before("escape", "math", read_inline)
    return parser


def closing_mark(opening: str) -> str:
    """Return the mark that ends a formula."""
    return CLOSING.get(opening, opening.replace("begin", "end"))


def read_block(state: StateBlock, first: int, end: int, silent: bool) -> bool:
    """Take a formula of one or more lines, which ends with its mark or before an empty line."""
    begin = state.bMarks[first] + state.tShift[first]
    match = BLOCK_MATH.match(state.src, begin, state.eMarks[first])
    if match is None or state.is_code_block(first):
        return False
    closing = closing_mark(match[0])
    start, line = match.end(), first
    while line < end and not state.isEmpty(line) and state.sCount[line] >= state.blkIndent:
        _, mark, rest = state.src[start : state.eMarks[line]].partition(closing)
        line += 1
        if mark and line == first + 1 and rest.strip(" .,;"):
            return False  # a formula in a sentence
        if mark:
            break
        start = state.bMarks[line]
    if not silent:
        token = state.push("math_block", "", 0)
        token.map = [first, line]
        token.content = state.getLines(first, line, state.blkIndent, keepLastLF=False)
        state.line = line
    return True


def read_table(state: StateBlock, first: int, end: int, silent: bool) -> bool:
    """Read a table. A | in code or in a formula does not separate cells. If a row has more cells
    than the head, the last column gets the extra ones.
    """
    if first + 1 >= end:
        return False
    at = state.bMarks[first + 1] + state.tShift[first + 1]
    if not state.src.startswith(("|", "-", ":"), at):
        return False  # decided before the slow part
    begin, src, last = len(state.tokens), state.src, first
    while last < end and not state.isEmpty(last):
        last += 1
    start, stop = state.bMarks[first], state.eMarks[last - 1]
    rows = UNDIVIDED.sub(lambda match: match[0].replace("|", PIPE), src[start:stop])
    state.src = src[:start] + rows + src[stop:]
    try:
        if not table(state, first, end, silent):
            return False
        tokens = state.tokens[begin:]
        num_columns = sum(token.type == "th_open" for token in tokens)
        for cell, following in zip(tokens, tokens[2:], strict=False):
            if cell.type == "inline" and following.type == "tr_close" and cell.map:
                cells = escapedSplit(
                    state.getLines(cell.map[0], cell.map[1], 0, keepLastLF=False).strip()
                )
                cells = cells[not cells[0] : len(cells) - (not cells[-1])]
                cell.content = "|".join(cells[num_columns - 1 :]).strip()
    finally:
        state.src = src
    for token in tokens:
        token.content = token.content.replace(PIPE, "|")
    return True


def read_inline(state: StateInline, silent: bool) -> bool:
    """Take a formula, or a backslash that escapes no mark, as text."""
    begin = state.pos
    mark = state.src[begin : begin + 2]
    end = 0
    if (opening := BLOCK_MATH.match(state.src, begin)) or mark == "\\(":
        closing = closing_mark(opening[0] if opening else mark)
        place = state.src.find(closing, begin + 2, begin + MAX_FORMULA)
        end = place + len(closing) if place >= 0 else 0
    elif match := DOLLARS.match(state.src, begin):
        end = match.end()
    if end <= begin + 2 and mark.startswith("\\") and mark[1:2] not in tuple(ESCAPED):
        end = begin + (1 if mark[1:2] in ("", "\n") else 2)
    if end <= begin:
        return False
    if not silent:
        state.pending += state.src[begin:end]
    state.pos = end
    return True


def show(token: Token) -> list[Token]:
    """Return a part of a paragraph as it is shown, with links for images, and line breaks."""
    if token.type == "softbreak":
        return [Token("hardbreak", "br", 0)]
    if token.type != "image":
        return [token]
    address = token.attrs["src"]
    return [
        Token("link_open", "a", 1, {"href": address}),
        Token("text", "", 0, content=f"[image: {token.content or address}]"),
        Token("link_close", "a", -1),
    ]


class AnswerMarkdown(Markdown):
    """A text of a model, formatted by rich."""

    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **Markdown.elements,
        "html_block": Paragraph,
        "math_block": Paragraph,
    }

    def __init__(self, text: str) -> None:
        super().__init__("")
        self.parsed = make_parser().parse(text)
        for token in self.parsed:
            if token.type == "html_block":
                token.content = token.content.rstrip("\n")
            token.children = [part for child in token.children or () for part in show(child)]
