"""``cllm pull``, ``list``, ``show``, ``rm`` and ``cp`` for models on this machine; ``ps``, ``stop``
and ``create`` for those of a running server.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from cyclopts import Parameter

from cllm.cli.conversation.reader import read_stdin
from cllm.cli.remote import LOCAL, Url, call
from cllm.cli.settings_flags import ConfigFlag, settings_from_flags
from cllm.cli.table import format_table
from cllm.config.sources import LoadedConfig
from cllm.errors import CLLMError, StartupError
from cllm.input_files import read_input_text
from cllm.models import catalog, hub
from cllm.models.description import describe_model, measure_files
from cllm.models.file_names import SPLIT, find_matching
from cllm.models.gguf import format_size
from cllm.models.model_file import list_files
from cllm.models.task import find_task
from cllm.store.created import CreatedModel, CreatedModels

Json = Annotated[bool, Parameter(name="--json", help="Print JSON.")]
Name = Annotated[str, Parameter(help="A model's name.")]
FolderFlag = Annotated[
    str | None,
    Parameter(
        name=["--models.folder", "--models-dir"],
        help="A folder of models, as for cllm serve. [default: models.folder]",
    ),
]


class InstalledModel(NamedTuple):
    """A model on this machine: its first file, or the folder of a checkpoint. ``kind`` says where
    its name comes from. A created model is made from the model ``base``, which may be missing.
    """

    name: str
    path: Path | None
    kind: str
    base: str = ""

    @property
    def files(self) -> list[Path]:
        return [] if self.path is None else list_files(self.path)

    @property
    def size(self) -> int:
        return measure_files(self.files)


def pull(
    name: Annotated[str, Parameter(help="hf:owner/repo[:quantization].")],
    /,
    *,
    as_json: Json = False,
) -> None:
    """Download a model into the Hugging Face cache and check it. An interrupted download is
    continued.
    """
    if not catalog.is_on_hub(name):
        raise StartupError(f"{name} is not on the hub; write hf:owner/repo or hf:owner/repo:Q4_K_M")
    with hub.stderr_progress() as progress:
        path = catalog.resolve(name, None, progress)
    files = list_files(path)
    hub.verify(files)
    size = measure_files(files)
    own_name = catalog.derive_model_name(path)
    if as_json:
        print(json.dumps({"name": own_name, "size": size, "files": list(map(str, files))}))
    else:
        print(f"{own_name}: {format_size(size)}, {path}")


def list_models(
    *, folder: FolderFlag = None, config: ConfigFlag = None, as_json: Json = False
) -> None:
    """List the models on this machine: the built-in one, those in the Hugging Face cache, and
    those of the settings or of a folder. A running server shows its models on its page; see also
    cllm ps.
    """
    loaded = read_settings(folder, config)
    entries = list_installed(loaded)
    if as_json:
        print(json.dumps([describe(entry) for entry in entries], indent=2))
        return
    rows = [
        (entry.name, format_size(entry.size) if entry.files else "", age(entry), entry.kind)
        for entry in entries
    ]
    print(format_table([("NAME", "SIZE", "MODIFIED", "FROM"), *rows]))
    stored = {file.resolve() for entry in entries for file in entry.files}
    print(f"{format_size(measure_files(stored))} in all", file=sys.stderr)
    if loaded.settings.models.folder is None:
        print("cllm: --models.folder FOLDER also lists those of a folder", file=sys.stderr)


def read_settings(folder: str | None, config: Path | None) -> LoadedConfig:
    """Return the settings, with ``folder`` as models.folder if it is given. Raises StartupError."""
    return settings_from_flags(config, {} if folder is None else {"models.folder": folder})


def show(
    name: Name,
    /,
    *,
    folder: FolderFlag = None,
    config: ConfigFlag = None,
    as_json: Json = False,
) -> None:
    """Show what a model's files say about it."""
    loaded = read_settings(folder, config)
    entry = find(list_installed(loaded), name)
    path = (entry and entry.path) or catalog.resolve(name)
    model = describe_model(path)
    kv_bytes = model.kv_bytes_per_token if find_task(path) != "embedding" else None
    facts = {
        "name": entry.name if entry else name,
        "path": str(path),
        "size": format_size(model.num_bytes),
        "format": model.form,
        "architecture": model.architecture,
        "parameters": f"{model.num_parameters / 1e6:.1f} M",
        "quantization": model.quantization,
        "context length": model.context_length,
        "layers": model.num_layers,
        "embedding length": model.embedding_length,
        "KV cache per token": f"{kv_bytes / 1000:.1f} kB" if kv_bytes else "",
        "chat template": "yes" if model.template else "no",
        "license": model.license,
    }
    facts = {key: value for key, value in facts.items() if value not in ("", None)}
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    print(format_table([*facts.items()]))


def rm(name: Name, /, *others: Name, config: ConfigFlag = None) -> None:
    """Remove models from the Hugging Face cache, or models that were created or copied."""
    loaded = settings_from_flags(config, None)
    for one in (name, *others):
        remove(loaded, one)


def remove(loaded: LoadedConfig, name: str) -> None:
    """Remove a model. Raises StartupError if it is unknown or cLLM must not remove it."""
    entry = find(list_installed(loaded), name)
    if entry is None:
        raise StartupError(f"there is no model {name}; see cllm list")
    if entry.kind == "created":
        created_models(loaded).remove(entry.name)
        print(f"removed {entry.name}")
    elif entry.kind == "hub":
        freed = hub.remove_cached(entry.files)
        print(f"removed {entry.name}, {format_size(freed)}")
    else:
        raise StartupError(f"{entry.name} is not in the Hugging Face cache; remove it yourself")


def cp(
    source: Name,
    destination: Name,
    /,
    *,
    folder: FolderFlag = None,
    config: ConfigFlag = None,
) -> None:
    """Give a model another name. Servers with the same storage.folder serve it under that name
    after their next start.
    """
    loaded = read_settings(folder, config)
    entries = list_installed(loaded)
    entry, created = find(entries, source), created_models(loaded)
    if entry is None:
        raise StartupError(f"there is no model {source}; see cllm list")
    other = find(entries, destination)
    if other is not None and other.kind != "created":
        raise StartupError(f"{destination} is the name of another model")
    model = created.read().get(entry.name) or CreatedModel(entry.name)
    created.put(destination, model)
    print(f"{destination} is {model.base}")


def ps(*, url: Url = LOCAL, as_json: Json = False) -> None:
    """List the models that a running server has loaded."""
    try:
        models = call(url, "GET", "/api/ps")["models"]
        rows = [
            (
                model["name"],
                format_size(model["size_used"]) if "size_used" in model else "",
                format_size(model["size"]),
                describe_processor(model),
                model["context_length"],
                "for ever" if model["expires_at"].startswith("2999") else model["expires_at"],
            )
            for model in models
        ]
    except (LookupError, TypeError, AttributeError):
        raise CLLMError(f"the server at {url} does not support /api/ps") from None
    if as_json:
        print(json.dumps(models, indent=2))
        return
    head = ("NAME", "MEMORY", "UP TO", "PROCESSOR", "CONTEXT", "UNTIL")
    print(format_table([head, *rows]))


def describe_processor(model: dict[str, Any]) -> str:
    """Return where a model of /api/ps computes. Servers other than cLLM give fewer details."""
    engines = model.get("engines", 1)
    text = "GPU" if model["size_vram"] else "CPU"
    text += f", {engines} engines" if engines > 1 else ""
    return text + (", shared cores" if model.get("shares_cores") else "")


def stop(model: Name, /, *, url: Url = LOCAL) -> None:
    """Unload a model of a running server, once its requests have ended."""
    call(url, "POST", "/models/unload", {"model": model})
    print(f"{model} is unloaded")


def create(
    name: Name,
    /,
    *,
    modelfile: Annotated[
        Path,
        Parameter(
            name=["--file", "-f"],
            help="The Modelfile; - is stdin.",
            allow_leading_hyphen=True,
        ),
    ] = Path("Modelfile"),
    url: Url = LOCAL,
) -> None:
    """Make a model of a running server from another one, with a system message and parameters of
    its own, as a Modelfile describes it. The server needs server.allow_model_changes.
    """
    try:
        text = read_stdin() if str(modelfile) == "-" else read_input_text(modelfile)
    except OSError as error:
        raise StartupError(f"cannot read {modelfile}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise StartupError(f"{modelfile} is not UTF-8 text") from None
    call(url, "POST", "/api/create", {"model": name, "modelfile": text, "stream": False})
    print(f"{name} is created")


def resolve_model(loaded: LoadedConfig, name: str) -> Path:
    """Return the file of a model: one that ``cllm list`` shows, a file, or one on the hub, which is
    downloaded if necessary. Raises StartupError.
    """
    entry = find(list_installed(loaded), name)
    if entry is not None and entry.path is not None:
        return entry.path
    with hub.stderr_progress() as progress:
        return catalog.resolve(name, None, progress)


def list_installed(loaded: LoadedConfig) -> list[InstalledModel]:
    """Return the models on this machine. Raises StartupError."""
    entries = [InstalledModel(catalog.BUILTIN_NAME, catalog.BUILTIN, "built in")]
    for name, settings in loaded.models.items():
        path = settings.model.path
        if path is not None and not catalog.is_on_hub(path):
            entries.append(InstalledModel(name, catalog.resolve(path), "settings"))
    if loaded.settings.models.folder is not None:
        folder = Path(loaded.settings.models.folder).expanduser()
        entries += [
            InstalledModel(name, path, "folder")
            for name, path in catalog.list_folder(folder).items()
        ]
    entries += [InstalledModel(name, path, "hub") for name, path in hub.list_cached().items()]
    for name, model in created_models(loaded).read().items():
        base = find(entries, model.base)
        entries.append(InstalledModel(name, base.path if base else None, "created", model.base))
    return entries


def find(entries: list[InstalledModel], name: str) -> InstalledModel | None:
    """Return the model ``name``, the only one in the repository ``name``, or the one that
    ``cllm pull`` gets for ``name``. Raises StartupError if there are several.
    """
    name = catalog.strip_hub(name).lower()
    names = (name, name.removesuffix(":latest"))
    matching = [entry for entry in entries if entry.name.lower() in names][:1]
    repo, _, tag = name.partition(":")
    if not matching and tag:
        cached = {
            SPLIT.sub(".gguf", hub.name_in_repo(entry.path)): entry
            for entry in entries
            if entry.path and entry.kind == "hub" and entry.name.lower().startswith(f"{repo}:")
        }
        matching = [cached[file] for file in find_matching({file: [] for file in cached}, tag)]
    elif not matching:
        matching = [entry for entry in entries if entry.name.lower().startswith(f"{name}:")]
    if len(matching) > 1:
        there = ", ".join(entry.name for entry in matching)
        raise StartupError(f"{name} has several models; name one: {there}")
    return next(iter(matching), None)


def created_models(loaded: LoadedConfig) -> CreatedModels:
    folder = loaded.settings.storage.folder
    return CreatedModels(None if folder is None else Path(folder))


def describe(entry: InstalledModel) -> dict[str, Any]:
    return {
        "name": entry.name,
        "size": entry.size,
        "from": entry.kind,
        "base": entry.base,
        "files": list(map(str, entry.files)),
    }


def age(entry: InstalledModel) -> str:
    """Return the day on which a model was stored."""
    files = entry.files
    return time.strftime("%Y-%m-%d", time.localtime(files[0].stat().st_mtime)) if files else ""
