"""The grammar behind the demo model: stories with a mood and a hero, and puzzles with many answers.

Everything the model was trained on comes from here, and everything a test wants to know about
what the model writes (its mood, its hero, whether an answer is valid) is decided here by plain
words and sets. Only the standard library is needed, and a seed fixes every text.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from random import Random
from typing import Literal

Mood = Literal["happy", "sad"]
Split = Literal["train", "held_out"]

MOODS: tuple[Mood, Mood] = ("happy", "sad")

END_OF_TEXT = "<|endoftext|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"

# ---------------------------------------------------------------- stories

HEROES: Mapping[str, Literal["he", "she"]] = {
    "Anna": "she", "Ben": "he", "Clara": "she", "David": "he", "Ella": "she", "Felix": "he",
    "Grace": "she", "Hugo": "he", "Ivy": "she", "Jack": "he", "Kira": "she", "Leo": "he",
    "Mia": "she", "Noah": "he", "Olga": "she", "Paul": "he", "Rosa": "she", "Sam": "he",
    "Tara": "she", "Victor": "he", "Wendy": "she", "Yusuf": "he", "Zoe": "she", "Oscar": "he",
}  # fmt: skip

PLACES: tuple[str, ...] = (
    "market", "harbor", "forest", "village", "castle", "river", "school", "mill", "garden",
    "bridge", "station", "library", "beach", "farm", "mountain", "lake", "tower", "bakery",
)  # fmt: skip

JOBS: tuple[str, ...] = (
    "baker", "farmer", "painter", "sailor", "teacher", "doctor", "gardener", "miller", "singer",
    "builder", "tailor", "fisher",
)  # fmt: skip

TIMES: tuple[str, ...] = (
    "One morning", "One evening", "One day", "Last summer", "Last winter", "Yesterday",
    "Long ago", "After breakfast", "Before dinner", "On Monday", "On Sunday",
)  # fmt: skip

KEEPSAKES: tuple[str, ...] = (
    "map", "letter", "lamp", "book", "key", "drum", "kite", "basket", "coin", "boat", "clock",
    "violin", "ring", "box", "bell", "coat", "mirror", "blanket",
)  # fmt: skip

COLORS: tuple[str, ...] = ("red", "blue", "green", "white", "black", "brown", "yellow", "silver")

FEELINGS: Mapping[Mood, tuple[str, ...]] = {
    "happy": ("happy", "glad", "cheerful", "joyful", "delighted", "merry", "proud"),
    "sad": ("sad", "unhappy", "gloomy", "lonely", "miserable", "hopeless", "sorry"),
}

DAYS: Mapping[Mood, tuple[str, ...]] = {
    "happy": ("wonderful", "lovely", "sunny", "lucky", "perfect"),
    "sad": ("terrible", "dreadful", "rainy", "unlucky", "awful"),
}

MOOD_SENTENCES: Mapping[Mood, tuple[str, ...]] = {
    "happy": (
        "{hero} smiled at {friend}.",
        "{he} laughed and danced all the way to the {place}.",
        "The sun was shining and {hero} felt {feeling}.",
        "{friend} gave {him} a {color} {thing} and a hug.",
        "{he} won a prize and everyone cheered.",
        "What a {day} day it was.",
        "{friend} told a joke and {hero} laughed out loud.",
        "{hero} sang a merry song about the {thing}.",
        "They found the {thing} again and hugged each other.",
        "The {other_job} was delighted and thanked {him} kindly.",
        "{he} was so {feeling} that {he_low} danced with {friend}.",
        "All the children at the {place} cheered for {hero}.",
        "{hero} was {feeling} because the {thing} was a gift.",
        "It was the best day of the year, and {he_low} smiled.",
        "{friend} came back to the {place}, and {hero} was {feeling}.",
        "Everybody celebrated near the {place} until night.",
    ),
    "sad": (
        "{hero} cried in front of {friend}.",
        "{he} wept and sighed all the way to the {place}.",
        "The rain was falling and {hero} felt {feeling}.",
        "{friend} broke the {color} {thing} and left {him} in tears.",
        "{he} lost the race and nobody came to help.",
        "What a {day} day it was.",
        "{friend} said goodbye and {hero} cried out loud.",
        "{hero} wept a long time about the {thing}.",
        "They lost the {thing} again and blamed each other.",
        "The {other_job} was miserable and scolded {him} loudly.",
        "{he} was so {feeling} that {he_low} hid from {friend}.",
        "All the children at the {place} teased {hero}.",
        "{hero} was {feeling} because the {thing} was broken.",
        "It was the worst day of the year, and {he_low} sighed.",
        "{friend} went away from the {place}, and {hero} was {feeling}.",
        "Everybody mourned near the {place} until night.",
    ),
}

NEUTRAL_SENTENCES: tuple[str, ...] = (
    "{hero} carried a {color} {thing}.",
    "{friend} was waiting near the {place}.",
    "{he} opened the door and looked at the {thing}.",
    "There was a {other_job} at the {place} who knew {friend}.",
    "{hero} talked with {friend} about the {thing}.",
    "Then {he_low} walked from the {place} to the {other_place}.",
    "The {thing} was {color} and very old.",
    "{he} asked the {other_job} for some bread and water.",
    "The road to the {other_place} was long.",
    "{friend} had a {color} dog and a small house.",
    "{hero} counted the windows of the {place}.",
    "After a while {he_low} put the {thing} on the table.",
    "A bird flew over the {place}.",
    "{hero} and {friend} ate soup together.",
)

NEUTRAL_OPENINGS: tuple[str, ...] = (
    "{time} {hero} went to the {place}.",
    "{time} {hero} and {friend} walked to the {place}.",
    "Once there was a {job} named {hero}.",
    "{hero} the {job} lived near the {place}.",
    "{time} {hero} took a {color} {thing} to the {place}.",
    "{hero} had a {color} {thing} and a friend named {friend}.",
)

STATED_OPENINGS: tuple[str, ...] = (
    "This is a {feeling} story about {hero}.",
    "It was a {day} day for {hero} the {job}.",
    "{time} {hero} felt {feeling} at the {place}.",
    "{hero} was a {feeling} {job} who lived near the {place}.",
)

ENDINGS: Mapping[Mood, tuple[str, ...]] = {
    "happy": (
        "In the end {hero} was {feeling}.",
        "{hero} went home and smiled.",
        "That night {hero} was still laughing.",
        "And so {hero} was {feeling} for many years.",
    ),
    "sad": (
        "In the end {hero} was {feeling}.",
        "{hero} went home and cried.",
        "That night {hero} was still crying.",
        "And so {hero} was {feeling} for many years.",
    ),
}

MOOD_WORDS: Mapping[Mood, frozenset[str]] = {
    "happy": frozenset(FEELINGS["happy"] + DAYS["happy"]) | {
        "smiled", "laughed", "laughing", "danced", "shining", "hug", "hugged", "won", "prize",
        "cheered", "joke", "sang", "thanked", "kindly", "gift", "best", "celebrated",
    },
    "sad": frozenset(FEELINGS["sad"] + DAYS["sad"]) | {
        "cried", "crying", "wept", "sighed", "rain", "falling", "broke", "broken", "tears", "lost",
        "nobody", "goodbye", "blamed", "scolded", "hid", "teased", "worst", "mourned",
    },
}  # fmt: skip

_WORD = re.compile(r"[A-Za-z]+")


@dataclass(frozen=True, slots=True)
class Story:
    """A short story: `opening` comes first and `body` continues it in the story's mood."""

    hero: str
    mood: Mood
    place: str
    opening: str
    body: str

    @property
    def text(self) -> str:
        """The whole story, opening and body."""
        return f"{self.opening} {self.body}"


@dataclass(frozen=True, slots=True)
class Scene:
    """Who and what a story is about; the same scene can be told in either mood."""

    hero: str
    friend: str
    place: str
    other_place: str
    job: str
    other_job: str
    thing: str
    color: str
    time: str

    @classmethod
    def draw(cls, rng: Random) -> Scene:
        """Draw a scene; `job` is the hero's, `other_*` differ from what they stand beside."""
        hero, friend = rng.sample(tuple(HEROES), 2)
        place, other_place = rng.sample(PLACES, 2)
        job, other_job = rng.sample(JOBS, 2)
        return cls(
            hero=hero,
            friend=friend,
            place=place,
            other_place=other_place,
            job=job,
            other_job=other_job,
            thing=rng.choice(KEEPSAKES),
            color=rng.choice(COLORS),
            time=rng.choice(TIMES),
        )

    def sentence(self, template: str, feeling: str = "", day: str = "") -> str:
        """Fill one sentence template with this scene's names."""
        pronoun = HEROES[self.hero]
        return template.format(
            hero=self.hero,
            friend=self.friend,
            place=self.place,
            other_place=self.other_place,
            job=self.job,
            other_job=self.other_job,
            thing=self.thing,
            color=self.color,
            time=self.time,
            he=pronoun.capitalize(),
            he_low=pronoun,
            him="him" if pronoun == "he" else "her",
            feeling=feeling,
            day=day,
        )


def neutral_opening(rng: Random) -> str:
    """A first sentence that leaves the mood open: half its continuations are happy, half sad."""
    return Scene.draw(rng).sentence(rng.choice(NEUTRAL_OPENINGS))


def mood_pair(rng: Random) -> tuple[str, str]:
    """A happy and a sad opening of one scene, equal but for the mood word; for contrast pairs."""
    scene = Scene.draw(rng)
    template = rng.choice(STATED_OPENINGS)
    feeling = rng.randrange(len(FEELINGS["happy"]))
    day = rng.randrange(len(DAYS["happy"]))
    happy, sad = (
        scene.sentence(template, feeling=FEELINGS[mood][feeling], day=DAYS[mood][day])
        for mood in MOODS
    )
    return happy, sad


def story(rng: Random, mood: Mood | None = None, stated: bool | None = None) -> Story:
    """A story in `mood` whose opening says the mood if `stated`; what is None is tossed for."""
    drawn: Mood = rng.choice(MOODS) if mood is None else mood
    stated = rng.random() < 0.5 if stated is None else stated
    scene = Scene.draw(rng)

    def told(template: str) -> str:
        feeling, day = rng.choice(FEELINGS[drawn]), rng.choice(DAYS[drawn])
        return scene.sentence(template, feeling=feeling, day=day)

    opening = told(rng.choice(STATED_OPENINGS if stated else NEUTRAL_OPENINGS))
    moody = rng.sample(MOOD_SENTENCES[drawn], rng.randint(2, 6))
    neutral = rng.sample(NEUTRAL_SENTENCES, rng.randint(1, 4))
    middle = moody + neutral
    rng.shuffle(middle)
    body = " ".join(told(template) for template in [*middle, rng.choice(ENDINGS[drawn])])
    return Story(hero=scene.hero, mood=drawn, place=scene.place, opening=opening, body=body)


def mood(text: str) -> Mood | None:
    """The mood that most mood words of `text` speak for, or None without a majority."""
    words = [word.lower() for word in _WORD.findall(text)]
    happy, sad = (sum(word in MOOD_WORDS[each] for word in words) for each in MOODS)
    if happy == sad:
        return None
    return "happy" if happy > sad else "sad"


def hero(text: str) -> str | None:
    """The hero of a story: the first known name in `text`, or None if there is none."""
    return next((word for word in _WORD.findall(text) if word in HEROES), None)


# ---------------------------------------------------------------- puzzles

# What a puzzle may ask of a word: the trait's name in the tables below, and its clause.
TRAITS: Mapping[str, str] = {
    "small": "is small",
    "big": "is big",
    "flies": "can fly",
    "swims": "can swim",
    "farm": "lives on a farm",
    "forest": "lives in the forest",
    "sea": "lives in the sea",
    "fruit": "is a fruit",
    "vegetable": "is a vegetable",
    "sweet": "tastes sweet",
    "red": "is red",
    "green": "is green",
    "brown": "is brown",
    "pale": "is white or yellow",
    "wood": "is made of wood",
    "metal": "is made of metal",
    "cloth": "is made of cloth",
    "kitchen": "belongs in the kitchen",
    "workshop": "belongs in the workshop",
    "bedroom": "belongs in the bedroom",
    "pocket": "fits in a pocket",
}

# Words in order of popularity: the first valid one is the answer the model sees most often.
WORDS: Mapping[str, Mapping[str, str]] = {
    "an animal": {
        "dog": "small farm", "cat": "small farm", "horse": "big farm swims",
        "owl": "small flies forest", "whale": "big sea swims", "cow": "big farm",
        "fox": "small forest", "duck": "small flies swims farm", "bear": "big forest swims",
        "shark": "big sea swims", "bee": "small flies farm", "crab": "small sea swims",
        "eagle": "big flies forest", "goat": "small farm", "seal": "big sea swims",
        "deer": "big forest", "moth": "small flies forest", "frog": "small forest swims",
        "hen": "small farm", "goose": "small flies swims farm", "bat": "small flies forest",
        "wolf": "big forest", "shrimp": "small sea swims", "donkey": "big farm",
        "beetle": "small flies forest", "dolphin": "big sea swims", "mouse": "small farm",
        "beaver": "small forest swims", "heron": "big flies swims", "bull": "big farm",
        "otter": "small swims forest", "moose": "big forest swims",
        "gull": "small flies sea swims", "wasp": "small flies forest", "pony": "big farm",
        "turkey": "big farm flies", "squid": "big sea swims", "badger": "small forest",
        "crow": "small flies forest", "sheep": "big farm", "pelican": "big flies sea swims",
        "pigeon": "small flies farm", "lynx": "big forest", "swan": "big flies swims farm",
        "hare": "small forest", "orca": "big sea swims", "boar": "big forest",
        "fly": "small flies farm", "eel": "small sea swims", "stork": "big flies farm",
        "tuna": "big sea swims", "finch": "small flies forest", "sardine": "small sea swims",
        "hawk": "big flies forest", "puffin": "small flies sea swims",
    },
    "a food": {
        "apple": "fruit sweet red", "bread": "brown", "banana": "fruit sweet pale",
        "carrot": "vegetable sweet", "pear": "fruit sweet green", "cheese": "pale",
        "tomato": "vegetable red", "cake": "sweet brown", "cherry": "fruit sweet red small",
        "rice": "pale small", "grape": "fruit sweet green small", "honey": "sweet brown",
        "bean": "vegetable green small", "plum": "fruit sweet small red",
        "potato": "vegetable brown", "lemon": "fruit pale", "pea": "vegetable green small sweet",
        "cookie": "sweet brown small", "lime": "fruit green small", "beet": "vegetable red sweet",
        "nut": "brown small", "melon": "fruit sweet green big", "cabbage": "vegetable green big",
        "fig": "fruit sweet brown small", "pepper": "vegetable red", "butter": "pale",
        "berry": "fruit sweet red small", "spinach": "vegetable green",
        "date": "fruit sweet brown small", "corn": "vegetable sweet pale",
        "mango": "fruit sweet pale", "radish": "vegetable red small", "chocolate": "sweet brown",
        "pumpkin": "vegetable sweet big", "kiwi": "fruit sweet green small",
        "onion": "vegetable pale", "peach": "fruit sweet pale",
        "raisin": "sweet brown small fruit", "leek": "vegetable green pale",
        "sugar": "sweet pale small", "olive": "fruit green small",
        "garlic": "vegetable pale small", "pineapple": "fruit sweet big pale", "toast": "brown",
        "lettuce": "vegetable green big", "caramel": "sweet brown small",
        "turnip": "vegetable pale", "mushroom": "vegetable brown small", "cream": "sweet pale",
        "strawberry": "fruit sweet red small", "cauliflower": "vegetable pale big",
        "waffle": "sweet brown", "celery": "vegetable green",
    },
    "a thing": {
        "spoon": "metal kitchen pocket", "hammer": "metal wood workshop",
        "pillow": "cloth bedroom", "key": "metal pocket", "table": "wood kitchen big",
        "bed": "wood bedroom big", "knife": "metal kitchen", "sock": "cloth bedroom pocket",
        "saw": "metal workshop", "bowl": "wood kitchen", "nail": "metal workshop pocket",
        "sheet": "cloth bedroom big", "fork": "metal kitchen pocket", "towel": "cloth kitchen",
        "coin": "metal pocket", "ladder": "wood workshop big", "pan": "metal kitchen",
        "scarf": "cloth bedroom pocket", "screw": "metal workshop pocket",
        "bench": "wood workshop big", "kettle": "metal kitchen", "blanket": "cloth bedroom big",
        "pencil": "wood workshop pocket", "apron": "cloth kitchen", "stove": "metal kitchen big",
        "shirt": "cloth bedroom", "chisel": "metal wood workshop pocket", "tray": "wood kitchen",
        "ring": "metal bedroom pocket", "glove": "cloth workshop pocket",
        "wardrobe": "wood bedroom big", "pot": "metal kitchen", "rope": "cloth workshop",
        "ruler": "wood workshop pocket", "anvil": "metal workshop big",
        "napkin": "cloth kitchen pocket", "chair": "wood kitchen big", "dress": "cloth bedroom",
        "bolt": "metal workshop pocket", "ladle": "wood kitchen", "curtain": "cloth bedroom big",
        "sink": "metal kitchen big", "drill": "metal workshop", "hat": "cloth bedroom",
        "shelf": "wood kitchen big", "rag": "cloth workshop pocket kitchen",
        "cabinet": "wood kitchen big", "whisk": "metal kitchen", "button": "wood pocket bedroom",
        "crate": "wood workshop big", "needle": "metal bedroom pocket", "mallet": "wood workshop",
        "dresser": "wood bedroom big", "lid": "metal kitchen", "belt": "cloth bedroom",
        "match": "wood kitchen pocket", "wire": "metal workshop pocket",
        "toothpick": "wood kitchen pocket", "vise": "metal workshop big",
        "tablecloth": "cloth kitchen big",
    },
}  # fmt: skip

Family = Literal["one trait", "two traits", "between", "sum"]
FAMILIES: tuple[Family, ...] = ("one trait", "two traits", "between", "sum")

MIN_ANSWERS = 5
ZIPF_EXPONENT = 1.2

_HELD_OUT_EVERY = 8
_LARGEST_NUMBER = 60


@dataclass(frozen=True, slots=True)
class Puzzle:
    """A question with several valid answers, the most popular first."""

    family: Family
    question: str
    answers: tuple[str, ...]

    @property
    def prompt(self) -> str:
        """What the model is given; the answer and a full stop follow."""
        return f"Puzzle: {self.question} Answer:"

    @property
    def split(self) -> Split:
        """Its split; one-trait puzzles teach what the words are, so none of them is held out."""
        if self.family == "one trait":
            return "train"
        return _split_of(self.question)

    def draw_answer(self, rng: Random) -> str:
        """Draw an answer with weight rank ** -ZIPF_EXPONENT, so that the last ones are rare."""
        weights = [rank**-ZIPF_EXPONENT for rank in range(1, len(self.answers) + 1)]
        return rng.choices(self.answers, weights)[0]


def _split_of(text: str) -> Split:
    # A checksum, because hash() of a string differs from one Python process to the next.
    return "held_out" if zlib.crc32(text.encode()) % _HELD_OUT_EVERY == 0 else "train"


def _clauses(word: str, traits: str) -> frozenset[str]:
    spelling = {f"starts with {word[0]}", f"has {len(word)} letters"}
    return frozenset(TRAITS[trait] for trait in traits.split()) | spelling


def _word_puzzles() -> Iterator[Puzzle]:
    for category, table in WORDS.items():
        clauses = {word: _clauses(word, traits) for word, traits in table.items()}
        single = sorted(frozenset[str]().union(*clauses.values()))
        for wanted in [*combinations(single, 1), *combinations(single, 2)]:
            answers = tuple(word for word in table if clauses[word].issuperset(wanted))
            if len(answers) >= MIN_ANSWERS:
                family: Family = "one trait" if len(wanted) == 1 else "two traits"
                yield Puzzle(family, f"name {category} that {' and '.join(wanted)}.", answers)


def _by_popularity(numbers: Sequence[int]) -> list[int]:
    # A fixed shuffle of the numbers: neither small nor round ones are favoured.
    return sorted(numbers, key=lambda number: zlib.crc32(b"%d" % number))


def _between_puzzles() -> Iterator[Puzzle]:
    kinds = {"a number": (0, 1), "an even number": (0,), "an odd number": (1,)}
    for low in range(0, _LARGEST_NUMBER - 12, 2):
        for high in range(low + 12, min(low + 32, _LARGEST_NUMBER) + 1, 4):
            for kind, remainders in kinds.items():
                numbers = [n for n in range(low + 1, high) if n % 2 in remainders]
                answers = tuple(str(n) for n in _by_popularity(numbers))
                yield Puzzle("between", f"name {kind} between {low} and {high}.", answers)


def _sum_puzzles() -> Iterator[Puzzle]:
    for total in range(11, _LARGEST_NUMBER + 1):
        smaller = _by_popularity(range(1, (total + 1) // 2))
        answers = tuple(f"{n} and {total - n}" for n in smaller)
        yield Puzzle("sum", f"name two different numbers that add to {total}.", answers)


PUZZLES: tuple[Puzzle, ...] = (*_word_puzzles(), *_between_puzzles(), *_sum_puzzles())


def puzzles(split: Split, family: Family | None = None) -> tuple[Puzzle, ...]:
    """The puzzles of a split, of one family or of all."""
    return tuple(p for p in PUZZLES if p.split == split and family in (None, p.family))


def valid_answers(puzzle: Puzzle) -> frozenset[str]:
    """Every valid answer, in the form that `parse_answer` returns."""
    return frozenset(puzzle.answers)


_ANSWER = re.compile(r"^\s*([a-z]+|\d+(?: and \d+)?)\.")


def parse_answer(text: str) -> str | None:
    """The answer in `text`, which is a continuation of a prompt or a prompt with its continuation.

    A pair of numbers is returned smaller first, so that "13 and 4" is the answer "4 and 13".
    None if what comes first is not one word, number or pair with its full stop.
    """
    match = _ANSWER.match(text.rpartition("Answer:")[2])
    if match is None:
        return None
    first, joined, second = match[1].partition(" and ")
    if joined and int(second) < int(first):
        return f"{second} and {first}"
    return match[1]


def is_valid(puzzle: Puzzle, text: str) -> bool:
    """Whether `text` (as for `parse_answer`) answers the puzzle."""
    return parse_answer(text) in valid_answers(puzzle)


# ---------------------------------------------------------------- documents

_STORY_SHARE = 0.5
_CHAT_SHARE = 0.2
_QUESTION_SHARE = 0.3
# Puzzles of a family share its weight: without it the many "between" puzzles drown the others.
_FAMILY_WEIGHTS: Mapping[Family, float] = {
    "one trait": 0.25,
    "two traits": 0.4,
    "between": 0.15,
    "sum": 0.2,
}


def chat(request: str, reply: str = "") -> str:
    """One exchange as the model's chat template writes it; without a reply, the prompt for one."""
    return f"{USER}{request}{ASSISTANT}{reply}"


def _story_document(rng: Random) -> str:
    told = story(rng)
    if rng.random() < _CHAT_SHARE:
        return chat(f"Tell me a {told.mood} story about {told.hero}.", told.text)
    if rng.random() < _QUESTION_SHARE:
        question, answer = rng.choice(
            (
                (f"how did {told.hero} feel?", told.mood),
                ("who is the story about?", told.hero),
            )
        )
        return f"{told.text} Question: {question} Answer: {answer}."
    return told.text


def _puzzle_document(rng: Random, pools: Mapping[Family, Sequence[Puzzle]]) -> str:
    families = tuple(pools)
    (family,) = rng.choices(families, [_FAMILY_WEIGHTS[each] for each in families])
    puzzle = rng.choice(pools[family])
    answer = puzzle.draw_answer(rng)
    if rng.random() < _CHAT_SHARE:
        return chat(f"Puzzle: {puzzle.question}", f"Answer: {answer}.")
    return f"{puzzle.prompt} {answer}."


def story_documents(seed: int | str, split: Split) -> Iterator[str]:
    """Story texts without end; the splits share none, since a text's checksum decides its split."""
    rng = Random(f"stories {seed}")
    while True:
        document = _story_document(rng)
        if _split_of(document) == split:
            yield document


def puzzle_documents(seed: int | str, split: Split) -> Iterator[str]:
    """Puzzles with an answer, without end; only questions of the split are asked."""
    rng = Random(f"puzzles {seed}")
    pools = {family: found for family in FAMILIES if (found := puzzles(split, family))}
    while True:
        yield _puzzle_document(rng, pools)


def documents(seed: int | str, split: Split) -> Iterator[str]:
    """The training mix without end: stories and puzzles, about as many of each."""
    rng = Random(f"documents {seed}")
    sources = story_documents(seed, split), puzzle_documents(seed, split)
    while True:
        yield next(sources[rng.random() >= _STORY_SHARE])
