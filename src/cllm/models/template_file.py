"""Read a chat template from a file that the settings name."""

from __future__ import annotations

from pathlib import Path

from cllm.errors import StartupError
from cllm.input_files import read_input

MAX_BYTES = 1 << 20


def read_template(name: str | None) -> str:
    """Return the text of the file ``name``, "" without a name. Raises StartupError."""
    if name is None:
        return ""
    path = Path(name).expanduser()
    try:
        data = read_input(path, MAX_BYTES + 1)
        text = data.decode()
    except UnicodeDecodeError:
        raise StartupError(f"the chat template {path} is not UTF-8 text") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise StartupError(f"the chat template {path} cannot be read: {why}") from None
    if len(data) > MAX_BYTES:
        raise StartupError(f"the chat template {path} is longer than 1 MB")
    if not text.strip():
        raise StartupError(f"the chat template {path} is empty")
    return text
