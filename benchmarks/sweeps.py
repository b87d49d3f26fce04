"""`python -m benchmarks.sweeps`: a sweep of `post_block` beside batched TransformerLens.

On a GPU where there is one, else on a CPU. GPT-2's shapes with random weights, the same weights and
type on both sides; every layer at some positions, the difference of two logits after the prompt.
TransformerLens patches in batches: positions of a layer are rows of a batch, which
`HookedTransformer.run_with_hooks` computes whole.
`from-layer` is what its user can do by hand: begin at the layer that is patched, and give the last
token alone to the LM head. Each has a process of its own with as many threads, and they compute in
turn, the same experiments, ours with an empty prefix cache; what comes out is compared.

TransformerLens is no dependency, and its `HookedTransformer` went with version 4. In an environment
of your own: `pip install 'transformer_lens<4'`.
"""

from __future__ import annotations

import datetime
import gc
import importlib.util
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
import torch
import typer

RESULTS = Path(__file__).parent / "results"

_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

_SHAPES: dict[str, dict[str, int]] = {
    "gpt2": {},
    "gpt2-xl": {"n_layer": 48, "n_embd": 1600, "n_head": 25},
    "gpt2-7b": {"n_layer": 32, "n_embd": 4096, "n_head": 32},
}
"""What differs from GPT-2 of 124M weights; `gpt2-7b` is as large as models of 7 billion."""

_AGREEING = {"float32": 1e-2, "bfloat16": 0.5}
"""The largest difference that is accepted, of the spread of the values."""

_ANSWERS = (11, 257)
_BATCH_TOKENS = 2000
"""Tokens in one batch of TransformerLens, whose logits of all positions are held."""


class PairedPrompts:
    """Two prompts that differ from the second token on, and where they are patched."""

    def __init__(self, tokens: int, positions: int, vocab: int) -> None:
        generator = np.random.default_rng(tokens)
        self.clean = generator.integers(1, vocab, tokens).tolist()
        self.corrupt = [self.clean[0], *generator.integers(1, vocab, tokens - 1).tolist()]
        chosen = np.linspace(1, tokens - 1, min(positions, tokens - 1))
        self.positions = sorted({int(each) for each in chosen})


def save_model(path: Path, shape: str, dtype: str) -> Any:
    """Random weights; logits are large enough to tell experiments apart.

    Returns:
        Its configuration.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    width = _SHAPES[shape].get("n_embd", 768)
    config = GPT2Config(initializer_range=0.04 * (768 / width) ** 0.5, **_SHAPES[shape])
    with torch.device(_DEVICE):
        model = GPT2LMHeadModel(config).to(getattr(torch, dtype)).eval()
    model.save_pretrained(path)
    return config


class Lens:
    """The same model in TransformerLens."""

    def __init__(self, model: Any, dtype: str) -> None:
        from transformer_lens import HookedTransformer, HookedTransformerConfig
        from transformer_lens.pretrained.weight_conversions import convert_gpt2_weights

        shape = model.config
        self.config = HookedTransformerConfig(
            n_layers=shape.n_layer,
            d_model=shape.n_embd,
            d_head=shape.n_embd // shape.n_head,
            n_heads=shape.n_head,
            d_mlp=4 * shape.n_embd,
            n_ctx=shape.n_positions,
            d_vocab=shape.vocab_size,
            act_fn="gelu_new",
            eps=shape.layer_norm_epsilon,
            normalization_type="LN",
            device=_DEVICE,
            dtype=getattr(torch, dtype),
            init_weights=False,
        )
        self.model = HookedTransformer(self.config)
        weights = convert_gpt2_weights(model, self.config)
        self.model.load_and_process_state_dict(
            weights, fold_ln=False, center_writing_weights=False, center_unembed=False,
            fold_value_biases=False,
        )  # fmt: skip
        self.model.eval()

    @torch.inference_mode()
    def sweep(self, prompts: PairedPrompts, *, from_layer: bool) -> torch.Tensor:
        """`[layers, positions]`, the difference of the answers' logits."""
        clean, corrupt = (
            torch.tensor([each], device=_DEVICE) for each in (prompts.clean, prompts.corrupt)
        )
        kept = [f"blocks.{layer}.hook_resid_post" for layer in range(self.config.n_layers)]
        _, cache = self.model.run_with_cache(clean, names_filter=lambda name: name in kept)
        _, of_base = self.model.run_with_cache(corrupt, names_filter=lambda name: name in kept)
        size = max(1, _BATCH_TOKENS // clean.shape[1])
        found = torch.empty(self.config.n_layers, len(prompts.positions), device=_DEVICE)
        for layer, name in enumerate(kept):
            for low in range(0, len(prompts.positions), size):
                at = torch.tensor(prompts.positions[low : low + size], device=_DEVICE)
                rows = torch.arange(len(at), device=_DEVICE)

                def patch(
                    stream: torch.Tensor,
                    at: torch.Tensor = at,
                    rows: torch.Tensor = rows,
                    name: str = name,
                    **_: Any,
                ) -> torch.Tensor:
                    stream[rows, at] = cache[name][0, at]
                    return stream

                if from_layer:
                    stream = patch(of_base[name].repeat(len(at), 1, 1))
                    if layer + 1 < self.config.n_layers:
                        stream = self.model(
                            stream, start_at_layer=layer + 1, stop_at_layer=self.config.n_layers
                        )
                    logits = self.model.unembed(self.model.ln_final(stream[:, -1:]))
                else:
                    logits = self.model.run_with_hooks(
                        corrupt.repeat(len(at), 1),
                        fwd_hooks=[(name, lambda stream, hook, patch=patch: patch(stream))],
                    )
                right, wrong = logits[:, -1, list(_ANSWERS)].float().unbind(1)
                found[layer, low : low + size] = right - wrong
        return found.cpu()


class LensProcess:
    """TransformerLens in a process of its own: vLLM binds the threads of the one that it is in.

    Args:
        folder: of the model.
    """

    def __init__(self, folder: str, dtype: str, threads: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(1, spawn, _load, (folder, dtype, threads))

    def sweep(self, prompts: PairedPrompts, *, from_layer: bool) -> tuple[float, torch.Tensor]:
        """Seconds, and what `Lens.sweep` gives."""
        took, found = self._pool.submit(_swept, prompts, from_layer).result()
        return took, torch.from_numpy(found)

    def close(self) -> None:
        """End the process."""
        self._pool.shutdown()


_loaded: list[Lens] = []
"""In the process of TransformerLens: its model."""


def _load(folder: str, dtype: str, threads: int) -> None:
    from transformers import GPT2LMHeadModel

    torch.set_num_threads(threads)
    model = GPT2LMHeadModel.from_pretrained(folder, dtype=getattr(torch, dtype))
    _loaded.append(Lens(model.to(_DEVICE), dtype))


def _swept(prompts: PairedPrompts, from_layer: bool) -> tuple[float, Any]:
    took, found = _timed(lambda: _loaded[0].sweep(prompts, from_layer=from_layer))
    return took, found.numpy()


def _timed(call: Callable[[], torch.Tensor]) -> tuple[float, torch.Tensor]:
    gc.collect()
    began = time.perf_counter()
    found = call()
    return time.perf_counter() - began, found


def measure(
    llm: Any, lens: LensProcess, prompts: PairedPrompts, rounds: int, agreeing: float
) -> dict[str, Any]:
    """Seconds of each way by round, in turn, and by how much they differ.

    Args:
        agreeing: the largest difference that is accepted, of the spread of the values.
    """

    def ours() -> torch.Tensor:
        llm.reset_prefix_cache()
        sweep = llm.patching.sweep(
            prompts.clean, prompts.corrupt, hooks="post_block", positions=prompts.positions,
            metric="logit_diff", answers=_ANSWERS,
        )  # fmt: skip
        tensor: torch.Tensor = sweep.tensor
        return tensor

    ways = {
        "tllm": lambda: _timed(ours),
        "batched": lambda: lens.sweep(prompts, from_layer=False),
        "from-layer": lambda: lens.sweep(prompts, from_layer=True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    values: dict[str, torch.Tensor] = {}
    for number in range(rounds + 1):  # the first one warms up
        for name, call in ways.items():
            took, values[name] = call()
            if number:
                seconds[name].append(took)
    change = float((values["tllm"] - values["batched"]).abs().max())
    spread = float(values["batched"].std())
    if change > agreeing * spread:
        raise SystemExit(
            f"the sweeps differ by {change:.2g}, of values that spread by {spread:.2g}"
        )
    return {
        "tokens": len(prompts.clean),
        "experiments": values["tllm"].numel(),
        "seconds": seconds,
        "ratios": {
            name: [theirs / us for theirs, us in zip(each, seconds["tllm"], strict=True)]
            for name, each in seconds.items()
            if name != "tllm"
        },
        "largest_difference": change,
        "spread_of_values": spread,
    }


def main(
    tokens: Annotated[list[int] | None, typer.Option(help="Lengths of the prompts.")] = None,
    positions: Annotated[int, typer.Option(help="The most positions that are patched.")] = 10,
    rounds: Annotated[int, typer.Option(help="Rounds of each way, in turn.")] = 3,
    shape: Annotated[str, typer.Option(help="gpt2, gpt2-xl or gpt2-7b.")] = "gpt2",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    own_process: Annotated[bool, typer.Option(help="The engine in a process of its own.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = RESULTS,
) -> None:
    """Measure both at each length, and write a file for each."""
    if importlib.util.find_spec("transformer_lens") is None:
        print("skipped: transformer_lens is not installed (pip install 'transformer_lens<4')")
        return
    if shape not in _SHAPES or dtype not in _AGREEING:
        raise typer.BadParameter(f"give a shape of {[*_SHAPES]} and a dtype of {[*_AGREEING]}")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(own_process))
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # this process has asked for the GPU
    os.environ["TRITON_F32_DEFAULT"] = "ieee"  # else the engine's attention multiplies with TF32
    from tllm import LLM

    on_gpu = {"gpu_memory_utilization": 0.3, "max_num_seqs": 256}
    on_cpu = {"enforce_eager": True, "max_num_seqs": 64, "block_size": 32}
    with tempfile.TemporaryDirectory() as folder:
        # In a process of its own, which gives back the GPU's memory.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as saving:
            vocab = saving.submit(save_model, Path(folder), shape, dtype).result().vocab_size
        llm = LLM(
            folder, skip_tokenizer_init=True, dtype=cast(Any, dtype), max_model_len=512,
            disable_log_stats=True, **(on_gpu if _DEVICE == "cuda" else on_cpu),
        )  # fmt: skip
        lens = LensProcess(folder, dtype, torch.get_num_threads())
        for length in tokens or [5, 200]:
            prompts = PairedPrompts(length, positions, vocab)
            result = measure(llm, lens, prompts, rounds, _AGREEING[dtype])
            about = {
                "shape": shape,
                "dtype": dtype,
                "own_process": own_process,
                "threads": torch.get_num_threads(),
            }
            _write(about | result, out)
        lens.close()


def _write(result: dict[str, Any], out: Path) -> None:
    """A length's result, `sweeps-DEVICE-SHAPE-DTYPE-LENGTH.json` (`-own-process`), and a line."""
    about = {
        "device": torch.cuda.get_device_name() if _DEVICE == "cuda" else "cpu",
        "load": os.getloadavg(),
        "versions": {name: version(name) for name in ("transformer_lens", "torch")},
        "date": datetime.date.today().isoformat(),
    }
    out.mkdir(parents=True, exist_ok=True)
    which = [result["shape"], result["dtype"], result["tokens"]]
    which += ["own-process"] if result["own_process"] else []
    path = out / f"sweeps-{_DEVICE}-{'-'.join(map(str, which))}.json"
    path.write_text(json.dumps(about | result, indent=1) + "\n")
    took = {name: f"{statistics.median(each):.2f} s" for name, each in result["seconds"].items()}
    ratios = {name: round(statistics.median(each), 2) for name, each in result["ratios"].items()}
    told = f"{result['tokens']} tokens, {result['experiments']} experiments: {took}, {ratios}"
    print(told, flush=True)


if __name__ == "__main__":
    typer.run(main)
