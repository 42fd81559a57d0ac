"""Texts of models and files cannot run scripts or load anything."""

import json

import pytest
from playwright.sync_api import expect

pytestmark = [pytest.mark.slow, pytest.mark.llama]

HOSTILE = """
<script>window.hacked = 1</script>
<img src=x onerror="window.hacked = 2">
<img src="https://evil.example/pixel.png">
<svg onload="window.hacked = 3"><a xlink:href="javascript:window.hacked=4">x</a></svg>
<iframe srcdoc="<script>parent.hacked = 5</script>"></iframe>
<style>@import "https://evil.example/a.css";</style>
<form action="https://evil.example/"><button>Send</button></form>
<a href="javascript:window.hacked = 6">html link</a>

![pixel](https://evil.example/pixel.png "title")
![local](ui/icon.svg)
[link](javascript:window.hacked=7)
[other](JaVaScRiPt:window.hacked=8)
[data](data:text/html,<script>window.hacked=9</script>)
[quote](https://example.com/"onmouseover="window.hacked=10)
<https://example.com/>

```"><img/src=x/onerror=window.hacked=11>
</code></pre><script>window.hacked = 12</script>
```

| a | b |
|---|---|
| <img src=x onerror=window.hacked=13> | `<b onclick=window.hacked=14>` |

- [ ] <input onfocus=window.hacked=15 autofocus>

<math><mtext><table><mglyph><style><!--</style><img title="--&gt;&lt;img src=1 onerror=window.hacked=16&gt;">
"""


def check_harmless(chat) -> None:
    page = chat.page
    for target in page.locator(".log a, .log .markdown button").all():
        href = target.get_attribute("href")
        assert href is None or target.get_attribute("rel") == "noopener noreferrer"
        assert href is None or href.startswith(("https:", "http:", "mailto:")), href
        target.dispatch_event("mouseover")
    assert page.evaluate("window.hacked") is None
    assert (
        page.locator(".markdown :is(script, img, svg, iframe, style, form, input, math)").count()
        == 0
    )
    attributes = page.evaluate(
        "[...document.querySelectorAll('.log *')].flatMap(e => e.getAttributeNames())"
    )
    assert {"href", "class"} <= set(attributes)
    assert not [name for name in attributes if name.startswith("on") or name == "style"]


def test_hostile_answer_is_shown_as_text(visit, server):
    chat = visit(server)
    chunk = {"choices": [{"index": 0, "delta": {"content": HOSTILE, "reasoning_content": HOSTILE}}]}
    events = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
    chat.page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(body=events, content_type="text/event-stream"),
    )
    chat.ask("<b>hello</b><script>window.hacked = 0</script>")
    chat.wait_until_answered()
    chat.page.locator("details.reasoning summary").click()
    expect(chat.answers().last).to_contain_text("<script>window.hacked = 1</script>")
    expect(chat.page.locator(".message.user .text")).to_contain_text("<script>")
    check_harmless(chat)


def test_hostile_conversation_is_harmless(visit, server):
    chat = visit(server)
    message = {
        "id": HOSTILE,
        "parent": None,
        "role": "assistant",
        "content": HOSTILE,
        "calls": [{"name": HOSTILE, "arguments": HOSTILE}, 7, None],
        "error": HOSTILE,
        "model": HOSTILE,
        "stats": {"seconds": "<img src=x>", "rate": 1},
    }
    wrong = [None, 5, {"role": "admin"}, {**message, "id": "b", "parent": "nothing"}]
    file = {
        "format": "cllm-conversations",
        "version": 1,
        "conversations": [
            {"title": HOSTILE, "messages": [message, *wrong], "leaf": HOSTILE, "settings": {"x": 1}}
        ],
    }
    chat.page.locator(".sidebar input[type=file]").set_input_files(
        {"name": "a.json", "mimeType": "application/json", "buffer": json.dumps(file).encode()}
    )
    chat.page.locator(".sidebar .title").click()
    expect(chat.page.locator(".message")).to_have_count(1)
    check_harmless(chat)
    chat.page.reload()
    expect(chat.page.locator(".message")).to_have_count(1)
    check_harmless(chat)


def test_policy_stops_what_a_fault_would_let_through(visit, server):
    """Scripts, images and requests that reach the document nevertheless are blocked."""
    chat = visit(server)
    chat.expected_fault = "violates the following"
    done = chat.page.evaluate(
        """async () => {
            const image = new Image();
            const blocked = new Promise(done => { image.onerror = () => done("blocked"); });
            image.src = "https://evil.example/pixel.png";
            const fetched = await fetch("https://evil.example/").then(() => "sent", () => "blocked");
            let assigned = "done";
            try { document.body.innerHTML = "<img>"; } catch { assigned = "blocked"; }
            return [await blocked, fetched, assigned];
        }"""
    )
    assert done == ["blocked", "blocked", "blocked"]
    chat.faults = [one for one in chat.faults if "a request to https://evil" not in one]
    chat.expected_fault = ""
    chat.faults = [one for one in chat.faults if "evil.example" not in one and "Trusted" not in one]


@pytest.mark.parametrize("text", ["> " * 5000 + "x", "- " * 5000 + "x", "word " * 50_000])
def test_text_that_the_parser_cannot_take_is_shown_as_it_is(visit, server, text):
    """Parsers of Markdown recurse; the page must open again with such an answer."""
    chat = visit(server)
    chunk = {"choices": [{"index": 0, "delta": {"content": text}}]}
    events = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
    chat.page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(body=events, content_type="text/event-stream"),
    )
    chat.ask("hello")
    expect(chat.answers()).to_have_text(text)
    chat.wait_until_answered()
    chat.page.reload()
    expect(chat.answers()).to_have_text(text)


WRITTEN = r"""Roses are red,
violets are blue.

Use map<std::string, int>, `List<int>` and List<String>. <br> Paths: C:\Users\new, \d+\.\d.

<div>
  <p>one</p>
</div>

Prices: $5 is **not** $6, and $HOME/$USER is a path.

| Operator | Meaning |
|---|---|
| `a || b` | or |
| vector<int> | a | list |

[note]: important
"""


def test_types_tags_and_prices_are_shown_as_written(visit, server):
    chat = visit(server)
    chunks = [{"choices": [{"index": 0, "delta": {"content": part}}]} for part in WRITTEN]
    events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    chat.page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(body=events, content_type="text/event-stream"),
    )
    chat.ask("hello")
    chat.wait_until_answered()
    shown = chat.answers().last.inner_text()
    for line in (
        "Roses are red,\nviolets are blue.",
        r"Use map<std::string, int>, List<int> and List<String>. <br> Paths: C:\Users\new, \d+\.\d.",
        "<div>\n  <p>one</p>\n</div>",
        "Prices: $5 is not $6, and $HOME/$USER is a path.",
        "[note]: important",
    ):
        assert line in shown
    cells = chat.answers().last.locator("td")
    expect(cells).to_have_text(["a || b", "or", "vector<int>", "a | list"])
