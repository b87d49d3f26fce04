"""What `transformers` computes for one sequence, with forward hooks: the truth of these tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

HIDDEN, LAYERS, VOCAB = 128, 4, 256
Place = tuple[str, int | None]
"""A hook point and its layer."""


def save_tiny_model(
    path: Path,
    config_class: Any = Qwen2Config,
    model_class: Any = Qwen2ForCausalLM,
    hidden: int = HIDDEN,
) -> Path:
    """A random Qwen2 (or what its classes name), small enough for a CPU and with states large
    enough to tell apart."""
    torch.manual_seed(0)
    config = config_class(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.15,
        tie_word_embeddings=False,
        eos_token_id=0,
        bos_token_id=1,
    )
    model_class(config).float().save_pretrained(path)
    # A token for each byte; the first ends a text.
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=letters[0]).save_pretrained(path)
    return path


@dataclass
class Addition:
    """A vector `[hidden]` added to the tokens at positions `start` to `stop`."""

    place: Place
    vector: torch.Tensor
    start: int = 0
    stop: int | None = None


@dataclass
class PatchedRow:
    """`keep h + scale source` in the place of the row at a position, on some dimensions or all."""

    place: Place
    position: int
    source: torch.Tensor
    keep: float = 0.0
    scale: float = 1.0
    dimensions: list[int] | None = None

    def of(self, row: torch.Tensor) -> torch.Tensor:
        patched = (self.keep * row if self.keep else 0 * self.source) + self.scale * self.source
        if self.dimensions is not None:
            patched, new = row.clone(), patched
            patched[self.dimensions] = new[self.dimensions]
        return patched


@dataclass
class GatedChange:
    """What is done to the rows of tokens `start` to `stop`, as much of it as scores say.

    Attributes:
        change: from rows `[tokens, hidden]` to what they are where the strength is 1.
        probes: where rows are scored as they arrive, and how: from rows to `[tokens]`.
        strength: from the scores of all probes to `[tokens]`, 0 to 1; None where it is 1.
        recall: from what the strengths are to how much is done to each of the tokens, where that
            depends on other tokens than itself.
        scores: of the last run, `[probes]` of `[tokens]`.
        seen: the rows of the last run, before they were changed.
        known: where `recall` is given, the scores of the run before, in which nothing was different
            before the tokens that it is right for.
    """

    place: Place
    change: Callable[[torch.Tensor], torch.Tensor]
    probes: list[tuple[Place, Callable[[torch.Tensor], torch.Tensor]]]
    strength: Callable[[list[torch.Tensor]], torch.Tensor] | None
    start: int = 0
    stop: int | None = None
    recall: Callable[[torch.Tensor], torch.Tensor] | None = None
    scores: list[torch.Tensor] = field(default_factory=list)
    seen: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    known: list[torch.Tensor] | None = None

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        self.seen = rows.clone()
        share = torch.ones(len(rows))
        if self.recall is None:
            share = share if self.strength is None else self.strength(self.scores)
        elif self.known is None:
            return rows
        else:
            share = self.shares(self.known)
        inside = torch.zeros(len(rows), 1)
        inside[self.start : self.stop] = 1
        return rows + inside * share[:, None] * (self.change(rows) - rows)

    def shares(self, scores: list[torch.Tensor]) -> torch.Tensor:
        assert self.recall is not None
        judged = torch.zeros(len(scores[0]))
        judged[self.start : self.stop] = 1
        return self.recall(judged * self.strength(scores))


class Reference:
    """The same model in `transformers`, float32, one sequence at a time."""

    def __init__(self, path: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def _module(self, place: Place) -> tuple[torch.nn.Module, str]:
        """The module at whose boundary a hook point lies, and on which side."""
        point, layer = place
        if point == "embed":
            return self.model.model.embed_tokens, "output"
        if point == "lm_head_in":
            return self.model.model.norm, "output"
        block = self.model.model.layers[layer]
        return {
            "pre_attn": (block, "input"),
            "attn_in": (block.self_attn, "input"),
            "attn_heads": (block.self_attn.o_proj, "input"),
            "attn_out": (block.self_attn, "output"),
            "post_attn": (block.post_attention_layernorm, "input"),
            "mlp_in": (block.mlp, "input"),
            "mlp_out": (block.mlp, "output"),
            "post_block": (block, "output"),
        }[point]

    @contextmanager
    def _hooked(self, place: Place, touch) -> Iterator[None]:
        """Call `touch(tensor)` at a hook point; what it returns replaces the tensor."""
        module, side = self._module(place)

        def before(module, args, kwargs):
            if args:
                return (touch(args[0]), *args[1:]), kwargs
            return args, kwargs | {"hidden_states": touch(kwargs["hidden_states"])}

        def after(module, args, output):
            if isinstance(output, tuple):
                return touch(output[0]), *output[1:]
            return touch(output)

        if side == "input":
            handle = module.register_forward_pre_hook(before, with_kwargs=True)
        else:
            handle = module.register_forward_hook(after)
        with handle:
            yield

    @torch.no_grad()
    def run(
        self,
        tokens: Sequence[int],
        places: Sequence[Place] = (),
        additions: Sequence[Addition] = (),
        patches: Sequence[PatchedRow] = (),
        gated: Sequence[GatedChange] = (),
    ) -> tuple[torch.Tensor, dict[Place, torch.Tensor]]:
        """Logits `[tokens, vocab]`, and the states `[tokens, hidden]` that arrive at each place."""
        seen: dict[Place, torch.Tensor] = {}

        def capture(place):
            def touch(tensor):
                seen[place] = tensor[0].clone()
                return tensor

            return touch

        def look(change, number, score):
            def touch(tensor):
                change.scores[number] = score(tensor[0])
                return tensor

            return touch

        def gate(change):
            def touch(tensor):
                return written(change.place, tensor, change.of(tensor[0])[None])

            return touch

        def add(addition):
            def touch(tensor):
                changed = tensor.clone()
                changed[:, addition.start : addition.stop] += addition.vector
                return written(addition.place, tensor, changed)

            return touch

        def patch(patched):
            def touch(tensor):
                changed = tensor.clone()
                if patched.position < tensor.shape[1]:
                    changed[0, patched.position] = patched.of(tensor[0, patched.position])
                return written(patched.place, tensor, changed)

            return touch

        def written(place, tensor, changed):
            if place[0] == "post_attn":
                tensor.copy_(changed)  # the stream itself, not only what the norm reads
                return tensor
            return changed

        with ExitStack() as stack:
            for place in places:  # a capture reads what arrives, before what is done there
                stack.enter_context(self._hooked(place, capture(place)))
            for change in gated:  # so does a probe
                change.scores = [torch.zeros(())] * len(change.probes)
                change.known = None
                for number, (place, score) in enumerate(change.probes):
                    stack.enter_context(self._hooked(place, look(change, number, score)))
            for patched in patches:
                stack.enter_context(self._hooked(patched.place, patch(patched)))
            for addition in additions:
                stack.enter_context(self._hooked(addition.place, add(addition)))
            for change in gated:
                stack.enter_context(self._hooked(change.place, gate(change)))
            logits = self.model(torch.tensor([list(tokens)])).logits[0]
            # What depends on earlier tokens: each run is right for one token more, at least.
            remembering = [change for change in gated if change.recall is not None]
            while any(
                change.known is None
                or not torch.equal(change.shares(change.known), change.shares(change.scores))
                for change in remembering
            ):
                for change in remembering:
                    change.known = list(change.scores)
                logits = self.model(torch.tensor([list(tokens)])).logits[0]
        return logits, seen

    def greedy(
        self,
        prompt: Sequence[int],
        count: int,
        additions: Sequence[Addition] = (),
        patches: Sequence[PatchedRow] = (),
        gated: Sequence[GatedChange] = (),
    ) -> list[int]:
        """The `count` most likely tokens after a prompt."""
        tokens = list(prompt)
        for _ in range(count):
            logits, _ = self.run(tokens, additions=additions, patches=patches, gated=gated)
            tokens.append(int(logits[-1].argmax()))
        return tokens[len(prompt) :]

    def would_generate(
        self,
        prompt: Sequence[int],
        tokens: Sequence[int],
        additions: Sequence[Addition] = (),
        patches: Sequence[PatchedRow] = (),
    ) -> bool:
        """Whether greedy sampling gives these tokens: `greedy` in one forward pass."""
        logits, _ = self.run([*prompt, *tokens][:-1], additions=additions, patches=patches)
        return logits[len(prompt) - 1 :].argmax(-1).tolist() == list(tokens)
