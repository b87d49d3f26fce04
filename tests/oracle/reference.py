"""The oracle: plain `transformers` in float32 with forward hooks, one request at a time."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tllm.verify.reference import Layer, Reference, States, Steers

Writes = Mapping[tuple[str, Layer], tuple[Tensor, Tensor]]
"""(hook point, layer) -> a vector [hidden] to add, and a mask [positions], False beyond its end."""


class FamilyReference(Reference):
    """One family's checkpoint, run by `transformers`."""

    def written(
        self, token_ids: list[int], writes: Writes, steers: Steers | None = None
    ) -> tuple[States, Tensor]:
        """As `run`; what is written at a place is added before it is steered there."""
        changes = {
            place: [("add", vector, {"scale": 1.0}, mask)]
            for place, (vector, mask) in writes.items()
        }
        for place, more in (steers or {}).items():
            changes.setdefault(place, []).extend(more)
        return self.run(token_ids, changes)

    def capture(self, token_ids: list[int], writes: Writes | None = None) -> States:
        """What arrives at every hook point, before a write at that same point."""
        return self.written(token_ids, writes or {})[0]

    def greedy(self, prompt_ids: list[int], n: int, writes: Writes | None = None) -> list[int]:
        """The `n` tokens that follow the prompt, each the most likely one."""
        token_ids = list(prompt_ids)
        for _ in range(n):
            token_ids.append(int(self.written(token_ids, writes or {})[1][-1].argmax()))
        return token_ids[len(prompt_ids) :]

    def logits(self, token_ids: list[int], writes: Writes | None = None) -> Tensor:
        """`[tokens, vocab]`."""
        return self.written(token_ids, writes or {})[1]

    @torch.no_grad()
    def hidden_states(self, token_ids: list[int]) -> tuple[Tensor, ...]:
        """The streams `[tokens, hidden]` as `transformers` reports them; the last one is normed. Of
        several `[streams, 1, tokens, hidden]`, the active one, and none is normed."""
        output = self.model(torch.tensor([token_ids]), output_hidden_states=True)
        active = getattr(self.model.config, "altup_active_idx", None)
        return tuple(
            stream[0] if stream.dim() == 3 else stream[active][0] for stream in output.hidden_states
        )

    def generated(self, prompt_ids: list[int], n: int) -> list[int]:
        """The `n` tokens of `transformers`' own greedy search, which has a KV cache."""
        prompt = torch.tensor([prompt_ids])
        output = self.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=n, do_sample=False
        )
        return output[0, len(prompt_ids) :].tolist()
