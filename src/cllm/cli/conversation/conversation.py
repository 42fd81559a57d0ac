"""A conversation in the terminal, which can be saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from cllm.cli.answers import AnswerOptions, AnswerPart, Messages
from cllm.cli.conversation.printer import join_text
from cllm.cli.conversation.reader import state_folder
from cllm.errors import CLLMError
from cllm.input_files import read_input
from cllm.private_files import open_private


class Saved(msgspec.Struct, kw_only=True):
    """The content of a saved conversation. Files of later versions may have more fields."""

    model: str = ""
    system: str = ""
    messages: list[dict[str, str]] = []
    sampling: dict[str, Any] = {}


class Conversation:
    """``messages`` are those of the user and the assistant, without the system message."""

    def __init__(self, system: str = "") -> None:
        self.system = system
        self.messages: Messages = []

    def clear(self) -> None:
        self.messages.clear()

    def outgoing(self) -> Messages:
        """Return the messages to send."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.messages]

    def ask(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def answer(self, parts: list[AnswerPart]) -> None:
        """Add the part of the answer that has arrived. Without any, also remove the question."""
        if text := join_text(parts):
            self.messages.append({"role": "assistant", "content": text})
        else:
            self.messages.pop()

    def save(self, name: str, model: str, options: AnswerOptions) -> Path:
        """Write the conversation to a file that only its owner can read. Raises CLLMError."""
        path = saved_path(name)
        saved = Saved(
            model=model, system=self.system, messages=self.messages, sampling=options.sampling
        )
        try:
            content = msgspec.json.format(msgspec.json.encode(saved)) + b"\n"
            if path.parent == chats_folder():
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open_private(path, "wb") as file:
                file.write(content)
        except OSError as error:
            raise CLLMError(f"cannot save {path}: {error.strerror}") from None
        except UnicodeEncodeError:
            raise CLLMError(f"cannot save {path}: the text is not valid Unicode") from None
        return path

    def load(self, name: str) -> Saved:
        """Continue the conversation in a file. Raises CLLMError."""
        path = saved_path(name)
        try:
            saved = msgspec.json.decode(read_input(path), type=Saved)
        except OSError as error:
            raise CLLMError(f"cannot load {path}: {error.strerror}") from None
        except msgspec.MsgspecError as error:
            raise CLLMError(f"{path} is not a saved conversation: {error}") from None
        self.system, self.messages = saved.system, list(saved.messages)
        return saved


def chats_folder() -> Path:
    return state_folder() / "chats"


def saved_path(name: str) -> Path:
    """Return the file of a saved conversation. ``name`` may be a path instead. Raises CLLMError."""
    if "\0" in name:
        raise CLLMError("a name cannot contain a null character")
    if "/" in name or "\\" in name or name.endswith(".json"):
        return Path(name).expanduser()
    return chats_folder() / f"{name}.json"


def list_saved() -> list[str]:
    return sorted(path.stem for path in chats_folder().glob("*.json"))
