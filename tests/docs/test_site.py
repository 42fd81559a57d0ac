"""The site of the documentation is built without a warning, and needs no other server to be read."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess

import pytest
from doc_pages import ROOT

BUILD = ["run", "--only-group", "site", "--isolated", "--offline", "mkdocs", "build", "--strict"]
LOADED = re.compile(
    r"""<(?:script|img|iframe)[^>]+src="https?://|<link[^>]+rel="(?:stylesheet|preconnect|icon)"[^>]+href="https?://"""
)


@pytest.mark.slow
def test_site_is_built_and_loads_nothing_from_other_servers(tmp_path):
    uv = shutil.which("uv", path=f"{os.environ['PATH']}{os.pathsep}{ROOT / '.tools' / 'bin'}")
    if uv is None:
        pytest.skip("uv is not installed")
    home = pwd.getpwuid(os.getuid()).pw_dir  # of uv's cache
    environment = {**os.environ, "HOME": home, "NO_MKDOCS_2_WARNING": "1"}
    environment.pop("UV_NO_SYNC", None)
    done = subprocess.run(
        [uv, *BUILD, "--site-dir", str(tmp_path)],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=environment,
    )
    if "Network connectivity is disabled" in done.stderr:
        pytest.skip("the packages of the group site are not in uv's cache")
    assert done.returncode == 0, done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 40
    assert [str(page) for page in pages if LOADED.search(page.read_text())] == []
