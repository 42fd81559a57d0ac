"""``cllm generate``."""

from __future__ import annotations

import json
import sys
from typing import Annotated

from cyclopts import Parameter

from cllm.cli.answers import AnswerFacts, AnswerOptions, AnswerPart
from cllm.cli.conversation.printer import join_text, open_printer, print_answer
from cllm.cli.conversation.reader import read_stdin
from cllm.cli.settings_flags import ConfigFlag, ModelFlags
from cllm.cli.talk import PromptFlag, SamplingFlags, UrlFlag, make_talker
from cllm.errors import StartupError


def generate(
    prompt: Annotated[
        str | None,
        Parameter(help="The text to continue, after -- if it begins with a dash. [default: stdin]"),
    ] = None,
    /,
    *,
    prompt_flag: PromptFlag = None,
    stdin: Annotated[bool, Parameter(name="-", help="Read the text from stdin.")] = False,
    chat: Annotated[bool, Parameter(help="Answer the text instead of continuing it.")] = False,
    as_json: Annotated[
        bool, Parameter(name="--json", help="Print one JSON object at the end.")
    ] = False,
    url: UrlFlag = None,
    sampling: SamplingFlags | None = None,
    config: ConfigFlag = None,
    settings: ModelFlags | None = None,
) -> None:
    """Complete one prompt, with a model loaded here or a running server, and print the text while
    it is generated.
    """
    if prompt_flag is not None and prompt is not None:
        raise StartupError("give the prompt as an argument or with --prompt, not both")
    prompt = prompt if prompt_flag is None else prompt_flag
    if prompt is not None and stdin:
        raise StartupError("give the prompt as an argument or with -, not both")
    if prompt is None:
        if sys.stdin.isatty():
            print("cllm: reading the prompt from the terminal; Ctrl-D ends it", file=sys.stderr)
        prompt = read_stdin()
    if not prompt:
        raise StartupError("the prompt is empty; give one as an argument or on stdin")
    talker = make_talker(url, AnswerOptions(dict(sampling or {})), config, settings, chats=chat)
    pieces = talker.ask([{"role": "user", "content": prompt}]) if chat else talker.complete(prompt)
    if as_json:
        print_json(list(pieces), talker.last)
        return
    parts: list[AnswerPart] = []
    print_answer(pieces, open_printer(is_markdown=False), parts)
    if not join_text(parts):
        print()
        if not chat:
            message = "cllm: the model ended the text at once; use --chat to ask it a question"
            print(message, file=sys.stderr)


def print_json(parts: list[AnswerPart], answer: AnswerFacts) -> None:
    """Print an answer with its token counts as one JSON object."""
    content = {"text": join_text(parts), **answer.counts()}
    if reasoning := "".join(part.text for part in parts if part.is_reasoning):
        content["reasoning"] = reasoning
    print(json.dumps(content, ensure_ascii=False))
