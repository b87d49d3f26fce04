"""Strength against effect and utility: how much of a steering is too much."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tllm.engine.verdicts import check_goes_on
from tllm.patching.sweep import frame_of
from tllm.spec.conditions import NamedCondition
from tllm.spec.phases import Phase, phase_named
from tllm.spec.reading import scalar
from tllm.spec.tiers import Tiers
from tllm.steering.extraction import Prompt, check_waits, listed, prompt_input, prompts_listed

if TYPE_CHECKING:
    from tllm.client.llm import LLM

Effect = Callable[[str], float]
_MODULE = "tllm.steering.sweep"


@dataclass(frozen=True)
class StrengthPoint:
    """What one strength does.

    Attributes:
        effect: mean over the prompts.
        effect_error: its standard error, from how the prompts differ; NaN for a single one.
        perplexity: of the unsteered model on what was written, but for the token that fills the
            context; NaN where that is nothing.
        text_perplexity: of the steered model on the fixed texts; NaN without any.
    """

    strength: float
    effect: float
    effect_error: float
    perplexity: float
    text_perplexity: float


@dataclass(frozen=True)
class StrengthSweep:
    """Strengths with what each does, in the order in which they were given."""

    rows: tuple[StrengthPoint, ...]

    @property
    def frame(self) -> Any:
        """A data frame, one row a strength; needs pandas."""
        return frame_of([vars(row) for row in self.rows])

    def best(self, max_perplexity_ratio: float = 1.5) -> StrengthPoint:
        """The strength with the greatest effect among those whose texts the unsteered model finds
        at most so much more surprising than those at the least strength in size.

        Raises `ValueError` for a ratio below 1, which not even that strength meets, and where that
        strength has no perplexity.
        """
        if not max_perplexity_ratio >= 1:
            raise ValueError(f"max_perplexity_ratio={max_perplexity_ratio} must be 1 or more")
        plain = min(self.rows, key=lambda row: abs(row.strength))
        if math.isnan(plain.perplexity):
            raise ValueError(
                f"strength {plain.strength} has no perplexity to compare with: what it wrote fills "
                "the context; give shorter prompts"
            )
        limit = plain.perplexity * max_perplexity_ratio
        return max((r for r in self.rows if r.perplexity <= limit), key=lambda row: row.effect)

    def plot(self, path: str | PathLike[str]) -> Path:
        """Draw effect and perplexity against strength, as SVG: the path must end in `.svg`."""
        path = Path(path)
        if path.suffix.lower() != ".svg":
            raise ValueError(f"path={str(path)!r} must end in .svg, which is what is written")
        path.write_text(_drawn(self.rows), encoding="utf-8")
        return path


def sweep(
    llm: LLM,
    vectors: Any,
    strengths: Sequence[float],
    prompts: Sequence[Prompt],
    effect: Effect,
    *,
    phase: Phase = "decode",
    texts: Sequence[Prompt] = (),
    max_tokens: int = 48,
    temperature: float = 0.0,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> StrengthSweep:
    """Steer at several strengths; measure what it brings, and what it costs.

    At each strength the model continues all prompts, steered, and `effect` judges what it wrote.
    What it wrote is then read by the model unsteered: its perplexity says how strange the text has
    become. `texts` are read under steering: how well the model still predicts text that is given.
    Several benchmarks find side effects of every method, so look at both before choosing.

    Args:
        llm: a `tllm.LLM`. Global steering applies throughout, as to any request.
        vectors: what `steering_vectors` takes, of any methods: a module, or a spec.
        strengths: what the whole effect is multiplied with, as a module's factor.
        prompts: to be continued, as text or token ids.
        effect: from a continuation's text to a number.
        phase: the tokens that are steered while it writes; `texts` are steered in whole.
        texts: of two tokens and more. With them, all entries of `vectors` have to be able to steer
            tokens of a prompt, which those of texts are.
        max_tokens, temperature, seed: of the continuations.
        progress: called with how many strengths are done, and of how many.

    Raises:
        ValueError: no strengths or prompts, steering that is refused, an effect that is no
            number, a text of one token, or texts with an entry for generated tokens alone.
    """
    from tllm.params import SamplingParams  # vLLM takes seconds to import

    factors = [
        scalar(each, f"strengths[{i}]") for i, each in enumerate(listed(strengths, "strengths"))
    ]
    prompts = prompts_listed(prompts, "prompts")
    if not factors or not prompts:
        raise ValueError("give at least one strength, and a list of at least one prompt")
    phase = phase_named(phase)
    texts = prompts_listed(texts, "texts")
    if not callable(effect):
        raise ValueError(f"effect={effect!r:.60} is no function; give one from a text to a number")
    check_waits(llm)
    if texts:
        _check_steers_texts(llm, vectors)
    field = "vectors" if phase == "any" else f"{phase}_vectors"
    # A prompt leaves room for one token: what filled the context is read but for its last.
    longest = llm.llm_engine.model_config.max_model_len - 1
    writing, reading = f"{_MODULE} writing", f"{_MODULE} reading"
    try:
        llm.steering.register_module(writing, {field: vectors})
        llm.steering.register_module(reading, {"vectors": vectors})
        rows = []
        for strength in factors:
            written = SamplingParams(
                max_tokens=max_tokens,
                temperature=temperature,
                seed=seed,
                steering_module_ref=(writing, strength),
            )
            outputs = llm.generate(
                [prompt_input(each) for each in prompts], written, use_tqdm=False
            )
            for output in outputs:
                check_goes_on(output)
            effects = [_judged(effect, output.outputs[0].text) for output in outputs]
            tokens = [(list(o.prompt_token_ids), list(o.outputs[0].token_ids)) for o in outputs]
            rows.append(
                StrengthPoint(
                    strength,
                    float(np.mean(effects)),
                    _standard_error(effects),
                    _perplexity(llm, [((p + c)[:longest], len(p)) for p, c in tokens if c], None),
                    _perplexity(llm, [(t, 1) for t in texts], (reading, strength)),
                )
            )
            if progress is not None:
                progress(len(rows), len(factors))
    finally:
        _unregister(llm, (writing, reading))
    return StrengthSweep(tuple(rows))


def _check_steers_texts(llm: LLM, vectors: Any) -> None:
    """Refuse entries that would do nothing to texts, whose tokens are all of the prompt's phase."""
    monitors = llm.steering.monitors()
    for entry in Tiers.parse(vectors=vectors):
        when = entry.when
        if isinstance(when, NamedCondition):
            of_prompt = "over" in monitors.get(when.name, {})
        else:
            of_prompt = when is not None and when.memory.of_prompt
        if not entry.steers_in("prefill"):
            why = "its 'positions' name no token of a prompt; give other 'positions'"
        elif of_prompt:
            why = "its condition has 'over'; give one without"
        else:
            continue
        raise ValueError(
            f"texts are read as prompts, and {entry.name} steers generated tokens alone: {why}, "
            "or leave texts out"
        )


def _unregister(llm: LLM, modules: Sequence[str]) -> None:
    """Forget those of these modules that are registered; an interrupt is raised when all are."""
    interrupt: KeyboardInterrupt | None = None
    for name in modules:
        try:
            _unregister_one(llm, name)
        except KeyboardInterrupt as error:
            interrupt = error
            _unregister_one(llm, name)  # it may have come before the workers heard of it
    if interrupt is not None:
        raise interrupt


def _unregister_one(llm: LLM, name: str) -> None:
    if name in llm.steering.modules():
        llm.steering.unregister_module(name)


def _judged(effect: Effect, text: str) -> float:
    judged = effect(text)
    try:
        number = float(judged)
        if not math.isfinite(number):  # of which no mean, and no best, can be told
            raise ValueError
    except (TypeError, ValueError):
        raise ValueError(
            f"effect said {judged!r:.60} of {text!r:.60}; let it return a finite number"
        ) from None
    return number


def _standard_error(values: Sequence[float]) -> float:
    """Of their mean; one value says nothing of it."""
    return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


def _perplexity(
    llm: LLM, texts: Sequence[tuple[Prompt, int]], module: tuple[str, float] | None
) -> float:
    """Of the tokens of texts, each from a position on; NaN without any."""
    from tllm.params import SamplingParams

    if not texts:
        return math.nan
    params = SamplingParams(
        max_tokens=1, temperature=0.0, prompt_logprobs=0, steering_module_ref=module
    )
    outputs = llm.generate([prompt_input(text) for text, _ in texts], params, use_tqdm=False)
    for i, (output, (text, start)) in enumerate(zip(outputs, texts, strict=True)):
        if module is not None and len(output.prompt_token_ids) <= start:
            raise ValueError(
                f"texts[{i}]={text!r:.60} is one token, which nothing predicts; give texts of two "
                "tokens and more"
            )
    found = [
        at[token].logprob
        for output, (_, start) in zip(outputs, texts, strict=True)
        for at, token in list(zip(output.prompt_logprobs, output.prompt_token_ids, strict=True))[
            start:
        ]
    ]
    return math.exp(-sum(found) / len(found)) if found else math.nan


# -- the picture -----------------------------------------------------------------------------------

_WIDTH, _HEIGHT, _MARGIN = 480, 220, 60


def _drawn(rows: Sequence[StrengthPoint]) -> str:
    """Two lines over the strengths, each with a scale of its own."""
    rows = sorted(rows, key=lambda row: row.strength)
    strengths = [row.strength for row in rows]
    lines = [("effect", "#b2182b", [row.effect for row in rows])]
    lines.append(("perplexity of what was written", "#2166ac", [row.perplexity for row in rows]))
    if any(math.isfinite(row.text_perplexity) for row in rows):
        lines.append(("perplexity of texts", "#4d9221", [row.text_perplexity for row in rows]))
    low, high = strengths[0], strengths[-1]
    parts = []
    for number, (name, colour, values) in enumerate(lines):
        top = _MARGIN / 2 + number * (_HEIGHT + _MARGIN)
        below = top + _HEIGHT + 16
        known = [value for value in values if math.isfinite(value)]
        least, most = (min(known), max(known)) if known else (0.0, 1.0)
        points = [
            (
                _MARGIN + _WIDTH * ((x - low) / (high - low) if high > low else 0.5),
                top + _HEIGHT * (1 - ((y - least) / (most - least) if most > least else 0.5)),
            )
            for x, y in zip(strengths, values, strict=True)
            if math.isfinite(y)
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts += [
            f'<text x="{_MARGIN}" y="{top - 8}" fill="{colour}">{name}</text>',
            f'<path d="M{_MARGIN} {top}v{_HEIGHT}h{_WIDTH}" fill="none" stroke="#999"/>',
            f'<text x="{_MARGIN - 6}" y="{top + 10}" text-anchor="end">{most:.3g}</text>',
            f'<text x="{_MARGIN - 6}" y="{top + _HEIGHT}" text-anchor="end">{least:.3g}</text>',
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>',
            *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points),
            f'<text x="{_MARGIN}" y="{below}">{low:g}</text>',
            f'<text x="{_MARGIN + _WIDTH}" y="{below}" text-anchor="end">{high:g}</text>',
        ]
    size = f"{_WIDTH + 2 * _MARGIN} {len(lines) * (_HEIGHT + _MARGIN) + _MARGIN / 2}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" font-size="12" '
            'font-family="sans-serif"><rect width="100%" height="100%" fill="white"/>',
            *parts,
            "</svg>",
            "",
        ]
    )
