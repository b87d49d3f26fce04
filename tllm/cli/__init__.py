"""The `tllm` command. What a subcommand needs, it imports itself: vLLM and torch take seconds, and
`tllm --help` must not."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.markup import escape

import tllm
from tllm.cli import values
from tllm.cli.console import Commands, output_console
from tllm.cli.ending import end_with_signals
from tllm.cli.files import check_model, check_there, check_writable, missing_here
from tllm.cli.store import app as store_app
from tllm.cli.vllm_help import VllmCommand
from tllm.spec.layers import Layers

app = typer.Typer(
    cls=Commands,
    help="tLLM: interventions for vLLM.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(store_app, name="store")

_FURTHER = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Of a command that is given what it does not know, and reads or refuses it."""


def _model(context: typer.Context, given: str) -> str:
    """The model, which an option that only vLLM knows may not precede: whether the word after it
    is its value is not known here."""
    if given.startswith("-"):
        raise typer.BadParameter(
            f"{given} stands in the model's place; give the model first: tllm {context.info_name} "
            f"MODEL {given} ..."
        )
    return given


Model = Annotated[
    str, typer.Argument(callback=_model, help="A path, or a name on the Hugging Face hub.")
]
EngineArguments = Annotated[
    list[str] | None,
    typer.Option(help="NAME=VALUE, an argument of tllm.LLM; the value is JSON or text."),
]
ConsumerSpecs = Annotated[
    list[str] | None, typer.Option(help="A consumer, as name:key=value,...; repeatable.")
]
CaptureConsumerSpecs = Annotated[
    list[str] | None,
    typer.Option(
        "--capture-consumer",
        "--capture-consumers",
        help="A consumer whose results are capture results; repeatable.",
    ),
]
SteeringModules = Annotated[
    list[str] | None,
    typer.Option(
        help="A steering module, as name=path of vectors, or of a spec in JSON; repeatable."
    ),
]
HookPoints = Annotated[
    str | None, typer.Option(help="Hook points to install, with commas between; or all.")
]
OurEngineArguments = Annotated[
    list[str] | None,
    typer.Option(
        help="NAME=VALUE, an argument of tllm.LLM that vLLM has not, such as "
        "max_steering_configs=64; repeatable."
    ),
]
DryRun = Annotated[bool, typer.Option(help="Print the command, and do not run it.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"tllm {tllm.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version."
        ),
    ] = False,
) -> None:
    """What every subcommand shares."""
    end_with_signals()


@app.command("doctor")
def doctor_command(
    model: Annotated[
        str | None,
        typer.Option(help="Also start an engine with this model (with random weights)."),
    ] = None,
) -> None:
    """Say what is installed, what was found in vLLM and in a model, and what is wrong."""
    from tllm.cli.doctor import examine, render

    report = examine(model)
    render(report, output_console())
    raise typer.Exit(1 if report.problems else 0)


@app.command(cls=VllmCommand, context_settings=_FURTHER)
def serve(
    context: typer.Context,
    model: Model,
    consumer: ConsumerSpecs = None,
    capture_consumer: CaptureConsumerSpecs = None,
    steering_module: SteeringModules = None,
    admin_api_key: Annotated[
        str | None,
        typer.Option(
            envvar="TLLM_ADMIN_API_KEY",
            help="Key of the admin routes; without one they answer on loopback only.",
        ),
    ] = None,
    hook_points: HookPoints = None,
    allow_capture: Annotated[bool, typer.Option(help="Let requests capture.")] = True,
    allow_consumers: Annotated[
        bool, typer.Option(help="Let requests give options to consumers.")
    ] = True,
    engine_arg: OurEngineArguments = None,
    limits: Annotated[
        Path | None, typer.Option(help="A JSON file with what callers may ask, by API key.")
    ] = None,
    max_body_mib: Annotated[
        int, typer.Option(min=1, help="The most that a request's body may have.")
    ] = 64,
    dry_run: DryRun = False,
) -> None:
    """Serve a model over HTTP with interventions; further options are those of `vllm serve`, which
    --help=all prints, --help=Frontend of one group, and --help=max-model-len by name."""
    from tllm.cli import serving

    try:
        check_model(model)
        serving.check_admin_key(admin_api_key)
        settings = serving.settings_of(
            {
                "consumers": tuple(consumer or ()),
                "capture_consumers": tuple(capture_consumer or ()),
                "steering_modules": serving.modules_of(steering_module or ()),
                "admin_api_key": admin_api_key,
                "allow_capture": allow_capture,
                "allow_consumers": allow_consumers,
                "limits": serving.limits_file(limits),
                "max_body_mib": max_body_mib,
            }
        )
        options = _options_of_engine(engine_arg, hook_points)
        own = _own_options(context)
        command = serving.command("serve", [model], context.args, settings, options, own)
    except ValueError as error:
        _refuse(error)
    if dry_run:
        print(serving.shown(*command))
        return
    serving.run(*command)


@app.command("run-batch", cls=VllmCommand, context_settings=_FURTHER)
def run_batch(
    context: typer.Context,
    model: Model,
    input_file: Annotated[
        Path,
        typer.Option("-i", "--input-file", help="Requests, one a line, as vllm run-batch reads."),
    ],
    output_file: Annotated[
        str, typer.Option("-o", "--output-file", help="Where the answers go: a path, or a URL.")
    ],
    consumer: ConsumerSpecs = None,
    capture_consumer: CaptureConsumerSpecs = None,
    steering_module: SteeringModules = None,
    hook_points: HookPoints = None,
    engine_arg: OurEngineArguments = None,
    dry_run: DryRun = False,
) -> None:
    """Answer a file of requests with interventions, without a server: `vllm run-batch`, whose other
    options may follow (--help=all prints them). Results stand in the answers."""
    from tllm.cli import serving
    from tllm.cli.batch_lines import check_lines

    with tempfile.TemporaryDirectory(prefix="tllm-batch-") as folder:
        try:
            check_model(model)
            check_lines(input_file)
            if "://" not in output_file:
                check_writable("-o", Path(output_file))
            settings = serving.settings_of(
                {
                    "consumers": tuple(consumer or ()),
                    "capture_consumers": tuple(capture_consumer or ()),
                    "steering_modules": serving.modules_of(steering_module or ()),
                    # No server is there from which results could be fetched.
                    "inline_bytes": sys.maxsize,
                    "captures_folder": Path(folder),
                }
            )
            options = _options_of_engine(engine_arg, hook_points)
            files, own = ["-i", str(input_file), "-o", output_file], _own_options(context)
            given = ["--model", model, *files]
            command = serving.command("run-batch", given, context.args, settings, options, own)
        except ValueError as error:
            _refuse(error)
        if dry_run:
            print(serving.shown(*command))
            return
        serving.run(*command)


@app.command("verify", context_settings=_FURTHER)
def verify_command(
    context: typer.Context,
    model: Model,
    points: Annotated[
        str | None, typer.Option(help="Hook points to look at, with commas between.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSON Lines of prompts of yours, compared beside the random ones."),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(help="The largest relative error; by default what rounding explains."),
    ] = None,
    steered_layers: Annotated[
        int, typer.Option(help="How many layers are steered at each hook point.")
    ] = 8,
    reference: Annotated[
        str,
        typer.Option(
            help="transformers; or plain: vLLM without tLLM, for log-probabilities alone."
        ),
    ] = "transformers",
    reference_device: Annotated[
        str, typer.Option(help="Where transformers runs: cpu, cuda, cuda:1.")
    ] = "cpu",
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the certificate to this file.")
    ] = None,
) -> None:
    """Compare rows, tokens and steering of a model with plain transformers, in mixed batches.

    Further options are those of vLLM's engine, such as --tensor-parallel-size 2.

    The exit status is
    0 if everything was compared and nothing differs,
    1 if something differs,
    2 if it could not be carried out,
    3 if something could not be compared.
    """
    from tllm.cli import verify as verifying
    from tllm.verify.job import VerifyJob, run

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    console = output_console()
    try:
        check_writable("--json", json_file)
        check_model(model)
        job = VerifyJob(
            model,
            points=tuple(values.several(points)) if points else None,
            prompts=prompts,
            tolerance=tolerance,
            steered_layers=steered_layers,
            reference=reference,
            reference_device=reference_device,
            engine=verifying.engine_options(context.args),
        )
        with console.status("looking at the model") as status:
            certificate = run(job, status.update)
    except Exception as error:  # of whatever kind: a status of 1 would say that something differs
        here = missing_here(model, error)
        _refuse(error, f"[red]not verified{here}:[/red] {{}}")
    if json_file is not None:  # before it is printed: nobody may read that to its end
        json_file.write_text(certificate.to_json(), encoding="utf-8")
    verifying.render(certificate, console)
    raise typer.Exit(certificate.exit_status)


@app.command("capture", context_settings=_FURTHER)
def capture_command(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="A path, or a name on the Hugging Face hub.")],
    input: Annotated[
        Path,
        typer.Option(
            help="JSON Lines: texts, or objects with 'prompt' or 'prompt_token_ids', and 'id'."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the store.")],
    hooks: Annotated[
        list[str],
        typer.Option(help="Such as post_block:12, post_block:4:9, attn_out:0,4,8, pre_attn:all."),
    ],
    positions: Annotated[
        str,
        typer.Option(
            help="all, all_prompt, all_generated, last_prompt, positions such as 0,-1, or JSON."
        ),
    ] = "all",
    reduction: Annotated[str, typer.Option(help="none, mean, max or last.")] = "none",
    dtype: Annotated[str, typer.Option(help="model, float32 or float16.")] = "model",
    tag: Annotated[str, typer.Option(help="Of the records.")] = "",
    layout: Annotated[str, typer.Option(help="sharded, packed or per_file.")] = "sharded",
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate for each prompt.")] = 1,
    batch: Annotated[int, typer.Option(help="Prompts handed to the engine at once.")] = 256,
    engine_arg: EngineArguments = None,
) -> None:
    """Write activations of many prompts into a store. Run it again to go on where it stopped."""
    from tllm.cli import capture as capturing

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    console = output_console()
    try:
        _nothing_further(context)
        check_model(model)
        job = capturing.Job(
            model=model,
            inputs=input,
            out=out,
            capture={
                "hooks": hooks,
                "positions": values.positions(positions),
                "reduction": reduction,
                "dtype": dtype,
            },
            tag=tag,
            layout=layout,  # type: ignore[arg-type]
            max_tokens=max_tokens,
            batch=batch,
            engine=values.engine_arguments(engine_arg, "capture_consumers", "result_timeout_s"),
        )
        summary = capturing.run(job, console)
    except Exception as error:  # of whatever kind, also an engine's
        _refuse(error)
    capturing.render(summary, job, console)
    raise typer.Exit(1 if summary.failures else 0)


@app.command("sweep", context_settings=_FURTHER)
def sweep_command(
    context: typer.Context,
    model: Model,
    clean: Annotated[
        str | None, typer.Option(help="The prompt that gives the right answer.")
    ] = None,
    corrupt: Annotated[
        str | None, typer.Option(help="The one that differs in what matters, of as many tokens.")
    ] = None,
    right: Annotated[str | None, typer.Option(help="The right next token, as text.")] = None,
    wrong: Annotated[str | None, typer.Option(help="A wrong next token, as text.")] = None,
    pairs: Annotated[
        Path | None,
        typer.Option(help="JSON Lines with 'clean', 'corrupt' and 'answers', in their place."),
    ] = None,
    hooks: Annotated[str, typer.Option(help="Hook points, with commas between.")] = "post_block",
    layers: Annotated[str | None, typer.Option(help="Such as 0,4-8,-1; all unless told.")] = None,
    positions: Annotated[str | None, typer.Option(help="Such as 3,-1; all unless told.")] = None,
    metric: Annotated[
        str, typer.Option(help="logit_diff, logprob, recovered, kl; with commas between.")
    ] = "recovered",
    noising: Annotated[
        bool, typer.Option(help="Put rows of the corrupt run into the clean one.")
    ] = False,
    window: Annotated[int, typer.Option(min=1, help="Layers that are patched together.")] = 1,
    heads: Annotated[
        str | None,
        typer.Option(help="With --hooks attn_heads, q, k, v: one at a time; 0,3 or all."),
    ] = None,
    together: Annotated[bool, typer.Option(help="Patch all positions in one experiment.")] = False,
    freeze: Annotated[
        str | None,
        typer.Option(help="Path patching: attn_out, mlp_out, or all; these branches keep still."),
    ] = None,
    receivers: Annotated[
        str | None,
        typer.Option(help="Where paths end, such as mlp_in:3,attn_in:4; else at the logits."),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Experiments to print.")] = 10,
    out: Annotated[
        Path | None, typer.Option(help="Write a row for each experiment, as JSON Lines.")
    ] = None,
    heatmap: Annotated[Path | None, typer.Option(help="Draw a PNG.")] = None,
    engine_arg: EngineArguments = None,
) -> None:
    """Patch one row at a time of one prompt into another, and say where it matters."""
    from tllm.cli import sweep as sweeping

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    console = output_console()
    try:
        _nothing_further(context)
        check_model(model)
        check_writable("--out", out)
        check_writable("--heatmap", heatmap, [".png"])
        check_there("--pairs", pairs)
        if pairs is not None:
            if any(each is not None for each in (clean, corrupt, right, wrong)):
                raise ValueError("--pairs has all prompts and answers; leave the others out")
            all_clean, all_corrupt, answers = sweeping.read_pairs(pairs)
        elif clean is None or corrupt is None:
            raise ValueError("give --clean and --corrupt, or --pairs")
        elif right is None and wrong is not None:
            raise ValueError("--wrong was given without --right; give the right next token too")
        else:
            all_clean, all_corrupt = [clean], [corrupt]
            given = [each for each in (right, wrong) if each is not None]
            answers = [list[str | int](given)] if given else None
        asked = {
            "clean": all_clean,
            "corrupt": all_corrupt,
            "answers": answers,
            "hooks": values.several(hooks),
            "layers": None if layers is None else Layers.parse(layers, "--layers"),
            "positions": None
            if positions is None
            else values.whole_numbers("--positions", positions),
            "metric": values.several(metric),
            "noising": noising,
            "window": window,
            "heads": heads if heads in (None, "all") else values.whole_numbers("--heads", heads),
            "together": together,
            "freeze": () if freeze is None else values.several(freeze),
            "receivers": () if receivers is None else values.places("--receivers", receivers),
        }
        engine = values.engine_arguments(engine_arg)
        found, texts = sweeping.run(model, engine, asked, console)
        if out is not None:  # before it is printed: nobody may read that to its end
            sweeping.write(found, texts, out)
        if heatmap is not None:
            sweeping.draw(found, texts, heatmap, console)
        sweeping.render(found, texts, top, console)
    except Exception as error:  # of whatever kind, also an engine's
        _refuse(error)


@app.command("strength-sweep", context_settings=_FURTHER)
def strength_sweep_command(
    context: typer.Context,
    model: Model,
    vectors: Annotated[Path, typer.Option(help="What tllm.steering.load reads.")],
    strengths: Annotated[str, typer.Option(help="Such as -1,0,0.5,1.")],
    prompt: Annotated[
        list[str] | None, typer.Option(help="A prompt to continue; repeatable.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="JSON Lines: texts, or objects with 'prompt' or 'prompt_token_ids'; to continue."
        ),
    ] = None,
    matches: Annotated[
        str | None,
        typer.Option(help="A regular expression; the effect is the share of texts that have it."),
    ] = None,
    effect: Annotated[
        str | None,
        typer.Option(help="FILE.py:NAME, a function from a text to a number, in its place."),
    ] = None,
    texts: Annotated[
        Path | None,
        typer.Option(help="JSON Lines as --prompts; read under steering, for their perplexity."),
    ] = None,
    hook: Annotated[
        str | None, typer.Option(help="The hook point, where the file names none or several.")
    ] = None,
    layers: Annotated[
        str | None, typer.Option(help="Such as 3,4-8; those of the file unless told.")
    ] = None,
    features: Annotated[
        str | None, typer.Option(help="Of a sparse autoencoder, such as 123,77.")
    ] = None,
    phase: Annotated[
        str, typer.Option(help="Tokens that are steered: any, prefill or decode.")
    ] = "decode",
    max_tokens: Annotated[int, typer.Option(help="Tokens of a continuation.")] = 48,
    temperature: Annotated[float, typer.Option(help="Of the continuations.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the continuations.")] = 0,
    max_perplexity_ratio: Annotated[
        float, typer.Option(help="What the best may cost, against the strength nearest to 0.")
    ] = 1.5,
    out: Annotated[Path | None, typer.Option(help="Write the rows: .json or .csv.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw an SVG.")] = None,
    engine_arg: EngineArguments = None,
) -> None:
    """Steer at several strengths, and say what each brings, and what it costs."""
    from tllm.cli import strength_sweep as strengthening

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    console = output_console()
    try:
        _nothing_further(context)
        check_model(model)
        loading = {
            "hook": hook,
            "layers": None if layers is None else values.layers_of_file(layers),
            "features": None if features is None else values.whole_numbers("--features", features),
        }
        job = strengthening.StrengthJob(
            model,
            vectors,
            values.reals("--strengths", strengths),
            {name: given for name, given in loading.items() if given is not None},
            prompt=prompt or (),
            prompts=prompts,
            texts=texts,
            matches=matches,
            effect=effect,
            phase=phase,  # type: ignore[arg-type]
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            out=out,
            plot=plot,
            max_perplexity_ratio=max_perplexity_ratio,
            engine=values.engine_arguments(engine_arg),
        )
        swept = strengthening.run(job, console)
        if out is not None:
            strengthening.write(swept, job, out)
        if plot is not None:
            swept.plot(plot)
        strengthening.render(swept, job, console)
    except Exception as error:  # of whatever kind, also an engine's
        _refuse(error)


def _nothing_further(context: typer.Context) -> None:
    """Refuse options that a command with `--engine-arg` does not know."""
    values.no_further(context.args, context.info_name or "", _own_options(context))


def _own_options(context: typer.Context) -> list[str]:
    """The options that a command itself has, also those that say no."""
    return [name for each in context.command.params for name in (*each.opts, *each.secondary_opts)]


def _options_of_engine(engine_arg: list[str] | None, hook_points: str | None) -> dict[str, Any]:
    """Arguments of tLLM's engine that a command was given."""
    from tllm.cli import serving

    options = serving.engine_options(map(values.engine_argument, engine_arg or ()))
    if hook_points is not None:
        points = tuple(values.several(hook_points))
        options["hook_points"] = "all" if points == ("all",) else points
    return options


def _refuse(error: Exception, form: str = "[red]{}[/red]") -> NoReturn:
    """Say why a command cannot be carried out, and end with a status of 2."""
    said = str(error).strip() or type(error).__name__
    output_console(stderr=True).print(form.format(escape(said)), soft_wrap=True)
    raise typer.Exit(2) from None
