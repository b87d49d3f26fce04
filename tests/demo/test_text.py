"""The grammar: what it writes is what its own checkers accept."""

from itertools import islice
from random import Random

import pytest

from demo.text import (
    FAMILIES,
    HEROES,
    MOOD_WORDS,
    MOODS,
    PUZZLES,
    Mood,
    Puzzle,
    Split,
    documents,
    hero,
    is_valid,
    mood,
    mood_pair,
    neutral_opening,
    parse_answer,
    puzzle_documents,
    puzzles,
    story,
    story_documents,
    valid_answers,
)

SPLITS: tuple[Split, Split] = ("train", "held_out")


def test_a_story_has_its_mood_and_names_its_hero_again() -> None:
    rng = Random(0)
    for _ in range(500):
        told = story(rng)
        assert mood(told.body) == told.mood
        assert hero(told.text) == told.hero
        assert told.hero in told.body


@pytest.mark.parametrize("wanted", MOODS)
def test_a_wanted_mood_is_told_whether_the_opening_states_it_or_not(wanted: Mood) -> None:
    rng = Random(1)
    assert {story(rng, mood=wanted, stated=True).mood for _ in range(50)} == {wanted}
    stated = [mood(story(rng, mood=wanted, stated=True).opening) for _ in range(50)]
    unstated = [mood(story(rng, mood=wanted, stated=False).opening) for _ in range(50)]
    assert set(stated) == {wanted}
    assert set(unstated) == {None}


def test_neutral_openings_have_no_mood_and_their_stories_are_half_happy() -> None:
    rng = Random(2)
    assert all(mood(neutral_opening(rng)) is None for _ in range(200))
    moods = [story(rng, stated=False).mood for _ in range(1000)]
    assert 400 < moods.count("happy") < 600


def test_a_mood_pair_differs_in_one_word() -> None:
    rng = Random(3)
    for _ in range(100):
        happy, sad = mood_pair(rng)
        assert (mood(happy), mood(sad)) == MOODS
        assert sum(a != b for a, b in zip(happy.split(), sad.split(), strict=True)) == 1


def test_mood_is_none_without_a_majority() -> None:
    assert mood("Mia walked to the market.") is None
    assert mood("Mia smiled and cried.") is None
    assert mood("Mia smiled, LAUGHED and cried.") == "happy"


def test_the_moods_share_no_word() -> None:
    assert not MOOD_WORDS["happy"] & MOOD_WORDS["sad"]


def test_hero_is_the_first_name_or_none() -> None:
    assert hero("Yesterday Mia met Leo.") == "Mia"
    assert hero("The road was long.") is None
    assert len(HEROES) >= 20


def test_every_generated_answer_is_valid() -> None:
    by_question = {puzzle.question: puzzle for puzzle in PUZZLES}
    for split in SPLITS:
        for document in islice(puzzle_documents(0, split), 1000):
            plain = document.replace("<|assistant|>", " ")
            question = plain.partition("Puzzle: ")[2].partition(" Answer:")[0]
            puzzle = by_question[question]
            assert puzzle.split == split
            assert is_valid(puzzle, document)


def test_each_valid_answer_parses_to_itself() -> None:
    for puzzle in PUZZLES:
        assert len(puzzle.answers) == len(valid_answers(puzzle)) >= 5
        assert {parse_answer(f" {answer}.") for answer in puzzle.answers} == valid_answers(puzzle)


def test_there_are_many_puzzles_with_ten_answers_or_more() -> None:
    assert len(PUZZLES) >= 40
    for family in FAMILIES:
        assert sum(len(p.answers) >= 10 for p in PUZZLES if p.family == family) >= 10


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (" owl.", "owl"),
        ("Puzzle: name an animal that can fly. Answer: owl. Mia", "owl"),
        (" 13 and 4.", "4 and 13"),
        (" 4 and 13.", "4 and 13"),
        (" 21.", "21"),
        (" owl", None),
        (" an owl.", None),
        (" 4 and.", None),
        ("", None),
    ],
)
def test_parse_answer(text: str, answer: str | None) -> None:
    assert parse_answer(text) == answer


def test_number_puzzles_have_the_answers_that_arithmetic_gives() -> None:
    (total,) = (p for p in PUZZLES if p.question.endswith("add to 12."))
    assert valid_answers(total) == {"1 and 11", "2 and 10", "3 and 9", "4 and 8", "5 and 7"}
    (even,) = (p for p in PUZZLES if p.question == "name an even number between 0 and 12.")
    assert valid_answers(even) == {"2", "4", "6", "8", "10"}


def test_popular_answers_are_drawn_more_often() -> None:
    puzzle = Puzzle("one trait", "name a letter.", tuple("abcdefghij"))
    rng = Random(4)
    drawn = [puzzle.draw_answer(rng) for _ in range(2000)]
    assert drawn.count("a") > 3 * drawn.count("e") > 3 * drawn.count("j") > 0


def test_documents_follow_from_the_seed() -> None:
    first, again, other = (list(islice(documents(seed, "train"), 50)) for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_held_out_puzzles_and_stories_are_never_trained_on() -> None:
    questions = [{p.question for p in puzzles(split)} for split in SPLITS]
    assert questions[0].isdisjoint(questions[1])
    assert len(questions[1]) >= 20
    stories = [set(islice(story_documents(0, split), 300)) for split in SPLITS]
    assert stories[0].isdisjoint(stories[1])


def test_one_trait_puzzles_are_always_trained() -> None:
    assert not puzzles("held_out", "one trait")
    assert sum(len(puzzles(split, "one trait")) for split in SPLITS) >= 40
