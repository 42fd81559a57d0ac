"""``cllm --install-completion``."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.completion.detect import ShellDetectionError, detect_shell

from cllm.errors import StartupError

Shell = Literal["bash", "zsh", "fish", "powershell"]


def install(
    *, shell: Annotated[Shell | None, Parameter(help="The shell; it is found out if it is not given.")] = None
) -> None:
    """Write the completion script where the shell looks for it."""
    from cllm.cli.main import app

    try:
        path = app.install_completion(shell=shell or detect_shell())
    except ShellDetectionError:
        raise StartupError("it cannot be told which shell this is: name it with --shell") from None
    except OSError as error:
        raise StartupError(f"the completion cannot be installed: {error}") from None
    print(f"{path} is installed and read by shells that start from now on")
