"""``cllm chat``."""

from __future__ import annotations

import re
import sys
from typing import Annotated

from cyclopts import Parameter

from cllm.cli.settings_flags import ConfigFlag, ModelArgument, ModelFlags
from cllm.cli.talk import Messages, SamplingFlags, Talker, UrlFlag, make_talker, print_stream
from cllm.errors import CLLMError

HELP = (
    "Type a message. /new starts a new conversation, /exit or Ctrl-D quits, /help shows this text, "
    "Ctrl-C stops an answer."
)


def chat(
    model: ModelArgument = None,
    /,
    *,
    url: UrlFlag = None,
    system: Annotated[str | None, Parameter(help="The system message.")] = None,
    sampling: SamplingFlags | None = None,
    config: ConfigFlag = None,
    settings: ModelFlags | None = None,
) -> None:
    """Talk with a model in the terminal: with a running server, or else with a model loaded
    here.
    """
    converse(make_talker(url, sampling, config, settings, model), system)


def converse(talker: Talker, system: str | None = None) -> None:
    """Read messages from stdin and print the answers, until /exit or the end of the input."""
    interactive = sys.stdin.isatty()
    if interactive:
        print(HELP)
    opening: Messages = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    while (text := read_message(interactive)) is not None:
        if text == "/exit":
            return
        if text == "/new":
            messages = list(opening)
        elif re.fullmatch("/[a-z]+", text):
            print(HELP)
        elif text:
            send_message(talker, messages, text)


def read_message(interactive: bool) -> str | None:
    """Return the next line, or None at the end of the input."""
    try:
        return input("> " if interactive else "").strip()
    except EOFError:
        return None


def send_message(talker: Talker, messages: Messages, text: str) -> None:
    """Send the messages with ``text``, print the answer, and append both to ``messages``.

    If the answer is stopped or fails, ``messages`` stays unchanged.
    """
    messages.append({"role": "user", "content": text})
    try:
        answer = print_stream(talker.ask(messages))
    except KeyboardInterrupt:
        print(" (stopped)")
        messages.pop()
    except CLLMError as error:
        print(f"({error})")
        messages.pop()
    else:
        messages.append({"role": "assistant", "content": answer})
