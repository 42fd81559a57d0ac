"""Hooks of MkDocs: bring the project's own pages, which are not under docs/, into the site.

On GitHub, links lead to these files where they are. On the site, the files are pages of the folder
project/, and the hooks rewrite the links.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
PROJECT = {
    f"{name}.md": f"project/{name}.md"
    for name in ("ARCHITECTURE", "CHANGELOG", "CONTRIBUTING", "README", "SECURITY")
}
PROJECT["tools/train_builtin/README.md"] = "project/train_builtin.md"
PROJECT["tools/train_builtin/report.md"] = "project/train_builtin_report.md"
SOURCES = {page: source for source, page in PROJECT.items()}


def on_files(files, config):
    for page, source in SOURCES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown, page, **_):
    """Make links between docs/ and the rest of the repository lead to pages of the site.

    Of links to other files of the repository, only the text stays.
    """
    source = SOURCES.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    here = posixpath.dirname(page.file.src_uri)

    def rewrite(link: re.Match[str]) -> str:
        path, hash_sign, anchor = link[2].partition("#")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if target.startswith("docs/"):
            path = target.removeprefix("docs/")
        elif target in PROJECT:
            path = PROJECT[target]
        else:
            return link[1] if (ROOT / target).exists() else link[0]
        return f"[{link[1]}]({posixpath.relpath(path, here or '.')}{hash_sign}{anchor})"

    return re.sub(r"\[([^\]]*)\]\(((?!https?://|#)[^)\s]+)\)", rewrite, markdown)
