"""Flags and variables of llama-server, vLLM and Ollama."""

from __future__ import annotations

import json

import pytest
from conftest import IS_FULL

from cllm.cli.main import list_names
from cllm.cli.peer_flags import (
    DEFAULT_VALUES,
    FLAGS,
    HUB,
    NOT_NEEDED,
    NOT_NEEDED_IF_ONE,
    NOT_NEEDED_WITH_VALUE,
    OTHER_NAMES,
    REWRITTEN,
    accept_flags,
    flags_in,
    remark_on_variables,
)
from cllm.config.file import PEER_KEYS
from cllm.config.settings import OPTIONS

ACCEPTED = {*NOT_NEEDED, *NOT_NEEDED_WITH_VALUE, *NOT_NEEDED_IF_ONE, *REWRITTEN, *HUB}
FAKE = ("--backend.name", "fake")


def test_other_names_set_the_same_options(cllm) -> None:
    for turn in range(max(map(len, OTHER_NAMES.values()))):
        names = {key: names[turn] for key, names in OTHER_NAMES.items() if len(names) > turn}
        words = [f"{name}={OPTIONS[key].default}" for key, name in names.items()]
        shown = json.loads(cllm("config", "show", "--json", *words).out)
        for key, name in names.items():
            assert shown["origins"][key] == OPTIONS[key].flag, name


@pytest.mark.slow
def test_values_that_mean_the_default_of_a_peer_mean_the_default(cllm) -> None:
    """Such as -c 0, -np -1 and -ngl all."""
    for key, values in DEFAULT_VALUES.items():
        for value in values:
            for words in (OTHER_NAMES[key][0], value), (f"{OPTIONS[key].flag}={value}",):
                shown = json.loads(cllm("config", "show", "--json", *words).out)["settings"]
                for part in key.split("."):
                    shown = shown[part]
                assert shown == OPTIONS[key].default, words
    assert cllm("config", "show", "-c", "1").err.startswith("cllm: -c must be")


@pytest.mark.parametrize("name", ["--n_ctx", "--n-ctx", "--num_ctx", "--num-ctx"])
def test_names_of_the_context_length_in_files_and_libraries_are_explained(cllm, name) -> None:
    for command in ("serve", "chat", "generate"):
        assert cllm(command, f"{name}=4096").err.endswith(f"{name}. Use --context.\n")


def test_familiar_command_line_is_understood(cllm) -> None:
    words = "-m q.gguf -c 4096 -ngl 99 -np 4 -t 2 -fa on -b 256 -ub 128 --host 0.0.0.0 --port 1"
    settings = json.loads(cllm("config", "show", "--json", *words.split()).out)["settings"]
    assert settings["model"]["path"] == "q.gguf"
    assert settings["model"]["max_context_length"] == 4096
    assert settings["scheduler"]["max_num_seqs"] == 4
    assert settings["scheduler"]["max_num_batched_tokens"] == 256
    assert settings["backend"]["llama_cpp"]["n_gpu_layers"] == 99
    assert settings["backend"]["llama_cpp"]["flash_attention"] == "on"


def test_generate_has_familiar_flags(cllm) -> None:
    words = ("-p", "a", "-n", "3", "--temp", "0", "-c", "64", "-s", "1")
    assert cllm("generate", *FAKE, *words).out == "bcd\n"
    assert "not both" in cllm("generate", "a", "-p", "b", *FAKE).err


def test_several_names_are_not_read_as_one(cllm) -> None:
    for words in (("-a", "a,b"), ("--alias=a,b",)):
        done = cllm("serve", *words)
        assert (done.code, "--model.aliases takes others" in done.err) == (2, True)


@pytest.mark.slow
@pytest.mark.parametrize("flag", sorted(FLAGS.keys() - ACCEPTED))
def test_unknown_flag_of_a_peer_gives_a_hint(cllm, flag: str) -> None:
    """One line, and exit code 2. A short run tries each form with half of the flags."""
    forms = [(flag, "1"), (f"{flag}=1",)]
    for words in forms if IS_FULL else [forms[len(flag) % 2]]:
        done = cllm("serve", *words)
        assert (done.code, done.out) == (2, "")
        assert done.err == f"cllm: Unknown option: {flag}. {FLAGS[flag]}\n"


def test_hints_name_options_that_exist() -> None:
    """Flags in the hints are flags of ``cllm serve``."""
    named = {flag for text in FLAGS.values() for flag in flags_in(text)}
    assert "--kv.type" in named
    assert named <= list_names("serve")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("serve -nkvo", "-nkvo."),
        ("serve -ngld 9", "-ngld. A draft model has no settings of its own."),
        ("serve -rea off", "-rea."),
        ("run m -ngl 9", "-ngl. cllm serve and cllm chat have it."),
        ("run m -c 9", "-c. cllm serve and cllm chat have it."),
        ("run m --max-model-len 9", "--max-model-len. cllm serve and cllm chat have it."),
        (
            "run m -ctk q8_0",
            "-ctk. With cllm serve: Use --kv.type, which applies to keys and values.",
        ),
        ("chat -np 2", "-np. cllm serve has it."),
        ("chat -ctk q8_0", "-ctk. Use --kv.type, which applies to keys and values."),
    ],
)
def test_flags_of_other_commands_are_explained(cllm, words: str, message: str) -> None:
    """-nkvo is not read as -n kvo."""
    assert cllm(*words.split()).err == f"cllm: Unknown option: {message}\n"


def test_variables_of_peers_are_named_but_not_read() -> None:
    assert remark_on_variables({"PATH": "/bin"}) == ""
    line = remark_on_variables({"OLLAMA_KEEP_ALIVE": "5m", "LLAMA_ARG_CTX_SIZE": "1"})
    assert line == (
        "not read: OLLAMA_KEEP_ALIVE (model.keep_alive); LLAMA_ARG_CTX_SIZE "
        "(flags of the same name)"
    )


def test_flags_that_are_not_needed_are_accepted_with_a_note(cllm) -> None:
    """In front of, between and behind other words, with the value in the same word or the next."""
    words = ["--jinja", "a", "-cb", "--cache-reuse", "256", "--max-tokens", "3", "--dtype=auto"]
    done = cllm("generate", *FAKE, *words, "--temperature", "0", "-tp", "1")
    assert (done.code, done.out) == (0, "bcd\n")
    assert [line.split()[1] for line in done.err.splitlines()] == [
        *("--jinja", "-cb", "--cache-reuse", "--dtype", "-tp")
    ]
    assert "Chat templates are always rendered as Jinja." in done.err


def test_flags_that_turn_off_logs_of_requests_are_accepted() -> None:
    words = ["--disable-log-requests", "--no-enable-log-requests", "--disable-log-stats"]
    kept, notes = accept_flags([*words, "--port", "1"], list_names("serve"))
    assert kept == ["--port", "1"]
    assert [note.split()[0] for note in notes] == words


def test_flags_that_are_not_needed_have_a_reason() -> None:
    assert FLAGS.keys() >= ACCEPTED
    own = list_names("serve")
    assert {word.partition("=")[0] for word in REWRITTEN.values()} <= own
    assert not ACCEPTED & own


def test_familiar_flags_are_read_as_ours() -> None:
    own = list_names("serve")
    assert accept_flags(["-hf", "a/b:Q4_K_M", "--no-mmap"], own)[0] == [
        *("--model=hf:a/b:Q4_K_M", "--backend.llama-cpp.use-mmap=false")
    ]
    assert accept_flags(["-hf", "a/b", "Why?"], list_names("run"))[0] == ["hf:a/b", "Why?"]
    assert accept_flags(["-tp", "2", "--metrics=1", "-hf"], own) == (
        ["-tp", "2", "--metrics=1", "-hf"],
        [],
    )


def test_verbose_of_run_stays_its_own() -> None:
    assert accept_flags(["m", "--verbose"], list_names("run")) == (["m", "--verbose"], [])


@pytest.mark.slow
@pytest.mark.parametrize("name", PEER_KEYS)
def test_keys_of_other_servers_name_the_setting(cllm, tmp_path, name: str) -> None:
    """At the top of the file, and in a section."""
    file = tmp_path / "a.yaml"
    for text in (f"{name}: 1\n", f"cache:\n  {name.replace('_', '-')}: 1\n"):
        file.write_text(text)
        done = cllm("config", "show", "--config", file)
        assert done.code == 2
        assert f"did you mean {PEER_KEYS[name]}?" in done.err
