"""What a sweep measures of the next token after a prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tllm.spec.reading import one_or_several

FloatArray: TypeAlias = npt.NDArray[np.float32]

Answer: TypeAlias = tuple[int, ...]
"""Token ids: the right one, and a wrong one where there is one."""

METRICS: Mapping[str, str] = {
    "logit_diff": "log-probability of the right answer above that of the wrong one, which is the "
    "difference of their logits",
    "logprob": "log-probability of the right answer",
    "recovered": "share of the clean run's logit difference: 1 is as clean, 0 as corrupt",
    "kl": "KL divergence of the next token's distribution from the clean run's, in nats",
}
"""Metrics by name."""

_NEEDED_ANSWERS = {"logit_diff": 2, "recovered": 2, "logprob": 1}


@dataclass(frozen=True)
class Measures:
    """The metrics of a sweep.

    Attributes:
        metrics: by name; None for those of `METRICS`, else the user's own function of the
            log-probabilities `[vocab]`.
        answers: of each pair of prompts; None where no metric needs them.
    """

    metrics: Mapping[str, Callable[[FloatArray], float] | None]
    answers: Sequence[Answer] | None

    @classmethod
    def parse(cls, metric: Any, answers: Sequence[Answer] | None) -> Measures:
        """Metrics as users write them: a name, a function, a list of these, functions by name."""
        if isinstance(metric, Mapping):
            found = _named(metric)
        else:
            found = _listed([metric] if callable(metric) else one_or_several(metric))
        named = [name for name, own in found.items() if own is None]
        needed = max((_NEEDED_ANSWERS.get(name, 0) for name in named), default=0)
        if needed and (answers is None or min(map(len, answers)) < needed):
            pair = "(right, wrong)" if needed == 2 else "right"
            raise ValueError(
                f"metric={', '.join(found)} compares answers; give answers={pair}, token ids or "
                "text of one token each, or a list with one for each pair of prompts (tllm sweep: "
                f"{'--right and --wrong' if needed == 2 else '--right'}, or 'answers' in --pairs)"
            )
        return cls(found, answers)

    @property
    def whole(self) -> bool:
        """Whether any needs the whole vocabulary."""
        return any(own is not None or name == "kl" for name, own in self.metrics.items())

    def tokens(self, pair: int) -> list[int] | None:
        """The tokens whose log-probabilities are needed; None for all."""
        return None if self.whole or self.answers is None else list(self.answers[pair])

    def of(
        self, logprobs: FloatArray, clean: FloatArray, corrupt: FloatArray, pair: int
    ) -> dict[str, float]:
        """All metrics of a pair, by name.

        Args:
            logprobs: `[vocab]`, or of `tokens`; `clean` and `corrupt` are those of the two runs.
        """
        return {name: self._one(name, logprobs, clean, corrupt, pair) for name in self.metrics}

    def _one(
        self, name: str, logprobs: FloatArray, clean: FloatArray, corrupt: FloatArray, pair: int
    ) -> float:
        own = self.metrics[name]
        if own is not None:
            return _one_number(own(logprobs.copy()), name)  # it may write into them
        if name == "kl":
            p, q = clean.astype(np.float64), logprobs.astype(np.float64)
            return float((np.exp(p) * (p - q)).sum())
        if name == "logprob":
            return float(self._answers(logprobs, pair)[0])
        found, best, worst = (self._difference(each, pair) for each in (logprobs, clean, corrupt))
        if name == "logit_diff":
            return found
        if best == worst:
            raise ValueError(
                f"pair {pair}: the clean and the corrupt run have the same logit difference, "
                f"{best:.4g}, so that no share of it is recovered; use metric='logit_diff'"
            )
        return (found - worst) / (best - worst)

    def _answers(self, logprobs: FloatArray, pair: int) -> FloatArray:
        assert self.answers is not None
        return logprobs[list(self.answers[pair])] if self.whole else logprobs

    def _difference(self, logprobs: FloatArray, pair: int) -> float:
        right, wrong = self._answers(logprobs, pair)[:2].astype(np.float64)
        return float(right - wrong)


def answers_in(metric: Any) -> dict[str, Any]:
    """The answers that metrics were given with, by metric: `{"logit_diff": (right, wrong)}`."""
    if not isinstance(metric, Mapping):
        return {}
    return {
        name: each
        for name, each in metric.items()
        if name in _NEEDED_ANSWERS
        and not callable(each)
        and not (isinstance(each, str) and each in METRICS)
    }


def _listed(given: Sequence[Any]) -> dict[str, Callable[[FloatArray], float] | None]:
    """Names and functions of a list, which have their own names."""
    found: dict[str, Callable[[FloatArray], float] | None] = {}
    for each in given:
        if not callable(each) and (not isinstance(each, str) or each not in METRICS):
            raise ValueError(
                f"metric={each!r} is not known; choose of {', '.join(METRICS)}, or give a "
                "function of the log-probabilities [vocab]"
            )
        name, own = _name_of(each), each if callable(each) else None
        if name in found and found[name] is not own:
            raise ValueError(
                f"metric: two different ones are called {name!r}, and their values could not be "
                "told apart; give functions by name: metric={'name': function, ...}"
            )
        found[name] = own
    if not found or len(found) < len(given):
        raise ValueError("metric names nothing, or the same twice; give different ones")
    return found


def _named(given: Mapping[Any, Any]) -> dict[str, Callable[[FloatArray], float] | None]:
    """Functions by the names that the user gave them; those of `METRICS` by their own."""
    found: dict[str, Callable[[FloatArray], float] | None] = {}
    for name, each in given.items():
        if not isinstance(name, str) or not name:
            raise ValueError(f"metric has the key {name!r:.60}; give each function a name, as text")
        of_ours = isinstance(each, str) and each in METRICS
        if not callable(each) and not of_ours:
            raise ValueError(
                f"metric[{name!r}] is {each!r:.60}; give a function of the log-probabilities "
                f"[vocab], or one of {', '.join(METRICS)} under its own name"
            )
        if (name in METRICS or of_ours) and name != each:
            raise ValueError(
                f"metric[{name!r}] is {each!r:.60}; {', '.join(METRICS)} are tLLM's metrics: each "
                "has its own name, and no function has it"
            )
        found[name] = None if of_ours else each
    if not found:
        raise ValueError("metric names nothing; give one of " + ", ".join(METRICS))
    return found


def _one_number(given: Any, name: str) -> float:
    """What a metric of the user's returned."""
    try:
        return float(given)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(
            f"metric: {name} returned {given!r:.60}; let it return one number for the "
            "log-probabilities [vocab] that it is given"
        ) from None


def _name_of(metric: Any) -> str:
    """Of a metric: its own, or that of a function. A partial function has the type's alone."""
    if isinstance(metric, str):
        return metric
    return str(metric.__name__ if hasattr(metric, "__name__") else type(metric).__name__)
