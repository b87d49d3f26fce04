"""`tllm store`: what is in a store of activations, whether it is whole, and copies of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.markup import escape
from rich.table import Column, Table

from tllm.cli.console import output_console
from tllm.spec.capture import Reduction
from tllm.spec.hooks import ranges

if TYPE_CHECKING:
    from tllm.stores import Store, StoredRecord

app = typer.Typer(
    help="Look at, check and export stores of activations. The exit status is 1 where something of "
    "a store is damaged, and 2 where a command cannot be carried out.",
    no_args_is_help=True,
)
_RUNS = 8  # of positions, or layers, that are shown

Root = Annotated[Path, typer.Argument(help="Folder of the store.", show_default=False)]
Tag = Annotated[str | None, typer.Option(help="Only records with this tag.")]
OfModel = Annotated[str | None, typer.Option("--model", help="Only records of this model.")]
OfReduction = Annotated[
    Reduction | None, typer.Option("--reduction", help="Only records of rows reduced like that.")
]
Hook = Annotated[str | None, typer.Option(help="Only this hook point, or its alias.")]
Layer = Annotated[str | None, typer.Option(help="Only these layers, such as 4 or 0,4-8.")]


@app.command("ls")
def list_records(
    root: Root,
    tag: Tag = None,
    model: OfModel = None,
    reduction: OfReduction = None,
    hook: Hook = None,
    layer: Layer = None,
    status: Annotated[
        Literal["ok", "partial_error", "pending"] | None,
        typer.Option(help="Only records with this status; pending ones are shown only so."),
    ] = None,
    limit: Annotated[int, typer.Option(help="Show that many records; 0 shows all.", min=0)] = 50,
) -> None:
    """List the records."""
    with _errors():
        whole = _open(root).filter(
            tag=tag, model=model, reduction=reduction, hook=hook, layers=layer
        )
        store = whole.filter(status=status)
        table = Table(*_columns())
        shown = store[: limit or len(store)]
        for record in shown:
            table.add_row(
                escape(record.name),
                _colored(record.status),
                record.layout,
                escape(_arrays(record)),
                f"{sum(record.shape(*key)[0] for key in record.keys):,}",
                _size(record.nbytes),
                record.created[:19],
            )
        console = output_console()
        console.print(table)
        left = f", {len(shown)} shown" if len(shown) < len(store) else ""
        console.print(
            f"{len(store):,} records{left}; {store.rows:,} rows, {_size(store.nbytes)}",
            highlight=False,
        )
        if status is None and (pending := len(whole.filter(status="pending"))):
            console.print(
                f"{pending:,} more are pending: they are being written, their writer was killed, "
                "or a pipeline stage wrote to a folder of another host. --status pending lists them"
            )
        _report_damages(store)


@app.command()
def show(
    root: Root,
    record: Annotated[str, typer.Argument(help="Request id, or the name that `ls` shows.")],
    tag: Tag = None,
    sample: Annotated[int | None, typer.Option(help="Only this sample.", min=0)] = None,
) -> None:
    """Show all about one record."""
    with _errors():
        store = _open(root)
        store = store.filter(
            status=("ok", "partial_error", "pending"), tag=tag, sample_index=sample
        )
        found = _find(store, record)
        facts = Table.grid("", Column(overflow="fold"), padding=(0, 2))
        for name, value in (
            ("request id", found.request_id),
            ("tag", found.tag or "none"),
            ("sample", found.sample_index),
            ("status", found.status),
            ("error", found.error or "none"),
            ("model", found.model or "not given"),
            ("reduction", found.reduction),
            ("prompt tokens", found.prompt_len),
            ("tokens", found.num_tokens),
            ("created", found.created),
            ("versions", ", ".join(f"{k} {v}" for k, v in sorted(found.versions.items()))),
            ("metadata", found.metadata or "none"),
            ("layout", f"{found.layout}, by writer {found.writer}"),
            ("record id", found.record_id),
            ("files", "\n".join(str(path.relative_to(store.root)) for path in found.files)),
        ):
            facts.add_row(f"[bold]{name}[/bold]", escape(str(value)))
        arrays = Table("array", "dtype", "shape", "positions")
        for key in found.keys:
            arrays.add_row(
                key.name,
                str(found.dtype(*key)).removeprefix("torch."),
                str(list(found.shape(*key))),
                ranges(found.positions(*key).tolist(), _RUNS),
            )
        console = output_console()
        console.print(facts)
        console.print(arrays)


@app.command()
def verify(
    root: Root,
    checksums: Annotated[bool, typer.Option(help="Read all rows, to compare checksums.")] = True,
) -> None:
    """Check every file; the exit status is 1 when something is wrong."""
    with _errors():
        result = _open(root).verify(checksums=checksums)
        console = output_console()
        for problem in result.problems:
            who = f" ({problem.record})" if problem.record else ""
            console.print(
                f"[red]wrong:[/red] {escape(problem.path)}{escape(who)}: {escape(problem.what)}",
                soft_wrap=True,
                highlight=False,
            )
        for path in result.unpublished:
            console.print(
                f"[yellow]not published:[/yellow] {escape(path)} (a writer is at work, or was "
                "killed; not part of the store)",
                soft_wrap=True,
                highlight=False,
            )
        console.print(
            f"{result.records:,} records, {result.pending:,} pending; {result.sidecars:,} sidecars "
            f"and {result.payloads:,} payloads with {_size(result.bytes)} checked",
            highlight=False,
        )
        if not result.ok:
            console.print(f"[red]{len(result.problems):,} problems[/red]", highlight=False)
            raise typer.Exit(1)
        console.print("[green]Nothing is wrong.[/green]")


@app.command()
def export(
    root: Root,
    out: Annotated[Path, typer.Argument(help="Folder for the files, one an array.")],
    format: Annotated[
        Literal["parquet", "npz", "safetensors"], typer.Option(help="Of the files.")
    ] = "parquet",
    tag: Tag = None,
    model: OfModel = None,
    reduction: OfReduction = None,
    hook: Hook = None,
    layer: Layer = None,
) -> None:
    """Copy rows into files of another format: rows, their positions, and whose they are.

    parquet and npz have columns request_id, tag, sample_index, position and rows. safetensors has
    tensors rows, positions and records, and a JSON file beside it says whose each number in records
    is.
    """
    with _errors():
        from tllm.stores import export as export_store

        whole = _open(root)
        store = whole.filter(tag=tag, model=model, reduction=reduction, hook=hook, layers=layer)
        asked = {
            "--tag": tag,
            "--model": model,
            "--reduction": reduction,
            "--hook": hook,
            "--layer": layer,
        }
        if whole.keys() and not store.keys():
            raise ValueError(_none_left(whole, asked))
        console = output_console()
        for path in export_store(store, out, format):
            console.print(f"{escape(str(path))}, {_size(path.stat().st_size)}", highlight=False)
        _report_damages(store)


@app.command()
def index(root: Root) -> None:
    """Write index.parquet, which makes opening faster, and can be queried."""
    with _errors():
        store = _open(root)
        rows = store.index()
        output_console().print(f"{len(rows):,} rows in {escape(str(store.root / 'index.parquet'))}")
        _report_damages(store)


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """What the user can put right is one line, not a traceback, and a status of 2, as of every
    command: 1 says that something is wrong with a store that could be read."""
    from tllm.stores import StoreError

    try:
        yield
    except (StoreError, ValueError, OSError) as error:
        output_console(stderr=True).print(
            f"[red]error:[/red] {escape(str(error))}", soft_wrap=True, highlight=False
        )
        raise typer.Exit(2) from None


def _open(root: Path) -> Store:
    # Imported here: torch takes seconds, and `tllm --help` must not.
    from tllm import stores

    return stores.open(root)


def _find(store: Store, name: str) -> StoredRecord:
    by_id = store.filter(request_id=name)
    if len(by_id) == 1:
        return by_id[0]
    for record in by_id if len(by_id) else store:
        if record.name == name:
            return record
    if len(by_id) > 1:
        names = ", ".join(record.name for record in by_id[:5])
        raise ValueError(
            f"{len(by_id)} records have the request id {name!r}; give one of their names ({names}),"
            " or --tag and --sample"
        )
    return store.record(name)


def _none_left(store: Store, asked: dict[str, str | None]) -> str:
    """That no record is as asked, and what there is in the place of it."""
    given = {option: value for option, value in asked.items() if value is not None}
    has = []
    for option, of in (("--tag", "tag"), ("--model", "model"), ("--reduction", "reduction")):
        if option in given:
            names = sorted({getattr(record, of) for record in store})
            more = f", and {len(names) - _RUNS:,} more" if len(names) > _RUNS else ""
            shown = ", ".join(name or "none" for name in names[:_RUNS])
            has.append(f"{option.removeprefix('--')} {shown}{more}")
    layers: dict[str, list[int]] = {}
    arrays_there = store.keys()
    for hook, layer in arrays_there:
        layers.setdefault(hook, []).extend(() if layer is None else (layer,))
    arrays = "; ".join(f"{hook} {ranges(sorted(of), _RUNS)}".strip() for hook, of in layers.items())
    words = " ".join(f"{option} {value}" for option, value in given.items())
    return f"no record is left by {words}; the store has {'; '.join([*has, f'arrays {arrays}'])}"


def _report_damages(store: Store) -> None:
    for damage in store.damages:
        output_console(stderr=True).print(
            f"[red]damaged:[/red] {escape(damage.path)} {escape(damage.what)}",
            soft_wrap=True,
            highlight=False,
        )
    if store.damages:
        raise typer.Exit(1)


def _arrays(record: StoredRecord) -> str:
    """`post_block 0-27; lm_head_in`."""
    return "; ".join(
        " ".join([hook, ranges(layers, _RUNS)]).strip() for hook, layers in record.hooks.items()
    )


def _columns() -> list[Column]:
    """Those of `ls`. A name that is cut could be given to no other command."""
    names = "record", "status", "layout", "arrays", "rows", "bytes", "created"
    return [Column(name, overflow="fold") for name in names]


def _colored(status: str) -> str:
    color = {"ok": "green", "partial_error": "red"}.get(status, "yellow")
    return f"[{color}]{status}[/{color}]"


def _size(nbytes: int) -> str:
    """In decimal units, as disks are sold."""
    if nbytes < 1000:
        return f"{nbytes} B"
    size = float(nbytes)
    for unit in ("kB", "MB", "GB", "TB"):
        size /= 1000
        if size < 1000 or unit == "TB":
            break
    return f"{size:.1f} {unit}"
