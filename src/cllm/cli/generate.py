"""``cllm generate``."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import msgspec
from cyclopts import Parameter

from cllm.cli.settings_flags import ConfigFlag, ModelFlags
from cllm.cli.talk import SamplingFlags, UrlFlag, make_talker, print_stream
from cllm.errors import StartupError


def generate(
    prompt: Annotated[
        str | None,
        Parameter(help="The text to continue, after -- if it begins with a dash. [default: stdin]"),
    ] = None,
    /,
    *,
    stdin: Annotated[
        bool, Parameter(name="-", help="Read the text from stdin.", negative="")
    ] = False,
    chat: Annotated[
        bool, Parameter(help="Answer the text instead of continuing it.", negative="")
    ] = False,
    as_json: Annotated[
        bool, Parameter(name="--json", help="Print one JSON object at the end.", negative="")
    ] = False,
    url: UrlFlag = None,
    sampling: SamplingFlags | None = None,
    config: ConfigFlag = None,
    settings: ModelFlags | None = None,
) -> None:
    """Complete one prompt, with a model loaded here or a running server, and print the text while
    it is generated.
    """
    if prompt is not None and stdin:
        raise StartupError("give the prompt as an argument or with -, not both")
    if prompt is None:
        if sys.stdin.isatty():
            print("cllm: reading the prompt from the terminal; Ctrl-D ends it", file=sys.stderr)
        prompt = sys.stdin.read()
    if not prompt:
        raise StartupError("the prompt is empty; give one as an argument or on stdin")
    talker = make_talker(url, sampling, config, settings)
    pieces = talker.ask([{"role": "user", "content": prompt}]) if chat else talker.complete(prompt)
    if as_json:
        text = "".join(pieces)
        print(json.dumps({"text": text, **msgspec.to_builtins(talker.last)}, ensure_ascii=False))
    elif not print_stream(pieces) and not chat:
        message = "cllm: the model ended the text at once; --chat asks it a question"
        print(message, file=sys.stderr)
