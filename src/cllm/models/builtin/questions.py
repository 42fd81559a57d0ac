"""Questions with one right answer each, on which the built-in model was trained and is tested.

The training script uses them, and so do the tests, ``cllm doctor`` and the load client: answers
that can be checked prove that batching, caching and parking never change a result. Questions whose
prompt hashes into the held-out 5% are never used for training.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]


@dataclass(frozen=True)
class Question:
    """A conversation whose next assistant message is known.

    ``thinking`` is the text of the reasoning span when the template opens one, else None.
    """

    kind: str
    messages: list[Message]
    answer: str
    tools: list[dict[str, Any]] = field(default_factory=list)
    thinking: str | None = None

    @property
    def held_out(self) -> bool:
        """Whether the prompt is among the 5% that training never sees."""
        prompt = json.dumps([self.messages, self.tools])
        return zlib.crc32(prompt.encode()) % 20 == 0


# fmt: off
CAPITALS = {
    "France": "Paris", "Spain": "Madrid", "Italy": "Rome", "Germany": "Berlin", "Austria": "Vienna",
    "Portugal": "Lisbon", "Greece": "Athens", "Norway": "Oslo", "Sweden": "Stockholm", "Finland": "Helsinki",
    "Denmark": "Copenhagen", "Poland": "Warsaw", "Hungary": "Budapest", "Ireland": "Dublin", "Egypt": "Cairo",
    "Kenya": "Nairobi", "Japan": "Tokyo", "China": "Beijing", "India": "New Delhi", "Thailand": "Bangkok",
    "Vietnam": "Hanoi", "Canada": "Ottawa", "Mexico": "Mexico City", "Cuba": "Havana", "Peru": "Lima",
    "Chile": "Santiago", "Brazil": "Brasilia", "Russia": "Moscow", "Turkey": "Ankara", "Iran": "Tehran",
}
COLOURS = {
    "grass": "green", "snow": "white", "blood": "red", "coal": "black", "a banana": "yellow", "a lemon": "yellow",
    "the sky": "blue", "an orange": "orange", "a carrot": "orange", "chocolate": "brown", "a tomato": "red",
    "milk": "white", "an elephant": "grey", "a frog": "green", "a crow": "black", "a flamingo": "pink",
    "a strawberry": "red", "the sun": "yellow", "the sea": "blue", "a plum": "purple",
}
EMOJI = {
    "cat": "🐱", "dog": "🐶", "fox": "🦊", "bear": "🐻", "frog": "🐸", "pig": "🐷", "lion": "🦁", "horse": "🐴",
    "fish": "🐟", "bird": "🐦", "tree": "🌳", "rose": "🌹", "apple": "🍎", "bread": "🍞", "house": "🏠", "star": "⭐",
}
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = ["January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
          "November", "December"]
NAMES = ["Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Ida", "Jack", "Kate", "Leo", "Mia",
         "Noah", "Olga", "Paul", "Rosa", "Sam", "Tina", "Victor"]
WORDS = """
apple bird bread bridge brown cake chair child cloud cold corn dance door dream early earth field fire floor
flower forest friend garden glass gold grass great green happy heart hill horse house island juice king lake
large light little long lunch market milk moon morning mother mountain music night ocean old orange paper pencil
picture plant queen quick quiet rain red river road rock round salt sand school sea sheep ship silver slow small
snow song spring star stone storm street strong summer sun sweet table tall tiger train tree valley village warm
water white wind window winter wood yellow young
""".split()  # noqa: SIM905  # one word per line would fill two pages
ANIMALS = {
    "fox": ("clever", "hen"), "bear": ("big", "bee"), "cat": ("lazy", "mouse"), "dog": ("loyal", "rabbit"),
    "owl": ("wise", "bat"), "frog": ("funny", "fly"), "horse": ("fast", "goat"), "lion": ("brave", "zebra"),
    "pig": ("pink", "duck"), "wolf": ("lonely", "sheep"),
}
PLACES = {
    "forest": "a golden nut", "garden": "a red rose", "city": "a lost key", "desert": "a cool well",
    "village": "a warm fire", "mountains": "a silver "
                                           "stone", "castle": "a secret "
                                                              "door", "valley": "a blue lake",
}
# fmt: on

SYSTEM_PROMPTS = [
    "You are a helpful assistant.",
    "Answer shortly.",
    "You are a friendly teacher. Answer with the right answer and nothing else.",
]


def ask(kind: str, text: str, answer: str, thinking: str | None = None) -> Question:
    return Question(kind, [{"role": "user", "content": text}], answer, thinking=thinking)


def sums(rng: random.Random) -> Question:
    a, b = (rng.randrange(rng.choice([10, 100, 100])) for _ in range(2))
    text = rng.choice(["What is {a} plus {b}?", "{a} + {b} = ?", "Add {a} and {b}."]).format(
        a=a, b=b
    )
    tens, ones = a // 10 * 10 + b // 10 * 10, a % 10 + b % 10
    thinking = (
        f"{a // 10 * 10} + {b // 10 * 10} = {tens}\n{a % 10} + {b % 10} = {ones}\n{tens} "
        f"+ {ones} = {a + b}"
    )
    return ask("sums", text, str(a + b), thinking)


def capitals(rng: random.Random) -> Question:
    country = rng.choice(list(CAPITALS))
    forms = [
        "What is the capital of {}?",
        "Name the capital of {}.",
        "Which city is the capital of {}?",
        "The capital of {} is",
        "Tell me the capital city of {}.",
        "{}: what is its capital?",
    ]
    city = CAPITALS[country]
    return ask(
        "capitals",
        rng.choice(forms).format(country),
        city,
        f"The country is {country}.\nIts capital is {city}.",
    )


def neighbours(kind: str, noun: str, items: list[str]) -> Callable[[random.Random], Question]:
    def make(rng: random.Random) -> Question:
        step = rng.choice([-1, 1])
        at = rng.randrange(len(items)) if len(items) < 20 else rng.randrange(1, len(items) - 1)
        word = "after" if step > 0 else "before"
        text = rng.choice(
            [
                "Which {n} comes {w} {i}?",
                "What {n} is {w} {i}?",
                "Name the {n} {w} {i}.",
                "The {n} {w} {i} is",
            ]
        ).format(n=noun, w=word, i=items[at])
        return ask(kind, text, items[(at + step) % len(items)])

    return make


def colours(rng: random.Random) -> Question:
    thing = rng.choice(list(COLOURS))
    text = rng.choice(
        [
            "What colour is {}?",
            "Which colour has {}?",
            "Tell me the colour of {}.",
            "Name the colour of {}.",
        ]
    )
    return ask("colours", text.format(thing), COLOURS[thing])


def emoji(rng: random.Random) -> Question:
    thing = rng.choice(list(EMOJI))
    text = rng.choice(
        ["Show the emoji for {}.", "Which emoji means {}?", "Write {} as an emoji.", "Emoji: {}"]
    )
    return ask("emoji", text.format(thing), EMOJI[thing])


def spelling(rng: random.Random) -> Question:
    word = rng.choice(WORDS)
    text = rng.choice(
        ["Spell the word {}.", "How do you spell {}?", "Spell {} letter by letter.", "Spell: {}"]
    )
    return ask("spelling", text.format(word), "-".join(word))


def copying(rng: random.Random) -> Question:
    words = " ".join(rng.choice(WORDS) for _ in range(rng.randint(3, 8)))
    text = rng.choice(["Repeat: {}", "Copy this: {}", "Say after me: {}"])
    return ask("copying", text.format(words), words)


def counting(rng: random.Random) -> Question:
    first = rng.randint(1, 60)
    last = first + rng.randint(4, 39)
    text = rng.choice(["Count from {} to {}.", "Write the numbers from {} to {}."])
    return ask("counting", text.format(first, last), " ".join(map(str, range(first, last + 1))))


def stories(rng: random.Random) -> Question:
    animal, place, name = rng.choice(list(ANIMALS)), rng.choice(list(PLACES)), rng.choice(NAMES)
    text = rng.choice(
        ["Tell a story about {}.", "Tell me a short story about {}.", "Write a story about {}."]
    )
    nature, friend = ANIMALS[animal]
    story = (
        f"Once there was a {nature} {animal} named {name} who lived in the {place}. "
        f"One morning {name} met a {friend} and said: good day, little friend! "
        f"Together they walked all day, and in the evening they found {PLACES[place]}. "
        f"The {friend} was happy, and {name} the {animal} slept well that night. The end."
    )
    article = "an" if animal[0] in "aeiou" else "a"
    return ask("stories", text.format(f"{article} {animal} named {name} in the {place}"), story)


def json_objects(rng: random.Random) -> Question:
    values: dict[str, object] = {
        "name": rng.choice(NAMES),
        "age": rng.randint(10, 99),
        "city": rng.choice([c for c in CAPITALS.values() if " " not in c]),
        "colour": rng.choice(["red", "green", "blue", "yellow", "black", "white"]),
    }
    keys = rng.sample(list(values), rng.randint(2, 4))
    facts = ", ".join(f"{key} {values[key]}" for key in keys)
    text = rng.choice(["Give me JSON with {}.", "Write a JSON object: {}.", "As JSON: {}."])
    return ask("json", text.format(facts), json.dumps({key: values[key] for key in keys}))


@dataclass(frozen=True)
class Tool:
    """A declared function, a user's question for it, its result, and how the model reports the
    result.
    """

    description: str
    parameters: dict[str, str]
    question: str
    arguments: Callable[[random.Random], dict[str, Any]]
    result: Callable[[random.Random], dict[str, Any]]
    report: str

    def declare(self, name: str) -> dict[str, Any]:
        properties = {key: {"type": kind} for key, kind in self.parameters.items()}
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        return {
            "type": "function",
            "function": {"name": name, "description": self.description, "parameters": schema},
        }


def one_city(rng: random.Random) -> dict[str, Any]:
    return {"city": rng.choice([c for c in CAPITALS.values() if " " not in c])}


TOOLS = {
    "get_weather": Tool(
        "Get the weather of a city",
        {"city": "string"},
        "How is the weather in {city}?",
        one_city,
        lambda rng: {
            "weather": rng.choice(["sunny", "rainy", "cloudy"]),
            "degrees": rng.randint(10, 35),
        },
        "It is {weather} in {city}, {degrees} degrees.",
    ),
    "get_time": Tool(
        "Get the time in a city",
        {"city": "string"},
        "What time is it in {city}?",
        one_city,
        lambda rng: {"hour": rng.randint(1, 23)},
        "It is {hour} o'clock in {city}.",
    ),
    "multiply": Tool(
        "Multiply two numbers",
        {"a": "integer", "b": "integer"},
        "Multiply {a} by {b}.",
        lambda rng: {"a": rng.randint(2, 99), "b": rng.randint(2, 99)},
        lambda rng: {"product": rng.randint(10, 9999)},
        "The product is {product}.",
    ),
    "send_mail": Tool(
        "Send a mail",
        {"to": "string", "text": "string"},
        "Send {to} a mail: {text}",
        lambda rng: {"to": rng.choice(NAMES), "text": " ".join(rng.sample(WORDS, 3))},
        lambda _: {"sent": True},
        "The mail is sent.",
    ),
    "find_book": Tool(
        "Find a book by its author",
        {"author": "string"},
        "Find a book by {author}.",
        lambda rng: {"author": rng.choice(NAMES)},
        lambda rng: {"title": " ".join(rng.sample(WORDS, 2))},
        "The title is {title}.",
    ),
}


def tool_calls(rng: random.Random) -> Question:
    names = rng.sample(list(TOOLS), rng.randint(1, 3))
    name = rng.choice(names)
    tool, arguments = TOOLS[name], TOOLS[name].arguments(rng)
    declared = [TOOLS[n].declare(n) for n in names]
    call = {"name": name, "arguments": arguments}
    messages: list[Message] = [{"role": "user", "content": tool.question.format(**arguments)}]
    answer = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    if rng.random() < 0.5:
        return Question("tools", messages, answer, declared)
    result = tool.result(rng)
    function = {"name": name, "arguments": json.dumps(arguments)}
    messages += [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": json.dumps(result)},
    ]
    return Question("tools", messages, tool.report.format(**arguments, **result), declared)


KINDS: dict[str, Callable[[random.Random], Question]] = {
    "sums": sums,
    "capitals": capitals,
    "alphabet": neighbours("alphabet", "letter", list("ABCDEFGHIJKLMNOPQRSTUVWXYZ")),
    "days": neighbours("days", "day", DAYS),
    "months": neighbours("months", "month", MONTHS),
    "colours": colours,
    "emoji": emoji,
    "spelling": spelling,
    "copying": copying,
    "counting": counting,
    "json": json_objects,
    "tools": tool_calls,
    "stories": stories,
}


def held_out_questions(seed: int = 0, kinds: list[str] | None = None) -> Iterator[Question]:
    """Yield distinct questions that training never saw, each kind in turn, without end."""
    rng = random.Random(seed)
    seen: set[str] = set()
    chosen = kinds or list(KINDS)
    misses = 0
    while True:
        for kind in chosen:
            for _ in range(200):
                question = KINDS[kind](rng)
                prompt = json.dumps([question.messages, question.tools])
                if question.held_out and prompt not in seen:
                    seen.add(prompt)
                    misses = 0
                    yield question
                    break
            else:  # this kind is used up: start over once every kind is
                misses += 1
                if misses > len(chosen):
                    seen.clear()
                    misses = 0
