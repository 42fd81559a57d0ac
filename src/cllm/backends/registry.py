"""The backends, by name.

Importing this module imports no backend: ``cllm.config`` needs only the options, the API process
only the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from cllm.backends.base import Backend, Vocabulary
    from cllm.backends.params import BackendParams, ModelSize, SingleGpu
    from cllm.models.hub import Progress

BACKENDS = (
    "llama_cpp",
    "torch",
    "fake",
)
"""The folders next to this file that contain a backend; the first one reads GGUF files.

``options.py`` defines ``Options``, a pydantic model of the backend's options, and ``SUMMARY``, the
words after the backend's name in the help of ``backend.name``. It imports pydantic only.
``loader.py`` has the functions of ``Loader``.
"""


class Loader(Protocol):
    """The functions of ``backends/<name>/loader.py``.

    Importing the module imports neither NumPy nor pydantic nor the backend's library, because
    commands and the engine process import it at their start. Its functions import what they need.
    ``COPIED_SHARE`` is the share of the weights that the library has in RAM twice, roughly.
    """

    COPIED_SHARE: float

    def resolve(
        self, name: str | None, quantization: str | None = None, progress: Progress | None = None
    ) -> Path | None:
        """Return the file of the model ``name`` (None: the default), downloaded if necessary, or
        None if the backend needs no file.

        ``quantization`` selects among the files of a repository. ``progress`` is passed to
        ``hub.download``. Raises StartupError if there is no such model.
        """
        ...

    def measure(self, params: BackendParams, *, check_tokens: bool = False) -> ModelSize | None:
        """Return the size of the model at ``params.path``, or None if there is no file to measure.

        It reads only the file's header, and passes ``check_tokens`` to ``gguf.read_header``. Raises
        StartupError if the file is not a model, or if its cells cannot have ``params.kv_type``.
        """
        ...

    def measure_gpus(self, params: BackendParams) -> int | None:
        """Return the free memory in bytes of the GPUs that will hold the weights; 0 if it is
        unknown, None if none will. Raises StartupError if the backend's library cannot be loaded.
        """
        ...

    def find_gpus(self, params: BackendParams) -> list[SingleGpu]:
        """Return the GPUs of which each engine may get one; none if the backend has none, or if the
        options say which to use. It runs in the API process, and does not load the library there.
        """
        ...

    def may_divide_cores(self, params: BackendParams) -> bool:
        """Return whether engines on the NUMA nodes of a machine are faster than one on all, as far
        as the options say.
        """
        ...

    def load(
        self,
        params: BackendParams,
        progress: Callable[[float], None] | None = None,
        on_abort: Callable[[str], None] = lambda _: None,
    ) -> Backend:
        """Load the model. Raises StartupError if it cannot be loaded.

        ``progress`` is called with the loaded share, 0 to 1, and ``on_abort`` with the reason just
        before the load aborts the process.
        """
        ...

    def load_vocabulary(self, params: BackendParams) -> Vocabulary:
        """Load only the vocabulary, without weights. Raises StartupError if the file cannot be
        read; a damaged file may abort the process.
        """
        ...


AUTO = "auto"
"""The name in the settings that stands for the backend that reads a model's files."""


def choose_backend(name: str, path: Path | None) -> str:
    """Return the backend that ``name`` means for the model at ``path``, a file or a folder."""
    if name != AUTO:
        return name
    return "torch" if path is not None and path.is_dir() else BACKENDS[0]


def import_options(backend: str) -> ModuleType:
    """Return the module ``options.py`` of one of BACKENDS."""
    return import_module(f"cllm.backends.{backend}.options")


def import_loader(backend: str) -> Loader:
    """Return the module ``loader.py`` of one of BACKENDS."""
    return cast(Loader, import_module(f"cllm.backends.{backend}.loader"))
