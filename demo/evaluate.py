"""Measures the demo model with plain transformers: `python -m demo.evaluate`.

Perplexity on held-out text, the share of sampled puzzle answers that are valid, how many of the
valid answers sampling finds, and how well stories keep their mood and hero.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from demo.text import (
    FAMILIES,
    Puzzle,
    Split,
    hero,
    is_valid,
    mood,
    mood_pair,
    neutral_opening,
    parse_answer,
    puzzle_documents,
    puzzles,
    story_documents,
    valid_answers,
)

SPLITS: tuple[Split, Split] = ("train", "held_out")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A model, its tokenizer, and how much to sample from it."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    temperature: float = 0.8
    samples_per_puzzle: int = 32
    puzzles_per_family: int = 40
    stories: int = 200
    batch: int = 256

    @torch.inference_mode()
    def perplexity(self, texts: Sequence[str]) -> float:
        """exp of the mean negative log-likelihood of every token but each text's first."""
        total, count = 0.0, 0
        for text in texts:
            ids = self.tokenizer(text, return_tensors="pt").input_ids
            end = torch.tensor([[self.tokenizer.eos_token_id]])
            ids = torch.cat([ids, end], dim=1)
            total += self.model(input_ids=ids, labels=ids).loss.item() * (ids.shape[1] - 1)
            count += ids.shape[1] - 1
        return math.exp(total / count)

    @torch.inference_mode()
    def sample(self, prompts: Sequence[str], max_new_tokens: int) -> Iterator[str]:
        """One continuation of each prompt, sampled at the temperature from the whole vocabulary."""
        for start in range(0, len(prompts), self.batch):
            chosen = list(prompts[start : start + self.batch])
            encoded = self.tokenizer(chosen, return_tensors="pt", padding=True, padding_side="left")
            ids = self.model.generate(
                **encoded,
                do_sample=True,
                temperature=self.temperature,
                top_k=0,
                max_new_tokens=max_new_tokens,
            )
            new_ids = ids[:, encoded.input_ids.shape[1] :]
            yield from self.tokenizer.batch_decode(new_ids, skip_special_tokens=True)

    def print_perplexity(self, documents: int = 300) -> None:
        """Held-out perplexity of stories and of puzzles with their answers."""
        for kind, source in (("stories", story_documents), ("puzzles", puzzle_documents)):
            texts = list(itertools.islice(source("evaluate", "held_out"), documents))
            print(f"held-out perplexity, {kind}: {self.perplexity(texts):.3f}")

    def print_puzzles(self) -> None:
        """A row for each family and split: accuracy, and how many valid answers were found."""
        print(
            f"| family | split | puzzles | accuracy | found in {self.samples_per_puzzle} samples |"
        )
        print("| --- | --- | ---: | ---: | ---: |")
        for split in SPLITS:
            scores = Score()
            for family in FAMILIES:
                known = puzzles(split, family)
                if known:
                    chosen = Random(0).sample(known, min(len(known), self.puzzles_per_family))
                    score = self.score(chosen)
                    print(f"| {family} | {split} | {len(chosen)} | {score} |")
                    scores += score
            print(f"| all of these | {split} | {scores.puzzles} | {scores} |")

    def score(self, chosen: Sequence[Puzzle]) -> Score:
        """Sample answers to the chosen puzzles and count the valid ones."""
        prompts = [puzzle.prompt for puzzle in chosen for _ in range(self.samples_per_puzzle)]
        # The longest answers are sums such as " 23 and 37.", of eight tokens.
        replies = list(self.sample(prompts, max_new_tokens=8))
        score = Score()
        for index, puzzle in enumerate(chosen):
            texts = replies[index * self.samples_per_puzzle :][: self.samples_per_puzzle]
            answers = {parse_answer(text) for text in texts}
            score += Score(
                puzzles=1,
                sampled=len(texts),
                valid=sum(is_valid(puzzle, text) for text in texts),
                found=len(answers & valid_answers(puzzle)),
                existing=len(puzzle.answers),
            )
        return score

    def print_stories(self) -> None:
        """Whether stories that continue an opening have its mood and name its hero again."""
        rng = Random(0)
        neutral = [neutral_opening(rng) for _ in range(self.stories)]
        pairs = [mood_pair(rng) for _ in range(self.stories // 2)]
        stated = [opening for pair in pairs for opening in pair]
        replies = list(self.sample([*neutral, *stated], max_new_tokens=200))
        moods = [mood(reply) for reply in replies]
        free, told = moods[: len(neutral)], moods[len(neutral) :]
        heroes = [hero(opening) for opening in [*neutral, *stated]]
        named = zip(heroes, replies, strict=True)
        again = sum(name is not None and name in reply for name, reply in named)
        kept = sum(said == mood(opening) for said, opening in zip(told, stated, strict=True))
        print(f"neutral openings continued happily: {free.count('happy') / len(free):.1%}")
        print(f"neutral openings continued sadly: {free.count('sad') / len(free):.1%}")
        print(f"stated moods kept: {kept / len(told):.1%}")
        print(f"heroes named again: {again / len(replies):.1%}")


@dataclass(frozen=True, slots=True)
class Score:
    """Counts over sampled puzzle answers; scores of several puzzles add up."""

    puzzles: int = 0
    sampled: int = 0
    valid: int = 0
    found: int = 0
    existing: int = 0

    def __add__(self, other: Score) -> Score:
        return Score(
            self.puzzles + other.puzzles,
            self.sampled + other.sampled,
            self.valid + other.valid,
            self.found + other.found,
            self.existing + other.existing,
        )

    def __str__(self) -> str:
        return f"{self.valid / self.sampled:.1%} | {self.found} of {self.existing}"


def main() -> None:
    """Print every figure of demo/README.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path(__file__).parent / "model")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    evaluation = Evaluation(
        model=AutoModelForCausalLM.from_pretrained(arguments.model).eval(),
        tokenizer=AutoTokenizer.from_pretrained(arguments.model),
    )
    evaluation.print_perplexity()
    evaluation.print_puzzles()
    evaluation.print_stories()


if __name__ == "__main__":
    main()
