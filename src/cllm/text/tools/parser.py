"""Split a model's output into text, reasoning and calls, while it streams.

Nothing is scanned twice. The parser holds back only the beginning of a mark, white space that may
precede one, or the head of a possible call: MAX_HEAD characters at most.
"""

from __future__ import annotations

import contextlib
import enum
import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import msgspec

from cllm.core.lines import Lines
from cllm.text.tools.argument_readers import ArgumentReader, Bare, Keywords, Object, Pairs
from cllm.text.tools.cut_calls import is_begun, may_begin_call
from cllm.text.tools.model_family import (
    MAX_HEAD,
    Calls,
    Marks,
    ModelFamily,
    compile_head,
    compile_marks,
    one_of_texts,
)

MAX_SPACE = 256  # characters of white space that are held back
MAX_MARK = 64  # characters; every mark is shorter
# The beginning of a call without a mark, and prefixes of that beginning.
BARE = re.compile(r'(?:\[\s{0,64})?\{\s{0,64}"(?:id|type|name|function)"')
BARE_BEGUN = re.compile(r'(?:\[\s{0,64})?(?:\{\s{0,64}(?:"[a-z]{0,8})?)?')
PYTHON = re.compile(r"\[\s{0,64}[A-Za-z_][\w.-]{0,255}\(")
PYTHON_BEGUN = re.compile(r"\[\s{0,64}(?:[A-Za-z_][\w.-]{0,255})?")
STRING = re.compile(r'"[^"]*"')

NO_CALLS = Calls(write="")
NO_CONTROL: Mapping[str, int] = {}


class Channel(enum.StrEnum):
    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"


class OutputPart(msgspec.Struct, gc=False):
    """A piece of a model's output.

    ``call`` counts the calls from 0. The first part of a call has the function's ``name``.
    """

    channel: Channel
    text: str
    call: int = 0
    name: str = ""


class Parser:
    """Parses one text.

    White space around reasoning and calls is dropped; everything else is returned.

    Text that merely resembles a call is returned as text, and so is a call of a function that is
    not declared. A call whose text ends early has the arguments received so far. Calls within
    reasoning are ignored, except in families that forget to close their reasoning.

    Reasoning is recognised before any text and between calls. It may resume after text, which may
    also mention its mark: the mark resumes reasoning at the beginning of a line, outside of code
    blocks, and is text elsewhere. If the mark is one control token, the same text in other tokens
    does not resume it. What remains is the text without this reasoning.
    """

    def __init__(
        self,
        family: ModelFamily,
        tools: Mapping[str, dict[str, Any]],
        *,
        inside: bool = False,
        begun: bool = False,
        max_calls: int | None = None,
        control: Mapping[str, int] = NO_CONTROL,
    ) -> None:
        """``tools`` has the argument schemas of the functions that may be called; if {}, calls are
        text. If ``inside``, the text begins in the middle of reasoning; if ``begun``, it continues
        reasoning or text from the prompt. After ``max_calls`` calls the parser is ``done`` and
        drops the rest. ``control`` has the ids of control tokens by their texts, which the model
        never writes in parts.
        """
        self._reasoning = family.reasoning
        self._header = family.header
        self._calls = family.calls if tools and family.calls else NO_CALLS
        self._long_closes = long_closes(self._calls)
        self._tools = tools
        self._max_calls = max_calls
        self._buffer = ""
        self._space = ""
        self._parts: list[OutputPart] = []
        self._is_last = False
        self._is_cut = False
        self._is_fresh = inside and not begun  # drop white space until other text arrives
        self._has_text = begun and not inside  # any text since the beginning or the last call
        self._joint: str | None = None  # white space around reasoning that has resumed after text
        self._lines = Lines(begun=self._has_text)  # of text, where reasoning may resume
        self._opener = ""
        self._num_seen = 0  # characters of a head that are already searched
        self._reader: ArgumentReader = Object()
        self._depth = 0  # open braces around the arguments
        self._state: Callable[[], bool] = self._in_text
        self._then: Callable[[], bool] = self._after_call  # the state after the arguments
        self.channel = Channel.TEXT
        self.num_calls = 0
        self.done = False
        openers = [*self._calls.open, *self._calls.skip]
        ends: tuple[str, ...] = ()
        if family.header:
            openers += [*family.header.open, *family.header.end]
            ends = (*family.header.open, *family.header.end)
            self._state = self._in_text if begun else self._in_header
        elif family.reasoning:
            openers += [family.reasoning.open, *family.reasoning.skip]
            ends = (family.reasoning.close,)
            if self._calls.ends_reasoning:
                ends += self._calls.open + self._calls.skip
        reasoning = family.reasoning
        marks = {reasoning.open, reasoning.close} if reasoning else set()
        self._controls = marks & control.keys()  # marks of reasoning that are one control token
        self.control_ids = {control[mark] for mark in self._controls}
        self._is_control = False  # whether the text that is fed is such a token
        openers += [mark for mark in self._controls if mark not in openers]
        self._openers, self._ends = (
            compile_marks(marks, frozenset(control)) for marks in (tuple(openers), ends)
        )
        if inside:
            self.channel, self._state = Channel.REASONING, self._in_region

    def feed(self, text: str, *, is_control: bool = False) -> list[OutputPart]:
        """Return the parts that ``text`` adds or continues. ``is_control`` says that it is one of
        the tokens ``control_ids``.
        """
        self._parts = []
        if self.done:
            return self._parts
        self._buffer += text
        self._is_control = is_control
        while not self.done and self._state():
            pass
        return self._parts

    def note_text(self, text: str) -> None:
        """Note the text before what will be fed."""
        self._has_text = bool(text.strip())
        self._lines.add(text)

    def flush(self, tail: str = "", *, is_cut: bool = False) -> list[OutputPart]:
        """Return the parts still held back, at the end of the text.

        ``tail`` replaces the bytes of an incomplete character. If ``is_cut``, the text ended
        because of its length; then the beginning of a mark, of a header or of a call is dropped.
        """
        is_free = not self._buffer and self._state in (self._in_text, self._in_region)
        self._is_last, self._is_cut = True, is_cut
        parts = self.feed(tail if is_free or not is_cut else "")
        if self._space and not self.done:
            self._emit(self._space)
        return parts

    def _drop(self) -> bool:
        """Drop what is held back, and the white space before it; return False."""
        self._buffer = self._space = ""
        return False

    # --- states: each consumes from the buffer and returns whether the next state can run --------

    def _in_text(self) -> bool:
        if self._calls.bare and not self._has_text and (text := self._buffer.lstrip()):
            bare, begun = (
                (PYTHON, PYTHON_BEGUN) if "python" in self._calls.head else (BARE, BARE_BEGUN)
            )
            if bare.match(text):
                self._emit_text(self._buffer[: len(self._buffer) - len(text)])
                self._buffer = text
                return self._begin_head("")
            if begun.fullmatch(text) and not self._is_last:
                return False
            if begun.fullmatch(text) and self._is_begun_call(text, ""):
                return self._drop()
        match = self._openers.whole.search(self._buffer)
        if not match:
            self._emit_certain(self._openers)
            return False
        self._emit_text(self._buffer[: match.start()])
        self._buffer = self._buffer[match.end() :]
        mark = match[0]
        if mark in self._calls.open:
            return self._begin_head(mark)
        if self._reasoning and mark == self._reasoning.open:
            if not self._has_text:
                self._begin_region(Channel.REASONING)
            elif self._reasoning.anywhere or self._is_real(mark):
                self._joint = self._space
                self._begin_region(Channel.REASONING)
            else:
                self._emit_text(mark)
        elif mark in self._controls and not self._is_real(mark):
            self._emit_text(mark)
        elif self._header and mark in self._header.open:
            self._opener, self._state = mark, self._in_header
        else:
            self._is_fresh = True
        return True

    def _in_region(self) -> bool:
        """Consume reasoning, or a call that ends with a mark."""
        match = self._ends.whole.search(self._buffer)
        if not match:
            self._emit_certain(self._ends)
            return False
        self._emit_text(self._buffer[: match.start()])
        is_opener = self._header is not None and match[0] in self._header.open
        self._buffer = self._buffer[match.start() if is_opener else match.end() :]
        if match[0] in self._calls.open:
            return self._begin_head(match[0])
        if match[0] in self._calls.skip:
            return True
        if self.channel == Channel.CALL:
            return self._end_call()
        self._begin_text()
        return True

    def _in_header(self) -> bool:
        assert self._header
        at = self._buffer.find(self._header.close, 0, MAX_HEAD)
        if at < 0 and self._is_cut and self._is_begun_header(self._opener + self._buffer):
            return self._drop()
        if at < 0:
            return (self._is_last or len(self._buffer) >= MAX_HEAD) and self._reject_call()
        header = self._opener + self._buffer[:at]
        self._buffer = self._buffer[at + len(self._header.close) :]
        if (match := compile_head(self._header.call).search(header)) and match[
            "name"
        ] in self._tools:
            self._begin_call(match["name"])
            self._begin_region(Channel.CALL)
        elif compile_head(self._header.reasoning).search(header):
            self._begin_region(Channel.REASONING)
        else:
            self._begin_text()
        return True

    def _in_head(self) -> bool:
        limit = min(len(self._buffer), MAX_HEAD)
        ends = compile_head_ends(self._calls)
        for match in ends.finditer(self._buffer, self._num_seen, limit):
            self._num_seen = match.end()
            head = self._buffer[: match.start()]
            if match[0] in "{(" or self._calls.tags:
                for source in self._calls.head:
                    if named := compile_head(source).fullmatch(head):
                        return self._begin_arguments(named["name"], head)
            if match[0] not in "{(":
                return self._is_whole_call(head) or self._reject_call()
        if self._is_last and self._is_whole_call(self._buffer):
            return True
        if self._is_begun_call(self._buffer, self._opener):
            return self._drop()
        if self._is_last:
            return self._reject_call()
        if limit == MAX_HEAD:
            return self._reject_call()
        self._num_seen = max(self._num_seen, limit - MAX_MARK)
        return False

    def _in_arguments(self) -> bool:
        text, rest = self._reader.feed(self._buffer)
        self._buffer = rest or ""
        if rest is None and self._is_last:
            text += self._reader.close(is_cut=self._is_cut)
        if text:
            self._emit(text)
        return rest is not None and self._end_call()

    def _in_rest(self) -> bool:
        """Consume the rest of the object around the arguments."""
        _, rest = self._reader.feed(self._buffer)
        self._buffer = rest or ""
        if rest is not None:
            self._state = self._after_call
        return rest is not None

    def _after_call(self) -> bool:
        self._buffer = self._buffer.lstrip()
        marks = (*self._calls.close, *self._calls.separators)
        for mark in marks:
            if self._buffer.startswith(mark):
                self._buffer = self._buffer[len(mark) :]
                return self._begin_head(mark) if mark in self._calls.separators else True
        if any(mark.startswith(self._buffer) for mark in marks):
            if not self._is_last:
                return False
            if self._is_cut:
                return self._drop()
        self._begin_text()
        return bool(self._buffer)

    def _is_real(self, mark: str) -> bool:
        """Whether a mark of reasoning, which comes next, is more than text that mentions it."""
        is_mark = self._is_control or mark not in self._controls
        return is_mark and self._lines.allow_mark(self._space)

    # --- transitions -----------------------------------------------------------------------------

    def _begin_text(self) -> None:
        self._space, self._is_fresh, self._has_text = "", True, False
        self.channel, self._state = Channel.TEXT, self._in_text

    def _begin_region(self, channel: Channel) -> None:
        self._space, self._is_fresh = "", True
        self.channel, self._state = channel, self._in_region

    def _begin_head(self, opener: str) -> bool:
        self._opener, self._num_seen, self._state = opener, 0, self._in_head
        return True

    def _reject_call(self) -> bool:
        """Treat the held characters as text, or as reasoning if they are inside of it; return
        True.
        """
        if self.channel == Channel.REASONING:
            self._state = self._in_region
            self._emit_text(self._opener)
            return True
        self.channel, self._state = Channel.TEXT, self._in_text
        self._emit_text(self._opener)
        self._has_text = True
        return True

    def _is_begun_call(self, head: str, opener: str) -> bool:
        """Whether the text was cut off in a text that could have become the head of a call."""
        return self._is_cut and may_begin_call(head, opener, self._calls, self._tools)

    def _is_begun_header(self, text: str) -> bool:
        assert self._header
        begins = (*self._header.open, "to=")
        return any(is_begun(text.lstrip(), begin) for begin in begins)

    def _is_whole_call(self, head: str) -> bool:
        """Whether ``head`` is a complete call, with its keys in an unusual order or no arguments.

        If so, emit it.
        """
        if "json" not in self._calls.head:
            return False
        try:
            value = json.loads(head)
        except (ValueError, RecursionError):
            return False
        value = value[0] if isinstance(value, list) and len(value) == 1 else value
        inner = value.get("function", value) if isinstance(value, dict) else None
        value = inner if isinstance(inner, dict) else {}
        name = value.get("name")
        if not isinstance(name, str) or name not in self._tools:
            return False
        arguments = value.get("arguments", value.get("parameters")) or {}
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError, RecursionError):
                arguments = json.loads(arguments)
        if not isinstance(arguments, dict):
            return False
        self._begin_call(name)
        self._emit(json.dumps(arguments, ensure_ascii=False))
        self._buffer = self._buffer[len(head) :]
        return self._end_call()

    def _begin_call(self, name: str) -> None:
        self._space, self._joint = "", None
        self.channel = Channel.CALL
        self._parts.append(OutputPart(Channel.CALL, "", self.num_calls, name))
        self.num_calls += 1

    def _begin_arguments(self, name: str, head: str) -> bool:
        if name not in self._tools:
            return self._reject_call()
        self._begin_call(name)
        self._buffer = self._buffer[len(head) :]
        if self._calls.tags:
            self._reader = Pairs(self._calls.tags, self._tools[name])
        elif self._buffer[0] == "(":
            self._reader = Keywords()
        else:
            self._reader = (
                Bare(self._calls.quote) if self._calls.quote else Object(0, self._long_closes)
            )
        self._depth = 0 if self._calls.tags else STRING.sub("", head).count("{")
        self._then = self._in_rest if self._depth else self._after_call
        self._state = self._in_arguments
        return True

    def _end_call(self) -> bool:
        self._state, self._then = self._then, self._after_call
        self._reader = Object(self._depth, self._long_closes)
        self.done = self.num_calls == self._max_calls
        return True

    # --- parts -----------------------------------------------------------------------------------

    def _emit_certain(self, marks: Marks) -> None:
        """Emit the buffer, except the beginning of a mark at its end."""
        is_whole = self._is_last and not (self._is_cut and self._may_begin_mark)
        begun = marks.cut if self._is_cut else marks.begun
        match = None if is_whole else begun.search(self._buffer)
        at = match.start() if match else len(self._buffer)
        self._emit_text(self._buffer[:at])
        self._buffer = self._buffer[at:]
        if self._is_cut and match:
            self._drop()

    @property
    def _may_begin_mark(self) -> bool:
        """Whether a mark can follow here. Without tools, only reasoning has marks, and it rarely
        resumes after text.
        """
        is_only_text = self.channel == Channel.TEXT and self._has_text and not self._header
        is_anywhere = self._reasoning is not None and self._reasoning.anywhere
        return not is_only_text or is_anywhere or self._calls is not NO_CALLS

    def _emit_text(self, text: str) -> None:
        """Emit ``text``, but hold back white space at its end, which may precede a mark."""
        if self._is_fresh:
            bare = text.lstrip()
            if self._joint is not None and self.channel == Channel.TEXT:
                self._joint = (self._joint + text[: len(text) - len(bare)])[:MAX_SPACE]
                bare = self._joint + bare if bare else ""
            text = bare
        if not text:
            return
        self._is_fresh = False
        if self.channel == Channel.TEXT:
            self._joint = None
        text = self._space + text
        certain = max(len(text.rstrip()), len(text) - MAX_SPACE)
        self._space = text[certain:]
        if certain:
            self._has_text = self._has_text or (
                self.channel == Channel.TEXT and not text[:certain].isspace()
            )
            self._emit(text[:certain])

    def _emit(self, text: str) -> None:
        if self._reasoning is not None and self.channel == Channel.TEXT:
            self._lines.add(text)
        call = self.num_calls - 1 if self.channel == Channel.CALL else 0
        last = self._parts[-1] if self._parts else None
        if last and last.channel == self.channel and last.call == call:
            last.text += text
        else:
            self._parts.append(OutputPart(self.channel, text, call))


@cache
def compile_head_ends(calls: Calls) -> re.Pattern[str]:
    """Return a pattern for the end of a call's head: the beginning of its arguments, or a mark if
    it has none.
    """
    begins = (
        {calls.tags.key_open}
        if calls.tags
        else {"(" if head == "python" else "{" for head in calls.head}
    )
    return re.compile(one_of_texts({*begins, *calls.open[:1], *long_closes(calls)}))


def long_closes(calls: Calls) -> tuple[str, ...]:
    """Return the marks that only end calls; brackets and fences also occur in heads."""
    return tuple(mark for mark in calls.close if len(mark) > 3)
