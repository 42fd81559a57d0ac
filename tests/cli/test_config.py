"""``cllm config``, and the settings as flags."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import PATIENCE

from cllm.cli import main as command_line
from cllm.cli.config import page
from cllm.cli.settings_flags import SHORT_NAMES, settings_from_flags
from cllm.config.settings import OPTIONS, Settings
from cllm.config.sources import load_settings
from cllm.errors import CLLMError, StartupError

DOCS_PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Change to a folder without settings files."""
    monkeypatch.chdir(tmp_path)


def shown(cllm, *arguments: str) -> dict:
    code, out, err = cllm("config", "show", "--json", *arguments)
    assert (code, err) == (0, "")
    return json.loads(out)


@pytest.mark.slow
def test_show_runs_as_process() -> None:
    """The installed command prints the tree with the origin of each value."""
    environ = {**os.environ, "CLLM_LOG_LEVEL": "debug"}
    script = "from cllm.cli.main import main; main()"
    process = subprocess.run(
        [sys.executable, "-c", script, "config", "show", "--port", "9000"],
        env=environ,
        check=False,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (process.returncode, process.stderr) == (0, "")
    lines = [line.split() for line in process.stdout.splitlines()]
    assert ["server.port:", "9000", "#", "--server.port"] in lines
    assert ["log.level:", '"debug"', "#", "CLLM_LOG_LEVEL"] in lines
    assert ["kv.max_memory_mb:", "null", "#", "default"] in lines
    assert len(lines) == len(OPTIONS)


def test_help_imports_only_what_it_needs() -> None:
    """--help imports neither a command nor what only commands need."""
    script = (
        "import sys; from cllm.cli.main import app; app(['--help'], result_action='return_value');"
        "slow = {'pydantic', 'yaml', 'numpy', 'fastapi', 'llama_cpp', 'cllm.config.settings', "
        "'rich.markdown'};"
        "print(sorted(slow & set(sys.modules)))"
    )
    process = subprocess.run(
        [sys.executable, "-c", script],
        check=False,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert process.stdout.splitlines()[-1] == "[]"
    assert "Serve a model over HTTP." in process.stdout


def test_show_prints_valid_settings_file(cllm, tmp_path: Path) -> None:
    """The output of show is a valid file for --config."""
    (tmp_path / "in.yaml").write_text(
        "resources: {max_batch_size: 4}\ncache: {cleanup_interval: 5}\n"
    )
    path = "/a long path/" + "x" * 300 + "/\u4f60 # \u2028.gguf"
    _, out, _ = cllm("config", "show", "--config", "in.yaml", "--model", path, "--threads", "2")
    assert "# note: in.yaml:2: cache.cleanup_interval is not needed: " in out
    (tmp_path / "out.yaml").write_text(out)
    settings = load_settings(tmp_path / "out.yaml", {}, {}).settings
    assert settings.model.path == path
    assert settings.scheduler.max_num_seqs == 4
    assert settings.model_dump()["backend"]["llama_cpp"]["n_threads"] == 2


def test_omitted_flags_keep_other_sources(cllm) -> None:
    """If a flag is not given, the option comes from the other sources."""
    result = shown(
        cllm, "--context", "none", "--backend.llama-cpp.no-use-mmap", "--kv.max-memory-mb=5"
    )
    assert {key: origin for key, origin in result["origins"].items() if origin != "default"} == {
        "model.max_context_length": "--model.max-context-length",
        "backend.llama_cpp.use_mmap": "--backend.llama-cpp.use-mmap",
        "kv.max_memory_mb": "--kv.max-memory-mb",
    }
    assert result["settings"]["backend"]["llama_cpp"]["use_mmap"] is False
    assert shown(cllm)["settings"] == Settings().model_dump()


@pytest.mark.parametrize(
    "names", [{option.key: option.flag for option in OPTIONS.values()}, SHORT_NAMES]
)
def test_every_option_is_a_flag(cllm, names: dict[str, str]) -> None:
    """Each option has a flag with its own name, and some have a short one."""
    given = {key: OPTIONS[key].default for key in names}
    if "model.sha256" in given:
        given["model.sha256"] = "0" * 64
    origins = shown(cllm, *(f"{names[key]}={value}" for key, value in given.items()))["origins"]
    assert {key for key, origin in origins.items() if origin == OPTIONS[key].flag} == set(names)


def test_help_describes_option(cllm) -> None:
    """--help shows the names, description, default and choices of each option."""
    code, out, _ = cllm("config", "show", "--help")
    assert code == 0
    for option in OPTIONS.values():
        assert option.flag in out
    assert "--server.port --port" in out
    assert "Port to listen on; 0 chooses a free port. [default: 8000]" in out
    assert "[choices: f16, q8_0, q4_0]" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["config", "show", "--port", "x"],
            'cllm: --port must be a whole number from 0 up to 65535, not "x"',
        ),
        (
            ["config", "show", "--port", "65536"],
            "cllm: --port must be a whole number from 0 up to 65535, not 65536",
        ),
        (["config", "show", "--prot", "1"], "cllm: Unknown option: --prot. Did you mean --port?"),
        (["config", "show", "--nope", "1"], "cllm: Unknown option: --nope."),
        (["config", "show", "--port"], "cllm: --port needs a value."),
        (["config", "show", "b"], 'cllm: Unexpected argument: "b". See cllm config show --help.'),
        (["bench", "load"], "cllm: bench load needs URL. See cllm bench load --help."),
        (
            ["bench", "make-model", "x.gguf", "--shap", "tiny", "--quant", "f16"],
            "cllm: bench make-model needs --shape. Did you mean --shape instead of --shap?",
        ),
        (
            ["chat", "--port", "8000"],
            (
                "cllm: Unknown option: --port. To use a running server, give --url "
                "http://127.0.0.1:8000."
            ),
        ),
        (
            ["config", "show", "--config", "no.yaml"],
            "cllm: no.yaml: cannot be read: No such file or directory",
        ),
        (
            ["config", "sho"],
            'cllm: Unknown command "sho". Did you mean "show"? Available commands: show, docs.',
        ),
        (["sevre"], 'cllm: "sevre" is not a command; did you mean serve?'),
        (["quux", "--port", "1"], 'cllm: "quux" is not a command; see cllm --help'),
    ],
)
def test_usage_errors_give_one_line(cllm, arguments: list[str], message: str) -> None:
    """A usage error gives one line on stderr and exit code 2."""
    assert cllm(*arguments) == (2, "", message + "\n")


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (StartupError("no such model\nsecond line"), 2, "cllm: no such model second line\n"),
        (CLLMError("engine gone"), 2, "cllm: engine gone\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_command_errors_set_exit_code(
    cllm, monkeypatch, error: BaseException, code: int, line: str
) -> None:
    """An expected error gives one line and an exit code, never a traceback."""

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(command_line, "app", SimpleNamespace(parse_args=fail))
    assert cllm() == (code, "", line)


@pytest.mark.slow
def test_closed_stdout_ends_command_quietly() -> None:
    """A closed pipe ends the command without a message."""
    reading, writing = os.pipe()
    os.close(reading)
    script = "from cllm.cli.main import main; main()"
    process = subprocess.run(
        [sys.executable, "-c", script, "config", "docs"],
        check=False,
        stdout=writing,
        stderr=subprocess.PIPE,
        timeout=PATIENCE,
    )
    os.close(writing)
    assert (process.returncode, process.stderr) == (141, b"")


def test_model_can_be_positional() -> None:
    """A positional model equals --model; both together are rejected."""
    loaded = settings_from_flags(None, None, "a.gguf")
    assert (loaded.settings.model.path, loaded.origins["model.path"]) == ("a.gguf", "--model.path")
    with pytest.raises(StartupError, match=r'named twice: "a\.gguf" and --model "b\.gguf"'):
        settings_from_flags(None, {"model.path": "b.gguf"}, "a.gguf")


def test_configuration_page_matches_the_code(cllm) -> None:
    """docs/configuration.md is what ``cllm config docs`` prints."""
    assert DOCS_PAGE.read_text(encoding="utf-8") == page() == cllm("config", "docs")[1]


def test_number_of_engines_may_be_auto_and_is_never_rounded(cllm) -> None:
    code, shown, _ = cllm("config", "show", "--engine.count", "auto")
    assert code == 0
    assert "engine.count: null" in shown
    code, shown, error = cllm("config", "show", "--engine.count", "1.5")
    assert (code, shown) == (2, "")
    assert error.startswith("cllm: --engine.count must be a whole number from 1")
