"""Stories made happy or sad by a vector, and the mood of each token as a probe sees it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

import torch

from demo.text import hero, mood, mood_pair, neutral_opening
from tllm import LLM, SamplingParams
from tllm.consumers.probe import ProbeConsumer
from tllm.steering import ExtractedModule, extract

SCALES = (-2.0, -1.0, -0.5, -0.25, 0.0, 0.25, 0.5, 1.0, 2.0)
PROBED_LAYER = 3


@dataclass(frozen=True)
class Way:
    """Where to steer: a layer, and which tokens, as `steering_positions` takes them."""

    layer: int
    positions: str

    @classmethod
    def parse(cls, text: str) -> Way:
        """From `LAYER:POSITIONS`."""
        layer, _, positions = text.partition(":")
        return cls(int(layer), positions or "all")

    def __str__(self) -> str:
        tokens = {"all": "all tokens", "all_generated": "generated tokens"}
        return f"layer {self.layer}, {tokens.get(self.positions, self.positions)}"


@dataclass(frozen=True)
class Point:
    """What came of steering in one way with one scale.

    Attributes:
        happy, sad: shares of the stories; the rest speaks for neither mood.
        kept: share of the stories that still name the opening's hero. It falls when the model is
            pushed so far that it stops telling a story.
    """

    way: Way
    scale: float
    happy: float
    sad: float
    kept: float


@dataclass(frozen=True)
class ToldStory:
    """A story and the mood of its tokens.

    Attributes:
        tokens: texts of the tokens, the prompt's first.
        scores: of each token that the model has computed, which the last one is not: above zero
            for happy, below for sad.
    """

    tokens: list[str]
    scores: list[float]


def mood_module(llm: LLM, pairs: int = 100) -> ExtractedModule:
    """The direction from sad to happy at every layer."""
    rng = Random(0)
    happy, sad = zip(*(mood_pair(rng) for _ in range(pairs)), strict=True)
    return extract(llm, happy, sad, method="diffmean")


def measure(
    llm: LLM,
    module: ExtractedModule,
    ways: Sequence[Way],
    openings: int,
    max_tokens: int = 48,
    scales: Sequence[float] = SCALES,
) -> Iterator[Point]:
    """Steer stories from neutral openings, in each way with each scale, all in one batch."""
    rng = Random(1)
    told = [neutral_opening(rng) for _ in range(openings)]
    settings = [(way, scale) for way in ways for scale in scales]
    params = [
        SamplingParams(
            steering_vectors=module.select(way.layer).scaled(scale),
            steering_positions=way.positions,
            max_tokens=max_tokens,
            temperature=0.8,
            seed=number,  # the same story, but for what steering does
        )
        for way, scale in settings
        for number in range(openings)
    ]
    outputs = llm.generate(told * len(settings), params, use_tqdm=False)
    texts = [output.outputs[0].text for output in outputs]
    for i, (way, scale) in enumerate(settings):
        stories = texts[i * openings : (i + 1) * openings]
        moods = [mood(story) for story in stories]
        pairs = zip(told, stories, strict=True)
        yield Point(
            way,
            scale,
            happy=moods.count("happy") / openings,
            sad=moods.count("sad") / openings,
            kept=sum(str(hero(opening)) in story for opening, story in pairs) / openings,
        )


def mood_probe(llm: LLM, pairs: int = 100) -> tuple[ProbeConsumer, float]:
    """A probe that tells the tokens of happy stories from those of sad ones, and the share of
    tokens that it gets right; see `mood_discriminant`."""
    weight, bias, right = mood_discriminant(llm, pairs)
    return ProbeConsumer(weight, bias, layer=PROBED_LAYER), right


def mood_discriminant(llm: LLM, pairs: int = 100) -> tuple[torch.Tensor, float, float]:
    """What tells the tokens of happy stories from those of sad ones.

    It is a linear discriminant of the residual stream (Fisher: `w = C^-1 (m_happy - m_sad)`, with
    the covariance `C` within the moods), so a score is the logarithm of the odds.

    Returns:
        Weight `[hidden]` and bias, learned on 70% of the stories, and the share of the other
        stories' tokens that they get right.
    """
    rng = Random(0)
    openings = [opening for _ in range(pairs) for opening in mood_pair(rng)]
    rows = {"memory": {"hooks": {"post_block": [PROBED_LAYER]}, "positions": "all_generated"}}
    params = SamplingParams(max_tokens=32, temperature=0.8, seed=3, capture=rows)
    outputs = llm.generate(openings, params, use_tqdm=False)
    moods = [mood(o.prompt + o.outputs[0].text) for o in outputs]
    states = [o.activations["post_block"][PROBED_LAYER].tensor for o in outputs]
    learned = int(0.7 * len(states))
    happy, sad = _rows_of(states[:learned], moods[:learned])
    within = torch.cat([happy - happy.mean(0), sad - sad.mean(0)])
    covariance = within.T @ within / len(within)
    covariance += 0.05 * within.square().mean() * torch.eye(len(covariance))
    weight = torch.linalg.solve(covariance, happy.mean(0) - sad.mean(0))
    bias = -float(weight @ (happy.mean(0) + sad.mean(0)) / 2)
    happy, sad = _rows_of(states[learned:], moods[learned:])
    right = int((happy @ weight + bias > 0).sum() + (sad @ weight + bias < 0).sum())
    return weight, bias, right / (len(happy) + len(sad))


def _rows_of(
    states: Sequence[torch.Tensor], moods: Sequence[str | None]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of the happy stories, and of the sad ones."""
    happy = [rows for rows, told in zip(states, moods, strict=True) if told == "happy"]
    sad = [rows for rows, told in zip(states, moods, strict=True) if told == "sad"]
    return torch.cat(happy), torch.cat(sad)


def tell(llm: LLM, openings: Sequence[str], max_tokens: int = 48) -> list[ToldStory]:
    """Let the model go on, and have its tokens scored by the registered probe."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.8, seed=1)
    outputs = llm.generate(list(openings), params, use_tqdm=False)
    tokenizer = llm.get_tokenizer()
    return [
        ToldStory(
            [tokenizer.decode([i]) for i in [*o.prompt_token_ids, *o.outputs[0].token_ids]],
            o.consumer_results["probe"].payload.values.tolist(),
        )
        for o in outputs
    ]
