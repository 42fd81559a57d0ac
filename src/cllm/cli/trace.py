"""``cllm trace``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, validators

from cllm.cli.remote import LOCAL, Url, error_message, send
from cllm.errors import CLLMError, StartupError


def trace(
    file: Annotated[Path, Parameter(help="The file to write, such as trace.json.")],
    /,
    *,
    url: Url = LOCAL,
    seconds: Annotated[
        float,
        Parameter(help="How long to record.", validator=validators.Number(gt=0, lte=60)),
    ] = 5.0,
) -> None:
    """Record what a running server does, step by step and request by request, and write a file that
    https://ui.perfetto.dev shows. If the server has API keys, CLLM_API_KEY must be one of an
    administrator.
    """
    params = {"seconds": seconds}
    answer = send(url, "GET", "/debug/trace", params=params, timeout=seconds + 60)
    if answer.status_code != 200:
        raise CLLMError(f"{error_message(answer)} ({url})")
    try:
        file.write_bytes(answer.content)
    except OSError as error:
        raise StartupError(f"{file} cannot be written: {error.strerror}") from None
    print(f"cllm: wrote {file}; open it at https://ui.perfetto.dev", file=sys.stderr)
