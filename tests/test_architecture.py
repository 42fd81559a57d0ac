"""The rules of ARCHITECTURE.md, read from the sources: who may import whom, and what lies where."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cllm.backends.registry import BACKENDS

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "cllm"
FILES = sorted(PACKAGE.rglob("*.py"))

# Imports go down this list, never up; the rooms of one floor do not know each other.
FLOORS = [
    {"cllm"},  # the package itself, what `import cllm` gives
    {"cli", "bench"},
    {"server"},
    {"registry", "embedding"},
    {"service"},
    {"answer"},
    {"text", "process", "llm"},
    {"engine"},
    {"scheduler", "sampling", "backends"},
    {"kv_cache"},
    {"core"},
]
NEIGHBOURS = {("cli", "bench"), ("llm", "text"), ("llm", "process")}
# The ground floor: everybody may import it, it imports only what is named here.
GROUND = {
    "errors": set(),
    "environment": set(),
    "models": {"errors"},
    "config": {"config_file"},
    "config_sources": {"errors", "config", "config_file"},
    "config_file": {"errors"},
    "observe": {"errors", "config", "core"},  # core, to count its nouns
}
# The one exception: through the registry, config imports the options.py of each backend.
UPWARD = {("cllm.config", "cllm.backends.registry")}
LEVEL = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}

# These decide or compute; they wait for nobody and speak no protocol.
PURE = {"core", "scheduler", "kv_cache", "sampling"}
NOT_PURE = {"asyncio", "threading", "multiprocessing", "pydantic", "fastapi", "starlette", "ctypes"}
# Only these know a particular backend; everybody else knows these modules.
KNOW_BACKENDS = ("cllm.cli.probe", "cllm.cli.simulate", "cllm.bench.")
NO_BACKEND = {"cllm.backends.base", "cllm.backends.params", "cllm.backends.registry"}


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(
        ".__init__"
    )


def room_of(module: str) -> str:
    return (module + ".cllm").split(".")[1].replace("__main__", "cllm")


def imports(path: Path) -> Iterator[str]:
    """Full names of what a file imports: `from a import b` gives a.b, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: imports are written in full"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


EDGES = [(module_of(path), target) for path in FILES for target in imports(path)]
INSIDE = [
    (source, target)
    for source, target in EDGES
    if target.split(".")[0] == "cllm" and "__" not in target
]


def may_import(source: str, target: str) -> bool:
    if source == target:
        return True
    if source in GROUND:
        return target in GROUND[source]
    return target in GROUND or (source, target) in NEIGHBOURS or LEVEL[source] < LEVEL[target]


def test_every_room_has_a_floor() -> None:
    assert {room_of(module_of(path)) for path in FILES} <= LEVEL.keys() | GROUND.keys()


def test_imports_go_down() -> None:
    assert [
        (source, target)
        for source, target in INSIDE
        if not may_import(room_of(source), room_of(target))
        and (source, target.rpartition(".")[0]) not in UPWARD
    ] == []


def test_core_imports_only_errors() -> None:
    assert [
        edge
        for edge in INSIDE
        if room_of(edge[0]) == "core" and room_of(edge[1]) not in {"core", "errors"}
    ] == []


@pytest.mark.parametrize("room", ["server", "backends"])
def test_dialects_and_backends_do_not_know_each_other(room: str) -> None:
    """server/openai and server/native, backends/fake and backends/llama_cpp; what they share has no
    folder.
    """
    kinds = {path.name for path in (PACKAGE / room).glob("*") if path.is_dir()}

    def kind(module: str) -> str:
        return (module + "...").split(".")[2] if room_of(module) == room else ""

    assert [
        edge
        for edge in INSIDE
        if {kind(edge[0]), kind(edge[1])} <= kinds and kind(edge[0]) != kind(edge[1])
    ] == []


def test_a_particular_backend_is_known_in_few_places() -> None:
    particular = [
        edge
        for edge in INSIDE
        if room_of(edge[1]) == "backends" and edge[1].rpartition(".")[0] not in NO_BACKEND
    ]
    assert [
        edge
        for edge in particular
        if not f"{edge[0]}.".startswith((*KNOW_BACKENDS, "cllm.backends."))
    ] == []


def test_options_of_backends_import_only_pydantic() -> None:
    """``config`` imports them wherever it is imported, so they must not import what computes."""
    modules = {module_of(path) for path in PACKAGE.glob("backends/*/options.py")}
    assert modules == {f"cllm.backends.{name}.options" for name in BACKENDS}
    assert [
        edge
        for edge in EDGES
        if edge[0] in modules and edge[1].split(".")[0] not in {"__future__", "typing", "pydantic"}
    ] == []


def test_llama_cpp_is_imported_in_one_folder() -> None:
    users = {source for source, target in EDGES if target.split(".")[0] == "llama_cpp"}
    assert {user for user in users if not user.startswith("cllm.backends.llama_cpp")} == set()


def test_deciding_and_computing_is_free_of_waiting_and_protocols() -> None:
    assert [
        edge for edge in EDGES if room_of(edge[0]) in PURE and edge[1].split(".")[0] in NOT_PURE
    ] == []


def test_nothing_runs_what_it_reads() -> None:
    """No pickle, no eval; and templates of models are rendered by one environment, the sandboxed
    one.
    """
    assert [
        edge for edge in EDGES if edge[1].split(".")[0] in {"pickle", "marshal", "shelve", "dill"}
    ] == []
    calls = [
        (module_of(path), ast.unparse(node.func).split(".")[-1], ast.unparse(node.func))
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    ]
    assert [call for call in calls if call[2] in {"eval", "exec", "jinja2.Template"}] == []
    assert len([call for call in calls if call[1].endswith("Environment")]) <= 1, (
        "one place renders templates"
    )


# One noun each, and still too long: they may shrink, not grow.
LONG = {"cllm.kv_cache.ledger": 600, "cllm.text.json_schema": 550}


def test_files_are_short() -> None:
    lengths = {module_of(path): len(path.read_text().splitlines()) for path in FILES}
    too_long = {name: n for name, n in lengths.items() if n > LONG.get(name, 500)}
    assert too_long == {}


def test_tests_mirror_the_sources() -> None:
    folders = {
        path.name
        for path in (ROOT / "tests").iterdir()
        if path.is_dir() and path.name.isidentifier()
    }
    assert {
        folder for folder in folders - {"data", "__pycache__"} if not (PACKAGE / folder).is_dir()
    } == set()


def tree_of(page: str) -> Iterator[Path]:
    """Folders and files named in the block that begins with src/cllm/; deeper lines lie in the line
    above.
    """
    block = re.search(r"^```\w*\n(src/cllm/.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert block, "ARCHITECTURE.md shows the tree under src/cllm/"
    above: list[tuple[int, Path]] = []
    for line in filter(str.strip, block[1].splitlines()):
        indent = len(line) - len(line.lstrip())
        above = [entry for entry in above if entry[0] < indent]
        parent = above[-1][1] if above else ROOT
        for position, word in enumerate(line.split()):
            if name := re.fullmatch(r"\(?([\w/]+/|[\w/]+\.py)[),;:.]*", word):
                yield parent / name[1]
                if not position:
                    above.append((indent, parent / name[1]))
                    parent = parent / name[1] if name[1].endswith("/") else parent


def test_the_drawn_tree_is_the_tree() -> None:
    page = ROOT / "ARCHITECTURE.md"
    if not page.exists():
        pytest.skip("no ARCHITECTURE.md yet")
    drawn = set(tree_of(page.read_text()))
    assert {str(path) for path in drawn if not path.exists()} == set()
    assert {path.parent for path in PACKAGE.glob("*/*.py")} - drawn == set(), (
        "folders that the page does not name"
    )
