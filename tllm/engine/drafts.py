"""Speculative decoding: which of the tokens that a step drafted are their sequences' own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn
from vllm.v1.core.sched.utils import check_stop

from tllm.engine.seams import uses
from tllm.models.sites import ModelSites
from tllm.runtime.columns import IntArray

_ENDS = "whether a sequence ends among the tokens that were accepted at once"
_OF_ITS_OWN = "a drafter that runs tapped modules is refused"
uses("vllm.v1.core.sched.utils", "check_stop", _ENDS, takes="request max_model_len")
uses(
    "vllm.v1.core.sched.output.SchedulerOutput",
    "scheduled_spec_decode_tokens",
    "which tokens of a step are drafted",
)
uses(
    "vllm.v1.outputs.ModelRunnerOutput",
    "req_id_to_index sampled_token_ids",
    "which drafted tokens are accepted",
)
uses("vllm.v1.worker.gpu_model_runner.GPUModelRunner", "get_draft_model", _OF_ITS_OWN)
uses("vllm.v1.worker.gpu.model_runner.GPUModelRunner", "get_draft_model", _OF_ITS_OWN)
uses(
    "vllm.v1.worker.gpu_input_batch.CachedRequestState",
    "sampling_params output_token_ids num_prompt_tokens",
    _ENDS,
)


METHODS = ("ngram", "eagle", "eagle3", "mtp")
"""Methods of drafting whose drafts are told from tokens."""


def check_drafter(drafter: nn.Module | None, sites: ModelSites) -> None:
    """Raise `ValueError` where a drafter runs modules of the model that are tapped.

    It computes rows of its own, at other places of a batch, and taps would take them for the
    model's. Embeddings and LM head, which most drafters share with the model, are no taps.
    """
    if drafter is None:
        return
    theirs = set(drafter.modules())
    shared = [
        str(site.point) if site.layer is None else f"{site.point} of layer {site.layer}"
        for key, site in sites.sites.items()
        if sites.points.is_needed(key) and theirs & {site.module, site.norm}
    ]
    if shared:
        raise ValueError(
            f"{type(drafter).__name__}, which drafts tokens, runs the modules of this model at "
            f"which {', '.join(shared)} can be read: leave out these hook_points, or "
            "speculative_config"
        )


def reads_between_blocks(config: Any) -> bool:
    """Whether a drafter is given states of the model as they are between its blocks.

    A norm of the next block that is computed together with a tap would steer them too late.
    """
    speculative = config.speculative_config
    return speculative is not None and speculative.method == "eagle3"


@dataclass(frozen=True, eq=False)
class StepDrafts:
    """The drafts of one step of a model runner that knows its tokens on the host.

    Attributes:
        by_request: the drafted tokens; below 0 where vLLM only keeps a place for one.
        request_ids: of the batch, in its order.
        computed: `[sequences]`, tokens of each that the step computes, drafts among them.
    """

    by_request: Mapping[str, Sequence[int]]
    request_ids: Sequence[str]
    computed: IntArray

    @property
    def counts(self) -> IntArray:
        """`[sequences]`, drafts of each."""
        drafted = (len(self.by_request.get(i, ())) for i in self.request_ids)
        return np.fromiter(drafted, np.int32, len(self.request_ids))

    def kept(self, output: Any, requests: Mapping[str, Any], max_model_len: int) -> IntArray:
        """`[sequences]`, how many of the tokens computed of each are its own.

        Args:
            output: of the model runner.
            requests: its requests, with the tokens of this step.
        """
        kept = self.computed - self.counts
        for i, request_id in enumerate(self.request_ids):
            if request_id in self.by_request:
                drawn = len(output.sampled_token_ids[output.req_id_to_index[request_id]])
                kept[i] += accepted_of(requests[request_id], drawn, max_model_len)
        return kept


def drafted_and_accepted(by_request: Mapping[str, Sequence[int]], output: Any) -> tuple[int, int]:
    """How many tokens a step drafted, and how many of them were drawn, as vLLM counts them."""
    drafted = accepted = 0
    for request_id, tokens in by_request.items():
        drawn = len(output.sampled_token_ids[output.req_id_to_index[request_id]])
        drafted += sum(token >= 0 for token in tokens)
        accepted += max(drawn - 1, 0)
    return drafted, accepted


def accepted_of(request: Any, drawn: int, max_model_len: int) -> int:
    """How many of the tokens that were drawn together are followed by another of the sequence.

    A sequence may end before the last of them: the scheduler finds that out later, and forgets the
    rest. The row of the token that it ends with would never have been computed without drafts.

    Args:
        request: the model runner's: its `sampling_params`, `num_prompt_tokens`, and
            `output_token_ids`, with those that were drawn.
    """
    for hidden in range(drawn - 1, 0, -1):
        if has_ended(request, max_model_len, hidden):
            return drawn - 1 - hidden
    return max(drawn - 1, 0)


def has_ended(request: Any, max_model_len: int, hidden: int) -> bool:
    """Whether a sequence ends with the last of its tokens that are not hidden.

    Args:
        request: as for `accepted_of`.
        hidden: how many of its last tokens are left out.
    """
    return check_stop(_SoFar(request, hidden), max_model_len)  # type: ignore[arg-type]


class _SoFar:
    """A sequence as `check_stop` looks at it, without the last tokens that were drawn.

    Args:
        request: the model runner's, with all of them.
        hidden: how many are left out.
    """

    pooling_params = None
    status: Any = None
    stop_reason: Any = None

    def __init__(self, request: Any, hidden: int) -> None:
        self.sampling_params = request.sampling_params
        self.max_tokens = request.sampling_params.max_tokens
        drawn = request.output_token_ids
        self.output_token_ids = FromEnd(drawn, len(drawn), hidden)
        self.num_output_tokens = len(self.output_token_ids)
        self.num_tokens = request.num_prompt_tokens + self.num_output_tokens


class FromEnd:
    """A list that is looked at from its end, and not copied.

    Args:
        tokens: its last elements, or all.
        length: of the list.
        hidden: how many of its last elements are left out.
    """

    def __init__(self, tokens: FromEnd | Sequence[int], length: int, hidden: int = 0) -> None:
        self._tokens = tokens
        self._length = length - hidden
        self._hidden = hidden

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        assert index < 0
        return self._tokens[index - self._hidden]
