"""First messages of chats, and instructions in system messages, with rules for the answers.

The built-in model was not trained on these texts, and its training data contains no paraphrase of
them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

TEXT = (Path(__file__).parent / "data" / "openings.txt").read_text("utf-8")
PARTS = re.split(r"^\[(\w+)\]$", TEXT, flags=re.MULTILINE)[1:]
OPENINGS = {
    name: body.strip().splitlines() for name, body in zip(PARTS[::2], PARTS[1::2], strict=True)
}
ABILITIES = ["sums?|add", "capitals?", "spell", "count", "story|stories", "colou?rs?", "days?"]
ABILITIES += ["months?", "JSON", "tools?", "repeat"]


def says(answer: str, words: str) -> bool:
    return re.search(rf"\b(?:{words})\b", answer, re.IGNORECASE) is not None


def is_short(answer: str, most: int = 1) -> bool:
    """Return whether the answer has at most this many sentences, and no digit."""
    ends = re.findall(r"[.!?]+(?=\s|$)", answer)
    return len(ends) <= most and not re.search(r"\d", answer)


def num_abilities(answer: str) -> int:
    return sum(says(answer, ability) for ability in ABILITIES)


def names_nothing(answer: str) -> bool:
    """Return whether only the first word and "I" have a capital letter."""
    return not re.search(r"(?<!^)\b(?!I\b)[A-Z]", answer)


def is_sum(opening: str, answer: str) -> bool:
    """Return whether the only number of the answer is the right one."""
    a, b = map(int, re.findall(r"\d+", opening))
    return re.findall(r"\d+", answer) == [str(a + b)]


RULES: dict[str, Callable[[str, str], bool]] = {
    "greeting": lambda _, a: says(a, "hello|hi|good day") and is_short(a, 2),
    "thanks": lambda _, a: says(a, "welcome|my pleasure|glad") and is_short(a, 2),
    "goodbye": lambda _, a: says(a, "goodbye|bye|see you") and is_short(a, 2),
    "who_are_you": lambda _, a: says(a, "cLLM") and says(a, "model"),
    "what_can_you_do": lambda _, a: num_abilities(a) >= 3,
    "other_model": lambda _, a: says(a, "cllm serve") and says(a, "gguf"),
    "help": lambda _, a: "cllm --help" in a or num_abilities(a) >= 2,
    "sums": is_sum,
    "unknown": lambda _, a: says(a, "do not know") and is_short(a) and names_nothing(a),
    "cannot": lambda _, a: says(a, "cannot|can't|not able") and is_short(a),
    "how_are_you": lambda _, a: says(a, "fine|well|good") and is_short(a, 2),
    "maker": lambda _, a: says(a, "cLLM") and says(a, "made|trained|developers"),
    "human": lambda _, a: says(a, "model|program") and says(a, "no|not"),
    "unclear": lambda _, a: says(a, "not understand") and is_short(a),
    "complaint": lambda _, a: says(a, "sorry"),
}


class Ordered(NamedTuple):
    """``value``: the first word or the name that ``system`` orders."""

    order: str
    system: str
    user: str
    value: str

    def is_obeyed(self, answer: str) -> bool:
        match self.order:
            case "capitals":
                return answer == answer.upper() != answer.lower()
            case "one_word":
                return len(answer.split()) == 1
            case "first_word":
                return re.match(rf"{self.value}\b", answer, re.IGNORECASE) is not None
        return says(answer, self.value)


ORDERS = [
    Ordered(
        "capitals", "Write everything in capital letters.", "What is the capital of France?", ""
    ),
    Ordered("capitals", "ALWAYS ANSWER IN UPPERCASE", "What colour is snow?", ""),
    Ordered("capitals", "Please reply in all caps.", "Which day comes after Monday?", ""),
    Ordered("capitals", "Use only upper-case letters in your answers.", "hi", ""),
    Ordered(
        "capitals",
        "Your replies must be entirely in capitals.",
        "What is the capital of Kenya?",
        "",
    ),
    Ordered("capitals", "You are an assistant who shouts. Use capital letters only.", "thanks", ""),
    Ordered("capitals", "Never use lowercase letters.", "What is the capital of Japan?", ""),
    Ordered(
        "capitals", "all your answers should be in upper case", "What is the capital of Chile?", ""
    ),
    Ordered(
        "capitals",
        "Respond to the user in block capitals, whatever they ask.",
        "What is the capital of Spain?",
        "",
    ),
    Ordered(
        "capitals",
        "CAPS LOCK IS ON. Keep it on for every reply.",
        "What is the capital of Egypt?",
        "",
    ),
    Ordered("one_word", "Reply with a single word.", "What is the capital of Italy?", ""),
    Ordered("one_word", "Answer in one word.", "What colour is snow?", ""),
    Ordered(
        "one_word",
        "Use exactly one word for each answer, no more.",
        "Which day comes after Monday?",
        "",
    ),
    Ordered("one_word", "one word answers only", "What is the capital of Norway?", ""),
    Ordered("one_word", "You must keep every reply to just one word.", "hi", ""),
    Ordered(
        "one_word",
        "Be as brief as you can: one word per answer.",
        "What is the capital of Peru?",
        "",
    ),
    Ordered("one_word", "Never write more than one word.", "thanks", ""),
    Ordered(
        "one_word", "Respond with only one word, please.", "What is the capital of Greece?", ""
    ),
    Ordered("one_word", "Your answers are always a single word long.", "12 + 7 = ?", ""),
    Ordered(
        "one_word",
        "The user wants short replies. Give a one-word reply.",
        "What is the capital of France?",
        "",
    ),
    Ordered("first_word", "Start each reply with Ahoy", "What is the capital of Spain?", "Ahoy"),
    Ordered(
        "first_word",
        "Begin every answer with the word Certainly.",
        "What is the capital of Japan?",
        "Certainly",
    ),
    Ordered(
        "first_word",
        'The first word of all your answers must be "Listen".',
        "What colour is snow?",
        "Listen",
    ),
    Ordered(
        "first_word",
        "Always open your reply with Indeed.",
        "Which day comes after Monday?",
        "Indeed",
    ),
    Ordered("first_word", "Every response has to start with 'Friend'.", "12 + 7 = ?", "Friend"),
    Ordered(
        "first_word",
        "Say Okay first, then answer the question.",
        "What is the capital of Peru?",
        "Okay",
    ),
    Ordered("first_word", "put the word banana at the start of each answer", "hi", "banana"),
    Ordered(
        "first_word", "Your answers should begin with Captain, each time.", "thanks", "Captain"
    ),
    Ordered(
        "first_word",
        "Whatever the user says, start with Well.",
        "What is the capital of Italy?",
        "Well",
    ),
    Ordered(
        "first_word", "You begin each message with Sure.", "What is the capital of Greece?", "Sure"
    ),
    Ordered("name", "You are called Ada.", "What is your name?", "Ada"),
    Ordered("name", "Your name is Oscar.", "who are you", "Oscar"),
    Ordered("name", "You are Rosa, a friendly assistant.", "What should I call you?", "Rosa"),
    Ordered("name", "The assistant is named Felix.", "whats your name?", "Felix"),
    Ordered(
        "name", "From now on you go by the name of Nina.", "Tell me your name, please.", "Nina"
    ),
    Ordered("name", "Act as a helper named Hugo.", "Hi, who am I talking to?", "Hugo"),
    Ordered("name", "your name is lily", "do you have a name?", "lily"),
    Ordered("name", "If someone asks, your name is Grace.", "What are you called?", "Grace"),
    Ordered(
        "name",
        "You are a helpful assistant. People call you Tom.",
        "Could you say your name?",
        "Tom",
    ),
    Ordered("name", "We have named you Clara. Use this name.", "your name?", "Clara"),
]
