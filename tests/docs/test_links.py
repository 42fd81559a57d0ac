"""Links of the documentation lead to files and headings that exist, on GitHub and on the site."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path

import pytest
import yaml
from doc_pages import OTHERS, PAGES, ROOT, name_of, without_blocks


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of the headings that are the same on GitHub and on the site."""
    headings = re.findall(r"^#+ (.+)$", without_blocks(page), re.MULTILINE)
    return {anchor for heading in headings if (anchor := slug(heading)) == site_slug(heading)}


def slug(heading: str) -> str:
    """Return GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def site_slug(heading: str) -> str:
    """Return the anchor that Python-Markdown gives to a heading."""
    text = (
        unicodedata.normalize("NFKD", heading.replace("`", "")).encode("ascii", "ignore").decode()
    )
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower())


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=name_of)
def test_links_lead_to_files_and_headings(page):
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_blocks(page)):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            broken.append(link)
    assert broken == []


def test_every_page_is_in_the_navigation_of_the_site():
    def pages_in(nav: object) -> list[str]:
        match nav:
            case str():
                return [nav]
            case dict():
                return [page for part in nav.values() for page in pages_in(part)]
            case list():
                return [page for part in nav for page in pages_in(part)]
        raise TypeError(nav)

    named = pages_in(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    present = [str(page.relative_to(ROOT / "docs")) for page in PAGES if page.parent != ROOT]
    assert sorted(page for page in named if not page.startswith("project/")) == sorted(present)
