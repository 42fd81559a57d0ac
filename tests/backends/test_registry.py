"""Backends bring their options and a loader; no other module knows them."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PATIENCE
from pydantic import ValidationError

from cllm.backends.registry import (
    AUTO,
    BACKENDS,
    Loader,
    choose_backend,
    import_loader,
    import_options,
)
from cllm.config.settings import BACKEND_SECTIONS, Section
from cllm.config.sources import load_settings
from cllm.engine.params import EngineParams
from cllm.engine.settings import make_engine_params

OPTIONS = """
from pydantic import BaseModel, ConfigDict, Field

SUMMARY = "exists only in a test"


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    speed: int = Field(default=3, ge=1, le=9, description="How fast it is.")
"""
USER = """
import json, sys
import cllm.backends
from cllm.backends import registry

cllm.backends.__path__.append(sys.argv[1])
registry.BACKENDS += ("toy",)

from cllm.config.settings import OPTIONS, Settings
from cllm.config.sources import load_settings
from cllm.engine.build import build_backend
from cllm.engine.settings import make_engine_params
from cllm.cli.config import page

loaded = load_settings(None, {"CLLM_BACKEND_TOY_SPEED": "5"}, {"backend.name": "toy"})
params = make_engine_params(loaded.settings, None)
print(json.dumps([params.options, build_backend(params).info.name, page()]))
"""


def run(script: str, *arguments: str) -> str:
    process = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        check=True,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    return process.stdout


@pytest.mark.slow
def test_backend_needs_only_a_folder_and_a_line(tmp_path: Path) -> None:
    """Its options reach the settings, the page that describes them, and the engine."""
    folder = tmp_path / "toy"
    folder.mkdir()
    (folder / "options.py").write_text(OPTIONS)
    (folder / "loader.py").write_text("from cllm.backends.fake.loader import *")
    options, name, page = json.loads(run(USER, str(tmp_path)))
    assert (options, name) == ({"speed": 5}, "fake")
    assert "load studies; toy exists only in a test. |" in page
    row = "| `backend.toy.speed` | `3` | a whole number from 1 up to 9 | How fast it is. |"
    assert (
        f"## backend.toy\n\n| Key | Default | Values | What it does |\n|---|---|---|---|\n{row}"
        in page
    )


def test_settings_import_only_the_options_of_backends() -> None:
    """Every command imports the settings, so they must not import what computes or loads."""
    script = "import json, sys, cllm.config.settings; print(json.dumps(list(sys.modules)))"
    modules = json.loads(run(script))
    assert {name for name in modules if name.startswith("cllm.backends.")} == {
        "cllm.backends.registry",
        *(f"cllm.backends.{name}" for name in BACKENDS),
        *(f"cllm.backends.{name}.options" for name in BACKENDS),
    }
    assert not {"numpy", "llama_cpp"} & {*modules}


@pytest.mark.parametrize("name", BACKENDS)
def test_loader_does_not_import_what_it_loads(name: str) -> None:
    """``cllm serve`` imports a loader before it starts to load, and so does the engine process,
    which needs no pydantic.
    """
    script = f"""
import json, sys, cllm.backends.{name}.loader
print(json.dumps(list(sys.modules)))"""
    assert not {"numpy", "llama_cpp", "pydantic"} & {*json.loads(run(script))}


@pytest.mark.parametrize("name", BACKENDS)
def test_loader_implements_the_protocol(name: str) -> None:
    loader = import_loader(name)
    functions = {
        function: inspect.signature(member)
        for function, member in vars(Loader).items()
        if inspect.isfunction(member) and not function.startswith("_")
    }
    assert len(functions) == 7
    for function, signature in functions.items():
        parameters = list(signature.parameters.values())[1:]
        offered = inspect.signature(getattr(loader, function)).parameters.values()
        assert [(one.name, one.kind) for one in offered] == [
            (one.name, one.kind) for one in parameters
        ]


@pytest.mark.parametrize("name", BACKENDS)
def test_backend_options_follow_the_rules_of_all_settings(name: str) -> None:
    """Every backend with options has a section of the settings."""
    has_options = bool(import_options(name).Options.model_fields)
    assert (name in BACKEND_SECTIONS) == has_options
    if has_options:
        assert BACKEND_SECTIONS[name].model_config == Section.model_config
        with pytest.raises(ValidationError):
            BACKEND_SECTIONS[name](unknown=1)


def test_options_of_the_chosen_backend_reach_the_engine() -> None:
    """The fake backend has no options and needs no file."""
    tree = load_settings(None, {}, {"backend.name": "fake", "backend.llama_cpp.n_ubatch": 64})
    assert make_engine_params(tree.settings, None) == EngineParams(backend="fake", log_level="info")


@pytest.mark.llama
def test_options_and_sizes_of_a_model_file_reach_the_engine(builtin_path: Path) -> None:
    settings = load_settings(None, {}, {"backend.llama_cpp.n_ubatch": 64}).settings
    params = make_engine_params(settings, builtin_path)
    assert params.options == {**import_options("llama_cpp").Options().model_dump(), "n_ubatch": 64}
    assert params.weight_bytes > params.kv_bytes_per_token > 0


def test_backend_is_chosen_by_the_model(tmp_path: Path) -> None:
    """A folder is a checkpoint. A name in the settings is not questioned."""
    file = tmp_path / "model.gguf"
    assert choose_backend(AUTO, tmp_path) == "torch"
    assert choose_backend(AUTO, file) == choose_backend(AUTO, None) == "llama_cpp"
    for name in BACKENDS:
        assert choose_backend(name, tmp_path) == choose_backend(name, file) == name
