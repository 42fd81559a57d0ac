"""The page at / over HTTP: who gets it, its files and their headers. tests/ui uses it in a browser."""

import http.client
import os
import pwd
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from cllm.server.page import FILES, FOLDER

ROOT = Path(__file__).parents[2]
CHROMIUM = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,*/*;q=0.8"


def get(server, path, **headers):
    """Send a path as it is, which the client library would normalize."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer, content


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        (CHROMIUM, "text/html"),
        ("text/html", "text/html"),
        ("TEXT/HTML; q=0.5", "text/html"),
        ("application/json;q=0.5, text/html", "text/html"),
        ("*/*", "application/json"),
        ("", "application/json"),
        ("text/*", "application/json"),
        ("application/json", "application/json"),
        ("application/json, text/html;q=0.5", "application/json"),
        ("text/html;q=0", "application/json"),
        ("text/html;q=x", "application/json"),
    ],
)
def test_only_clients_that_accept_html_get_the_page(fake_server, accept, kind):
    answer = fake_server.client.get("/", headers={"accept": accept})
    assert answer.status_code == 200
    assert answer.headers["content-type"].split(";")[0] == kind
    assert answer.headers["vary"] == "accept"
    if kind == "application/json":
        assert answer.json()["name"] == "cLLM"


def test_policy_allows_only_files_of_the_server(fake_server):
    answer = fake_server.client.get("/", headers={"accept": CHROMIUM})
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert not re.search(r"https?:|\*|data:|blob:", policy)
    assert "frame-ancestors 'none'" in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert not re.search(r"<style|\son\w+=|\sstyle=|javascript:|<script(?! [^>]*src=)", answer.text)


def test_head_of_the_page_is_get_without_a_body(fake_server):
    head = fake_server.client.head("/", headers={"accept": CHROMIUM})
    page = fake_server.client.get("/", headers={"accept": CHROMIUM})
    assert head.content == b""
    for name in ("content-type", "content-length", "etag", "content-security-policy"):
        assert head.headers[name] == page.headers[name]


KINDS = {
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "woff2": "font/woff2",
}


def test_every_file_has_its_type_and_can_be_revalidated(fake_server):
    assert {"app.js", "app.css", "icon.svg", "vendor/marked.js", "vendor/icons.svg"} <= FILES
    for name in FILES:
        answer = fake_server.client.get(f"/ui/{name}")
        assert answer.status_code == 200, name
        assert answer.headers["content-type"] == KINDS[name.rpartition(".")[2]]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-cache"
        etag = answer.headers["etag"]
        for known in (etag, f'"other", W/{etag}'):
            again = fake_server.client.get(f"/ui/{name}", headers={"if-none-match": known})
            assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
        changed = fake_server.client.get(f"/ui/{name}", headers={"if-none-match": '"other"'})
        assert changed.status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/ui",
        "/ui/",
        "/ui/nothing.js",
        "/ui/vendor",
        "/ui/vendor/",
        "/ui/vendor/LICENSES.txt",
        "/ui/index.html",
        "/ui/../app.py",
        "/ui/../metrics",
        "/ui/vendor/../app.js",
        "/ui/%2e%2e/app.py",
        "/ui/..%2fapp.py",
        "/ui//etc/passwd",
        "/ui/%2fetc%2fpasswd",
        "/ui/app.js%00",
        "/ui/\\..\\app.py",
    ],
)
def test_unknown_file_gets_404_in_json(fake_server, path):
    answer, content = get(fake_server, path, accept=CHROMIUM)
    assert answer.status == 404
    assert answer.getheader("content-type") == "application/json"
    assert b'"not_found"' in content


def test_page_needs_no_key_and_tells_nothing(start_server):
    server = start_server("--backend.name", "fake", "--api-key", "secret-key")
    for path in ("/", "/docs", *(f"/ui/{name}" for name in sorted(FILES))):
        answer, content = get(server, path, accept=CHROMIUM)
        assert answer.status == 200, path
        assert b"secret-key" not in content
    for path in ("/ui/nothing.js", "/ui/../metrics", "/openapi.json", "/v1/models"):
        answer, _ = get(server, path, accept=CHROMIUM)
        assert answer.status == 401, path


def imports(name: str) -> set[str]:
    """Return the names of the files that a file of the page loads."""
    if name.endswith(".woff2"):
        return set()
    text = FOLDER.joinpath(*name.split("/")).read_text("utf-8")
    folder = name.rpartition("/")[0]
    near = re.findall(r'(?:from|import)[\s(]*"\./([^"]+)"|url\((fonts/[^)]+)\)', text)
    far = re.findall(r"[\"`]ui/([\w/.]+?\.\w+)[\"`#]", text)
    named = {f"{folder}/{one or other}".lstrip("/") for one, other in near} | set(far)
    if "vendor/katex/katex.js" in named:
        named.add("vendor/katex/katex.css")  # formula.js names its folder once
    return named


def test_pages_load_every_file_that_is_served():
    """No library is left over, and none is missing."""
    pages = {"index.html", "bench/index.html", "live/index.html"}
    reached, new = set(), pages
    while new:
        reached |= new
        new = {file for name in new for file in imports(name)} - reached
    assert reached - pages == FILES


def test_icons_that_the_page_names_exist():
    icons = FOLDER.joinpath("vendor", "icons.svg").read_text("utf-8")
    made = set(re.findall(r'symbol id="([^"]+)"', icons))
    scripts = [FOLDER.joinpath(name).read_text("utf-8") for name in FILES if "/" not in name]
    text = "".join(scripts)
    named = set(re.findall(r'<\$\{Icon\} name="([^"]+)"|icon="([^"]+)"|icon: "([^"]+)"', text))
    assert {name for names in named for name in names if name} <= made
    assert {name for name in made if f'"{name}"' not in text} == set()


def test_libraries_stay_small():
    """KaTeX with its fonts is the largest, and is loaded only for formulas."""
    sizes = {name: len(FOLDER.joinpath(*name.split("/")).read_bytes()) for name in FILES}
    katex = sum(size for name, size in sizes.items() if "katex" in name)
    assert katex < 600_000
    assert sum(sizes.values()) - katex < 500_000


def test_every_library_has_its_licence():
    script = (ROOT / "tools" / "vendor_page.py").read_text("utf-8")
    licences = FOLDER.joinpath("vendor", "LICENSES.txt").read_text("utf-8")
    packages = re.findall(r'Package\(\s*"([^"]+)",\s*"([^"]+)"', script)
    assert len(packages) >= 5
    for name, version in packages:
        assert f"== {name} {version}\n" in licences
    assert licences.count("Copyright") >= len(packages) - 1  # DOMPurify's has another wording


@pytest.mark.slow
def test_wheel_contains_the_page(tmp_path):
    uv = shutil.which("uv", path=f"{os.environ['PATH']}:{ROOT}/.tools/bin")
    if uv is None:
        pytest.skip("uv is not installed, so the wheel is not built")
    command = [uv, "build", "--wheel", "--offline", "--out-dir", str(tmp_path), str(ROOT)]
    environment = {**os.environ, "HOME": pwd.getpwuid(os.getuid()).pw_dir}  # which has uv's cache
    built = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    if built.returncode and "network was disabled" in built.stderr:
        pytest.skip("the wheel is not built, because uv's cache has no hatchling")
    assert not built.returncode, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {*FILES, "index.html", "vendor/LICENSES.txt"}
    assert {f"cllm/server/ui/{name}" for name in wanted} <= names
