"""Download models from the Hugging Face Hub to the cache that llama.cpp and all other Hugging Face
tools share.

``huggingface_hub`` does the transport and reads HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_CACHE and
HF_HUB_OFFLINE. It resumes a download after a network failure. If the process is stopped, the next
run downloads that file from its beginning. The library is imported where it is used, because the
import takes 0.6 s.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from cllm.errors import StartupError
from cllm.http_client import explained_proxies, is_on_this_machine, without_proxies
from cllm.models.checkpoint import CONFIG, read_checkpoint
from cllm.models.file_names import (
    Form,
    choose_files,
    choose_form,
    group_files,
    list_checkpoint,
    parse_quantization,
)
from cllm.models.gguf import format_size

Progress = Callable[[str, int, int], None]
"""Called with a file's name, the bytes received, and the file's size in bytes (0 if unknown)."""

SHA256 = re.compile(r"[0-9a-f]{64}")
LINE_EVERY = 10.0  # seconds between two lines if there is no terminal

logger = logging.getLogger(__name__)


def download(
    repo: str,
    quantization: str | None = None,
    progress: Progress | None = None,
    form: Form | None = None,
) -> Path:
    """Download all parts of ``repo``'s model to the local cache, and return the path of the first
    file, or of the folder if the model is a checkpoint.

    ``quantization`` is ``Q4_K_M`` and the like in any case, or a file name; None and ``latest``
    take the usual one (DEFAULT_ORDER). If ``form`` is None, ``choose_form`` decides. Without
    ``progress``, a bar is drawn on stderr. Without a connection, or offline by HF_HUB_OFFLINE, the
    cached files are used.

    Raises StartupError if the repository or the quantization does not exist, or if the disk space
    is not sufficient.
    """
    with _one_line_errors(repo):
        try:
            sizes = _list_files(repo)
        except Exception as error:
            cached = _find_cached_files(repo)
            if not cached:
                raise
            logger.warning(
                "%s: using the cached files, because the hub did not answer (%s)",
                repo,
                type(error).__name__,
            )
            where = f"The cached part of {repo}"
            return find_model(cached, _choose_files(where, cached, quantization, form))
        files = _choose_files(repo, sizes, quantization, form)
        _check_space(repo, {file: sizes[file] for file in files})
        with contextlib.nullcontext(progress) if progress else stderr_progress() as report:
            return find_model({file: _fetch_file(repo, file, report) for file in files}, files)


def _choose_files(
    where: str, files: Iterable[str], quantization: str | None, form: Form | None
) -> list[str]:
    """Return the files of the model to download. Raises StartupError if there are none."""
    files = list(files)
    if (form or choose_form(files, quantization)) == "gguf":
        return choose_files(where, files, quantization)
    if chosen := list_checkpoint(files):
        return chosen
    raise StartupError(f"{where} has no checkpoint with config.json and safetensors")


def find_model(paths: Mapping[str, Path], files: list[str]) -> Path:
    """Return the path of a model with these files: its folder if it is a checkpoint, or else its
    first file. ``paths`` has the path of each file.
    """
    return paths[CONFIG].parent if CONFIG in files else paths[files[0]]


@contextlib.contextmanager
def stderr_progress() -> Iterator[Progress]:
    """Show a bar on a terminal; elsewhere write a line every ten seconds, so that a log shows
    progress.
    """
    if not sys.stderr.isatty():
        yield _line_progress()
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Bars(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bars:
        tasks: dict[str, Any] = {}

        def report(file: str, done: int, total: int) -> None:
            if file not in tasks:
                tasks[file] = bars.add_task(file)
            bars.update(tasks[file], completed=done, total=total or None)

        yield report


def _line_progress() -> Progress:
    last = -LINE_EVERY

    def report(file: str, done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last < LINE_EVERY and done < total:
            return
        last = time.monotonic()
        sys.stderr.write(f"Downloading {file}: {format_size(done)} of {format_size(total)}\n")

    return report


def _list_files(repo: str) -> dict[str, int]:
    """Return all files of the repository with their sizes in bytes; 0 if the hub does not state a
    size.
    """
    from huggingface_hub import HfApi, constants, get_session

    near = is_on_this_machine(constants.ENDPOINT)
    with explained_proxies(), without_proxies() if near else contextlib.nullcontext():
        get_session()  # makes the client that all later calls use
    siblings = HfApi().model_info(repo, files_metadata=True).siblings or []
    return {sibling.rfilename: sibling.size or 0 for sibling in siblings}


def _find_cached_files(repo: str) -> dict[str, Path]:
    """Return the repository's files in the cached snapshot of main, or else in the newest one that
    has a model.
    """
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"
    snapshots = list(filter(_exists, (folder / "snapshots").glob("*")))
    snapshots.sort(key=lambda path: path.stat().st_mtime)
    with contextlib.suppress(OSError):
        snapshots.append(folder / "snapshots" / (folder / "refs" / "main").read_text().strip())
    for snapshot in reversed(snapshots):
        files = {
            path.relative_to(snapshot).as_posix(): path
            for path in snapshot.rglob("*")
            if _exists(path)
        }
        if list_checkpoint(files) or any(file.lower().endswith(".gguf") for file in files):
            return files
    return {}


def _exists(path: Path) -> bool:
    """Return whether a file exists; False if it is in a folder that this user cannot read."""
    try:
        return path.exists()
    except OSError:
        return False


def list_cached() -> dict[str, Path]:
    """Return the complete models in the cache: the first file of each, as owner/repo:quantization
    or owner/repo:file; or as owner/repo, the folder of a checkpoint, if a repository has no others.
    """
    from huggingface_hub import constants

    models: dict[str, Path] = {}
    for folder in sorted(Path(constants.HF_HUB_CACHE).glob("models--*--*")):
        repo = folder.name.removeprefix("models--").replace("--", "/", 1)
        cached = _find_cached_files(repo)
        grouped = group_files(cached)
        for name, files in grouped.items():
            title = f"{repo}:{parse_quantization(name) or name}"
            if title in models:  # several files have this quantization
                title = f"{repo}:{name}"
            models[title] = cached[files[0]]
        if not grouped and list_checkpoint(cached):
            with contextlib.suppress(StartupError):
                models[repo] = read_checkpoint(cached[CONFIG].parent).folder
    return models


def name_in_repo(file: Path) -> str:
    """Return the name that a file of the cache has in its repository."""
    after = file.as_posix().partition("/snapshots/")[2]
    return after.partition("/")[2]


def verify(files: Iterable[Path]) -> None:
    """Check the files of the cache whose SHA-256 is known from the hub. If the hash of a file
    differs, remove the file and raise StartupError.
    """
    for file in files:
        stored = file.resolve()
        if not SHA256.fullmatch(stored.name):  # a small file, or a copy without links
            continue
        with stored.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        if digest != stored.name:
            remove_cached([file])
            raise StartupError(f"{file.name} is damaged and was removed; download it again")


def remove_cached(files: Iterable[Path]) -> int:
    """Remove files of the cache, and what they link to. Return the bytes that are freed. Raises
    OSError.
    """
    freed = 0
    for file in files:
        stored, folder = file.resolve(), file.parent
        repo = next(each for each in file.parents if each.name.startswith("models--"))
        if stored.parent == (repo / "blobs").resolve() or not file.is_symlink():
            freed += stored.stat().st_size
            stored.unlink()
        file.unlink(missing_ok=True)
        while folder.parent.name == "snapshots" or folder.name == "snapshots":
            if any(folder.iterdir()):
                break
            folder.rmdir()
            folder = folder.parent
    return freed


def _check_space(repo: str, sizes: Mapping[str, int]) -> None:
    from huggingface_hub import constants, try_to_load_from_cache

    needed = sum(
        size
        for file, size in sizes.items()
        if not isinstance(try_to_load_from_cache(repo, file), str)
    )
    cache = Path(constants.HF_HUB_CACHE)
    there = next(path for path in (cache, *cache.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise StartupError(
            f"{repo} needs {format_size(needed)} but {cache} has {format_size(free)} free: "
            "free some space, or set HF_HOME to a folder on another disk"
        )


def _fetch_file(repo: str, file: str, progress: Progress) -> Path:
    from huggingface_hub import hf_hub_download

    class FileMeter(_Meter):
        def report(self, done: int, total: int) -> None:
            progress(file, done, total)

    meter: Any = FileMeter  # used like a class of tqdm, without being one
    return Path(hf_hub_download(repo, file, tqdm_class=meter))


class _Meter:
    """The part of tqdm's interface that ``huggingface_hub`` uses, turned into calls of
    ``report``.
    """

    def __init__(self, *, total: float | None = None, initial: float = 0, **_: object) -> None:
        self.n, self.total = initial, total

    def report(self, done: int, total: int) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, num_bytes: float = 1) -> None:
        self.n += num_bytes
        self.report(int(self.n), int(self.total or 0))

    def update_transfer(self, num_bytes: float) -> None:
        """Ignore bytes on the wire: with deduplication they differ from the file's bytes."""

    def set_postfix_str(self, *_: object, **__: object) -> None:
        pass

    set_transfer_postfix_str = set_postfix_str


@contextlib.contextmanager
def _one_line_errors(repo: str) -> Iterator[None]:
    try:
        yield
    except StartupError:
        raise
    except Exception as error:
        raise StartupError(_explain_error(repo, error)) from error


def _explain_error(repo: str, error: Exception) -> str:
    """Return one line with the remedy; huggingface_hub's own messages are paragraphs."""
    import httpx2
    from huggingface_hub import constants, errors

    if isinstance(error, errors.GatedRepoError):
        return (
            f"{repo} is gated: accept its terms at {constants.ENDPOINT}/{repo} and set "
            f"HF_TOKEN to your token"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"There is no model {repo} at {constants.ENDPOINT}; if it is private, set HF_TOKEN to "
            f"your token"
        )
    if isinstance(error, errors.HFValidationError):
        return f"{repo!r} is not the name of a repository; names have the form owner/repo"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return (
            f"HF_HUB_OFFLINE is set and {repo} is not in {constants.HF_HUB_CACHE}; unset it "
            f"to download the model"
        )
    if isinstance(error, errors.HfHubHTTPError) and error.response.status_code in (401, 403):
        return f"{constants.ENDPOINT} denies access to {repo}: set HF_TOKEN to a token with access"
    if isinstance(error, errors.HfHubHTTPError):
        return (
            f"{constants.ENDPOINT} answered {error.response.status_code} for {repo}; try "
            f"again later"
        )
    if isinstance(error, httpx2.NetworkError | httpx2.ProtocolError) and not isinstance(
        error, httpx2.ConnectError
    ):
        return (
            f"The connection to {constants.ENDPOINT} failed during the download of {repo}; "
            "try again"
        )
    if isinstance(error, httpx2.HTTPError | errors.LocalEntryNotFoundError | ConnectionError):
        return (
            f"Cannot reach {constants.ENDPOINT} and {repo} is not in {constants.HF_HUB_CACHE}: "
            f"check the network and HF_ENDPOINT, or give the path of a model "
            f"({type(error).__name__})"
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"The disk is full while downloading {repo}; free some space, or set HF_HOME"
    return f"Cannot download {repo}: {(str(error).strip() or type(error).__name__).splitlines()[0]}"
