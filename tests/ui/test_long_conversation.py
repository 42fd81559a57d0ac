"""Conversations of thousands of messages do not freeze the page."""

import pytest
from playwright.sync_api import expect

pytestmark = [pytest.mark.slow, pytest.mark.llama]

NUM_MESSAGES = 5000
ANSWER = """Answer {number} with **Markdown**, a list and code.

1. one
2. two

```python
def add(a: int, b: int) -> int:
    return a + b + {number}
```
"""
MAX_DRAWN = 200  # messages


def make_conversation(count: int) -> dict:
    messages = [
        {
            "id": str(number),
            "parent": str(number - 1) if number else None,
            "role": "assistant" if number % 2 else "user",
            "content": ANSWER.format(number=number) if number % 2 else f"question {number}",
        }
        for number in range(count)
    ]
    return {"title": "Long", "messages": messages}


class Clock:
    """The CPU time of the page's process, which does not depend on other processes."""

    def __init__(self, page) -> None:
        self._session = page.context.new_cdp_session(page)
        self._session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def read(self) -> float:
        """Return the seconds that tasks, scripts and layout have taken."""
        metrics = self._session.send("Performance.getMetrics")["metrics"]
        return next(one["value"] for one in metrics if one["name"] == "TaskDuration")


def test_only_messages_near_the_view_are_drawn(visit, server):
    chat = visit(server)
    chat.import_conversations(make_conversation(NUM_MESSAGES))
    shown = chat.page.locator(".message")
    expect(shown.last).to_contain_text(f"Answer {NUM_MESSAGES - 1} ")
    expect(shown.last).to_be_in_viewport()
    assert shown.count() <= MAX_DRAWN
    button = chat.page.get_by_role("button", name="Show earlier messages")
    expect(button).to_be_attached()
    log = chat.page.get_by_role("log")
    before = shown.first.inner_text()
    log.evaluate("log => (log.scrollTop = 0)")
    expect(shown.first).not_to_have_text(before)
    expect(chat.page.get_by_role("button", name="Jump to the latest message")).to_be_visible()
    assert log.evaluate("log => log.scrollTop") > 0  # the view stays where the user was reading
    assert shown.count() <= MAX_DRAWN
    chat.page.get_by_role("button", name="Jump to the latest message").click()
    expect(shown.last).to_be_in_viewport()


def test_opening_and_answering_costs_little_cpu_time(visit, server):
    """The times are of the page's thread, so other processes do not change them."""
    chat = visit(server)
    chat.import_conversations(make_conversation(NUM_MESSAGES))
    expect(chat.page.locator(".message").last).to_be_in_viewport()
    chat.page.get_by_role("button", name="New conversation").click()
    expect(chat.page.locator(".welcome")).to_be_visible()
    clock = Clock(chat.page)
    begun = clock.read()
    chat.page.locator(".sidebar .title").first.click()
    expect(chat.page.locator(".message").last).to_be_in_viewport()
    opened = clock.read() - begun
    chat.stream(*[{"content": "word "}] * 300)
    begun = clock.read()
    chat.ask("What is 27 plus 45?")
    chat.wait_until_answered()
    answered = clock.read() - begun
    assert opened < 0.5
    assert answered < 0.5
