"""What users give to `llm.patching`, read and checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from numbers import Integral, Number
from typing import TYPE_CHECKING, Any

from tllm.client.generation import AsyncGeneration, SyncGeneration
from tllm.client.path_ways import PathWays, Place
from tllm.client.sweep_form import PromptPair
from tllm.patching.metrics import Answer, Measures, answers_in
from tllm.spec.hooks import HEAD_POINTS, HookPoint
from tllm.spec.layers import Layers, layer_numbered
from tllm.spec.reading import (
    FloatArray,
    check_text,
    float_array,
    hook_named,
    one_or_several,
    whole_numbers,
)

if TYPE_CHECKING:
    from tllm.client.registrations import Registrations


class PatchingArguments:
    """Reads arguments of `PatchingControl` once its engine's facts are known. Every method raises
    `ValueError` naming what is wrong."""

    def __init__(
        self, registered: Registrations, generation: SyncGeneration | AsyncGeneration
    ) -> None:
        self._registered = registered
        self._generation = generation

    def pairs(self, clean: Any, corrupt: Any) -> list[PromptPair]:
        """Prompts of both kinds, as token ids."""
        both = [
            [self.tokens(prompt) for prompt in (given if are_several(given) else [given])]
            for given in (clean, corrupt)
        ]
        if len(both[0]) != len(both[1]):
            raise ValueError(
                f"{len(both[0])} clean prompts and {len(both[1])} corrupt ones were given; give as "
                "many of each"
            )
        return [PromptPair(*pair) for pair in zip(*both, strict=True)]

    def heads(self, given: Any, places: Sequence[Place]) -> tuple[int, ...] | None:
        """The heads that a sweep patches one at a time."""
        if given is None:
            return None
        if other := [hook for hook, _ in places if hook not in HEAD_POINTS]:
            raise ValueError(
                f"heads is given with hooks={other[0]!r}; heads are of {', '.join(HEAD_POINTS)}"
            )
        splits = self._registered.facts.points.heads
        most = max(splits[HookPoint(point), layer].num_heads for point, layer in places)
        if isinstance(given, str) and given == "all":
            return tuple(range(most))
        return tuple(dict.fromkeys(whole_numbers(given, "heads", 0, most - 1)))

    def ways(self, freeze: Any, receivers: Any) -> PathWays | None:
        """What a sweep keeps still, and where changes arrive."""
        places: list[Place] = []
        receivers = () if receivers is None else receivers
        if isinstance(receivers, str) or not isinstance(receivers, Sequence):
            raise ValueError(
                f"receivers={receivers!r:.60}: give a list of pairs such as ('mlp_in', 3)"
            )
        for each in receivers:
            if isinstance(each, str) or not isinstance(each, Sequence) or len(each) != 2:
                raise ValueError(
                    f"receivers: {each!r:.60} is no place; give pairs such as ('mlp_in', 3)"
                )
            hook, layer = each
            places += self.places(hook, layer, "receivers", "receivers")
        return PathWays.parse(self._registered.facts.points, freeze, places)

    def measures(self, metric: Any, answers: Any, count: int) -> Measures:
        """Metrics, and what they compare: given beside them, or by a metric's name."""
        by_metric = answers_in(metric)
        given = {f"metric[{name!r}]": each for name, each in by_metric.items()}
        if answers is not None:
            given["answers"] = answers
        found = {name: self.answers(each, count) for name, each in given.items()}
        first, *others = found.items() or [("", None)]
        if other := next((name for name, each in others if each != first[1]), None):
            raise ValueError(
                f"{first[0]} and {other} are different answers; a sweep compares one (right, "
                "wrong) for each pair of prompts: give it as answers, and metrics by their names"
            )
        if by_metric:
            metric = {name: name if name in by_metric else each for name, each in metric.items()}
        return Measures.parse(metric, first[1])

    def answers(self, given: Any, count: int) -> list[Answer]:
        """Answers as token ids, for each pair of prompts."""
        if isinstance(given, (Mapping, Set)):
            raise ValueError(
                f"answers={given!r:.60} is {type(given).__name__}, which has no order; give "
                "(right, wrong), or a list with a pair for each pair of prompts"
            )
        nested = isinstance(given, Sequence) and not isinstance(given, str)
        several = nested and given and not isinstance(given[0], (str, Number))
        each = list(given) if several else [given] * count
        if len(each) != count:
            raise ValueError(f"answers has {len(each)} entries for {count} pairs of prompts")
        return [self._answers_of_pair(one) for one in each]

    def _answers_of_pair(self, given: Any) -> Answer:
        """The right answer of a pair of prompts, and the wrong one where there is one."""
        found = tuple(map(self._answer, one_or_several(given)))
        if len(found) > 2:
            raise ValueError(
                f"answers: {given!r:.60} are {len(found)} answers for a pair of prompts; give "
                "(right, wrong), or a list with one of these for each pair of prompts, such as "
                "[(right, wrong), ...] or [(right,), ...]"
            )
        if len(found) == 2 and found[0] == found[1]:
            raise ValueError(
                f"answers: {given!r:.60} has token {found[0]} as the right answer and as the wrong "
                "one; give two different tokens"
            )
        return found

    def _answer(self, given: Any) -> int:
        vocab = self._registered.facts.vocab_size
        if isinstance(given, str):
            tokens = self._generation.tokenizer.encode(given, add_special_tokens=False)
            if len(tokens) != 1:
                raise ValueError(
                    f"answers: {given!r} is {len(tokens)} tokens; give text of one token (with the "
                    "space before it, where the model's tokens have one), or a token id"
                )
            return int(tokens[0])
        plain = isinstance(given, Integral) and not isinstance(given, bool)
        if not plain or not 0 <= given < vocab:
            raise ValueError(f"answers: {given!r} is no token id from 0 to {vocab - 1}")
        return int(given)

    def places(
        self, hooks: Any, layers: Any, field: str = "hooks", of_layers: str = "layers"
    ) -> list[Place]:
        """Hook points by layer. Raises `ValueError` for what this engine does not have.

        Args:
            field, of_layers: where hook points and layers were given, for messages.
        """
        points = self._registered.facts.points
        asked = Layers.parse("all" if layers is None else layers, of_layers)
        named = [] if hooks is None else one_or_several(hooks)
        if not named:
            raise ValueError(f"{field} is empty; give one hook point or more")
        found: list[Place] = []
        for hook in named:
            point = hook_named(hook, field)
            chosen: Sequence[int | None] = points.layers(point)
            if point.has_layer and not asked.is_all:
                chosen = asked.of(points.num_layers, point, of_layers)
            if not chosen:
                raise ValueError(points.explain_missing(point, 0))
            for layer in chosen:
                point, at = points.check(point, layer)
                found.append((point.value, at))
        return list(dict.fromkeys(found))

    def tokens(self, prompt: Any) -> list[int]:
        if isinstance(prompt, Mapping) and set(prompt) == {"prompt_token_ids"}:
            prompt = prompt["prompt_token_ids"]
        elif isinstance(prompt, Mapping) and set(prompt) == {"prompt"}:
            prompt = prompt["prompt"]
        if isinstance(prompt, str):
            check_text(prompt, "the prompt")
            return list(self._generation.tokenizer.encode(prompt))
        plain = isinstance(prompt, Sequence) and not isinstance(prompt, bytes)
        if not plain or not prompt or not all(type(token) is int for token in prompt):
            raise ValueError(
                f"the prompt is {prompt!r:.60}; give text, or a list of token ids; prompts with "
                "images, embeddings or roles are neither kept nor swept"
            )
        vocab = self._registered.facts.vocab_size
        if other := [token for token in prompt if not 0 <= token < vocab]:
            raise ValueError(f"the prompt has {other[0]}, no token id from 0 to {vocab - 1}")
        return list(prompt)

    def mean_rows(self, rows: Mapping[str, Any]) -> Iterable[tuple[Place, FloatArray]]:
        if not isinstance(rows, Mapping) or not rows:
            raise ValueError(f"rows is {rows!r:.60}; give {{hook: {{layer: row}}}}")
        facts = self._registered.facts
        given: dict[Place, str] = {}
        for hook, layers in rows.items():
            point = hook_named(hook, "rows")
            if point.has_layer and not isinstance(layers, Mapping):
                raise ValueError(f"rows[{hook!r}] is {type(layers).__name__}; give {{layer: row}}")
            if point.has_layer and not layers:
                raise ValueError(f"rows[{hook!r}] is empty; give {{layer: row}}, or leave it out")
            for layer, row in layers.items() if point.has_layer else [(None, layers)]:
                where = f"rows[{hook!r}][{layer}]"
                number = None if layer is None else layer_numbered(layer, f"rows[{hook!r}]")
                point, at = facts.points.check(point, number)
                array = float_array(row, where)
                if array.shape != (facts.hidden_size,):
                    raise ValueError(
                        f"{where} has shape {list(array.shape)}; give [{facts.hidden_size}]"
                    )
                if not abs(array).max() <= min(facts.max_value, facts.max_reach):
                    raise ValueError(f"{where} has values that are larger than the model's rows")
                if (first := given.setdefault((point.value, at), where)) != where:
                    raise ValueError(
                        f"{first} and {where} are of the same place; leave one of them out"
                    )
                yield (point.value, at), array


def positions_of(given: Any) -> tuple[int, ...] | None:
    """The positions that a sweep patches, each once; None for all."""
    if given is None or (isinstance(given, str) and given == "all"):
        return None
    if isinstance(given, str):
        raise ValueError(
            f'positions={given!r:.60} is not known; give "all", a position or a list of positions; '
            "-1 is the last token of the prompt"
        )
    return tuple(dict.fromkeys(whole_numbers(given, "positions")))


def are_several(given: Any) -> bool:
    """Whether a list holds prompts, and not the tokens of one."""
    several = isinstance(given, Sequence) and not isinstance(given, (str, bytes))
    return several and len(given) > 0 and type(given[0]) is not int
