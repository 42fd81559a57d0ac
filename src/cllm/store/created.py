"""Models that clients or commands have created from others: another name, a system message, and
defaults of sampling parameters. One JSON file has them.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgspec

from cllm.errors import StartupError
from cllm.private_files import replace_private

FORMAT = 1  # format of the file; newer versions write higher ones
FILE = "models.json"  # in the folder storage.folder
MAX_MODELS = 1000


class CreatedModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A model that was made from ``base``, the name of the model that computes.

    ``system`` is the system message of conversations that have none. ``sampling`` has defaults by
    their names in the section sampling.
    """

    base: str
    system: str = ""
    sampling: dict[str, Any] = {}


class Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    models: dict[str, CreatedModel]


class CreatedModels:
    """The file in ``folder``. Its methods block. Without a folder, nothing is stored."""

    def __init__(self, folder: Path | None) -> None:
        """Raises StartupError if the file cannot be used."""
        self._path = None if folder is None else folder.expanduser() / FILE
        self._lock = threading.Lock()
        self._models: dict[str, CreatedModel] = {}
        self.read()

    def read(self) -> dict[str, CreatedModel]:
        """Return the models, which a command may have changed. Raises StartupError."""
        if self._path is not None and self._path.exists():
            self._models = read(self._path)
        return self._models

    def put(self, name: str, model: CreatedModel) -> None:
        """Add or replace a model. Raises OSError and StartupError, and ValueError if there are too
        many.
        """
        with self._lock:
            models = self.read()
            if name not in models and len(models) >= MAX_MODELS:
                raise ValueError(f"at most {MAX_MODELS} models can be created")
            self._write({**models, name: model})

    def remove(self, name: str) -> None:
        """Remove a model. Raises OSError and StartupError, and KeyError if there is none of that
        name.
        """
        with self._lock:
            models = dict(self.read())
            del models[name]
            self._write(models)

    def _write(self, models: dict[str, CreatedModel]) -> None:
        if self._path is not None:
            data = msgspec.json.format(msgspec.json.encode(Content(FORMAT, models)))
            replace_private(self._path, data)
        self._models = models


def read(path: Path) -> dict[str, CreatedModel]:
    """Return the models in the file. Raises StartupError."""
    try:
        content = path.read_bytes()
        fields = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
        version = msgspec.json.decode(fields.get("format", b"0"), type=int)
        if version > FORMAT:
            raise StartupError(f"{path} was written by a newer version of cLLM")
        return msgspec.json.decode(content, type=Content).models
    except OSError as error:
        raise StartupError(f"{path}: cannot be read: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise StartupError(f"{path} is damaged: {error}") from None
