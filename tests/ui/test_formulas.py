"""Formulas in answers, which KaTeX draws."""

import pytest
from playwright.sync_api import expect

pytestmark = [pytest.mark.slow, pytest.mark.llama]

TEXT = r"""A sum \(a_1 * b_2 * c\) or $x_1 * y_2 * z$, and $5 is **not** $6.
\[
- a = b \\
= \frac{1}{2} * x * y
\]
Then \[ d \] and $$e*f*g$$ is *nice*.

\begin{align}
a &= b \\
c &= d
\end{align}

| Area | \(|x|\) |
|---|---|
| $\pi r^2$ | $\pmb{b}$ and $\fcolorbox{red}{white}{c}$ |
"""
SOURCES = [
    *("a_1 * b_2 * c", "x_1 * y_2 * z", "- a = b \\\\\n= \\frac{1}{2} * x * y", "d", "e*f*g"),
    *("\\begin{align}\na &= b \\\\\nc &= d\n\\end{align}", "|x|", "\\pi r^2", "\\pmb{b}"),
    "\\fcolorbox{red}{white}{c}",
]
WRONG = r"""Not TeX: $\frac{1$ and $\nothing{x}$.

$$\href{javascript:window.hacked=1}{x} \includegraphics{https://evil.example/a.png}$$

$\htmlStyle{color: red}{x}$ and $\def\a{\a\a}\a$

$$
never closed
"""


def test_formulas_are_drawn_with_their_source_as_a_tooltip(visit, server):
    chat = visit(server)
    chat.stream(*[{"content": part} for part in TEXT])
    chat.ask("hello")
    chat.wait_until_answered()
    formulas = chat.page.locator(".formula")
    expect(chat.page.locator(".formula:has(.katex)")).to_have_count(len(SOURCES))
    assert formulas.evaluate_all("all => all.map(one => one.title)") == SOURCES
    expect(chat.page.locator(".formula .katex-error")).to_have_count(0)
    expect(chat.answers()).to_contain_text("$5 is not $6.")
    expect(chat.page.locator(".formula math").first).to_be_attached()
    fonts = "document.fonts.ready.then(() => document.fonts.check('16px KaTeX_Math'))"
    assert chat.page.evaluate(fonts)
    chat.reload()
    expect(chat.page.locator(".formula:has(.katex)")).to_have_count(len(SOURCES))


def test_katex_is_loaded_only_for_formulas(visit, server):
    chat = visit(server)
    loaded = []
    chat.page.on("request", lambda request: loaded.append(request.url))
    chat.ask("What is 27 plus 45?")
    expect(chat.answers()).to_have_text("72")
    chat.wait_until_answered()
    assert not [url for url in loaded if "katex" in url]
    chat.stream({"content": "$x$"})
    chat.ask("A formula")
    expect(chat.page.locator(".katex").first).to_be_attached()
    names = {url.rpartition("/")[2] for url in loaded if "katex" in url.lower()}
    assert {"katex.js", "katex.css"} <= names


def test_hostile_and_wrong_formulas_are_harmless(visit, server):
    chat = visit(server)
    chat.stream({"content": "$x$\n\n" + WRONG})
    chat.ask("hello")
    chat.wait_until_answered()
    expect(chat.page.locator(".katex").first).to_be_attached()
    expect(chat.answers()).to_contain_text(r"$\frac{1$ and $\nothing{x}$")
    expect(chat.answers()).to_contain_text("never closed")
    expect(chat.page.locator(".markdown :is(a, img, script)")).to_have_count(0)
    assert chat.page.evaluate("window.hacked") is None


def test_formula_keeps_its_source_if_katex_cannot_be_loaded(visit, server):
    chat = visit(server)
    chat.expected_fault = "Failed to load resource"
    chat.page.route("**/katex.js", lambda route: route.fulfill(status=404))
    chat.stream({"content": "$x^2$"})
    with chat.page.expect_response("**/katex.js"):
        chat.ask("hello")
    chat.wait_until_answered()
    expect(chat.answers()).to_have_text("$x^2$")
