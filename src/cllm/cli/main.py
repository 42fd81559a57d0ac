"""The command ``cllm``; each subcommand is imported when it is called, so that ``cllm --help`` stays quick."""

from __future__ import annotations

import difflib
import importlib.metadata
import os
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError, UnknownCommandError

from cllm.errors import CLLMError

COMMANDS = {
    "serve": ("cllm.cli.serve:serve", "Serve a model over HTTP."),
    "chat": ("cllm.cli.chat:chat", "Talk with a model in the terminal."),
    "generate": ("cllm.cli.generate:generate", "Complete one prompt and print the text."),
    "doctor": ("cllm.cli.doctor:doctor", "Check this machine and say what cLLM will do on it."),
    "bench": ("cllm.cli.bench:app", "Measure a server under load."),
    "simulate": ("cllm.cli.simulate:app", "Replay a trace through the scheduler in simulated time."),
    "explain": ("cllm.cli.explain:explain", "Say how a running server fills its steps, who waits, and why."),
    "config": ("cllm.cli.config:app", "Show the effective settings and describe all of them."),
}


def version() -> str:
    return importlib.metadata.version("cllm")


# Plain text keeps "[default: 1]" from being read as markup, and the Markdown renderer (0.1 s) out of --help.
app = App(
    name="cllm",
    help="Serve GGUF language models to many people at once.",
    version=version,
    help_format="plaintext",
    suppress_keyboard_interrupt=False,
)
for name, (import_path, summary) in COMMANDS.items():
    app.command(import_path, name=name, help=summary)
app.register_install_completion_command(help="Install completion for your shell.")


def explain(error: Exception) -> str:
    """The error on one line."""
    # cyclopts would import every command to name the nearest one.
    if isinstance(error, UnknownCommandError) and error.app is app and error.unused_tokens:
        near = difflib.get_close_matches(error.unused_tokens[0], COMMANDS, 1)
        hint = f"did you mean {near[0]}?" if near else "see cllm --help"
        return f'"{error.unused_tokens[0]}" is not a command; {hint}'
    return " ".join(str(error).split())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; an error that was foreseen is one line on stderr.

    arguments: None takes those of the process.

    Exit codes: 0; 2 for usage and start-up errors; 130 for Ctrl-C; 141 when the reader of a pipe has gone.
    """
    try:
        try:
            app(sys.argv[1:] if arguments is None else arguments, exit_on_error=False, print_error=False)
        finally:
            sys.stdout.flush()
    except (CLLMError, CycloptsError) as error:
        print("cllm:", explain(error), file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The interpreter flushes stdout once more when it ends; that must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
