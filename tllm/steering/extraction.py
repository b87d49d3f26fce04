"""Steering vectors made from prompts that show a contrast."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, Literal

import torch

from tllm.spec.capture import Reduction
from tllm.spec.hooks import HookPoint
from tllm.spec.layers import Layers
from tllm.spec.reading import (
    hook_named,
    own_numbers,
    require_bool,
    require_one_of,
    whole_number,
)
from tllm.spec.selection import Selection
from tllm.steering.directions import NoDirectionError, find_direction, finder_named
from tllm.steering.module import ExtractedModule, VectorEntry
from tllm.steering.separation import held_out_scores

if TYPE_CHECKING:
    from tllm.client.llm import LLM

Prompt = str | Sequence[int]
Scale = Literal["natural", "unit"]


def extract(
    llm: LLM,
    positive: Sequence[Prompt],
    negative: Sequence[Prompt],
    *,
    method: str = "diffmean",
    hook: str | HookPoint = HookPoint.POST_BLOCK,
    layers: int | Iterable[int] | str = "all",
    positions: str | Sequence[int] | Mapping[str, Any] = "last_prompt",
    reduction: Reduction = "none",
    paired: bool = True,
    scale: Scale = "natural",
    batch_size: int = 256,
    seed: int = 0,
) -> ExtractedModule:
    """A steering module that leads from what `negative` says to what `positive` says.

    Every prompt passes the model once; what the chosen tokens have at the hook point are the rows
    from which each layer's direction is found. With several tokens a prompt, each is a row (unless
    they are reduced to one): longer prompts weigh more, and a prompt's rows stay together in the
    held-out scores. Global steering applies as it does to any request.

    Args:
        llm: a `tllm.LLM`.
        positive, negative: prompts, as text or token ids; at least two of each.
        method: `diffmean`, `pca`, `lat` or `probe`; see `tllm.steering.directions`.
        hook: hook point, or its alias; one that belongs to layers.
        layers: `"all"`, a layer, several, or a range such as `"4:8"`; negative ones count from the
            end.
        positions: tokens of the prompt to read, as `capture` takes them: `"last_prompt"`,
            `"all_prompt"`, positions, or a selection.
        reduction: `"mean"` makes one row of each prompt's tokens, as `capture` does.
        paired: `positive[i]` and `negative[i]` belong together: the scores hold both out at once,
            `pca` and `lat` use their differences, and both must give as many rows.
        scale: `"natural"`, with which scale 1 leads from the mean of the negative rows to that of
            the positive ones along the direction; or `"unit"`, with which it is a step of
            length 1. Vectors have unit length either way.
        batch_size: prompts a call of `llm.generate`; the rows of all are kept on the CPU.
        seed: of what is random in the scores and in `lat`.

    Returns:
        A module with a vector for each layer, `separation` (held-out AUROC), `d_prime` and
        `best_layer`. Usually one good layer steers better than all at once:
        `module.select(module.best_layer)`.

    Raises:
        ValueError: an argument that is not as above, activations that are not finite, or a layer
            at which the two sides do not differ.
    """
    require_one_of("scale", scale, Scale)
    require_bool("paired", paired)
    whole_number(seed, "seed=")
    point, (high, high_prompts), (low, low_prompts) = rows_of_prompts(
        llm, positive, negative, method, hook, layers, positions, batch_size, reduction, paired
    )
    if paired and not torch.equal(high_prompts, low_prompts):
        i = int(torch.nonzero(torch.bincount(high_prompts) != torch.bincount(low_prompts))[0])
        raise ValueError(
            f"positions={positions!r} gives different numbers of rows for positive[{i}] and "
            f"negative[{i}], so their rows are no pairs; use 'last_prompt', prompts of the same "
            "length, or paired=False"
        )

    entries: dict[int, VectorEntry] = {}
    separation, d_prime = {}, {}
    for layer in sorted(high):
        try:
            found = find_direction(high[layer], low[layer], method, paired=paired, seed=seed)
        except NoDirectionError as error:
            raise NoDirectionError(f"{point} of layer {layer}: {error}") from None
        scores = held_out_scores(
            high[layer],
            low[layer],
            method,
            paired=paired,
            seed=seed,
            positive_groups=high_prompts,
            negative_groups=low_prompts,
        )
        separation[layer], d_prime[layer] = scores.separation
        step = found.scale if scale == "natural" else 1.0
        entries[layer] = {"vector": found.vector, "scale": step}
    return ExtractedModule(
        {str(point): entries},
        source=f"extract({method})",
        metadata={
            "prompts": [len(positive), len(negative)],
            "positions": Selection.parse(positions).to_wire(),
            "reduction": reduction,
            "paired": paired,
            "scale": scale,
            "seed": seed,
        },
        method=method,
        separation=separation,
        d_prime=d_prime,
    )


Rows = tuple[dict[int, torch.Tensor], torch.Tensor]
"""What was captured of prompts, by layer `[rows, hidden]`, and each row's prompt."""


def rows_of_prompts(
    llm: LLM,
    positive: Sequence[Prompt],
    negative: Sequence[Prompt],
    method: str,
    hook: str | HookPoint,
    layers: int | Iterable[int] | str,
    positions: str | Sequence[int] | Mapping[str, Any],
    batch_size: int,
    reduction: str = "none",
    paired: bool = False,
) -> tuple[HookPoint, Rows, Rows]:
    """The hook point, and the rows of the prompts of both sides; the arguments are those of
    `extract`, and a `ValueError` says which of them are not."""
    finder_named(method)
    point = hook_named(hook, "hook")
    if not point.has_layer:
        raise ValueError(f"hook={hook!r} belongs to no layer; choose one that does")
    if Selection.parse(positions).phase == "generation":
        raise ValueError(
            f"positions={positions!r} reads what the model writes, and extract has it write "
            "nothing; put the texts into the prompts and read 'all_prompt'"
        )
    whole_number(batch_size, "batch_size=", 1)
    positive, negative = prompts_listed(positive, "positive"), prompts_listed(negative, "negative")
    for name, prompts in (("positive", positive), ("negative", negative)):
        if len(prompts) < 2:
            raise ValueError(f"{name} must be a list of at least two prompts, not {prompts!r:.60}")
    if paired and len(positive) != len(negative):
        raise ValueError(
            f"there are {len(positive)} positive and {len(negative)} negative prompts, which are "
            "no pairs; give as many of each, in the same order, or say paired=False"
        )
    require_one_of("reduction", reduction, Reduction)
    chosen = Layers.parse(layers)
    check_waits(llm)
    capture: dict[str, Any] = {
        "hooks": {str(point): chosen.of(llm.steering.layers()["num_layers"], point, "layers")},
        "positions": positions,
        "reduction": reduction,
    }
    high, low = (_rows(llm, prompts, capture, batch_size) for prompts in (positive, negative))
    return point, high, low


def check_waits(llm: Any) -> None:
    """Refuse an engine whose calls are awaited, and one whose requests are unfinished."""
    from tllm.client.generation import check_alone
    from tllm.client.llm import AsyncLLM

    if isinstance(llm, AsyncLLM):
        raise TypeError(
            f"vectors are made and measured with a tllm.LLM, and a {type(llm).__name__} was given; "
            "make them with an LLM, save them, and load them for the other"
        )
    check_alone(llm.llm_engine, "making and measuring vectors")


def listed(given: Any, name: str) -> list[Any]:
    """A list of what is given; `ValueError` for a text, a mapping, a set, a generator, or one
    thing."""
    if isinstance(given, (str, bytes, Mapping, Set)) or not hasattr(given, "__len__"):
        raise ValueError(
            f"{name}={given!r:.60} is {type(given).__name__}; give a list (list(...) makes one of "
            "what a generator gives)"
        )
    return list(given)


def prompts_listed(given: Any, name: str) -> list[Prompt]:
    """A list of prompts; `ValueError` that names one which is neither text nor token ids."""
    prompts: list[Prompt] = []
    for i, prompt in enumerate(listed(given, name)):
        tokens = own_numbers(prompt)
        if isinstance(tokens, (list, tuple)):
            tokens = [own_numbers(token) for token in tokens]
            if not all(type(token) is int for token in tokens):
                tokens = None
        if not isinstance(tokens, (str, list)):
            raise ValueError(
                f"{name}[{i}]={prompt!r:.60} is neither a text nor a list of token ids"
            )
        prompts.append(tokens)
    return prompts


def prompt_input(prompt: Prompt) -> Any:
    """A prompt as `llm.generate` takes it."""
    return prompt if isinstance(prompt, str) else {"prompt_token_ids": list(prompt)}


def _by_argument(refusal: str) -> str:
    """A capture's refusal, by the names of our arguments."""
    for key, argument in (("hooks", "hook"), ("positions", "positions")):
        refusal = refusal.replace(f"capture['memory'][{key!r}]", argument)
    return refusal


def _rows(llm: LLM, prompts: Sequence[Prompt], capture: Mapping[str, Any], batch_size: int) -> Rows:
    """What was captured, by layer `[rows, hidden]` in the model's dtype, and each row's prompt."""
    # Here, because vLLM takes seconds to import, and tllm.steering.load needs none of it.
    from tllm.params import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0.0, capture={"memory": dict(capture)})
    (hook,) = capture["hooks"]
    given = list(map(prompt_input, prompts))
    captured: dict[int, list[torch.Tensor]] = {}
    counts: list[int] = []
    for start in range(0, len(given), batch_size):
        try:
            outputs = llm.generate(given[start : start + batch_size], params, use_tqdm=False)
        except ValueError as error:
            raise ValueError(_by_argument(str(error))) from None
        for output in outputs:
            result = output.capture_results["memory"]
            if result.status != "ok":
                raise RuntimeError(
                    f"the activations of prompt {len(counts)}, {output.prompt!r:.60}, were not "
                    f"captured: {result.error}"
                )
            layers = output.activations[hook]
            counts.append(len(next(iter(layers.values())).tensor))
            if counts[-1] == 0:
                raise ValueError(
                    f"positions={capture['positions']!r} selects no token of prompt "
                    f"{len(counts) - 1}, {output.prompt!r:.60}"
                )
            for layer, rows in layers.items():
                captured.setdefault(layer, []).append(rows.tensor.cpu())
    prompt_of_row = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    stacked = {layer: torch.cat(rows) for layer, rows in captured.items()}
    return stacked, prompt_of_row
