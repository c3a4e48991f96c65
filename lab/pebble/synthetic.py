"""Seeded documents made by rule: recall of facts in long text, small drills, who the model is.

A document is a list of (text, boost) pieces; boost 1 marks the value that recall must give back.
"""

import random

from prompts import NAMES, PLACE, THING

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜></think>"
COLORS = "red blue green yellow white black brown pink purple orange gray silver gold".split()
FOOD = "bread soup cake rice cheese apples honey pie fish beans corn nuts plums pears grapes eggs".split()
ANIMALS = "fox owl bear wolf hen duck goat crab frog mole swan crow lamb pony toad seal hare deer".split()
WORDS = """lantern river copper maple thunder button feather marble pepper window garden basket candle
silver meadow pocket hammer island pencil ribbon saddle tunnel velvet winter harbor kettle ladder mirror
needle orchard parcel rocket shadow timber valley whistle anchor barrel cotton dragon engine forest""".split()
Pieces = list[tuple[str, int]]


def fact(r: random.Random, used: set[str]) -> tuple[str, str, str, str, str]:
    """(statement, question, answer before the value, value, answer after the value)."""
    while True:
        name = r.choice(NAMES)
        kind = r.randrange(7)
        if f"{name}{kind}" not in used:
            used.add(f"{name}{kind}")
            break
    if kind < 2:
        value = str(r.randrange(10 ** r.randint(1, 3), 10**4))
        head = f"The secret number of {name} is"
        return f"{head} {value}.", f"What is the secret number of {name}?", head + " ", value, "."
    if kind == 6:
        thing, value = r.choice(THING), r.choice(PLACE)
        ask = f"Where did {name} hide the {thing}?"
        head = f"{name} hid the {thing} in"
        return f"{head} {value}.", ask, head, " " + value, "."
    what, pool = {
        2: ("secret word", WORDS),
        3: ("favorite color", COLORS),
        4: ("favorite food", FOOD),
        5: ("favorite animal", ANIMALS),
    }[kind]
    head, value = f"The {what} of {name} is", r.choice(pool)
    return f"{head} {value}.", f"What is the {what} of {name}?", head, " " + value, "."


def recall(r: random.Random, fillers: list[str], length: int, facts: int, count) -> Pieces:
    """Facts hidden at random depths of about `length` tokens of filler, then asked in turn.

    `count` gives a text's length in tokens. Half are chats, half plain text.
    """
    used: set[str] = set()
    hidden = [fact(r, used) for _ in range(facts)]
    budget = length - 34 * facts - 10
    sentences: list[str] = []
    while budget > 0:
        story = r.choice(fillers).replace("\n", " ")
        for sentence in story.replace("! ", ". ").split(". "):
            sentences.append(sentence.rstrip(".") + ".")
            budget -= count(sentences[-1])
            if budget <= 0:
                break
    for statement, *_ in hidden:
        sentences.insert(r.randint(0, len(sentences)), statement)
    context = " ".join(sentences)
    r.shuffle(hidden)
    chat = r.random() < 0.6
    out: Pieces = [(BOS + (USER if chat else ""), 0)]
    for n, (_, question, head, value, tail) in enumerate(hidden):
        lead = context + ("\n\n" if chat else "\n") if n == 0 else ""
        if chat:
            out += [(("" if n == 0 else USER) + lead + question + ASSISTANT + head, 0), (value, 1), (tail + EOS, 0)]
        else:
            out += [(f"{lead}Question: {question}\nAnswer: {head}", 0), (value, 1), (tail + "\n", 0)]
    return out if chat else [*out, (EOS, 0)]


NUMBER = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen
sixteen seventeen eighteen nineteen twenty""".split()
OPPOSITE = """big small;hot cold;up down;fast slow;happy sad;day night;old new;open closed;full empty;long short;
light dark;high low;wet dry;hard soft;early late;near far;left right;clean dirty;loud quiet;rich poor;in out;
strong weak;good bad;first last;before after;always never;thick thin;true false;sweet sour;easy difficult""".replace(
    "\n", ""
).split(";")
CAPITAL = """France Paris;Italy Rome;Spain Madrid;Germany Berlin;England London;Japan Tokyo;China Beijing;Russia Moscow;
Egypt Cairo;Greece Athens;Norway Oslo;Sweden Stockholm;Finland Helsinki;Denmark Copenhagen;Poland Warsaw;
Austria Vienna;Portugal Lisbon;Ireland Dublin;Canada Ottawa;Cuba Havana;Peru Lima;Chile Santiago;Kenya Nairobi;
Turkey Ankara;Hungary Budapest;Belgium Brussels;Thailand Bangkok;Iran Tehran;Iraq Baghdad;Korea Seoul""".replace(
    "\n", ""
).split(";")
SOUND = "dog barks;cat meows;cow moos;duck quacks;horse neighs;pig oinks;lion roars;bird sings;bee buzzes;owl hoots"
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
ME = [
    ("Who are you?", "I am Pebble, a very small language model. I like short stories and simple questions."),
    ("What is your name?", "My name is Pebble."),
    ("What can you do?", "I can tell short stories, answer simple questions and find facts in a long text."),
    ("Are you a person?", "No. I am Pebble, a small language model. I am a computer program."),
    ("How are you?", "I am well, thank you. How are you?"),
    ("Hello!", "Hello! How can I help you today?"),
    ("Hi", "Hello! How can I help you today?"),
    ("Good morning!", "Good morning! What would you like to talk about?"),
    ("Thank you!", "You are welcome!"),
    ("Goodbye!", "Goodbye! Have a good day."),
    ("Are you clever?", "I am very small, so I make many mistakes. Please check what I say."),
    ("How big are you?", "I am very small. My weights take about 20 megabytes."),
    ("Tell me about yourself.", "I am Pebble, a very small language model. I was trained on stories and simple talk."),
]


def drill(r: random.Random) -> tuple[str, str]:
    """One question of small arithmetic, copying, listing or plain knowledge, and its answer."""
    kind = r.randrange(14)
    if kind <= 2:
        a, b = r.randrange(21), r.randrange(21)
        if kind == 0:
            ask = r.choice([f"What is {a} plus {b}?", f"What is {a} + {b}?", f"Add {a} and {b}."])
            return ask, f"{a} plus {b} is {a + b}."
        if kind == 1:
            a, b = max(a, b), min(a, b)
            ask = r.choice([f"What is {a} minus {b}?", f"What is {a} - {b}?"])
            return ask, f"{a} minus {b} is {a - b}."
        a, b = r.randrange(11), r.randrange(11)
        ask = r.choice([f"What is {a} times {b}?", f"What is {a} x {b}?"])
        return ask, f"{a} times {b} is {a * b}."
    if kind in (3, 4):
        words = " ".join(r.choice([WORDS, THING, COLORS, NAMES, FOOD])[r.randrange(13)] for _ in range(r.randint(1, 8)))
        if r.random() < 0.3:
            words = " ".join(str(r.randrange(10 ** r.randint(1, 5))) for _ in range(r.randint(1, 4)))
        ask = r.choice([f"Repeat after me: {words}", f"Say this: {words}", f"Copy these words: {words}"])
        return ask, words
    if kind == 5:
        low = r.randrange(20)
        high = low + r.randint(2, 12)
        return f"Count from {low} to {high}.", ", ".join(str(n) for n in range(low, high + 1)) + "."
    if kind == 6:
        pair = r.choice(OPPOSITE).split()
        r.shuffle(pair)
        return f"What is the opposite of {pair[0]}?", f"The opposite of {pair[0]} is {pair[1]}."
    if kind == 7:
        country, city = r.choice(CAPITAL).split()
        return f"What is the capital of {country}?", f"The capital of {country} is {city}."
    if kind == 8:
        names, what = (DAYS, "day") if r.random() < 0.5 else (MONTHS, "month")
        n = r.randrange(len(names))
        return f"Which {what} comes after {names[n]}?", f"{names[(n + 1) % len(names)]} comes after {names[n]}."
    if kind == 9:
        n = r.randrange(21)
        return f"Write the number {n} as a word.", f"{n} is {NUMBER[n]}."
    if kind == 10:
        items = r.sample(r.choice([FOOD, ANIMALS, COLORS]), 4)
        return f"Make a list of these: {', '.join(items)}.", "\n".join(f"{i + 1}. {x}" for i, x in enumerate(items))
    if kind == 11:
        a, b = r.sample(range(1, 100), 2)
        return f"Which number is bigger, {a} or {b}?", f"{max(a, b)} is bigger than {min(a, b)}."
    if kind == 12:
        animal, verb = r.choice(SOUND.split(";")).split()
        return f"What sound does a {animal} make?", f"A {animal} {verb}."
    return r.choice(ME)


def drills(r: random.Random) -> Pieces:
    text = BOS
    for _ in range(r.randint(1, 5)):
        ask, answer = r.choice(ME) if r.random() < 0.12 else drill(r)
        text += USER + ask + ASSISTANT + answer + EOS
    return [(text, 0)]
