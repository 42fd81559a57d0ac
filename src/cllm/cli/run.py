"""``cllm run``."""

from __future__ import annotations

import os
import sys
from typing import Annotated

from cyclopts import Parameter

from cllm.cli.answers import AnswerOptions, AnswerPart, Talker, read_schema
from cllm.cli.chat import converse
from cllm.cli.conversation.printer import open_printer, print_answer, print_dim
from cllm.cli.conversation.reader import read_stdin
from cllm.cli.models import created_models, resolve_model
from cllm.cli.remote import LOCAL, Remote, call
from cllm.cli.settings_flags import settings_from_flags
from cllm.cli.talk import FormatFlag, HideFlag, PromptFlag, SamplingFlags, SystemFlag, ThinkFlag
from cllm.config.sources import LoadedConfig
from cllm.errors import StartupError
from cllm.models import catalog


def run(
    model: Annotated[str, Parameter(help="A model's name, hf:owner/repo:Q4_K_M, or a file.")],
    /,
    *prompt: Annotated[
        str, Parameter(help="A question; text on stdin precedes it. [default: a conversation]")
    ],
    prompt_flag: PromptFlag = None,
    url: Annotated[
        str | None,
        Parameter(help=f"The server's address. [default: {LOCAL}] [env: CLLM_URL]"),
    ] = None,
    system: SystemFlag = None,
    schema: FormatFlag = None,
    think: ThinkFlag = None,
    hide_thinking: HideFlag = False,
    verbose: Annotated[bool, Parameter(help="Print timings on stderr after the answer.")] = False,
    keep_alive: Annotated[
        str | None,
        Parameter(
            name=["--keep-alive", "--keepalive"],
            help="How long the server keeps the model loaded, such as 5m; needs "
            "server.allow_model_changes.",
        ),
    ] = None,
    sampling: SamplingFlags | None = None,
) -> None:
    """Ask a model, or talk with it, as ``ollama run`` does.

    A running server answers, and loads the model if necessary. If there is no server, or the server
    at the default address does not have the model, the model is loaded here. It is downloaded first
    if it is on the hub.
    """
    options = AnswerOptions(dict(sampling or {}), read_schema(schema), think)
    question = " ".join(filter(None, (*prompt, prompt_flag)))
    if not sys.stdin.isatty():
        question = "\n\n".join(filter(None, (read_stdin().strip(), question)))
    talker, own_system = open_talker(model, url, options, keep_alive)
    system = system or own_system
    if not question:
        if not sys.stdin.isatty():
            raise StartupError("there is no prompt; give one as an argument or on stdin")
        converse(talker, system, hides_reasoning=hide_thinking)
        return
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": question})
    parts: list[AnswerPart] = []
    printer = open_printer(hides_reasoning=hide_thinking)
    print_answer(talker.ask(messages), printer, parts)
    if verbose:
        print_dim(str(talker.last))


def open_talker(
    model: str, url: str | None, options: AnswerOptions, keep_alive: str | None
) -> tuple[Talker, str]:
    """Return the server or the model that answers, and the model's system message if it is known.

    Raises StartupError and CLLMError.
    """
    given = url or os.environ.get("CLLM_URL")
    remote, why = None, f"there is no server at {LOCAL}"
    try:
        remote = Remote(given or LOCAL, options)
    except StartupError:
        if given:
            raise
    if remote is not None:
        why = f"the server at {LOCAL} does not have it"
        names = dict.fromkeys((model, catalog.strip_hub(model)))
        remote.model = next(filter(remote.knows, names), "")
        if given and not remote.model:
            remote.model = pull(given, model)
        if remote.model:
            remote.shows_loading = True
            if keep_alive is not None:
                body = {"model": remote.model, "keep_alive": keep_alive, "stream": False}
                call(given or LOCAL, "POST", "/api/generate", body)
            return remote, ""
    if keep_alive is not None:
        raise StartupError(f"--keep-alive needs a server that has {model}; {why}")
    return open_local(model, options, why)


def pull(url: str, model: str) -> str:
    """Let a server download a model that it does not have, if it is on the hub and the server
    allows it. Return its name. Raises CLLMError.
    """
    if catalog.is_on_hub(model):
        call(url, "POST", "/api/pull", {"model": model, "stream": False})
    return catalog.strip_hub(model)


def open_local(model: str, options: AnswerOptions, why: str) -> tuple[Talker, str]:
    """Load a model here. Return it and its system message. ``why`` says why no server answers.

    Raises StartupError.
    """
    from cllm.cli.local import Local

    def load(name: str | None) -> LoadedConfig:
        return settings_from_flags(None, None, name)

    loaded = load(None)
    created = created_models(loaded).read().get(model)
    if created is not None:
        options.sampling = {**created.sampling, **options.sampling}
    path = resolve_model(loaded, model)
    print(f"cllm: loading {model} in this process, because {why}", file=sys.stderr)
    return Local(load(str(path)), options, load), created.system if created else ""
