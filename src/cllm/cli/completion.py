"""``cllm --install-completion``."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.completion.detect import ShellDetectionError, detect_shell

from cllm.errors import StartupError

Shell = Literal["bash", "zsh", "fish", "powershell"]


def install(
    *,
    shell: Annotated[
        Shell | None, Parameter(help="The shell. [default: the shell that runs this command]")
    ] = None,
) -> None:
    """Install the completion script for your shell."""
    from cllm.cli.main import app

    try:
        path = app.install_completion(shell=shell or detect_shell())
    except ShellDetectionError:
        raise StartupError("cannot detect the shell; name it with --shell") from None
    except OSError as error:
        raise StartupError(f"cannot install the completion script: {error}") from None
    print(f"Installed {path}. New shells will use it.")
