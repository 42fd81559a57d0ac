"""``cllm generate``."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import msgspec
from cyclopts import Parameter

from cllm.cli.settings_flags import ConfigFlag, ModelFlags, settings_from_flags
from cllm.cli.talk import DEFAULTS, Local, Sampling, Talker, print_stream
from cllm.errors import StartupError


def generate(
    prompt: Annotated[
        str | None, Parameter(help="The text to continue; - or nothing reads it from stdin.", allow_leading_hyphen=True)
    ] = None,
    /,
    *,
    chat: Annotated[bool, Parameter(help="Ask it as a question instead of continuing it.", negative="")] = False,
    as_json: Annotated[bool, Parameter(name="--json", help="Print one JSON object at the end.", negative="")] = False,
    sampling: Sampling = DEFAULTS,
    config: ConfigFlag = None,
    settings: ModelFlags | None = None,
) -> None:
    """Complete one prompt with a model in this process and print the text as it comes."""
    if prompt is None or prompt == "-":
        prompt = sys.stdin.read()
    if not prompt:
        raise StartupError("there is no prompt: give one, or pipe it in")
    talker: Talker = Local(settings_from_flags(config, settings), sampling)
    pieces = talker.ask([{"role": "user", "content": prompt}]) if chat else talker.complete(prompt)
    if as_json:
        text = "".join(pieces)
        print(json.dumps({"text": text, **msgspec.to_builtins(talker.last)}, ensure_ascii=False))
    else:
        print_stream(pieces)
