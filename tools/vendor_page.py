"""Fetches the libraries of the page at / from npm into src/cllm/server/ui/vendor.

To take a newer version, change PACKAGES and run:  python tools/vendor_page.py

npm must be installed. The files are the packages' own. Only names of other packages in their
imports are replaced by file names, because browsers do not know packages, and references to source
maps are removed.
"""

from __future__ import annotations

import re
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import NamedTuple

VENDOR = Path(__file__).parents[1] / "src" / "cllm" / "server" / "ui" / "vendor"
LANGUAGES = (
    *("bash", "c", "cpp", "csharp", "css", "diff", "go", "ini", "java", "javascript", "json"),
    *("markdown", "php", "python", "ruby", "rust", "sql", "typescript", "xml", "yaml"),
)


class Package(NamedTuple):
    """A package of npm. files: the names under VENDOR by the names in the package."""

    name: str
    version: str
    licence: str
    files: dict[str, str]


PACKAGES = (
    Package(
        "preact",
        "11.2.0",
        "LICENSE",
        {"dist/preact.mjs": "preact.js", "hooks/dist/hooks.mjs": "preact-hooks.js"},
    ),
    Package("htm", "3.1.1", "LICENSE", {"dist/htm.module.js": "htm.js"}),
    Package("marked", "18.2.1", "LICENSE", {"lib/marked.esm.js": "marked.js"}),
    Package("dompurify", "3.4.18", "LICENSE", {"dist/purify.es.mjs": "dompurify.js"}),
    Package("idb-keyval", "6.3.0", "LICENCE", {"dist/index.js": "idb-keyval.js"}),
    Package(
        "@highlightjs/cdn-assets",
        "11.12.0",
        "LICENSE",
        {
            "es/core.min.js": "highlight.js",
            **{f"es/languages/{name}.min.js": f"languages/{name}.js" for name in LANGUAGES},
        },
    ),
)
IMPORTS = {"preact": "./preact.js"}


def main() -> None:
    (VENDOR / "languages").mkdir(parents=True, exist_ok=True)
    for old in VENDOR.rglob("*.*"):
        old.unlink()
    licences = ["The libraries in this folder, and their licences.\n"]
    with tempfile.TemporaryDirectory() as folder:
        for package in PACKAGES:
            texts = fetch(package, Path(folder))
            licences.append(f"== {package.name} {package.version}\n\n{texts.pop('')}")
            for name, text in texts.items():
                (VENDOR / name).write_text(adapt(text), "utf-8")
    (VENDOR / "LICENSES.txt").write_text("\n".join(licences), "utf-8")


def fetch(package: Package, folder: Path) -> dict[str, str]:
    """Return the texts of a package's files by their names under VENDOR; its licence has none."""
    command = ["npm", "pack", "--silent", f"{package.name}@{package.version}"]
    archive = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    wanted = {**package.files, package.licence: ""}
    texts = {}
    with tarfile.open(folder / archive.stdout.strip()) as files:
        for source, name in wanted.items():
            file = files.extractfile(f"package/{source}")
            assert file is not None, source
            texts[name] = file.read().decode()
    return texts


def adapt(text: str) -> str:
    """Return a module that imports files instead of packages and has no source map."""
    text = re.sub(r"\n?//# sourceMappingURL=\S+\s*", "", text)
    for name, file in IMPORTS.items():
        text = re.sub(rf'(from\s*)"{re.escape(name)}"', rf'\1"{file}"', text)
    return text.rstrip() + "\n"


if __name__ == "__main__":
    main()
