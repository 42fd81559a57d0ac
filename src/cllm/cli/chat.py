"""``cllm chat``."""

from __future__ import annotations

import sys

from cllm.cli.answers import AnswerOptions, AnswerPart, Messages, Talker, read_schema
from cllm.cli.conversation.conversation import Conversation
from cllm.cli.conversation.printer import (
    CONTROL,
    open_printer,
    print_answer,
    print_dim,
    silence_keyboard,
)
from cllm.cli.conversation.reader import CONTINUED, PROMPT, open_reader
from cllm.cli.conversation.slash_commands import SlashCommands
from cllm.cli.settings_flags import ConfigFlag, ModelArgument, ModelFlags
from cllm.cli.talk import (
    FormatFlag,
    HideFlag,
    SamplingFlags,
    SystemFlag,
    ThinkFlag,
    UrlFlag,
    make_talker,
)
from cllm.errors import CLLMError

MAX_SHOWN = 20  # messages of a loaded conversation
LEAVE = "Ctrl-C once more, Ctrl-D or /bye leaves."


def chat(
    model: ModelArgument = None,
    /,
    *,
    url: UrlFlag = None,
    system: SystemFlag = None,
    schema: FormatFlag = None,
    think: ThinkFlag = None,
    hide_thinking: HideFlag = False,
    sampling: SamplingFlags | None = None,
    config: ConfigFlag = None,
    settings: ModelFlags | None = None,
) -> None:
    """Talk with a model, which is loaded here or, with --url, belongs to a running server."""
    options = AnswerOptions(dict(sampling or {}), read_schema(schema), think)
    talker = make_talker(url, options, config, settings, model)
    converse(talker, system or "", hides_reasoning=hide_thinking)


def converse(talker: Talker, system: str = "", *, hides_reasoning: bool = False) -> None:
    """Read messages from stdin and print the answers, until /bye or the end of the input.

    On a terminal, Ctrl-C stops an answer or a command, an error is printed, and the conversation
    continues. Otherwise KeyboardInterrupt and CLLMError are raised.
    """
    conversation = Conversation(system)
    commands = SlashCommands(talker, conversation)
    reader = open_reader(commands.complete)
    was_stopped = False  # by Ctrl-C; another Ctrl-C then ends the chat
    while not commands.has_ended:
        try:
            text = reader.read()
        except KeyboardInterrupt:
            if was_stopped or not reader.is_interactive:
                raise
            was_stopped = True
            print_dim(LEAVE)
            continue
        was_stopped = False
        if text is None:
            return
        try:
            with silence_keyboard():
                printed = commands.run(text)
                if commands.has_loaded:
                    commands.has_loaded = False
                    print_messages(conversation.messages)
                if printed is not None:
                    print(printed, end="\n" if printed else "")
                elif text:
                    answer(talker, conversation, text, hides_reasoning=hides_reasoning)
                    if reader.is_interactive and commands.is_verbose:
                        print_dim(str(talker.last))
        except KeyboardInterrupt:
            if not reader.is_interactive:
                raise
            was_stopped = True
            print_dim("(stopped)")
        except CLLMError as error:
            if not reader.is_interactive:
                raise
            print("cllm:", error, file=sys.stderr)


def print_messages(messages: Messages) -> None:
    """Print the last messages of a loaded conversation as they were shown."""
    shown = messages[-MAX_SHOWN:]
    if len(shown) < len(messages):
        print_dim(f"... {len(messages) - len(shown)} earlier messages")
    for message in shown:
        if message["role"] == "user":
            print(PROMPT + message["content"].translate(CONTROL).replace("\n", f"\n{CONTINUED}"))
        else:
            print_answer((part for part in [AnswerPart(message["content"])]), open_printer(), [])


def answer(talker: Talker, conversation: Conversation, text: str, *, hides_reasoning: bool) -> None:
    """Send the conversation with ``text``, print the answer and add both to the conversation.

    Raises CLLMError, and KeyboardInterrupt. The part of the answer that has arrived is kept.
    """
    conversation.ask(text)
    parts: list[AnswerPart] = []
    try:
        printer = open_printer(hides_reasoning=hides_reasoning)
        print_answer(talker.ask(conversation.outgoing()), printer, parts)
    finally:
        conversation.answer(parts)
