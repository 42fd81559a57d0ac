"""Fetches the libraries of the page at / from npm into src/cllm/server/ui/vendor.

To take a newer version, change PACKAGES and run:  python tools/vendor_page.py

npm must be installed. The files are the packages' own, with three changes. Names of other packages
in imports become file names, because browsers do not know packages. References to source maps and
to fonts in other formats than woff2 are removed. The icons become one file of symbols.
"""

from __future__ import annotations

import re
import shutil
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
ICONS = (
    *("activity", "arrow-down", "arrow-up", "book-open", "box", "brain", "check"),
    *("chevron-down", "chevron-left", "chevron-right", "copy", "download", "ellipsis"),
    *("file-text", "key-round", "menu", "monitor", "moon", "paperclip", "pencil", "play"),
    *("power", "refresh-cw", "search", "sliders-horizontal", "square", "square-pen", "sun"),
    *("trash-2", "undo-2", "upload", "wrench", "x"),
)
FONTS = (
    *("AMS-Regular", "Caligraphic-Bold", "Caligraphic-Regular", "Fraktur-Bold", "Fraktur-Regular"),
    *("Main-Bold", "Main-BoldItalic", "Main-Italic", "Main-Regular", "Math-BoldItalic"),
    *("Math-Italic", "SansSerif-Bold", "SansSerif-Italic", "SansSerif-Regular", "Script-Regular"),
    *("Size1-Regular", "Size2-Regular", "Size3-Regular", "Size4-Regular", "Typewriter-Regular"),
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
    Package(
        "katex",
        "0.19.1",
        "LICENSE",
        {
            "dist/katex.min.js": "katex/katex.js",
            "dist/katex.min.css": "katex/katex.css",
            **{
                f"dist/fonts/KaTeX_{name}.woff2": f"katex/fonts/KaTeX_{name}.woff2"
                for name in FONTS
            },
        },
    ),
    Package(
        "lucide-static",
        "1.62.0",
        "LICENSE",
        {f"icons/{name}.svg": f"icons/{name}.svg" for name in ICONS},
    ),
)
IMPORTS = {"preact": "./preact.js"}


def main() -> None:
    shutil.rmtree(VENDOR)
    licences = ["The libraries in this folder, and their licences.\n"]
    symbols = []
    with tempfile.TemporaryDirectory() as folder:
        for package in PACKAGES:
            files = fetch(package, Path(folder))
            licence = files.pop("").decode()
            licences.append(f"== {package.name} {package.version}\n\n{licence}")
            for name, content in files.items():
                if name.startswith("icons/"):
                    symbols.append(make_symbol(Path(name).stem, content.decode()))
                    continue
                path = VENDOR / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content if path.suffix == ".woff2" else adapt(content.decode()))
    sheet = '<svg xmlns="http://www.w3.org/2000/svg">\n' + "".join(symbols) + "</svg>\n"
    (VENDOR / "icons.svg").write_text(sheet, "utf-8")
    (VENDOR / "LICENSES.txt").write_text("\n".join(licences), "utf-8")


def fetch(package: Package, folder: Path) -> dict[str, bytes]:
    """Return a package's files by their names under VENDOR; its licence has none."""
    command = ["npm", "pack", "--silent", f"{package.name}@{package.version}"]
    archive = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    wanted = {**package.files, package.licence: ""}
    contents = {}
    with tarfile.open(folder / archive.stdout.strip()) as files:
        for source, name in wanted.items():
            file = files.extractfile(f"package/{source}")
            assert file is not None, source
            contents[name] = file.read()
    return contents


def adapt(text: str) -> bytes:
    """Return a module that imports files instead of packages and has no source map, or a style
    sheet whose fonts are woff2 only.
    """
    text = re.sub(r"\n?//# sourceMappingURL=\S+\s*", "", text)
    text = re.sub(r',url\([^)]+\.(?:woff|ttf)\) format\("\w+"\)', "", text)
    for name, file in IMPORTS.items():
        text = re.sub(rf'(from\s*)"{re.escape(name)}"', rf'\1"{file}"', text)
    return (text.rstrip() + "\n").encode()


def make_symbol(name: str, icon: str) -> str:
    """Return the shapes of an icon as a symbol of the sheet of icons."""
    shapes = re.findall(r"<(?!!|/|svg)[^>]+/>", icon)
    return f'<symbol id="{name}" viewBox="0 0 24 24">{"".join(shapes)}</symbol>\n'


if __name__ == "__main__":
    main()
