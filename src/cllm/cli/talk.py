"""The flags that ``cllm chat``, ``run`` and ``generate`` share, and the choice of the server or the
model in this process that answers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

from cyclopts import Parameter

from cllm.cli.answers import AnswerOptions, Talker, Think
from cllm.cli.peer_flags import OTHER_SAMPLING_NAMES
from cllm.cli.remote import Remote
from cllm.cli.settings_flags import settings_from_flags
from cllm.config.settings import OPTIONS
from cllm.core.params import PARAMETERS
from cllm.errors import StartupError

UrlFlag = Annotated[
    str | None, Parameter(help="A running server, e.g. http://127.0.0.1:8000. [env: CLLM_URL]")
]
PromptFlag = Annotated[
    str | None, Parameter(name=["--prompt", "-p"], help="The prompt, the same as the argument.")
]
SystemFlag = Annotated[
    str | None,
    Parameter(name=["--system", "-sys", "--system-prompt"], help="The system message."),
]
FormatFlag = Annotated[
    str | None,
    Parameter(
        name="--format", help="The form of the answers: json, a JSON schema, or a file with one."
    ),
]
ThinkFlag = Annotated[
    Think | None,
    Parameter(
        help="Let the model reason before it answers, or not; --think=low, =medium or =high say "
        "how much. [default: as the model's template does]",
        negative="--no-think",
        show_choices=False,
    ),
]
HideFlag = Annotated[
    bool, Parameter(name=["--hide-thinking", "--hidethinking"], help="Do not show reasoning.")
]


# The sampling parameters of the configuration, and the seed: their types and help.
SAMPLING: dict[str, tuple[Any, str]] = {
    "max_tokens": (int, "Largest number of tokens in an answer."),
    **{
        name: (parameter.type, parameter.help)
        for name, parameter in PARAMETERS.items()
        if parameter.default is not None or name == "seed"
    },
}


def sampling_flag(name: str) -> Any:
    kind, text = SAMPLING[name]
    names = [f"--{name.replace('_', '-')}", *OTHER_SAMPLING_NAMES.get(name, ())]
    return Annotated[kind, Parameter(name=names, help=text)]


if TYPE_CHECKING:
    SamplingFlags = dict[str, Any]
else:
    # It contains only the given ones. The model or the server chooses the others.
    given: Any = TypedDict("SamplingFlags", {n: sampling_flag(n) for n in SAMPLING}, total=False)
    SamplingFlags = Annotated[given, Parameter(name="*")]


def make_talker(
    url: str | None,
    options: AnswerOptions,
    config: Path | None,
    settings: Mapping[str, object] | None,
    model: str | None = None,
    *,
    chats: bool = True,
) -> Talker:
    """Return a client of the server at ``url`` (or at CLLM_URL if no model is named), or load a
    model here with these settings. ``Local`` explains ``chats``.

    Raises StartupError.
    """
    of_a_model = [OPTIONS[key].flag for key in settings or {}]
    of_a_model += [
        word for word, given in ((f"the model {model}", model), ("--config", config)) if given
    ]
    if url and of_a_model:
        raise StartupError(
            f"--url uses the model of a running server; remove --url or {of_a_model[0]}"
        )
    if not of_a_model:
        url = url or os.environ.get("CLLM_URL")
    if url:
        return Remote(url, options)
    from cllm.cli.local import Local

    given = dict(settings or {})
    others = {key: value for key, value in given.items() if key != "model.path"}
    loaded = settings_from_flags(config, given, model)
    return Local(loaded, options, partial(settings_from_flags, config, others), chats=chats)
