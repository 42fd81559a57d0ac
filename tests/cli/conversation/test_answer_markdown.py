"""What models write reaches a terminal as written, except for the marks of Markdown."""

import io
import random
import re
import sys
import time

import pytest

from cllm.cli.answers import AnswerPart
from cllm.cli.conversation.answer_markdown import AnswerMarkdown, make_parser
from cllm.cli.conversation.printer import MarkdownPrinter

ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x1b]*\x1b\\)")
PLAIN = (
    *("word", "two words.", "List<String>", "Map<String, List<int>>", "vector<int>", "<T>", "<br>"),
    *("map<std::string, int>", "<div class='a'>", "</div>", "<script>x()</script>", "<!-- a -->"),
    *("#include <iostream>", "a < b && c > d", "<kbd>Ctrl</kbd>", "<john@example.com>", "<a b"),
    *("<https://example.com/a>", r"\(a_1 * b_2 * c\)", "$x_i * y_i * z$", "$$a*b*c$$", r"\[ x \]"),
    *(r"C:\Users\new", r"\d+\.\d", r"\frac{1}{2}", "[1]: source", "[^1]: there", "costs $5 or $6"),
    *("x = {y: [1, 2]}", "snake_case_name", "100 %", "@user", "a/b", "résumé 日本語 🙂", "<think>"),
    *(
        "\\[\na = b \\\\\n= c\n\\]",
        "$$\n- x_1\n- x_2\n$$",
        "\\begin{aligned}\na &= b*c*d\n\\end{aligned}",
    ),
    *("<p>\n  one\n</p>", "<details>\n<summary>More</summary>", "</details>"),
)


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def show(monkeypatch):
    """Return what a terminal gets of an answer in pieces, without what is drawn again later."""
    monkeypatch.setenv("TERM", "xterm-256color")

    def printed(pieces: list[str]) -> str:
        monkeypatch.setattr(sys, "stdout", screen := Screen())
        printer = MarkdownPrinter()
        printer._live.stop()
        for piece in pieces:
            printer.add(AnswerPart(piece))
        printer.close()
        return ESCAPES.sub("", screen.getvalue())

    return printed


def visible(text: str) -> str:
    return "".join(text.split())


def test_every_character_of_text_without_markup_reaches_the_terminal(show):
    """However the answer is cut into pieces and into paragraphs."""
    choose = random.Random(1)
    for _ in range(60):
        words = choose.choices(PLAIN, k=choose.randint(1, 12))
        text = "".join(
            ("\n" if "\n" in word else "") + word + choose.choice((" ", "\n", "\n\n"))
            for word in words
        )
        cuts = sorted(choose.sample(range(len(text)), min(len(text), choose.randint(0, 30))))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert visible(show(pieces)) == visible(text), pieces


@pytest.mark.parametrize(
    "around", ["{}", "**{}**", "* {}", "1. {}", "> {}", "# {}", "[{}](http://a)"]
)
def test_types_and_tags_are_shown_inside_other_markup(show, around):
    for word in ("vector<int>", "map<std::string, int>", "a<br>b", "<i>x</i>", r"\(a_1*b_1*c\)"):
        assert word in " ".join(show([around.format(word)]).split())


def test_lines_of_html_and_formulas_stay_lines(show):
    for text in ("<div>\n  <p>a</p>\n</div>", "\\[\na = b \\\\\n= c\n\\]", "$$\n- a\n- b\n$$"):
        lines = [line.rstrip() for line in show([f"Text:\n\n{text}\n\nMore."]).split("\n")]
        assert "\n".join(lines).strip() == f"Text:\n\n{text}\n\nMore."


def test_formulas_in_lists_and_quotations_are_shown(show):
    printed = show(["* one:\n  \\[\n  a_1 * b_1 * c\n  \\]\n\n> $$\n> a*b*c\n> $$\n"])
    assert "   \\[" in printed
    assert "   a_1 * b_1 * c" in printed
    assert "▌ a*b*c" in printed


def test_tables_show_all_cells(show):
    """Code may contain the mark between columns, and surplus cells are not dropped."""
    text = (
        "| Operator | Meaning |\n|---|---|\n| `a || b` | or |\n| vector<int> | a **list** | of |\n"
        "| \\(|x|\\) | $a_1 * b_1$ |\n"
    )
    lines = [" ".join(line.split()) for line in show([text]).split("\n")]
    assert "a || b or" in lines
    assert "vector<int> a list | of" in lines
    assert r"\(|x|\) $a_1 * b_1$" in lines


def test_lines_of_a_text_stay_lines(show):
    """Such as those of a poem, of an address, and of a table whose head has another width."""
    for text in ("Roses are red,\nviolets\nare blue.", "| a | b|c |\n|---|---|\n| 1 | 2 |"):
        lines = [line.strip() for line in show([text]).split("\n")]
        assert "\n".join(lines).strip() == text
    assert "   and more" in show(["* one\n  and more"])


def test_images_are_links_at_their_place(show):
    printed = " ".join(
        show(["See ![a *cat*](http://a/c.png) and ![](http://a/d.png), please."]).split()
    )
    assert printed == "See [image: a *cat*] and [image: http://a/d.png], please."


def test_markup_is_still_formatted(show):
    text = "**bold** *em* ~~gone~~ `code` \\*star\\* [text](http://a) &lt;b&gt;\n\n* item\n\n```\n<b>\n```\n"
    assert visible(show([text])) == "boldemgonecode*star*text<b>•item<b>"


@pytest.mark.slow
def test_hostile_answers_are_formatted_quickly():
    """A long line of marks takes time that grows with its length."""
    begun = time.process_time()
    for mark in ("\\(", "$$", "$a", "\\[", "<a", "\\", "`a ", "a\n", "|a\n|-\n", "| \\(", "<!--"):
        make_parser().parse(mark * 5000)
        make_parser().parse("|a\n|-\n|" + mark * 5000)
    assert time.process_time() - begun < 20
    AnswerMarkdown("a\n|")
