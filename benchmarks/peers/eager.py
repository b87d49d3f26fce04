"""Peers that run the model in PyTorch, in their user's process."""

from __future__ import annotations

import asyncio
from typing import Any

import torch

from benchmarks.peers.model import CHECKED, summary
from benchmarks.peers.work import LAYERS, Size, Work


def load(path: str, size: Size) -> Any:
    """The model in `transformers`."""
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, size.shape.dtype)
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval().to(size.device)


class EagerPeer:
    """A model that is called in this process."""

    def __init__(self, size: Size) -> None:
        self.vocab = size.shape.vocab
        self._device = size.device
        self._dtype = getattr(torch, size.shape.dtype)

    def forget(self) -> None:
        """Nothing is kept from one round to the next."""

    def ids(self, work: Work, number: int) -> torch.Tensor:
        """The prompts of a round, where the model is."""
        return torch.tensor(work.tokens(self.vocab, number), device=self._device)

    def vectors(self, work: Work, number: int) -> torch.Tensor:
        """`[prompts, steered layers, hidden]`, as the model has its rows."""
        drawn = [torch.from_numpy(work.vectors(i, number)) for i in range(work.prompts)]
        return torch.stack(drawn).to(self._device, self._dtype)


class TransformerLens(EagerPeer):
    """`HookedTransformer`: its user adds vectors of a batch in one hook a layer."""

    def __init__(self, path: str, size: Size) -> None:
        from transformer_lens import HookedTransformer, HookedTransformerConfig
        from transformer_lens.pretrained.weight_conversions import convert_qwen2_weights

        super().__init__(size)
        model = load(path, size)
        shape = model.config
        config = HookedTransformerConfig(
            n_layers=shape.num_hidden_layers,
            d_model=shape.hidden_size,
            d_head=shape.hidden_size // shape.num_attention_heads,
            n_heads=shape.num_attention_heads,
            n_key_value_heads=shape.num_key_value_heads,
            d_mlp=shape.intermediate_size,
            n_ctx=shape.max_position_embeddings,
            d_vocab=self.vocab,
            act_fn="silu",
            eps=shape.rms_norm_eps,
            normalization_type="RMS",
            positional_embedding_type="rotary",
            rotary_base=int(shape.rope_parameters["rope_theta"]),
            rotary_adjacent_pairs=False,
            rotary_dim=shape.hidden_size // shape.num_attention_heads,
            final_rms=True,
            gated_mlp=True,
            default_prepend_bos=False,
            device=self._device,
            dtype=self._dtype,
        )
        self.model = HookedTransformer(config)
        self.model.load_and_process_state_dict(
            convert_qwen2_weights(model, config), fold_ln=False, center_writing_weights=False,
            center_unembed=False, fold_value_biases=False,
        )  # fmt: skip
        self.model.eval()

    @torch.inference_mode()
    def plain(self, work: Work, number: int) -> Any:
        """`generate`, greedy, with its cache of keys and values."""
        ids = self.ids(work, number)
        found = self.model.generate(
            ids, max_new_tokens=work.max_tokens, do_sample=False, stop_at_eos=False,
            prepend_bos=False, verbose=False, return_type="tokens",
        )  # fmt: skip
        return lambda: found[:, ids.shape[1] :].tolist()

    def steer(self, work: Work, number: int) -> Any:
        """The same under hooks."""
        vectors = self.vectors(work, number)

        def adding(vector: torch.Tensor) -> Any:
            return lambda rows, hook: rows + vector[:, None]

        hooks = [
            (f"blocks.{layer}.hook_resid_post", adding(vectors[:, index]))
            for index, layer in enumerate(work.steered_layers)
        ]
        with self.model.hooks(fwd_hooks=hooks):
            return self.plain(work, number)

    @torch.inference_mode()
    def capture(self, work: Work, number: int) -> Any:
        """`run_with_cache`."""
        kept = [f"blocks.{layer}.hook_resid_post" for layer in range(LAYERS)]
        ids = self.ids(work, number)
        _, cache = self.model.run_with_cache(ids, names_filter=lambda name: name in kept)
        rows = torch.stack([cache[name] for name in kept], 1)
        return lambda: summary(rows)


class NnSight(EagerPeer):
    """Traces of `TransformersModel`: Python that runs between the layers."""

    def __init__(self, path: str, size: Size) -> None:
        from nnsight import TransformersModel
        from transformers import AutoTokenizer

        super().__init__(size)
        tokenizer = AutoTokenizer.from_pretrained(path)
        self.model = TransformersModel(load(path, size), tokenizer=tokenizer)

    def _options(self, work: Work) -> dict[str, Any]:
        return {
            "max_new_tokens": work.max_tokens,
            "min_new_tokens": work.max_tokens,
            "do_sample": False,
        }

    @torch.inference_mode()
    def plain(self, work: Work, number: int) -> Any:
        """`generate`, with nothing in its trace but the result."""
        ids = self.ids(work, number)
        with self.model.generate(ids, **self._options(work)) as tracer:
            found = tracer.result.save()
        return lambda: found[:, ids.shape[1] :].tolist()

    @torch.inference_mode()
    def steer(self, work: Work, number: int) -> Any:
        """Vectors of a batch, added at each step."""
        ids = self.ids(work, number)
        vectors, layers, steps = self.vectors(work, number), work.steered_layers, work.max_tokens
        model = self.model
        with model.generate(ids, **self._options(work)) as tracer:
            for _ in tracer.iter[:steps]:
                for index, layer in enumerate(layers):
                    model.model.layers[layer].output[:] += vectors[:, index][:, None]
            found = tracer.result.save()
        return lambda: found[:, ids.shape[1] :].tolist()

    @torch.inference_mode()
    def capture(self, work: Work, number: int) -> Any:
        """Saved outputs of each layer."""
        import nnsight

        ids = self.ids(work, number)
        model = self.model
        with model.trace(ids):
            kept = nnsight.save([])
            for layer in range(LAYERS):
                kept.append(model.model.layers[layer].output)
        rows = torch.stack(list(kept), 1)
        return lambda: summary(rows)


class Genlm:
    """`AsyncTransformer`: its other backend asks for an older vLLM."""

    def __init__(self, path: str, size: Size) -> None:
        from genlm.backend.llm.hf import AsyncTransformer
        from transformers import AutoTokenizer

        self.vocab = size.shape.vocab
        tokenizer = AutoTokenizer.from_pretrained(path)
        (particles,) = (work.prompts for work in size.works if work.doing == "query")
        self.lm = AsyncTransformer(load(path, size), tokenizer, batch_size=particles)

    def forget(self) -> None:
        """Forget cached prompts and their answers."""
        self.lm.clear_cache()

    def query(self, work: Work, number: int) -> Any:
        """Each particle's whole context at each step; the shared prompt is kept, as users do."""
        found = asyncio.run(self._query(work, number))
        return lambda: torch.stack(found, 1).tolist()

    async def _query(self, work: Work, number: int) -> list[torch.Tensor]:
        prompt = work.tokens(self.vocab, number)[0]
        self.lm.cache_kv(prompt)
        fed = work.fed(self.vocab, number)
        found = []
        for step in range(1, work.steps + 1):
            rows = await asyncio.gather(
                *(self.lm.next_token_logprobs(prompt + tokens[:step]) for tokens in fed)
            )
            found.append(torch.stack([row[:CHECKED] for row in rows]))
        return found
