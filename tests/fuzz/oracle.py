"""What a request must give, from the same request alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from capture.truth import WITHOUT_LAYER, located, meant, reduced
from engine.reference import LAYERS

import tllm.stores
from fuzz.asks import Ask
from fuzz.controllers import CONTROLLERS, controlled, declared, wrong_about
from fuzz.features import MODULES
from fuzz.gates import SAE, SAE_PLACE, conditions_in, edges_of, is_near
from tllm.consumers.sparse_autoencoder import SparseAutoencoder

RELATIVE = {"model": 5e-5, "float32": 5e-5, "float16": 2e-3}
"""Largest error of a row relative to its norm: sums in another order, and rounding to half."""

OFF = {name: {"enabled": False} for name in ("esamp", "probe", "logging")}
"""What scores, counts or guides, and is told not to; ESamp where the engine has it."""
PROBED = ("post_block", LAYERS - 1)


class WrongError(AssertionError):
    """A request gave what it would not have given alone."""


@dataclass
class Alone:
    """What one sample was when nobody else was there.

    Attributes:
        tokens: all of its tokens, the prompt's first.
        rows: by hook point and layer, `[computed, hidden]`.
        signals: what conditions of steering made of its tokens, by name.
        ended: why.
    """

    tokens: list[int]
    rows: Mapping[tuple[str, int | None], torch.Tensor]
    signals: Mapping[str, Any]
    ended: tuple[Any, Any] = None, None

    @property
    def computed(self) -> list[int]:
        """The tokens that have rows: the last one was drawn and not computed, unless nothing was
        drawn, since the prompt was refused."""
        return self.tokens if self.ended[0] == "abort" else self.tokens[:-1]


class Oracle:
    """Says what to run alone, and compares with what that gave.

    Args:
        probe: `(weight [hidden], bias)` of the engine's probe.
        root: of the engine's store.
        apart: whether the engine is another process, and computes ahead of what this one has seen.

    Attributes:
        looked: outputs that `check` was given.
        near: those of them that could not be compared, since alone a score lay on the edge of a
            condition.
    """

    def __init__(self, probe: tuple[torch.Tensor, float], root: Any, *, apart: bool) -> None:
        self._probe = probe
        self._root = root
        self._apart = apart
        self._autoencoder = SparseAutoencoder.load(root.with_name("autoencoder"))
        self.looked = 0
        self.near = 0

    def alone(self, ask: Ask, output: Any) -> tuple[list[list[int]], Any]:
        """What to run, one after the other, to know what an output should be.

        Returns:
            Prompts and their parameters: the request itself, all of whose rows are kept, with
            conditions in the place of controllers; or, where nobody else can tell the tokens, those
            of each sample as a prompt of their own.
        """
        off = {name: no for name, no in OFF.items() if name != "esamp" or name in ask.consumers}
        asked: dict[str, Any] = {"capture": _everything(ask), "consumers": off, **declared(ask)}
        if not ask.guided:
            return [ask.prompt], ask.params(**asked)
        asked |= {"n": None, "max_tokens": 1, "temperature": 0.0, "min_tokens": None, "seed": None}
        prompts = [[*ask.prompt, *sample.token_ids][:-1] for sample in output.outputs]
        return prompts, ask.params(**asked)

    def truth(self, ask: Ask, output: Any, outputs: Sequence[Any]) -> list[Alone]:
        """Each sample of the request, from the outputs of what `alone` said."""
        if ask.guided:
            return [
                Alone(
                    [*ask.prompt, *sample.token_ids],
                    _states(each.outputs[0]),
                    each.outputs[0].signals,
                )
                for sample, each in zip(output.outputs, outputs, strict=True)
            ]
        [each] = outputs
        return [
            Alone(
                [*ask.prompt, *sample.token_ids],
                _states(sample),
                sample.signals,
                (sample.finish_reason, sample.stop_reason),
            )
            for sample in each.outputs
        ]

    def check(self, ask: Ask, output: Any, truth: Sequence[Alone], everywhere: Any = None) -> None:
        """Raises `WrongError` unless an output is what its request gives alone.

        Args:
            everywhere: global steering.
        """
        self.looked += 1
        given = [
            everywhere,
            ask.options,
            declared(ask),
            *(MODULES.values() if "module" in ask.drawn else ()),
        ]
        edges = edges_of(conditions_in(given))
        if any(is_near(alone.signals, edges) for alone in truth):
            self.near += 1
            return
        if len(output.outputs) != len(truth):
            raise WrongError(f"{len(output.outputs)} samples, and alone {len(truth)}")
        for completion, alone in zip(output.outputs, truth, strict=True):
            tokens = [*ask.prompt, *completion.token_ids]
            if not ask.guided and tokens != alone.tokens:
                raise WrongError(
                    f"sample {completion.index} has the tokens {tokens[len(ask.prompt) :]}, and "
                    f"alone {alone.tokens[len(ask.prompt) :]}"
                )
            # vLLM does not forget the token by which an earlier part's answer has ended.
            reason = alone.ended[1] if ask.parts else completion.stop_reason
            ended = completion.finish_reason, reason
            if not ask.guided and ended != alone.ended:
                raise WrongError(f"it ended with {ended}, and alone with {alone.ended}")
            for name in controlled(ask):
                if wrong := wrong_about(name, ask, completion, alone):
                    raise WrongError(wrong)
            for name in ask.captures:
                result = completion.capture_results[name]
                if self._apart and _is_too_far_ahead(ask, name, result):
                    continue
                if (result.status, result.error) != ("ok", None):
                    raise WrongError(f"capture {name!r} is {result.status}: {result.error}")
                self._check_capture(ask, name, completion, alone)
            if ask.consumers["probe"].get("enabled", True):
                self._check_probe(completion, alone)
            if SAE in ask.consumers:
                self._check_features(ask, completion, alone)
        if not ask.guided:
            _check_signals(ask, output, truth)

    def check_power(self) -> None:
        """Raises `WrongError` where so many outputs lay on edges that little was compared."""
        if self.near > 6 + 0.1 * self.looked:  # a request runs three times; two may be unlucky
            raise WrongError(f"scores of {self.near} of {self.looked} outputs lay on edges")

    # -- comparing -------------------------------------------------------------------------------

    def _check_capture(self, ask: Ask, name: str, completion: Any, alone: Alone) -> None:
        spec = ask.captures[name]
        positions = meant(spec["positions"], len(ask.prompt), alone.computed)
        found: dict[Any, tuple[list[int], torch.Tensor]] = {}
        if name == "memory":
            for point, layers in completion.activations.items():
                for layer, rows in layers.items():
                    found[point, layer] = rows.positions.tolist(), rows.tensor
        else:
            if completion.index:  # prompt rows are in the record of the first sample
                positions = [position for position in positions if position >= len(ask.prompt)]
            payload = completion.capture_results[name].payload
            record = tllm.stores.open(self._root).record(
                payload.request_id, tag=payload.tag, sample_index=completion.index
            )
            if list(record.token_ids) != alone.tokens:
                raise WrongError(f"record {payload.request_id} has the tokens {record.token_ids}")
            for key in record.keys:
                found[tuple(key)] = record.positions(*key).tolist(), record.tensor(*key)
        places = set(located(spec["hooks"])) if positions or name == "memory" else set(found)
        if set(found) != places:
            raise WrongError(f"capture {name!r} has rows at {set(found)}, and asked {places}")
        for place, (where, rows) in found.items():
            told = f"capture {name!r} of sample {completion.index} at {place}"
            expected, asked = alone.rows[place][positions], positions
            if spec.get("reduction", "none") != "none":
                expected = reduced(expected, spec["reduction"])
                asked = positions if name == "memory" else positions[-1:]
            if where != asked:
                raise WrongError(f"{told} is of the positions {where}, and asked were {asked}")
            dtype = spec.get("dtype", "model")
            _compare(rows, expected, RELATIVE[dtype], told)

    def _check_probe(self, completion: Any, alone: Alone) -> None:
        weight, bias = self._probe
        scores = completion.consumer_results["probe"].payload
        if scores.positions.tolist() != list(range(len(alone.computed))):
            raise WrongError(f"the probe scored the positions {scores.positions.tolist()}")
        expected = alone.rows[PROBED] @ weight + bias
        _compare(torch.from_numpy(scores.values)[None], expected[None], 1e-4, "the probe's scores")

    def _check_features(self, ask: Ask, completion: Any, alone: Alone) -> None:
        payload = completion.consumer_results[SAE].payload
        active = self._autoencoder.encode(alone.rows[SAE_PLACE])
        most = active.topk(ask.consumers[SAE].get("top_k", 5)).values
        for part in payload.values():
            if part.positions.tolist() != list(range(len(alone.computed))):
                raise WrongError(f"features are of the positions {part.positions.tolist()}")
        values = torch.from_numpy(payload["values"].values)
        if not torch.allclose(values, most, rtol=1e-4, atol=1e-3):
            raise WrongError(f"features are as active as {values}, and alone {most}")


def _check_signals(ask: Ask, output: Any, truth: Sequence[Alone]) -> None:
    """What conditions made of each token that was computed for a sample.

    Tokens of the prompt that the cache had were judged for another; one of several samples computes
    the prompt, or each a part of it.
    """
    off = not ask.consumers.get("signals", {}).get("enabled", True)
    first = len(ask.prompt)
    several = len(truth) > 1 or ask.parts
    cached = first if several else min(first, output.num_cached_tokens or 0)
    for completion, alone in zip(output.outputs, truth, strict=True):
        names = set() if off else alone.signals.keys() - CONTROLLERS.keys()
        if set(completion.signals) != names:
            raise WrongError(f"signals {set(completion.signals)}, and alone {names}")
        for name, signal in completion.signals.items():
            told = f"signal {name!r} of sample {completion.index}"
            expected = {}
            for each in [*truth, alone]:  # the prompt's tokens are those of all samples
                scored = each.signals[name]
                known = zip(scored.positions, scored.scores, scored.strengths, strict=True)
                expected |= {p: (s, x) for p, s, x in known if each is alone or p < first}
            found = signal.positions.tolist()
            missing = {p for p in expected if p >= cached} - set(found)
            if missing or found != sorted(set(found)) or set(found) - set(expected):
                raise WrongError(f"{told} is of {found}, and alone of {sorted(expected)}")
            wanted = np.array([expected[p] for p in found], np.float64).reshape(-1, 2)
            scores, strengths = wanted.T
            if not np.allclose(signal.scores, scores, rtol=1e-4, atol=1e-3, equal_nan=True):
                raise WrongError(f"{told} has the scores {signal.scores}, and alone {scores}")
            if not np.allclose(signal.strengths, strengths, atol=2e-3):
                raise WrongError(f"{told} has strengths {signal.strengths}, alone {strengths}")
            sure = (strengths < 0.498) | (strengths > 0.502)
            fired = np.isin(signal.positions, signal.fired)
            if (fired != (strengths > 0.5))[sure].any():
                raise WrongError(f"{told} fired at {signal.fired}, its strengths are {strengths}")


def _is_too_far_ahead(ask: Ask, name: str, result: Any) -> bool:
    """Whether a capture says that it was reduced over tokens beyond a stop string, which this
    process was slow to find."""
    reduced_text = "stop" in ask.options and ask.captures[name].get("reduction", "none") != "none"
    return reduced_text and "that were computed ahead of the sequence's end" in (result.error or "")


def at_these_positions(
    steering: Mapping[str, Any], prompt_len: int, tokens: Sequence[int]
) -> dict[str, Any]:
    """Global steering, for tokens of a request that pass the model as one prompt: what names tokens
    by the phase they were in, or by the prompt's end, names their positions."""

    def located_entry(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
        if "positions" not in entry:
            return [dict(entry)]
        positions = meant(entry["positions"], prompt_len, tokens)
        return [{**entry, "positions": positions}] if positions else []

    found: dict[str, Any] = {}
    for point, layers in steering.items():
        if point in WITHOUT_LAYER:
            for entry in located_entry(layers):
                found[point] = entry
            continue
        at = {n: [e for each in given for e in located_entry(each)] for n, given in layers.items()}
        if at := {layer: entries for layer, entries in at.items() if entries}:
            found[point] = at
    return found


def _everything(ask: Ask) -> dict[str, Any] | None:
    """A capture of all rows at all points that the request reads; None if it reads none."""
    places = {place for spec in ask.captures.values() for place in located(spec["hooks"])}
    if ask.consumers["probe"].get("enabled", True):
        places.add(PROBED)
    if SAE in ask.consumers:
        places.add(SAE_PLACE)
    hooks: dict[str, Any] = {}
    for point, layer in sorted(places, key=str):
        hooks.setdefault(point, []).append(layer)
    for point in hooks.keys() & WITHOUT_LAYER:
        hooks[point] = "all"
    return {"memory": {"hooks": hooks}} if hooks else None


def _states(completion: Any) -> dict[tuple[str, int | None], torch.Tensor]:
    found = completion.activations or {}
    return {
        (point, layer): rows.tensor
        for point, layers in found.items()
        for layer, rows in layers.items()
    }


def _compare(rows: torch.Tensor, expected: torch.Tensor, relative: float, told: str) -> None:
    if rows.shape != expected.shape:
        raise WrongError(f"{told} has the shape {list(rows.shape)}, not {list(expected.shape)}")
    if not len(rows):
        return
    errors = (rows.float() - expected.float()).norm(dim=-1) / (expected.float().norm(dim=-1) + 1e-6)
    if not bool((errors < relative).all()):
        raise WrongError(
            f"{told} is wrong by {[f'{float(each):.1e}' for each in errors]} of its norm"
        )
