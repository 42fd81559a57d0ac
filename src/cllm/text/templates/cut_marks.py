"""Keep answers whole that mention a mark at which the chat template cuts earlier answers to drop
their reasoning.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from cllm.text.templates.fences import BREAK, CLOSE, CUT, OPEN, Fenced

Messages = list[dict[str, Any]]

MARKS = re.compile(r"</[\w:]{1,40}>|\[/\w{1,40}\]|<\|[^<>|\s]{1,40}\|>")


class CutMarks:
    """The marks at which one chat template cuts earlier answers."""

    def __init__(self, source: str, show: Callable[[Messages], str | None]) -> None:
        """``show`` renders messages with the template ``source``; it returns None if the template
        refuses them.
        """
        self._marks = sorted(set(MARKS.findall(source)))
        self._show = show
        self._is_cut: dict[str, bool] = {}

    def protect(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return an answer, which has been fenced, so that the template shows its text whole.

        Reasoning that its text begins with is left to the template, and so is a text that the
        prompt continues.
        """
        text = message["content"]
        if message["role"] != "assistant" or not text or CUT in text:
            return message
        marks = [mark for mark in self._marks if mark in text and self._cuts(mark)]
        end = 0
        if not message.get("reasoning_content"):
            end = max((end_of_reasoning(text, mark) for mark in marks), default=0)
        thought, answer = text[:end], text[end:]
        for mark in marks:
            for one in (mark, opening_mark(mark)):
                thought = thought.replace(f"{OPEN}{one}{CLOSE}", one)
                answer = answer.replace(one, one[0] + BREAK + one[1:])
        return {**message, "content": Fenced(thought + answer)} if marks else message

    def _cuts(self, mark: str) -> bool:
        """Return whether the template omits the text before ``mark`` in an earlier answer."""
        if mark not in self._is_cut:
            answer = {"role": "assistant", "content": f"probe{mark}text"}
            asked = {"role": "user", "content": "a"}
            text = self._show([asked, answer, asked])
            self._is_cut[mark] = text is not None and "probe" not in text
        return self._is_cut[mark]


def opening_mark(mark: str) -> str:
    """Return the mark that ``mark`` closes, such as <think>."""
    return mark.replace("/", "", 1)


def end_of_reasoning(text: str, mark: str) -> int:
    """Return the end of the reasoning with which ``text`` begins and that ``mark`` closes, or 0.

    The mark that opens the reasoning may be missing, because templates write it. In that case, the
    closing mark begins or ends a line, unlike a mark that is mentioned in a sentence.
    """
    match = re.search(f"{OPEN}?{re.escape(mark)}{CLOSE}?", text)
    assert match
    before, after = text[: match.start()], text[match.end() :]
    opening = opening_mark(mark)
    if opening in before:
        is_reasoning = before.lstrip().removeprefix(OPEN).startswith(opening)
    else:
        is_reasoning = before.endswith("\n") or after.startswith("\n") or "" in (before, after)
    return match.end() if is_reasoning else 0
