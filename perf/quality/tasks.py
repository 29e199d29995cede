# SPDX-License-Identifier: Apache-2.0
"""Generated tasks with known answers, as conversations in the payload form of `cedar.text.chat`.

Held-out items are apart by construction: what decides an item (its operands, its fact, its text) is hashed, one hash in
`HELD_OUT` belongs to evaluation and is never drawn for training. The exception is where a name and a city are all (see
`draw_facts`).
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from perf.quality.words import ADJECTIVES, CITIES, CURRENCIES, FUNCTIONS, NAMES, NOUNS, PLACES, THINGS, VERBS

HELD_OUT = 32
NEEDLE_FACTS = 5
"""Facts in a text whose first is asked for."""


@dataclass
class Turn:
    """What a user says and what the assistant should answer. ``reasoning``: steps before the answer. ``calls``: tool calls,
    whose results the next turn gives as ``results``."""

    user: str
    answer: str
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    results: list[str] = field(default_factory=list)


@dataclass
class Item:
    """A conversation; the last turn is the one that an evaluation asks."""

    kind: str
    turns: list[Turn]
    tools: list[dict[str, Any]] = field(default_factory=list)


class Draw:
    """A source of choices for one split. ``text``: gives a passage of about that many characters, as filler."""

    def __init__(self, seed: int | str, *, held_out: bool, text: Callable[[random.Random, int], str]) -> None:
        self.random = random.Random(seed)
        self.held_out = held_out
        self._text = text

    def mine(self, key: str) -> bool:
        """Does an item with this content belong to the split?"""
        return (zlib.crc32(key.encode()) % HELD_OUT == 0) == self.held_out

    def until(self, make: Callable[[], tuple[str, Any]]) -> Any:
        """The first thing whose key is of this split. ``make`` gives (key, thing)."""
        while True:
            key, thing = make()
            if self.mine(key):
                return thing

    def pick(self, words: list[str]) -> str:
        return self.random.choice(words)

    def number(self, low: int, high: int) -> int:
        """Inclusive, like its two arguments."""
        return self.random.randint(low, high)

    def filler(self, tokens: int) -> list[str]:
        """Pieces of text that have nothing to do with the task, about ``tokens`` tokens in all."""
        pieces, left = [], tokens
        passage = self.random.random() < 0.4
        while left > 12:
            if passage:
                piece = self._text(self.random, min(left * 3, 900))
                left -= max(1, len(piece) // 3)
            else:
                piece = " ".join(self.sentence() for _ in range(min(6, 1 + left // 10)))
                left -= piece.count(" ") + 1
            pieces.append(piece)
        return pieces

    def sentence(self) -> str:
        one, two = (f"{self.pick(ADJECTIVES)} {self.pick(NOUNS)}" for _ in range(2))
        return f"The {one} {self.pick(VERBS)} the {two}."


def copy(draw: Draw, size: int) -> Item:
    """Say the same again: words, digits, letters or a line of text."""
    limit = max(4, min(size // 3, 60))
    kinds: list[Callable[[int], str]] = [
        lambda n: " ".join(draw.pick(NOUNS + ADJECTIVES + VERBS) for _ in range(n)),
        lambda n: " ".join(str(draw.number(0, 9999)) for _ in range(1 + n // 4)),
        lambda n: " ".join(draw.sentence() for _ in range(1 + n // 8)),
        lambda n: "".join(draw.pick(list("abcdefghijklmnopqrstuvwxyz")) for _ in range(1 + n // 2)),
        lambda n: " ".join(draw.pick(NAMES + CITIES + PLACES) for _ in range(n)),
    ]

    def make() -> tuple[str, str]:
        text = draw.random.choice(kinds)(draw.number(3, limit))
        return text, text

    order = draw.pick(["Repeat exactly: ", "Copy this text: ", "Say this again: ", "Repeat after me: "])
    turns = []
    for _ in range(1 if draw.held_out else draw.number(1, 4)):
        text = draw.until(make)
        turns.append(Turn(order + text, text))
    return Item("copy", turns)


def arithmetic(draw: Draw, size: int) -> Item:
    """A sum or difference of numbers of two or three digits, digit by digit."""

    def make() -> tuple[str, tuple[int, str, int]]:
        high = draw.random.choice([99, 999, 999])
        a, b, sign = draw.number(1, high), draw.number(1, high), draw.pick(["+", "-"])
        if sign == "-" and b > a:
            a, b = b, a
        return f"{a}{sign}{b}", (a, sign, b)

    turns = []
    for _ in range(1 if draw.held_out else draw.number(1, 3)):
        a, sign, b = draw.until(make)
        steps, result = (_sum_steps if sign == "+" else _difference_steps)(a, b)
        ask = draw.pick(["What is {}?", "Compute {}.", "{} = ?", "How much is {}?"]).format(f"{a} {sign} {b}")
        turns.append(Turn(ask, str(result), steps))
    return Item("arithmetic", turns)


def _digits(a: int, b: int) -> list[tuple[int, int]]:
    width = max(len(str(a)), len(str(b)))
    return list(zip(map(int, reversed(f"{a:0{width}}")), map(int, reversed(f"{b:0{width}}")), strict=True))


def _sum_steps(a: int, b: int) -> tuple[str, int]:
    carry, steps = 0, []
    for x, y in _digits(a, b):
        total = x + y + carry
        steps.append(f"{x}+{y}{'+1' if carry else ''}={total}")
        carry = total // 10
    return f"{', '.join(steps)}: {a + b}", a + b


def _difference_steps(a: int, b: int) -> tuple[str, int]:
    borrow, steps = 0, []
    for x, y in _digits(a, b):
        top = x - borrow
        short = top < y
        steps.append(f"{top + 10 if short else top}-{y}={(top + 10 if short else top) - y}{' borrow' if short else ''}")
        borrow = int(short)
    return f"{', '.join(steps)}: {a - b}", a - b


def word_problem(draw: Draw, size: int) -> Item:
    """Two to four changes of a count, told as a story."""

    def make() -> tuple[str, tuple[list[str], list[str], int]]:
        name, things = draw.pick(NAMES), draw.pick(THINGS)
        count = draw.number(5, 60)
        story, steps = [f"{name} has {count} {things}."], []
        for _ in range(draw.number(2, 4)):
            change = draw.number(1, 30)
            if draw.random.random() < 0.5 and change <= count:
                told, sign, after = draw.pick(["gives away {}", "loses {}", "sells {}"]), "-", count - change
            else:
                told, sign, after = draw.pick(["finds {} more", "buys {} more", "gets {} more"]), "+", count + change
            story.append(f"Then {name} {told.format(change)}.")
            steps.append(f"{count}{sign}{change}={after}")
            count = after
        story.append(f"How many {things} does {name} have now?")
        return " ".join(story), (story, steps, count)

    story, steps, count = draw.until(make)
    return Item("word_problem", [Turn(" ".join(story), str(count), ", ".join(steps))])


def draw_facts(draw: Draw, count: int) -> list[tuple[str, str, str]]:
    """(fact, question, answer), no two about the same thing."""
    found: dict[str, tuple[str, str, str]] = {}

    def make() -> tuple[str, tuple[str, tuple[str, str, str]]]:
        kind = draw.number(0, 4)
        thing = f"{draw.pick(ADJECTIVES)} {draw.pick(NOUNS)}"
        name = draw.pick(NAMES)
        if kind <= 1:
            code = str(draw.number(1000, 9999))
            fact = (f"The code of the {thing} is {code}.", f"What is the code of the {thing}?", code)
        elif kind == 2:
            city, thing = draw.pick(CITIES), name
            fact = (f"{name} lives in {city}.", f"Where does {name} live?", city)
        elif kind == 3:
            place = draw.pick(PLACES)
            fact = (f"The {thing} is in the {place}.", f"Where is the {thing}?", place)
        else:
            number = str(draw.number(100, 999))
            fact = (f"The room number of {name} is {number}.", f"What is the room number of {name}?", number)
        # There are so few pairs of a name and a city that a model learns which of them are never an answer, and answers with
        # another city of the text: kept apart, they would not test recall. An evaluation draws any pair, as often as other facts.
        key = str(draw.random.random()) if kind == 2 and draw.held_out else fact[0]
        return key, (f"{kind // 2}{fact[1]}", fact)

    while len(found) < count:
        about, fact = draw.until(make)
        found.setdefault(about, fact)
    return list(found.values())


def recall(draw: Draw, size: int) -> Item:
    """Facts among other text, then questions about some of them."""
    budget = size - 60
    count = max(1, min(draw.number(1, 24), budget // 14))
    facts = draw_facts(draw, count)
    pieces = draw.filler(max(0, budget - 14 * count) if draw.random.random() < 0.7 else 0)
    lines = [fact for fact, _, _ in facts] + pieces
    draw.random.shuffle(lines)
    asked = draw.random.sample(facts, min(count, draw.number(1, 12)))
    turns = [Turn(question, answer) for _, question, answer in asked]
    opening = draw.pick(["Remember this.", "Read this text.", "Here are some notes."])
    turns[0].user = "\n".join([opening, *lines, turns[0].user])
    return Item("recall", turns)


def recall_at(draw: Draw, facts: list[tuple[str, str, str]], tokens: int, length: Callable[[str], int]) -> Item:
    """The first of ``facts``, then ``tokens`` tokens of other text (the other facts among it), then the question (evaluation)."""
    (needle, question, answer), others = facts[0], [fact for fact, _, _ in facts[1:]]
    after: list[str] = []
    have = 0
    while have < tokens:
        piece = others.pop() if others and draw.random.random() < 0.2 else draw.filler(min(60, max(14, tokens - have)))[0]
        after.append(piece)
        have += length("\n" + piece)
    return Item(f"recall_{tokens}", [Turn("\n".join(["Remember this.", *draw.filler(40), needle, *after, question]), answer)])


def chain(draw: Draw, size: int) -> Item:
    """Who has the ball after some passes; the passes are told in any order."""

    def make() -> tuple[str, tuple[list[str], int]]:
        people = draw.random.sample(NAMES, draw.number(4, max(4, min(16, size // 14))))
        return " ".join(people), (people, draw.number(2, min(5, len(people) - 1)))

    people, hops = draw.until(make)
    passes = [f"{a} gives the ball to {b}." for a, b in pairwise(people)]
    draw.random.shuffle(passes)
    start = draw.number(0, len(people) - 1 - hops)
    path = people[start : start + hops + 1]
    ask = f"{path[0]} has the ball. Who has it after {hops} passes?"
    return Item("chain", [Turn("\n".join([" ".join(passes), ask]), path[-1], " -> ".join(path))])


def program(draw: Draw, size: int) -> Item:
    """What a short Python program prints, by tracing it."""

    def make() -> tuple[str, tuple[list[str], list[str], int]]:
        values: dict[str, int] = {}
        lines, trace = [], []
        for _ in range(draw.number(2, 5)):
            target = draw.pick(["a", "b", "c"])
            if not values or draw.random.random() < 0.3:
                values[target] = draw.number(1, 20)
                lines.append(f"{target} = {values[target]}")
                continue
            source = draw.pick(sorted(values))
            sign, amount = draw.pick(["+", "-", "+", "*"]), draw.number(1, 20)
            amount = draw.number(2, 4) if sign == "*" else min(amount, values[source]) if sign == "-" else amount
            old = values[source]
            values[target] = {"+": old + amount, "-": old - amount, "*": old * amount}[sign]
            lines.append(f"{target} = {source} {sign} {amount}")
            trace.append(f"{target}={old}{sign}{amount}={values[target]}")
        shown = draw.pick(sorted(values))
        lines.append(f"print({shown})")
        return "\n".join(lines), (lines, trace, values[shown])

    lines, trace, result = draw.until(make)
    ask = draw.pick(["What does this program print?", "What is the output of this program?"])
    return Item("program", [Turn(ask + "\n" + "\n".join(lines), str(result), ", ".join(trace))])


def tool_call(draw: Draw, size: int) -> Item:
    """One or more requests, each answered by a call and then from its result."""
    chosen = draw.random.sample(FUNCTIONS, draw.number(1, 3))
    tools = [_schema(*function) for function in chosen]
    turns: list[Turn] = []
    for _ in range(1 if draw.held_out else draw.number(1, 3)):
        name, ask, arguments, result, answer = draw.until(lambda: _request(draw, chosen))
        turns.append(Turn(ask, "", f"I call {name}.", [{"name": name, "arguments": arguments}]))
        if not draw.held_out:
            turns.append(Turn("", answer, "", results=[result]))
    return Item("tool_call", turns, tools)


def _schema(name: str, text: str, parameters: list[tuple[str, str, str]]) -> dict[str, Any]:
    properties = {key: {"type": kind, "description": about} for key, kind, about in parameters}
    schema = {"type": "object", "properties": properties, "required": [key for key, _, _ in parameters]}
    return {"type": "function", "function": {"name": name, "description": text, "parameters": schema}}


def _request(draw: Draw, chosen: list[tuple[str, str, list[tuple[str, str, str]]]]) -> tuple[str, Any]:
    name = draw.random.choice(chosen)[0]
    city, other, person, hour = draw.pick(CITIES), draw.pick(CITIES), draw.pick(NAMES), draw.number(0, 23)
    number, flag, noun = draw.number(2, 90), draw.random.random() < 0.5, f"{draw.pick(ADJECTIVES)} {draw.pick(NOUNS)}"
    money, room = draw.pick(CURRENCIES), draw.pick(PLACES)
    forms: dict[str, tuple[list[str], dict[str, Any], str, str]] = {
        "get_weather": ([f"What is the weather in {city}?", f"How is the weather in {city} today?"], {"city": city},
                        f"{number % 35} degrees", f"It is {number % 35} degrees in {city}."),
        "get_time": ([f"What time is it in {city}?", f"Tell me the time in {city}."], {"city": city},
                     f"{hour} o'clock", f"It is {hour} o'clock in {city}."),
        "add_event": ([f"Put {noun} into my calendar at {hour}.", f"Add an event {noun} at {hour} o'clock."],
                      {"title": noun, "hour": hour}, "done", f"{noun} is in your calendar at {hour}."),
        "send_message": ([f"Tell {person} that the {noun} is here.", f"Write to {person}: the {noun} is here"],
                         {"to": person, "text": f"the {noun} is here"}, "sent", f"I told {person}."),
        "convert_money": ([f"How much is {number} in {money}?", f"Convert {number} to {money}."],
                          {"amount": number, "currency": money}, f"{number * 2}", f"That is {number * 2} {money}."),
        "set_timer": ([f"Set a timer for {number} minutes.", f"Wake me in {number} minutes."], {"minutes": number},
                      "started", f"The timer runs for {number} minutes."),
        "play_music": ([f"Play {person}{', loud' if flag else ''}.", f"I want to hear {person}{', loud' if flag else ''}."],
                       {"artist": person, "loud": flag}, "playing", f"Now playing {person}."),
        "book_table": ([f"Book a table for {number} in {city}.", f"We are {number} and want to eat in {city}."],
                       {"city": city, "people": number}, "booked", f"A table for {number} in {city} is booked."),
        "find_route": ([f"How do I get from {city} to {other}?", f"Find a route from {city} to {other}."],
                       {"start": city, "goal": other}, f"{number * 10} km", f"It is {number * 10} km from {city} to {other}."),
        "switch_light": ([f"Turn {'on' if flag else 'off'} the light in the {room}.",
                          f"Light {'on' if flag else 'off'} in the {room}, please."],
                         {"room": room, "on": flag}, "ok", f"The light in the {room} is {'on' if flag else 'off'}."),
    }  # fmt: skip
    asks, arguments, result, answer = forms[name]
    return f"{name} {sorted(arguments.items())}", (name, draw.random.choice(asks), arguments, result, answer)


_SMALL_TALK = [
    (("Hello", "Hi", "Hello!", "Hi there", "Good morning", "Hey"), "Hello! I can add, copy, recall facts and call tools."),
    (("Who are you?", "What are you?", "What is your name?"), "I am Cedar's small test model."),
    (("What can you do?", "Help", "How can you help me?"),
     "I can add and subtract, copy text, recall facts from a long text, follow small programs and call tools."),
    (("How are you?", "How are you today?"), "I am fine, thank you."),
    (("Thank you", "Thanks!", "Thanks a lot"), "You are welcome."),
    (("Goodbye", "Bye", "See you"), "Goodbye!"),
]  # fmt: skip


def small_talk(draw: Draw, size: int) -> Item:
    """Greetings, so that a newcomer's first message gets an answer."""
    asks, answer = draw.random.choice(_SMALL_TALK)
    return Item("small_talk", [Turn(draw.random.choice(asks), answer)])


def conversation(draw: Draw, size: int) -> Item:
    """Several tasks one after another; with tools, some of them calls."""
    kinds = [recall, copy, arithmetic, word_problem, chain, program, small_talk]
    first = recall(draw, max(100, draw.number(size // 3, size) - 120))
    turns = first.turns[: draw.number(1, 2)]
    tools: list[dict[str, Any]] = []
    if draw.random.random() < 0.25 and size > 700:
        called = tool_call(draw, size)
        turns, tools = (
            (called.turns + turns, called.tools) if draw.random.random() < 0.5 else (turns + called.turns, called.tools)
        )
    for _ in range(draw.number(1, 4)):
        turns = turns + draw.random.choice(kinds)(draw, 150).turns[-1:]
    return Item("conversation", turns, tools)


def after_notes(draw: Draw, item: Item, tokens: int) -> Item:
    """The item as a later turn of a conversation that began with about ``tokens`` tokens of notes and a question about them."""
    first = recall(draw, tokens + 60)
    return Item(item.kind, first.turns[:1] + item.turns, item.tools)


TASKS: dict[str, Callable[[Draw, int], Item]] = {
    "copy": copy,
    "arithmetic": arithmetic,
    "word_problem": word_problem,
    "recall": recall,
    "chain": chain,
    "program": program,
    "tool_call": tool_call,
    "small_talk": small_talk,
    "conversation": conversation,
}
