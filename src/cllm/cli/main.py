"""The command ``cllm``.

Each subcommand is imported when it is called, so that ``cllm --help`` is quick.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import re
import signal
import sys
from collections.abc import Collection, Sequence
from functools import cache
from itertools import pairwise

from cyclopts import (
    App,
    Argument,
    CycloptsError,
    MissingArgumentError,
    Parameter,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from cllm.cli.streams import flush_stdout, set_error_handling
from cllm.errors import CLLMError, StartupError, describe_os_error
from cllm.process.launch import Popen

SERVE = """Serve a model over HTTP.

MODEL is a GGUF file, a checkpoint's folder or hf:owner/repo[:quantization]. The default is the
built-in model.
"""
CHAT = """Talk with a model in the terminal.

With --url, use a running server. Otherwise load the model here.
"""
GENERATE = """Complete one prompt and print the text.

With --url, use a running server. Otherwise load the model here. With --chat, the model answers the
prompt. Otherwise it continues the text, by 256 tokens unless --max-tokens is given.
"""
# The list of commands shows the first paragraph, and --help of the command all of it.
BENCH = """Measure servers and compare them; make stand-in models.

Start with a running server and cllm bench load, which needs no more.
"""
SIMULATE = """Replay a trace through the scheduler in simulated time.

1. cllm simulate synth trace.jsonl  writes a trace; a server's own trace does too.

2. cllm simulate trace.jsonl  replays it, and prints waiting times and rates.
"""
RPC_WORKER = """Lend this machine's memory and processors to a server on another machine.

The server loads the model, and sends this worker its layers: backend.llama_cpp.rpc names the
workers. Both need a build of llama.cpp with RPC.
"""

COMMANDS = {
    "serve": ("cllm.cli.serve:serve", SERVE),
    "chat": ("cllm.cli.chat:chat", CHAT),
    "generate": ("cllm.cli.generate:generate", GENERATE),
    "pull": ("cllm.cli.models:pull", "Download a model from the Hugging Face hub."),
    "list": ("cllm.cli.models:list_models", "List the models on this machine."),
    "show": ("cllm.cli.models:show", "Show what a model's file says about it."),
    "rm": ("cllm.cli.models:rm", "Remove a downloaded or created model."),
    "cp": ("cllm.cli.models:cp", "Give a model another name."),
    "ps": ("cllm.cli.models:ps", "List the models that a running server has loaded."),
    "run": ("cllm.cli.run:run", "Ask a model, or talk with it, on a server or here."),
    "stop": ("cllm.cli.models:stop", "Unload a model of a running server."),
    "create": (
        "cllm.cli.models:create",
        "Make a model of a running server from a Modelfile.",
    ),
    "launch": (
        "cllm.cli.launch:launch",
        "Start Claude Code, Codex CLI, aider or OpenCode with a running server.",
    ),
    "tune": (
        "cllm.cli.bench.tune:tune",
        "Find the settings that make a model fastest on this machine.",
    ),
    "doctor": (
        "cllm.cli.doctor:doctor",
        "Check whether cLLM works on this machine, and how llama.cpp was built.",
    ),
    "bench": ("cllm.cli.bench.main:app", BENCH),
    "simulate": (
        "cllm.cli.bench.simulate:app",
        SIMULATE,
    ),
    "explain": (
        "cllm.cli.explain:explain",
        "Show what a running server computes, which requests wait, and why.",
    ),
    "trace": ("cllm.cli.trace:trace", "Record what a running server does, for Perfetto."),
    "usage": ("cllm.cli.usage:usage", "Show what accounts have used, by model and day."),
    "top": (
        "cllm.cli.top:top",
        "Watch the requests, engines and models of a running server.",
    ),
    "rpc-worker": ("cllm.cli.rpc_worker:rpc_worker", RPC_WORKER),
    "keys": ("cllm.cli.keys:app", "Create, list and revoke the API keys of a server."),
    "cluster": ("cllm.cli.cluster:app", "Serve from several machines at one address."),
    "config": ("cllm.cli.config:app", "Show the effective settings and describe all of them."),
}
ALIASES = {"list": ("ls",)}


def version() -> str:
    return importlib.metadata.version("cllm")


# Plain text keeps "[default: 1]" from being read as markup, and the Markdown renderer (0.1 s) out
# of --help.
app = App(
    name="cllm",
    help="Serve language models to many users at once.",
    version=version,
    help_format="plaintext",
    default_parameter=Parameter(negative=""),  # few flags have an opposite, such as --no-think
    suppress_keyboard_interrupt=False,
)
for name, (import_path, summary) in COMMANDS.items():
    app.command(import_path, name=name, alias=ALIASES.get(name, ()), help=summary)
app.command(
    "cllm.cli.completion:install",
    name="--install-completion",
    help="Install completion for your shell.",
)


TALKS = ("cllm chat", "cllm run", "cllm generate")  # they take --url


def explain(error: Exception) -> str:
    """Return the error as one line."""
    match error:
        # cyclopts would import every command to name the nearest one.
        case UnknownCommandError(unused_tokens=[word, *_], app=within) if within is app:
            near = difflib.get_close_matches(word, COMMANDS, 1)
            hint = f"did you mean {near[0]}?" if near else "see cllm --help"
            return f'"{word}" is not a command; {hint}'
        case UnknownOptionError():
            return unknown_option(error)
        case UnusedCliTokensError(unused_tokens=[word, *_]):
            return f'Unexpected argument: "{word}". See {command(error)} --help.'
        case MissingArgumentError(keyword=str(option)):
            return f"{option} needs a value."
        case MissingArgumentError(argument=Argument(name=name)):
            similar = str(error).partition(" Did you mean ")[2]
            hint = f"Did you mean {similar}" if similar else f"See {command(error)} --help."
            return f"{command(error).removeprefix('cllm ')} needs {name}. {hint}"
    return " ".join(str(error).split())


def command(error: CycloptsError) -> str:
    return " ".join(["cllm", *(error.command_chain or [])])


def unknown_option(error: UnknownOptionError) -> str:
    word = (error.token.keyword or error.token.value).partition("=")[0]
    names = [name for option in error.argument_collection if option.parse for name in option.names]
    return describe_unknown(command(error), word, names)


def describe_unknown(command: str, word: str, names: Collection[str]) -> str:
    """Return a message about an option that is not among ``names``, the command's options. It names
    a replacement, or the most similar option.
    """
    from cllm.cli.peer_flags import COMMANDS_WITH_HINTS, FLAGS, flags_in

    message = f"Unknown option: {word}."
    if command in TALKS and word in ("--host", "--port"):
        return f"{message} To use a running server, give --url http://127.0.0.1:8000."
    if command in COMMANDS_WITH_HINTS and word in FLAGS:
        where = "" if flags_in(FLAGS[word]) <= set(names) else "With cllm serve: "
        return f"{message} {where}{FLAGS[word]}"
    if command in TALKS and (owners := commands_with(word)):
        return f"{message} {' and '.join(owners)} {'have' if owners[1:] else 'has'} it."
    # leading dashes do not count as similar
    long = {name.lstrip("-"): name for name in names if name.startswith("--")}
    near = difflib.get_close_matches(word.lstrip("-"), long, 1, cutoff=0.7)
    hint = f" Did you mean {long[near[0]]}?" if near else ""
    if command == "cllm generate" and not near:
        hint = " A text that begins with a dash comes last, after --."
    return f"{message}{hint}"


def commands_with(flag: str) -> list[str]:
    """Return those of cllm serve and cllm chat that have a flag."""
    return [f"cllm {name}" for name in ("serve", "chat") if flag in list_names(name)]


@cache
def list_names(command: str) -> frozenset[str]:
    """Return the names of a command's options."""
    options = app[command].assemble_argument_collection()
    return frozenset(name for option in options for name in option.names if name.startswith("-"))


SHORT_FLAG = re.compile("-[A-Za-z]{2,}")


def read_arguments(given: Sequence[str]) -> list[str]:
    """Return the arguments, with a value for --think, which may stand alone before a prompt.

    Flags of other servers that are not needed are left out, with a note on stderr. Raises
    StartupError for an unknown short flag of several letters, such as -ctk of another
    server, which would otherwise be read as -c tk.
    """
    from cllm.cli.peer_flags import COMMANDS_WITH_HINTS, FLAGS, accept_flags

    arguments = list(given)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    command = f"cllm {' '.join(arguments[:1])}"
    if command in COMMANDS_WITH_HINTS:
        if any(argument.partition("=")[0] in FLAGS for argument in arguments[1:end]):
            accepted, notes = accept_flags(arguments[1:end], list_names(arguments[0]))
            arguments[1:end], end = accepted, 1 + len(accepted)
            for note in notes:
                print("cllm:", note, file=sys.stderr)
        for flag in (argument.partition("=")[0] for argument in arguments[1:end]):
            is_short = SHORT_FLAG.fullmatch(flag) or (flag in FLAGS and not flag.startswith("--"))
            if is_short and flag not in (names := list_names(arguments[0])):
                raise StartupError(describe_unknown(command, flag, names))
        for flag, value in pairwise("=".join(arguments[1:end]).split("=")):
            if flag in ("-a", "--alias") and "," in value:  # as llama-server allows
                raise StartupError(f"{flag} takes one name; --model.aliases takes others")
    return [
        "--think=true" if argument == "--think" else argument for argument in arguments[:end]
    ] + arguments[end:]


def install_signal_handlers() -> None:
    """Make signals that end the process raise SystemExit, so that its child processes and temporary
    files are removed.

    ``cllm serve`` installs its own handlers later.
    """
    for name in ("SIGTERM", "SIGHUP"):
        if number := getattr(signal, name, None):
            signal.signal(number, lambda number, _: sys.exit(128 + number))


def main(arguments: Sequence[str] | None = None, launched: Popen[bytes] | None = None) -> None:
    """Run the command line: ``arguments``, or those of the process. Expected errors become one line
    on stderr.

    Commands that take an engine process get ``launched``.

    The exit code is 0; 2 for usage and start-up errors; 130 for Ctrl-C; 141 if the reader of a pipe
    has exited; 128 + n for another signal n.
    """
    if arguments is None:
        install_signal_handlers()
        set_error_handling()
    try:
        try:
            tokens = read_arguments(sys.argv[1:] if arguments is None else arguments)
            # imports the command
            command, bound, given = app.parse_args(tokens, exit_on_error=False, print_error=False)
            if arguments is None and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            command(
                *bound.args,
                **bound.kwargs,
                **({"launched": launched} if "launched" in given else {}),
            )
        finally:
            sys.stdout.flush()
    except (CLLMError, CycloptsError) as error:
        print("cllm:", explain(error), file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        flush_stdout()
        sys.exit(141)
    except OSError as error:
        flush_stdout()
        print("cllm:", describe_os_error(error), file=sys.stderr)
        sys.exit(2)
    except UnicodeEncodeError as error:
        if error.reason != "surrogates not allowed":  # those of an argument that is not UTF-8
            raise
        flush_stdout()
        text = error.object[max(0, error.start - 20) : error.end]
        print(f"cllm: {text!a} is not UTF-8 text", file=sys.stderr)
        sys.exit(2)
