"""The rules of ARCHITECTURE.md, checked in the sources: which module may import which, and where
things are.
"""

import ast
import functools
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from cllm.backends.registry import BACKENDS

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "cllm"
FILES = sorted(PACKAGE.rglob("*.py"))

# Imports go down this list, never up, and never between the packages of one layer.
LAYERS = [
    {"cllm"},  # the package itself, what `import cllm` gives
    {"cli", "bench"},
    {"cluster"},
    {"server"},
    {"serving", "local"},
    {"text", "process"},
    {"engine"},
    {"scheduler", "sampling", "backends"},
    {"kv_cache", "routing", "store"},
    {"core"},
]
NEIGHBOURS = {("cli", "bench")}
# The ground layer: every module may import it; it imports only what is named here.
GROUND = {
    "errors": set(),
    "environment": set(),
    "private_files": set(),
    "input_files": set(),
    "http_client": {"errors"},
    "http_connection": set(),
    "models": {"errors", "environment", "http_client", "input_files"},
    "config": {"errors", "input_files"},
    "observe": {
        "errors",
        "environment",
        "config",
        "core",
        "private_files",
        "input_files",
    },  # core, whose types it records
}
# The exceptions: config imports where its options are declared. Those of a backend come through
# the registry, from the options.py of its folder.
UPWARD = {
    ("cllm.config.settings", "cllm.backends.registry"),
    ("cllm.config.settings", "cllm.core.params"),
    ("cllm.config.settings", "cllm.core.request"),
}
LEVEL = {package: level for level, packages in enumerate(LAYERS) for package in packages}

# The folders of text/, each of which may import those before it. The files beside them may import all.
TEXT_FOLDERS = ["schema", "tools", "templates"]

# A dialect that adds routes to another one, and uses it.
EXTENDS = {("llama_server", "openai")}

# These packages decide or compute. They do not wait for I/O and implement no protocol.
PURE = {"core", "scheduler", "kv_cache", "sampling", "routing"}
NOT_PURE = {"asyncio", "threading", "multiprocessing", "pydantic", "fastapi", "starlette", "ctypes"}
# Only these may import a particular backend; other modules use backends through them.
KNOW_BACKENDS = (
    *("cllm.cli.probe", "cllm.cli.rpc_worker"),
    *("cllm.cli.bench.simulate", "cllm.bench."),
)
NO_BACKEND = {"cllm.backends.base", "cllm.backends.params", "cllm.backends.registry"}


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(
        ".__init__"
    )


def package_of(module: str) -> str:
    return (module + ".cllm").split(".")[1].replace("__main__", "cllm")


def imports(path: Path) -> Iterator[str]:
    """Return the full names that a file imports: `from a import b` gives a.b, also inside
    functions.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: imports are written in full"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@functools.cache
def all_imports() -> list[tuple[str, str]]:
    """Return each module with each name that it imports."""
    return [(module_of(path), target) for path in FILES for target in imports(path)]


def inner_imports() -> list[tuple[str, str]]:
    """Return the same for names of cLLM."""
    return [
        (source, target)
        for source, target in all_imports()
        if target.split(".")[0] == "cllm" and "__" not in target
    ]


def may_import(source: str, target: str) -> bool:
    if source == target:
        return True
    if source in GROUND:
        return target in GROUND[source]
    return target in GROUND or (source, target) in NEIGHBOURS or LEVEL[source] < LEVEL[target]


def test_every_package_has_a_layer() -> None:
    assert {package_of(module_of(path)) for path in FILES} <= LEVEL.keys() | GROUND.keys()


def test_imports_go_down() -> None:
    assert [
        (source, target)
        for source, target in inner_imports()
        if not may_import(package_of(source), package_of(target))
        and (source, target.rpartition(".")[0]) not in UPWARD
    ] == []


def test_folders_of_text_import_in_one_direction() -> None:
    def level(module: str) -> int:
        folder = (module + "...").split(".")[2]
        return TEXT_FOLDERS.index(folder) if folder in TEXT_FOLDERS else len(TEXT_FOLDERS)

    assert [
        edge
        for edge in inner_imports()
        if {*map(package_of, edge)} == {"text"} and level(edge[0]) < level(edge[1])
    ] == []


def test_core_imports_only_errors() -> None:
    assert [
        edge
        for edge in inner_imports()
        if package_of(edge[0]) == "core" and package_of(edge[1]) not in {"core", "errors"}
    ] == []


@pytest.mark.parametrize("package", ["server", "backends"])
def test_dialects_and_backends_do_not_import_each_other(package: str) -> None:
    """What they share is outside of their folders."""
    kinds = {path.name for path in (PACKAGE / package).glob("*") if path.is_dir()} - {"http"}

    def kind(module: str) -> str:
        return (module + "...").split(".")[2] if package_of(module) == package else ""

    assert [
        edge
        for edge in inner_imports()
        if {kind(edge[0]), kind(edge[1])} <= kinds
        and kind(edge[0]) != kind(edge[1])
        and (kind(edge[0]), kind(edge[1])) not in EXTENDS
    ] == []


def test_few_modules_import_a_particular_backend() -> None:
    particular = [
        edge
        for edge in inner_imports()
        if package_of(edge[1]) == "backends" and edge[1].rpartition(".")[0] not in NO_BACKEND
    ]
    assert [
        edge
        for edge in particular
        if not f"{edge[0]}.".startswith((*KNOW_BACKENDS, "cllm.backends."))
    ] == []


def test_options_of_backends_import_only_pydantic() -> None:
    """``config`` imports them, so they must not import what computes."""
    modules = {module_of(path) for path in PACKAGE.glob("backends/*/options.py")}
    assert modules == {f"cllm.backends.{name}.options" for name in BACKENDS}
    assert [
        edge
        for edge in all_imports()
        if edge[0] in modules and edge[1].split(".")[0] not in {"__future__", "typing", "pydantic"}
    ] == []


def test_llama_cpp_is_imported_in_one_folder() -> None:
    users = {source for source, target in all_imports() if target.split(".")[0] == "llama_cpp"}
    assert {user for user in users if not user.startswith("cllm.backends.llama_cpp")} == set()


def test_ray_is_imported_in_one_folder() -> None:
    users = {source for source, target in all_imports() if target.split(".")[0] == "ray"}
    assert users
    assert {user for user in users if not user.startswith("cllm.cluster.ray.")} == set()


def test_layers_that_decide_or_compute_do_no_io() -> None:
    assert [
        edge
        for edge in all_imports()
        if package_of(edge[0]) in PURE and edge[1].split(".")[0] in NOT_PURE
    ] == []


@pytest.mark.slow
def test_input_is_never_executed() -> None:
    """No pickle and no eval, and chat templates are rendered only in the sandbox."""
    assert [
        edge
        for edge in all_imports()
        if edge[1].split(".")[0] in {"pickle", "marshal", "shelve", "dill"}
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


def find_circle(edges: set[tuple[str, str]]) -> list[str]:
    """Return the nodes of a circle, the first one again at its end; [] if there is none."""
    graph: dict[str, set[str]] = {}
    for source, target in edges:
        graph.setdefault(source, set()).add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    """Imports inside functions count too, and those for types only."""
    modules = {module_of(path) for path in FILES}
    edges = {
        (source, target if target in modules else target.rpartition(".")[0])
        for source, target in inner_imports()
    }
    assert find_circle(edges) == []


MAX_LINES = {"function": 60, "class": 450}  # without its docstring
# The functions and classes that are longer, with their lengths, which may only shrink.
LONG: dict[str, int] = {}


def measure(node: ast.AST, name: str) -> Iterator[tuple[str, str, int]]:
    """Return the kind, full name and length of each function and class inside ``node``."""
    for child in ast.iter_child_nodes(node):
        own = name
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            own = f"{name}.{child.name}"
            kind = "class" if isinstance(child, ast.ClassDef) else "function"
            text = len((ast.get_docstring(child, clean=False) or "").splitlines())
            yield kind, own, (child.end_lineno or 0) - child.lineno + 1 - text
        yield from measure(child, own)


def test_functions_and_classes_are_within_the_length_limits() -> None:
    too_long = {
        name: length
        for path in FILES
        for kind, name, length in measure(ast.parse(path.read_text()), module_of(path))
        if length > MAX_LINES[kind]
    }
    assert {name: n for name, n in too_long.items() if n > LONG.get(name, 0)} == {}
    assert LONG.keys() <= too_long.keys(), "what is short enough is no exception any more"


def test_tests_mirror_the_sources() -> None:
    folders = {
        path.name
        for path in (ROOT / "tests").iterdir()
        if path.is_dir() and path.name.isidentifier()
    }
    others = {"data", "docs", "native", "ui", "__pycache__"}
    assert {folder for folder in folders - others if not (PACKAGE / folder).is_dir()} == set()


def tree_of(page: str) -> Iterator[Path]:
    """Return the folders and files in the block that begins with src/cllm/; an indented line
    continues the line above.
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


def test_documented_tree_matches_the_folders() -> None:
    page = ROOT / "ARCHITECTURE.md"
    if not page.exists():
        pytest.skip("no ARCHITECTURE.md yet")
    drawn = set(tree_of(page.read_text()))
    assert {str(path) for path in drawn if not path.exists()} == set()
    assert {path.parent for path in PACKAGE.glob("*/*.py")} - drawn == set(), (
        "folders that the page does not name"
    )


def definitions(path: Path) -> set[str]:
    """Names of the functions and classes of a file; methods as Class.method."""
    body = ast.parse(path.read_text()).body
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in body if isinstance(node, kinds)} | {
        f"{node.name}.{method.name}"
        for node in body
        if isinstance(node, ast.ClassDef)
        for method in node.body
        if isinstance(method, kinds)
    }


def test_functions_on_the_path_of_a_request_exist() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text()
    stops = re.findall(r"^\| \d+ \| `(.+?\.py)` \| `(.+?)` \|", page, re.MULTILINE)
    assert len(stops) == 14
    assert [
        (module, name)
        for module, name in stops + re.findall(r"`([\w/]+\.py): (\w+)`", page)
        if name not in definitions(PACKAGE / module)
    ] == []
