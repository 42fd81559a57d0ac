"""The settings tree and its four sources."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from pydantic import ValidationError

from cllm.cli.config import as_json, as_lines
from cllm.config.file import ALIASES, MAX_FILE_BYTES, NOT_NEEDED
from cllm.config.settings import OPTIONS, Settings
from cllm.config.sources import (
    SERVICE_VARIABLE,
    VARIABLES,
    LoadedConfig,
    get_value,
    is_from_kubernetes,
    load_settings,
)
from cllm.errors import StartupError

SEED_YAML = Path(__file__).parents[1] / "data" / "seed_recommended.yaml"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Write a YAML file as c.yaml in the current folder."""
    monkeypatch.chdir(tmp_path)

    def write(content: str | bytes) -> Path:
        path = Path("c.yaml")
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


def refusal(
    config: Path | None = None, environ: dict[str, str] | None = None, **flags: object
) -> str:
    with pytest.raises(StartupError) as caught:
        load_settings(config, environ or {}, flags)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def from_environment(variable: str, text: str) -> object:
    loaded = load_settings(None, {variable: text}, {})
    return get_value(loaded.settings, VARIABLES[variable].key)


def test_options_without_a_source_have_their_defaults() -> None:
    """The origin of each is "default"."""
    loaded = load_settings(None, {}, {})
    assert loaded == LoadedConfig(Settings(), dict.fromkeys(OPTIONS, "default"), [])
    assert loaded.settings.server.port == 8000
    assert loaded.settings.model.path is None


def test_settings_are_immutable() -> None:
    with pytest.raises(ValidationError):
        Settings().server.port = 1


def test_every_option_has_a_help_sentence() -> None:
    assert [option.key for option in OPTIONS.values() if not option.help.endswith(".")] == []


def test_defaults_pass_the_checks_of_given_values() -> None:
    for key, option in OPTIONS.items():
        assert (
            get_value(load_settings(None, {}, {key: option.default}).settings, key)
            == option.default
        )


def test_variables_and_keys_are_unique() -> None:
    """No two options share a variable, and no alias has the name of an option."""
    assert len({option.variable for option in OPTIONS.values()}) == len(OPTIONS)
    assert set(VARIABLES) - {option.variable for option in OPTIONS.values()} == {"CLLM_API_KEY"}
    assert not set(OPTIONS) & (set(ALIASES) | set(NOT_NEEDED))
    assert set(ALIASES.values()) <= set(OPTIONS)


def test_flags_win_over_environment_over_file_over_defaults(file) -> None:
    """Each value has its origin."""
    path = file("server:\n  host: file\n  port: 1\n  max_body_mb: 2\n")
    environ = {"CLLM_SERVER_PORT": "3", "CLLM_SERVER_MAX_BODY_MB": "4", "PATH": "x"}
    loaded = load_settings(path, environ, {"server.max_body_mb": 5})
    server = loaded.settings.server
    assert (server.host, server.port, server.max_body_mb, server.drain_timeout) == (
        "file",
        3,
        5,
        30.0,
    )
    assert {key: origin for key, origin in loaded.origins.items() if origin != "default"} == {
        "server.host": "c.yaml:2",
        "server.port": "CLLM_SERVER_PORT",
        "server.max_body_mb": "--server.max-body-mb",
    }


def test_cllm_config_names_the_file_if_no_flag_does(file) -> None:
    path = file("log: {level: debug}\n")
    assert load_settings(None, {"CLLM_CONFIG": "c.yaml"}, {}).settings.log.level == "debug"
    assert load_settings(path, {"CLLM_CONFIG": "missing.yaml"}, {}).settings.log.level == "debug"
    assert load_settings(None, {"CLLM_CONFIG": ""}, {}).settings.log.level == "info"
    assert refusal(environ={"CLLM_CONFIG": "missing.yaml"}).startswith(
        "missing.yaml: cannot be read: "
    )


# ---------------------------------------------------------------------------------- the seed's file


def test_seed_file_loads_unchanged() -> None:
    """The recommended YAML of the first design takes effect under cLLM's names of its keys."""
    settings = load_settings(SEED_YAML, {}, {}).settings
    assert (settings.server.host, settings.server.port) == ("0.0.0.0", 8080)
    given = {"path": "/path/to/model", "max_context_length": 2048, "quantization": "q4_k_m"}
    assert settings.model == Settings().model.model_copy(update=given)
    given = {"max_num_seqs": 16, "max_num_batched_tokens": 1024, "request_timeout": 120.0}
    assert settings.scheduler == Settings().scheduler.model_copy(update=given)
    assert (settings.cache.max_results, settings.cache.max_memory_mb) == (200, 8192)
    assert settings.kv.max_memory_mb == 8192
    usual = Settings().model_dump()["backend"]["llama_cpp"]
    assert settings.model_dump()["backend"]["llama_cpp"] == {**usual, "n_threads": 8}


def test_seed_file_gets_a_note_for_each_key_without_effect() -> None:
    """Each is named with its line and the reason. One line says which limit applies."""
    loaded = load_settings(SEED_YAML, {}, {})
    reasons = [note for note in loaded.notes if "is not needed: " in note]
    assert len(reasons) == len(NOT_NEEDED) == 10
    assert (
        f"{SEED_YAML}:4: server.num_threads is not needed: {NOT_NEEDED['server.num_threads']}"
        in reasons
    )
    assert [note for note in loaded.notes if note not in reasons] == [
        (
            f"{SEED_YAML}:23: scheduler.max_num_seqs is 16 by resources.max_batch_size, the "
            f"smallest; "
            "ignored: scheduler.max_batch_size: 64, backend.llama_cpp.n_seq_max: 16"
        )
    ]
    assert loaded.origins["scheduler.max_num_seqs"] == f"{SEED_YAML}:23"
    assert loaded.origins["kv.max_memory_mb"] == f"{SEED_YAML}:25"


@pytest.mark.parametrize(
    ("text", "backend", "notes"),
    [
        ("server: {use_libtorch: true}", "torch", []),
        ("server: {use_libtorch: false}", "auto", []),
        ("server: {use_libtorch: true}\nbackend: {name: torch}", "torch", []),
        (
            "server: {use_libtorch: true}\nbackend: {name: fake}",
            "fake",
            [
                'c.yaml:2: backend.name is "fake" by its own name; ignored: server.use_libtorch: true'
            ],
        ),
    ],
)
def test_switch_of_the_seed_chooses_the_backend(file, text, backend, notes) -> None:
    loaded = load_settings(file(text), {}, {})
    assert loaded.settings.backend.name == backend
    assert loaded.notes == notes
    assert load_settings(file(text), {}, {"backend.name": "fake"}).settings.backend.name == "fake"


def test_switch_must_be_true_or_false(file) -> None:
    message = refusal(file("server:\n  use_libtorch: maybe\n"))
    assert message == 'c.yaml:2: server.use_libtorch must be true or false, not "maybe"'


def test_single_alias_sets_its_option_without_a_note(file) -> None:
    loaded = load_settings(file("backend: {llama_cpp: {n_seq_max: 7}}"), {}, {})
    assert loaded.settings.scheduler.max_num_seqs == 7
    assert loaded.notes == []


def test_canonical_key_wins_over_an_alias(file) -> None:
    """Its place and its value do not matter. A note reports it."""
    loaded = load_settings(
        file("resources: {max_batch_size: 4}\nscheduler: {max_num_seqs: 9}"), {}, {}
    )
    assert loaded.settings.scheduler.max_num_seqs == 9
    assert loaded.notes == [
        (
            "c.yaml:2: scheduler.max_num_seqs is 9 by its own name; ignored: "
            "resources.max_batch_size: 4"
        )
    ]


def test_alias_has_the_bounds_of_its_option(file) -> None:
    """An error uses the name in the file, even if another alias would win."""
    message = refusal(file("resources:\n  max_batch_size: 4\nscheduler:\n  max_batch_size: 257\n"))
    assert (
        message
        == "c.yaml:4: scheduler.max_batch_size must be a whole number from 1 up to 256, not 257"
    )


def test_alias_of_a_nullable_option_may_be_null(file) -> None:
    loaded = load_settings(file("resources: {kv_cache_max_memory_mb: null}"), {}, {})
    assert loaded.settings.kv.max_memory_mb is None


# ------------------------------------------------------------------------------------ the YAML file


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "server:\n", "server: {}\n", "---\n", "\ufeffserver:\n"]
)
def test_empty_file_or_section_gives_the_defaults(file, text: str) -> None:
    assert load_settings(file(text), {}, {}).settings == Settings()


def test_dotted_key_equals_nested_mappings(file) -> None:
    loaded = load_settings(file("server.port: 1\nbackend.llama_cpp:\n  n_threads: 2\n"), {}, {})
    assert loaded.settings.server.port == 1
    assert loaded.settings.model_dump()["backend"]["llama_cpp"]["n_threads"] == 2
    assert loaded.origins["backend.llama_cpp.n_threads"] == "c.yaml:3"


def test_float_option_accepts_an_integer(file) -> None:
    """It accepts null too, if the option is nullable."""
    loaded = load_settings(
        file("scheduler: {request_timeout: 5}\nserver: {drain_timeout: 0}"), {}, {}
    )
    assert loaded.settings.scheduler.request_timeout == 5.0
    assert isinstance(loaded.settings.server.drain_timeout, float)
    assert (
        load_settings(
            file("scheduler: {request_timeout: ~}"), {}, {}
        ).settings.scheduler.request_timeout
        is None
    )


def test_yaml_date_is_read_as_text(file) -> None:
    assert (
        load_settings(file("model: {name: 2024-01-31}"), {}, {}).settings.model.name == "2024-01-31"
    )


def test_mapping_of_names_is_read_from_yaml(file) -> None:
    """In a block or on one line. Names may contain dots, and are not split at them."""
    weights = load_settings(
        file("scheduler:\n  weights:\n    user-a.b@c: 2\n    7: 0.5\n"), {}, {}
    ).settings
    assert weights.scheduler.weights == {"user-a.b@c": 2.0, "7": 0.5}
    loaded = load_settings(file('scheduler.weights: {"x: y": 3}'), {}, {})
    assert loaded.settings.scheduler.weights == {"x: y": 3.0}
    assert loaded.origins["scheduler.weights"] == "c.yaml:1"


@pytest.mark.parametrize("text", ["scheduler:\n  weights:\n", "scheduler: {weights: {}}"])
def test_empty_mapping_is_accepted(file, text: str) -> None:
    """All of its entries may be commented out."""
    assert load_settings(file(text), {}, {}).settings == Settings()


def test_mapping_in_a_variable_or_flag_is_json() -> None:
    """A Python caller may pass a dictionary."""
    assert from_environment("CLLM_SCHEDULER_WEIGHTS", '{"user-a": 2}') == {"user-a": 2.0}
    for value in ('{"user-a": 2}', {"user-a": 2}):
        loaded = load_settings(
            None, {"CLLM_SCHEDULER_WEIGHTS": '{"b": 1}'}, {"scheduler.weights": value}
        )
        assert loaded.settings.scheduler.weights == {"user-a": 2.0}


@pytest.mark.parametrize(
    "text",
    [
        'model:\n  aliases: [gpt-4o, "claude-*", 7]\n',
        "model:\n  aliases:\n    - gpt-4o\n    - claude-*\n    - 7\n",
        "model.aliases: gpt-4o, claude-*,7",
    ],
)
def test_list_of_names_is_read_from_yaml_or_commas(file, text: str) -> None:
    """A variable or a flag separates the names with commas."""
    aliases = ["gpt-4o", "claude-*", "7"]
    assert load_settings(file(text), {}, {}).settings.model.aliases == aliases
    assert from_environment("CLLM_MODEL_ALIASES", "gpt-4o, claude-*, 7") == aliases
    assert (
        load_settings(None, {}, {"model.aliases": "gpt-4o,claude-*,7"}).settings.model.aliases
        == aliases
    )


def test_list_of_names_that_starts_with_a_bracket_is_json() -> None:
    text = ' ["gpt-4o", "claude-*", "a,b"]'
    aliases = ["gpt-4o", "claude-*", "a,b"]
    assert load_settings(None, {}, {"model.aliases": text}).settings.model.aliases == aliases
    assert from_environment("CLLM_MODEL_ALIASES", text) == aliases
    assert from_environment("CLLM_MODEL_ALIASES", "[]") == []


@pytest.mark.parametrize(
    "text", ["[gpt-4o, x]", '["a"', "[7]", '[["a"]]', '[""]', '["a"], b', "[" * 100_000]
)
def test_list_of_names_with_invalid_json_is_rejected(text: str) -> None:
    for environ, flags in (({"CLLM_MODEL_ALIASES": text}, {}), ({}, {"model.aliases": text})):
        with pytest.raises(
            StartupError, match="must be names with commas between them, or a JSON list"
        ):
            load_settings(None, environ, flags)


@pytest.mark.parametrize(
    "text", ["model:\n  aliases:\n", "model: {aliases: []}", "model: {aliases: ''}"]
)
def test_empty_list_of_names_is_accepted(file, text: str) -> None:
    assert load_settings(file(text), {}, {}).settings == Settings()
    assert from_environment("CLLM_MODEL_ALIASES", "") == []


WEIGHT = "a number from 0.001 up to 1000"
PORT = "c.yaml:2: server.port must be a whole number from 0 up to 65535, not "


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("server:\n  port: '8080'", PORT + '"8080"'),
        ("server:\n  port: 70000", PORT + "70000"),
        ("server:\n  port: -1", PORT + "-1"),
        ("server:\n  port: true", PORT + "true"),
        ("server:\n  port: 80.0", PORT + "80.0"),
        ("server:\n  port:", PORT + "null"),
        ("server:\n  port: [1]", PORT + "a list"),
        ("server:\n  port: {a: 1}", PORT + "a mapping"),
        (
            "model: {aliases: 7}",
            (
                "c.yaml:1: model.aliases must be names with commas between them, or a JSON list of "
                "names, not 7; write it in quotes"
            ),
        ),
        (
            "model: {aliases: {a: b}}",
            (
                "c.yaml:1: model.aliases must be names with commas between them, or a JSON list of "
                "names, not a mapping"
            ),
        ),
        ("model:\n  aliases: [[a]]", "c.yaml:2: a name must be a word, not a list"),
        ("server:\n  port: 0x" + "f" * 9000, PORT + "a huge number"),
        ("server:\n  port: " + "9" * 9000, 'c.yaml:2: "' + "9" * 76 + "... cannot be read as int"),
        ("server:\n  port: " + "x" * 99, PORT + '"' + "x" * 76 + "..."),
        (
            "server:\n  drain_timeout: .nan",
            "c.yaml:2: server.drain_timeout must be a number from 0 up to 86400, not NaN",
        ),
        (
            "scheduler:\n  weights: 2",
            f"c.yaml:2: scheduler.weights must be a mapping of names, each to {WEIGHT}, not 2",
        ),
        (
            "scheduler.weights: [1]",
            f"c.yaml:1: scheduler.weights must be a mapping of names, each to {WEIGHT}, not a list",
        ),
        (
            "scheduler:\n  weights:\n    a: 1\n    b: 0",
            f"c.yaml:4: scheduler.weights: b must be {WEIGHT}, not 0",
        ),
        (
            "scheduler:\n  priorities: {a: high}",
            'c.yaml:2: scheduler.priorities: a must be interactive, normal or batch, not "high"',
        ),
        (
            "scheduler:\n  weights: {a: 1001}",
            f"c.yaml:2: scheduler.weights: a must be {WEIGHT}, not 1001",
        ),
        (
            "scheduler:\n  weights: {a: .inf}",
            f"c.yaml:2: scheduler.weights: a must be {WEIGHT}, not Infinity",
        ),
        (
            "scheduler:\n  weights: {a: x}",
            f'c.yaml:2: scheduler.weights: a must be {WEIGHT}, not "x"',
        ),
        (
            "scheduler:\n  weights: {a: {b: 1}}",
            f"c.yaml:2: scheduler.weights: a must be {WEIGHT}, not a mapping",
        ),
        (
            "scheduler:\n  weights: {a: }",
            f"c.yaml:2: scheduler.weights: a must be {WEIGHT}, not null",
        ),
        (
            "scheduler:\n  weights:\n    a: 1\n    a: 1",
            "c.yaml:4: scheduler.weights.a is given twice",
        ),
        ("scheduler:\n  weights: {[a]: 1}", "c.yaml:2: a key must be a word, not a list"),
        (
            "scheduler:\n  weights: {'': 1}",
            'c.yaml:2: scheduler.weights: a name must be one line of text, not ""',
        ),
        ("scheduler:\n  weights: !secret {a: 1}", "c.yaml:2: the tag !secret is not allowed"),
        (
            "scheduler.weights.a: 1",
            "c.yaml:1: scheduler.weights.a is not a setting; did you mean scheduler.weights?",
        ),
        (
            "kv: {layout: paged_}",
            'c.yaml:1: kv.layout must be auto, paged, partitioned or unified, not "paged_"',
        ),
        ("model: {name: ''}", 'c.yaml:1: model.name must be one line of text or null, not ""'),
        (
            'model: {path: "a\\nb"}',
            'c.yaml:1: model.path must be one line of text or null, not "a\\nb"',
        ),
        ("server:\n  prot: 1", "c.yaml:2: server.prot is not a setting; did you mean server.port?"),
        ("\nport: 1", "c.yaml:2: port is not a setting; did you mean server.port?"),
        ("sever: {port: 1}", "c.yaml:1: sever is not a setting; did you mean server?"),
        (
            "log: {name: x}",
            "c.yaml:1: log.name is not a setting; did you mean backend.name or model.name?",
        ),
        ("zzz: 1", "c.yaml:1: zzz is not a setting"),
        ('"a\\nb": 1', "c.yaml:1: a\\nb is not a setting"),
        ("<<: {port: 1}", "c.yaml:1: << is not a setting"),
        ("server:\n  port: 1\n  port: 2", "c.yaml:3: server.port is given twice"),
        ("server: {port: 1}\nserver.port: 2", "c.yaml:2: server.port is given twice"),
        ("server: {port: 1}\nserver: {host: a}", "c.yaml:2: server is given twice"),
        ("server: 3", "c.yaml:1: server must be a mapping, not 3"),
        (
            "backend:\n  llama_cpp:\n  - 1",
            "c.yaml:3: backend.llama_cpp must be a mapping, not a list",
        ),
        ("just text", 'c.yaml:1: the file must be a mapping, not "just text"'),
        ("- 1", "c.yaml:1: the file must be a mapping, not a list"),
        ("? [a]\n: 1", "c.yaml:1: a key must be a word, not a list"),
        (
            "server:\n  port: 1\n   host: 2",
            "c.yaml:3: not valid YAML: mapping values are not allowed here",
        ),
        (
            "server:\n\tport: 1",
            (
                "c.yaml:2: not valid YAML: found character '\\t' that cannot start any token; use "
                "spaces instead of tabs"
            ),
        ),
        ("log:\n  level: 'x", "c.yaml:2: not valid YAML: found unexpected end of stream"),
        ("log: {}\n---\nlog: {}", "c.yaml:2: not valid YAML: but found another document"),
        ("log: {}\nkv: \x01", "c.yaml:2: not valid YAML: unprintable character #x0001"),
        ("log: &a {}\nkv: *a", "c.yaml:2: not valid YAML: aliases (*name) are not allowed"),
        ("[" * 5000, "c.yaml: nested too deeply"),
        (
            "model:\n  path: !!python/object/apply:os.system ['true']",
            "c.yaml:2: the tag tag:yaml.org,2002:python/object/apply:os.system is not allowed",
        ),
        ("model:\n  path: !secret x", "c.yaml:2: the tag !secret is not allowed"),
        ("server:\n  port: !!int x", 'c.yaml:2: "x" cannot be read as int'),
        ("server:\n  port: !!bool x", 'c.yaml:2: "x" cannot be read as bool'),
        (b"server:\n  host: \xff", "c.yaml:2: not valid UTF-8"),
        (
            "#" * (MAX_FILE_BYTES + 1),
            "c.yaml: larger than 1000000 bytes, so not a file of settings",
        ),
    ],
)
def test_file_error_names_the_file_the_line_and_the_key(
    file, text: str | bytes, message: str
) -> None:
    assert refusal(file(text)) == message


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("kv: {max-memory-mb: 1}", "did you mean kv.max_memory_mb?"),
        ("sampling: {seed: 0}", "c.yaml:1: sampling.seed is not a setting"),
        ("models: {m: {n_ctx: 5}}", "did you mean max_context_length?"),
        ("models: {m: {path: a, path: b}}", "c.yaml:1: models.m: path is given twice"),
        ("model: a.gguf", "did you mean model.path?"),
        ("backend: fake", "did you mean backend.name?"),
        ("server:\n  port:9000", "a space must follow a colon"),
        ("model: {name: 7}", "not 7; write it in quotes"),
        ("model: {name: no}", "not false; write it in quotes"),
        ("server: {api_key: 1234}", "a key without spaces or null; write it in quotes"),
        ("server:\n  port:\t9000", "use spaces instead of tabs"),
        ("server: {port: 1}".encode("utf-16"), "c.yaml: is UTF-16 text; save it as UTF-8"),
    ],
)
def test_file_error_says_what_to_write_instead(file, text: str | bytes, end: str) -> None:
    assert refusal(file(text)).endswith(end)


def test_number_with_exponent_is_read_from_yaml(file) -> None:
    loaded = load_settings(
        file(
            "sampling: {temperature: 1e-1}\nscheduler: {weights: {a: 2E+1}, request_timeout: 1e3}\n"
            "model: {name: 1e5}\nadapters: {a: {path: 1e6, scale: 5e-1}}"
        ),
        {},
        {},
    )
    assert get_value(loaded.settings, "sampling.temperature") == 0.1
    assert loaded.settings.scheduler.weights == {"a": 20}
    assert loaded.settings.scheduler.request_timeout == 1000
    assert loaded.settings.model.name == "1e5"
    assert (loaded.adapters["a"].path, loaded.adapters["a"].scale) == ("1e6", 0.5)
    message = refusal(file("sampling: {temperature: 1e..5}"))
    assert message.endswith('must be a number from 0 up to 100, not "1e..5"')
    assert refusal(file("scheduler: {weights: {a: 1e4}}")).endswith('not "1e4"')


def test_name_of_the_file_may_begin_with_the_home_folder(file, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(file("server: {port: 9000}").absolute().parent))
    assert load_settings(None, {"CLLM_CONFIG": "~/c.yaml"}, {}).settings.server.port == 9000


def test_alias_bomb_is_rejected_without_expansion(file) -> None:
    levels = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30))
    assert (
        refusal(file("a0: &a0 [x]\n" + levels))
        == "c.yaml:2: not valid YAML: aliases (*name) are not allowed"
    )


def test_unreadable_file_is_a_startup_error(tmp_path: Path) -> None:
    """A missing file, a directory, and an impossible name."""
    assert refusal(tmp_path / "no.yaml").endswith(
        "no.yaml: cannot be read: No such file or directory"
    )
    assert refusal(tmp_path).endswith(": cannot be read: Is a directory")
    assert "cannot be read" in refusal(Path("a\0b"))


# ------------------------------------------------------------------------------- environment, flags


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        ("CLLM_SERVER_PORT", "9000", 9000),
        ("CLLM_SERVER_ALLOW_PULL", " true\n", True),
        ("CLLM_BACKEND_LLAMA_CPP_N_THREADS", "3", 3),
        ("CLLM_BACKEND_LLAMA_CPP_N_THREADS", "", None),
        ("CLLM_BACKEND_LLAMA_CPP_N_THREADS", "None", None),
        ("CLLM_BACKEND_LLAMA_CPP_N_GPU_LAYERS", "-1", -1),
        ("CLLM_BACKEND_LLAMA_CPP_USE_MMAP", "false", False),
        ("CLLM_BACKEND_LLAMA_CPP_USE_MMAP", "0", False),
        ("CLLM_BACKEND_LLAMA_CPP_USE_MLOCK", "TRUE", True),
        ("CLLM_BACKEND_LLAMA_CPP_USE_MLOCK", "1", True),
        ("CLLM_SCHEDULER_REQUEST_TIMEOUT", "null", None),
        ("CLLM_SCHEDULER_REQUEST_TIMEOUT", "5", 5.0),
        ("CLLM_MODEL_PATH", "hf:owner/repo:q4_k_m", "hf:owner/repo:q4_k_m"),
        ("CLLM_MODEL_NAME", "7", "7"),
        ("CLLM_KV_LAYOUT", "unified", "unified"),
    ],
)
def test_variable_is_parsed_by_the_type_of_its_option(
    variable: str, text: str, value: object
) -> None:
    assert from_environment(variable, text) == value


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("CLLM_SERVER_PORT", "x", 'must be a whole number from 0 up to 65535, not "x"'),
        ("CLLM_SERVER_PORT", "tcp://x", 'must be a whole number from 0 up to 65535, not "tcp://x"'),
        ("CLLM_SERVER_PORT", "none", 'must be a whole number from 0 up to 65535, not "none"'),
        ("CLLM_SERVER_PORT", "65536", "must be a whole number from 0 up to 65535, not 65536"),
        (
            "CLLM_SERVER_PORT",
            "9" * 5000,
            'must be a whole number from 0 up to 65535, not "' + "9" * 76 + "...",
        ),
        ("CLLM_SAMPLING_TOP_P", "nan", "must be a number from 0 up to 1, not NaN"),
        ("CLLM_SAMPLING_TEMPERATURE", "inf", "must be a number from 0 up to 100, not Infinity"),
        (
            "CLLM_SCHEDULER_REQUEST_TIMEOUT",
            "0",
            "must be a number above 0 up to 604800 or null, not 0.0",
        ),
        ("CLLM_BACKEND_LLAMA_CPP_USE_MMAP", "yes", 'must be true or false, not "yes"'),
        ("CLLM_LOG_LEVEL", "LOUD", 'must be debug, info, warning or error, not "LOUD"'),
        (
            "CLLM_SCHEDULER_WEIGHTS",
            '{"a"',
            f'must be a mapping of names, each to {WEIGHT}, not "{{\\"a\\""',
        ),
    ],
)
def test_variable_error_names_the_variable_and_the_expected_type(
    variable: str, text: str, message: str
) -> None:
    assert refusal(environ={variable: text}) == f"{variable} {message}"


def test_unknown_variables_are_ignored_with_a_warning() -> None:
    """One line for each, with a suggestion for near misses. The other variables take effect."""
    environ = {
        "CLLM_SERVER_PROT": "1",
        "CLLM_PORT": "1",
        "CLLM_ZZZ": "",
        "CLLM_KV_LAYOUT": "unified",
    }
    loaded = load_settings(None, environ, {})
    assert loaded.notes == [
        "ignored: CLLM_PORT is not a setting; did you mean CLLM_SERVER_PORT?",
        "ignored: CLLM_SERVER_PROT is not a setting; did you mean CLLM_SERVER_PORT?",
        "ignored: CLLM_ZZZ is not a setting",
    ]
    assert loaded.settings == load_settings(None, {}, {"kv.layout": "unified"}).settings


@pytest.mark.parametrize(
    "service", ["CLLM", "CLLM_SERVER", "CLLM_MODEL", "CLLM_CONFIG", "CLLM_MODEL_V2"]
)
@pytest.mark.parametrize("host", ["10.0.0.11", "[fd00::11]"])
def test_variables_of_kubernetes_services_are_ignored(service: str, host: str) -> None:
    """Kubernetes sets them in every pod next to a service named cllm. They change nothing and cause
    no warning.
    """
    address = f"tcp://{host}:8000"
    environ = {
        f"{service}_SERVICE_HOST": host,
        f"{service}_SERVICE_PORT": "8000",
        f"{service}_SERVICE_PORT_HTTP_API": "8000",
        f"{service}_PORT": address,
        f"{service}_PORT_8000_TCP": address,
        f"{service}_PORT_8000_TCP_PROTO": "tcp",
        f"{service}_PORT_8000_TCP_PORT": "8000",
        f"{service}_PORT_8000_TCP_ADDR": host,
        f"{service}_PORT_53_UDP": f"udp://{host}:53",
    }
    assert load_settings(None, environ, {}) == load_settings(None, {}, {})


def test_no_option_is_named_like_a_variable_of_kubernetes() -> None:
    """Otherwise it could not be set in the environment."""
    assert [
        variable for variable in VARIABLES if is_from_kubernetes(variable, {variable: "1"})
    ] == []
    assert [variable for variable in VARIABLES if SERVICE_VARIABLE.fullmatch(variable)] == []


def test_variables_of_the_client_commands_are_not_settings() -> None:
    """A server ignores them without a warning."""
    environ = {"CLLM_URL": "http://localhost:1", "CLLMX": "1"}
    loaded = load_settings(None, environ, {})
    assert loaded.settings == Settings()
    assert loaded.notes == []


def test_secrets_are_never_shown(capsys) -> None:
    """Neither in the effective settings nor in an error."""
    loaded = load_settings(None, {"CLLM_API_KEY": "not-to-be-seen"}, {})
    assert loaded.settings.server.api_key == "not-to-be-seen"
    for text in (as_lines(loaded), as_json(loaded)):
        assert "not-to-be-seen" not in text
        assert "***" in text
    with pytest.raises(StartupError) as caught:
        load_settings(None, {"CLLM_API_KEY": "not to be seen"}, {})
    assert "not to be" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "server.port",
            65536,
            "--server.port must be a whole number from 0 up to 65535, not 65536",
        ),
        ("sampling.min_p", math.nan, "--sampling.min-p must be a number from 0 up to 1, not NaN"),
        ("sampling.min_p", 10**400, "--sampling.min-p must be a number from 0 up to 1, not 1000"),
        ("scheduler.weights", '{"a": -1}', f"--scheduler.weights: a must be {WEIGHT}, not -1"),
        ("scheduler.weights", '{"a": NaN}', f"--scheduler.weights: a must be {WEIGHT}, not NaN"),
        (
            "scheduler.weights",
            "[1]",
            f"--scheduler.weights must be a mapping of names, each to {WEIGHT}, not [1]",
        ),
        ("scheduler.weights", "[" * 99_999, "--scheduler.weights must be a mapping of names"),
        ("server.prot", 1, "--server.prot is not a setting; did you mean server.port?"),
    ],
)
def test_flag_error_names_the_flag_as_typed(key: str, value: object, message: str) -> None:
    assert refusal(**{key: value}).startswith(message)


def test_invalid_value_is_rejected_even_if_overridden(file) -> None:
    """A flag does not hide an error in the file."""
    assert refusal(file("server:\n  port: x"), **{"server.port": 1}) == PORT + '"x"'


MODELS = """
kv: {type: q8_0}
models:
  folder: here
  qwen2.5:7b:
    path: a.gguf
    aliases: [gpt-4o, "claude-*"]
    keep_alive: 60
    kv: {max_memory_mb: 100}
    sampling.temperature: 0.2
  b: {}
"""


def test_models_have_their_own_settings_and_those_of_the_file(file) -> None:
    """Flags and variables hold for all of them, unless a model has its own value."""
    loaded = load_settings(file(MODELS), {"CLLM_SAMPLING_TOP_K": "7"}, {"model.path": "c.gguf"})
    first, second = loaded.models.values()
    assert [*loaded.models] == ["qwen2.5:7b", "b"]
    assert (first.model.path, first.model.name) == ("a.gguf", "qwen2.5:7b")
    assert first.model.aliases == ["gpt-4o", "claude-*"]
    assert (first.kv.type, first.kv.max_memory_mb) == ("q8_0", 100)
    assert get_value(first, "sampling.temperature") == 0.2
    assert get_value(first, "sampling.top_k") == 7
    assert (second.model.path, second.model.keep_alive, second.kv.max_memory_mb) == (None,) * 3
    assert loaded.settings.models.folder == "here"
    assert loaded.settings.model.path == "c.gguf"


def test_shown_models_are_read_as_the_same(file) -> None:
    adapters = "adapters: {poet: {path: a.gguf, base: b}}\n"
    loaded = load_settings(file(MODELS + adapters), {}, {})
    again = load_settings(file(as_lines(loaded)), {}, {})
    assert (again.models, again.adapters) == (loaded.models, loaded.adapters)
    assert loaded.adapters
    assert '"keep_alive": 60' in as_json(loaded)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: {pth: x}", "c.yaml:1: models.a: pth is not a setting; did you mean path?"),
        ("a: 3", "c.yaml:1: models.a must be a mapping with a path, not 3"),
        ("a:", "c.yaml:1: models.a must be a mapping with a path, not null"),
        ("a: {path: [1]}", "c.yaml:1: models.a.path must be one line of text or null, not a list"),
        ("a: {kv: {type: x}}", 'c.yaml:1: models.a.kv.type must be f16, q8_0 or q4_0, not "x"'),
        ("a: {}, a: {}", "c.yaml:1: models.a is given twice"),
        ("a: {name: x}", "c.yaml:1: models.a: name is not a setting"),
        ("a: {scheduler: {policy: x}}", "c.yaml:1: models.a: scheduler is not a setting"),
        (
            "folder: {path: x}",
            "c.yaml:1: models.folder must be one line of text or null, not a map",
        ),
        ("[1]: {path: x}", "c.yaml:1: a name must be a word, not a list"),
        ('"a\\nb": {}', "c.yaml:1: a name must be one line of up to 300"),
    ],
)
def test_faulty_model_is_refused(file, text, message) -> None:
    assert refusal(file(f"models: {{{text}}}")).startswith(message)


def test_adapters_are_read(file) -> None:
    text = "adapters:\n  poet: {path: a.gguf, base: b, scale: 0.5}\n  plain: {path: c.gguf}\n"
    loaded = load_settings(file(text), {}, {})
    poet, plain = loaded.adapters.values()
    assert (poet.path, poet.base, poet.scale) == ("a.gguf", "b", 0.5)
    assert (plain.base, plain.scale) == (None, 1.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: {}", "adapters.a needs a path"),
        ("a: {path: x, scale: y}", "c.yaml:1: adapters.a.scale must be a number from -100 up to"),
        ("a: {path: x, sale: 1}", "c.yaml:1: adapters.a: sale is not a setting"),
        ("a: x", 'c.yaml:1: adapters.a must be a mapping with a path, not "x"'),
        ("x", "c.yaml:1: adapters must be a mapping, not"),
    ],
)
def test_faulty_adapter_is_refused(file, text, message) -> None:
    assert refusal(file(f"adapters: {{{text}}}" if ":" in text else "adapters: x")).startswith(
        message
    )


@pytest.mark.parametrize("option", OPTIONS.values(), ids=lambda option: option.key)
def test_empty_variable_counts_as_unset(option) -> None:
    loaded = load_settings(None, {option.variable: ""}, {})
    assert loaded.origins[option.key] == "default"
    assert get_value(loaded.settings, option.key) == option.default


def test_empty_variable_leaves_the_file_its_value(file) -> None:
    path = file("model: {path: m.gguf}")
    assert load_settings(path, {"CLLM_MODEL_PATH": ""}, {}).settings.model.path == "m.gguf"
    assert load_settings(path, {"CLLM_MODEL_PATH": "null"}, {}).settings.model.path is None
