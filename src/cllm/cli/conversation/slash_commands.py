"""The commands of a conversation in the terminal, such as /new."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgspec

from cllm.cli.answers import Talker, Think, read_schema
from cllm.cli.conversation.conversation import Conversation, list_saved
from cllm.cli.talk import SAMPLING
from cllm.core.params import SamplingParams
from cllm.errors import CLLMError

COMMAND = re.compile(r"(/[a-z]+|/\?)(?:\s+(.*))?", re.DOTALL)
OLLAMA_NAMES = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
EFFORTS: dict[str, Think] = {"": True, "low": "low", "medium": "medium", "high": "high"}
SWITCHES = ("think", "nothink", "verbose", "quiet", "noformat")


class Help(NamedTuple):
    usage: str
    text: str


HELP = (
    Help("/help, /?", "show this help"),
    Help("/new, /clear", "start a new conversation"),
    Help("/system [TEXT]", "show or set the system message"),
    Help("/set NAME VALUE", "set a sampling parameter, such as temperature"),
    Help("/set format json", "answer with JSON; also a schema, or a file with one"),
    Help("/set noformat", "answer without a format again"),
    Help("/set think, nothink", "let the model reason before it answers, or not"),
    Help("/set think low", "choose the effort: low, medium or high"),
    Help("/set verbose, quiet", "show timings after each answer, or not"),
    Help("/show", "show the model and the settings"),
    Help("/model [NAME]", "list the models, or use another one"),
    Help("/save NAME, /load NAME", "save the conversation, or continue a saved one"),
    Help("/bye, /exit, Ctrl-D", "leave"),
    Help('"""', "begin and end a message of several lines"),
    Help("Alt-Enter", "begin a new line"),
    Help("Ctrl-C", "stop an answer; press it twice to leave"),
)
HELP_TEXT = "\n".join(f"  {usage:<24}{text}" for usage, text in HELP)


class SlashCommands:
    """Runs the commands of a conversation.

    It ``is_verbose`` while timings are to be shown after each answer, ``has_ended`` when the user
    wants to leave, and ``has_loaded`` when /load has replaced the conversation.
    """

    def __init__(
        self, talker: Talker, conversation: Conversation, *, is_verbose: bool = True
    ) -> None:
        self._talker, self._conversation = talker, conversation
        self.is_verbose = is_verbose
        self.has_ended = self.has_loaded = False
        self._commands: dict[str, Callable[[str], str]] = {
            "/help": lambda _: HELP_TEXT,
            "/?": lambda _: HELP_TEXT,
            "/new": self._new,
            "/clear": self._new,
            "/system": self._system,
            "/set": self._set,
            "/show": self._show,
            "/model": self._model,
            "/save": self._save,
            "/load": self._load,
            "/bye": self._leave,
            "/exit": self._leave,
            "/quit": self._leave,
        }

    def run(self, text: str) -> str | None:
        """Run the command in ``text`` and return what to print, or None if ``text`` is a message.

        Raises CLLMError.
        """
        match = COMMAND.fullmatch(text)
        if match is None:
            return None
        if match[1] not in self._commands:
            return f"There is no command {match[1]}; /help lists them."
        return self._commands[match[1]]((match[2] or "").strip())

    def complete(self, text: str) -> Iterable[str]:
        """Return the words that may be the last one of ``text``."""
        if not text.startswith("/") or "\n" in text:
            return []
        *words, last = text.split(" ")
        return sorted(word for word in self._words_after(words) if word.startswith(last))

    def _words_after(self, words: list[str]) -> Iterable[str]:
        match words:
            case []:
                return self._commands
            case ["/set"]:
                return [*SAMPLING, "format", "system", *SWITCHES]
            case ["/set", "format"]:
                return ["json"]
            case ["/set", "think"]:
                return [effort for effort in EFFORTS if effort]
            case ["/load"]:
                return list_saved()
            case ["/model"]:
                try:
                    return self._talker.list_models()
                except CLLMError:
                    return []
        return []

    def _new(self, _: str) -> str:
        self._conversation.clear()
        return "A new conversation begins."

    def _leave(self, _: str) -> str:
        self.has_ended = True
        return ""

    def _system(self, text: str) -> str:
        if text:
            self._conversation.system = text
            return "The system message is set."
        return self._conversation.system or "There is no system message."

    def _set(self, text: str) -> str:
        name, _, value = text.removeprefix("parameter ").strip().partition(" ")
        name, value = OLLAMA_NAMES.get(name, name), value.strip()
        options = self._talker.options
        match name:
            case "":
                return self._show("")
            case "system" if value:
                return self._system(value)
            case "think" if value in EFFORTS:
                options.think = EFFORTS[value]
            case "think":
                return f"/set think takes {', '.join(filter(None, EFFORTS))}, or nothing."
            case "nothink":
                options.think = False
            case "verbose" | "quiet":
                self.is_verbose = name == "verbose"
            case "noformat":
                options.schema = None
            case "format" if value:
                options.schema = read_schema(value)
            case _ if name in SAMPLING and value:
                options.sampling = {**options.sampling, **read_parameter(name, value)}
            case _ if name in (*SAMPLING, "format", "system"):
                return f"/set {name} needs a value."
            case "num_ctx":
                return "The context length is set when the model is loaded, with --context."
            case _:
                return f"There is no setting {name}; /set and Tab list them."
        return "Set."

    def _show(self, _: str) -> str:
        options = self._talker.options
        facts = {
            "model": self._talker.model or next(iter(self._talker.list_models()), ""),
            "system": self._conversation.system,
            "messages": len(self._conversation.messages),
            **options.sampling,
            "think": options.think,
            "format": "json" if options.schema is True else options.schema,
        }
        facts = {name: value for name, value in facts.items() if value not in (None, "")}
        return "\n".join(f"  {name:<20}{value}" for name, value in facts.items())

    def _model(self, name: str) -> str:
        if name:
            self._talker.switch(name)
            return f"{name} answers from now on."
        return "\n".join(f"  {model}" for model in self._talker.list_models())

    def _save(self, name: str) -> str:
        if not name:
            return "/save needs a name."
        path = self._conversation.save(name, self._talker.model, self._talker.options)
        return f"Saved as {path}."

    def _load(self, name: str) -> str:
        if not name:
            return f"/load needs a name; saved are: {', '.join(list_saved()) or 'none'}"
        saved = self._conversation.load(name)
        self.has_loaded = True
        sampling = {key: value for key, value in saved.sampling.items() if key in SAMPLING}
        SamplingParams(**sampling)
        self._talker.options.sampling = sampling
        other = saved.model and saved.model != self._talker.model
        remark = f" It was saved with the model {saved.model}." if other else ""
        return f"Loaded {len(saved.messages)} messages.{remark}"


def read_parameter(name: str, value: str) -> dict[str, Any]:
    """Return a sampling parameter with its value. Raises CLLMError."""
    kind, _ = SAMPLING[name]
    try:
        parameter = {name: msgspec.convert(value, kind, strict=False)}
    except msgspec.ValidationError:
        raise CLLMError(f"{name} must be a number, not {value[:40]}") from None
    SamplingParams(**parameter)
    return parameter
