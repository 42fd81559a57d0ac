"""Prints the page docs/cli.md: every command with an example, exit codes, variables, files, and the
flags of other servers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from cllm.cli.conversation.slash_commands import HELP
from cllm.cli.main import ALIASES, COMMANDS
from cllm.cli.peer_flags import DEFAULT_VALUES, HINTS, OTHER_NAMES, OTHER_SAMPLING_NAMES, VARIABLES
from cllm.cli.settings_flags import SHORT_NAMES
from cllm.config.settings import OPTIONS

EXAMPLES = {
    "serve": "cllm serve hf:Qwen/Qwen3-0.6B-GGUF:Q8_0 --port 8080",
    "chat": "cllm chat --url http://127.0.0.1:8000 --system 'Be brief.'",
    "run": "cllm run cllm-builtin 'What is 27 plus 45?' --verbose",
    "generate": "cllm generate 'Once there was a clever' --max-tokens 40 --json",
    "pull": "cllm pull hf:Qwen/Qwen3-0.6B-GGUF:Q8_0",
    "list": "cllm list --json",
    "show": "cllm show cllm-builtin",
    "rm": "cllm rm Qwen/Qwen3-0.6B-GGUF:Q8_0",
    "cp": "cllm cp cllm-builtin mine",
    "ps": "cllm ps --url http://127.0.0.1:8000",
    "stop": "cllm stop mine",
    "create": "cllm create mario -f Modelfile",
    "launch": "cllm launch claude --print",
    "tune": "cllm tune model.gguf --out cllm.yaml",
    "doctor": "cllm doctor --json",
    "bench": "cllm bench load http://127.0.0.1:8000",
    "simulate": "cllm simulate --help",
    "explain": "cllm explain --steps 5",
    "trace": "cllm trace trace.json --seconds 5",
    "usage": "cllm usage --by account,model",
    "top": "cllm top --url http://127.0.0.1:8000",
    "rpc-worker": "cllm rpc-worker --address 10.0.0.5:50052",
    "keys": "cllm keys add anna --tokens-per-minute 10000",
    "config": "cllm config show --port 8080",
    "cluster": "cllm cluster front --urls http://10.0.0.5:8000,http://10.0.0.6:8000",
}
EXIT_CODES = {
    "0": "success",
    "1": "the command ran, and what it checked or measured failed (`doctor`, `bench`, `tune`, "
    "`simulate`)",
    "2": "a wrong command line or setting, a model or server that cannot be used, or an answer that "
    "failed: one line on stderr says why",
    "130": "Ctrl-C",
    "141": "the program that reads the output has ended",
    "128 + n": "another signal n",
    "any": "`cllm launch` ends with the exit code of the tool",
}
ENVIRONMENT = {
    "CLLM_URL": "the server that `chat`, `generate`, `run`, `ps`, `stop`, `create`, `launch`, "
    "`explain`, `trace` and `usage` use",
    "CLLM_API_KEY": "the key for that server; for `serve`, the key that clients need",
    "CLLM_CONFIG": "the YAML file of settings",
    "CLLM_...": "any [setting](configuration.md), such as `CLLM_SERVER_PORT`",
    "HF_TOKEN, HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE": "access to the Hugging Face hub, and its cache",
    "XDG_STATE_HOME": "where `chat` and `run` keep their files, instead of `~/.local/state`",
    "NO_COLOR, TERM": "with `NO_COLOR` there are no colours; with `TERM=dumb`, plain text",
}
PATHS = {
    "~/.local/state/cllm/chat_history": "what was typed in `chat` and `run`; only the user can read "
    "it",
    "~/.local/state/cllm/chats/": "conversations that `/save` keeps; only the user can read them",
    "~/.local/state/cllm/": "`storage.folder`: created models, files, batches and usage of a server",
    "~/.config/cllm/keys.json": "`server.keys_file`: accounts and the hashes of their keys",
    "~/.config/cllm/servers/": "servers without keys, which `cllm keys add` names",
    "~/.cache/huggingface/hub/": "downloaded models",
}

INTRODUCTION = """\
# Commands

This page lists all commands. `make docs` generates it from the code, with `tools/cli_page.py`.

`cllm COMMAND --help` describes all options of a command. Results are printed on stdout, and everything else on stderr.
With `--json`, a command prints JSON for scripts, whose fields [stay stable](public_api.md).

"""
TALKING = """
## Talking

`cllm run MODEL [PROMPT]` works as `ollama run` does. A running server answers and loads the model if necessary. Without a
server, or if the server at the default address does not have the model, `cllm run` loads the model itself, and downloads a
model whose name begins with `hf:`. Text on stdin precedes the prompt: `cllm run cllm-builtin 'Summarize this.' < notes.txt`.
`--format json` or `--format schema.json` constrains the form of the answer. `--think`, `--no-think` and `--think=low` control
reasoning, and `--hide-thinking` does not show it.

On a terminal, answers are formatted as Markdown and reasoning is dimmed. Elsewhere, stdout gets the text alone and
unchanged, and reasoning goes to stderr. `cllm chat` then reads a message from each line of stdin. `cllm run` reads stdin as
one message.

In a conversation:

"""
LAUNCHING = """
## Coding tools

`cllm launch claude`, `codex`, `aider` and `opencode` find the model of a running server and start the tool with it. They set
variables and arguments for this one run and write nothing to the tool's own settings. `--print` shows the command without
starting it. Arguments after `--` go to the tool: `cllm launch claude -- --help`. The prompts of these tools are long
(Claude Code about 36,000 tokens, Codex CLI 16,000, OpenCode 15,000), so the server needs a model with a long context that
can call tools. The built-in model is too small for them.
"""
OTHERS = """
## Flags of other servers

These flags of llama-server, vLLM and Ollama are accepted by `cllm serve`, and those for a model also by `cllm chat`
and `cllm generate`. `-c` differs slightly: in llama-server it is the size of the whole KV cache, and here the longest
context of each sequence. The last column has values that mean the same as no flag.

| Flag | Setting | Default |
|---|---|---|
"""
HINTED = """
These have another name here, or nothing to set. cLLM accepts with a note those that ask for what it does anyway, such as
`--jinja` and `-cb`, and `-hf`. For the others it stops with exit code 2 and says what to use.

| Flag | Instead |
|---|---|
"""
UNREAD = """
Variables of other servers are not read, because they are meant for programs that may run on the same machine. If one of
these is set, `cllm serve` names the setting to use.

| Variable | Instead |
|---|---|
"""


def render_page() -> str:
    return "".join(sections())


def sections() -> Iterator[str]:
    yield INTRODUCTION
    yield "| Command | What it does | Example |\n|---|---|---|\n"
    for name, (_, summary) in COMMANDS.items():
        names = code((name, *ALIASES.get(name, ())))
        first = " ".join(summary.partition("\n\n")[0].split())
        yield f"| {names} | {first} | `{EXAMPLES[name]}` |\n"
    yield TALKING
    yield "| | |\n|---|---|\n"
    yield from (f"| `{usage}` | {text} |\n" for usage, text in HELP)
    yield LAUNCHING
    yield "\n## Exit codes\n\n| Code | Meaning |\n|---|---|\n" + rows(EXIT_CODES)
    yield "\n## Environment\n\n| Variable | Meaning |\n|---|---|\n" + rows(ENVIRONMENT)
    yield "\n## Files\n\n| File | Content |\n|---|---|\n" + rows(PATHS)
    yield OTHERS
    for key, flags in OTHER_NAMES.items():
        setting, values = SHORT_NAMES.get(key, OPTIONS[key].flag), DEFAULT_VALUES.get(key, ())
        yield f"| {code(flags)} | `{setting}` | {code(values)} |\n"
    for name, flags in OTHER_SAMPLING_NAMES.items():
        own = f"--{name.replace('_', '-')}"
        yield f"| {code(flags)} | `{own}` of `chat`, `run` and `generate` | |\n"
    yield HINTED
    yield from (f"| {code(flags)} | {text} |\n" for flags, text in HINTS.items())
    yield UNREAD
    yield rows(VARIABLES)


def code(names: tuple[str, ...]) -> str:
    return " ".join(f"`{name}`" for name in names)


def rows(entries: Mapping[str, str]) -> str:
    return "".join(
        f"| {code(tuple(key.split(', ')))} | {text} |\n" for key, text in entries.items()
    )


if __name__ == "__main__":
    print(render_page(), end="")
