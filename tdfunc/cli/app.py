"""The commands and their options, as typer reads them."""

from dataclasses import replace
from enum import Enum
from importlib.metadata import version as version_of
from typing import Annotated

import typer

from tdfunc.cli.average import average_files
from tdfunc.cli.convert import Part, Target, rewrite
from tdfunc.cli.diff import diff as run_diff
from tdfunc.cli.merging.config import from_options, read_config
from tdfunc.cli.merging.run import merge_files
from tdfunc.cli.numbers import Tolerance
from tdfunc.cli.output import Table, print_table
from tdfunc.cli.show import show as run_show
from tdfunc.cli.sources import make_filter
from tdfunc.cli.template import check as check_template
from tdfunc.cli.verify import verify as run_verify
from tdfunc.weights.methods import HEADER, rows

app: typer.Typer = typer.Typer(
    name="tdfunc",
    help="Show, compare, verify, convert and merge checkpoints, also checkpoints that are larger than memory.",
    epilog="PATH is a safetensors file, a folder of shards, a memmap folder, a folder of steps, or a .pt file.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


template: typer.Typer = typer.Typer(no_args_is_help=True, help="Look at chat templates.")
app.add_typer(template, name="template")


class Format(str, Enum):
    """The formats that can be written."""

    safetensors = "safetensors"
    shards = "shards"
    memmap = "memmap"
    torch = "torch"


class Unequal(str, Enum):
    """The treatment of values that differ and have no mean."""

    error = "error"
    first = "first"


Path = Annotated[str, typer.Argument(help="The checkpoint.", metavar="PATH", show_default=False)]
Out = Annotated[
    str, typer.Option("--out", "-o", help="The file or folder to write.", metavar="OUT", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Include = Annotated[
    list[str] | None,
    typer.Option(
        "--filter", "-f", help="A glob on dotted paths, in which * crosses dots; may be repeated.", metavar="GLOB"
    ),
]
Exclude = Annotated[
    list[str] | None, typer.Option("--exclude", "-x", help="A glob of leaves to leave out.", metavar="GLOB")
]
To = Annotated[Format | None, typer.Option("--to", help="The format, if the name does not decide it.")]
ShardSize = Annotated[
    str | None, typer.Option("--max-shard-size", help='Write shards of at most this size: "5GB", or bytes.')
]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing file or folder.")]
Dequantize = Annotated[
    bool, typer.Option("--dequantize", help="Multiply FP8 codes by their scales; float32 without --dtype.")
]
IfUnequal = Annotated[
    Unequal,
    typer.Option("--unequal", help="If integers, bools or non-tensor data differ: an error, or take the first."),
]
Dtype = Annotated[str | None, typer.Option("--dtype", help="Cast floating leaves: bf16, float16, float8_e4m3fn, ...")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tdfunc {version_of('tdfunc')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks; may be anywhere.")] = False,
) -> None:
    """Take the options of all commands."""
    # `main` reads --debug before typer does.
    del version, debug


@app.command()
def show(
    path: Path,
    tree: Annotated[bool, typer.Option("--tree", help="Show the nesting.")] = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="In place of size and kind: min, max, mean, std, NaN, inf, zeros.")
    ] = False,
    include: Include = None,
    exclude: Exclude = None,
    json: Json = False,
) -> None:
    """Show the leaves of a checkpoint: path, dtype, shape, size, kind, ties, and totals."""
    run_show(path, include or (), exclude or (), as_tree=tree, with_stats=stats, as_json=json)


@app.command(epilog="Exit code: 0 no differences, 1 differences, 2 trouble.")
def diff(
    a: str,
    b: str,
    values: Annotated[bool, typer.Option("--values", help="Read and compare all values.")] = False,
    tol: Annotated[
        str | None, typer.Option(help="Compare values up to |a - b| <= ATOL + RTOL |b|.", metavar="RTOL[/ATOL]")
    ] = None,
    metadata: Annotated[bool, typer.Option("--metadata/--no-metadata", help="Compare more than leaves.")] = True,
    include: Include = None,
    exclude: Exclude = None,
    json: Json = False,
) -> None:
    """Compare two checkpoints: structure, shapes, dtypes, metadata, and values (without --values by checksums)."""
    if tol is not None:
        tolerance = _tolerance(tol)
    elif values:
        tolerance = Tolerance()
    else:
        tolerance = None
    where = make_filter(include or (), exclude or ())
    raise typer.Exit(run_diff(a, b, where, tolerance=tolerance, with_metadata=metadata, as_json=json))


@app.command(epilog="Exit code: 0 whole, 1 damaged, 2 trouble, 3 the structure is whole and there are no checksums.")
def verify(path: Path, json: Json = False) -> None:
    """Read everything and compare the checksums; in a folder of steps, of all steps."""
    raise typer.Exit(run_verify(path, json=json))


@template.command("check", epilog="Exit code: 0 nothing to note, 1 a property may go wrong, 2 trouble.")
def check(
    folder: Annotated[str, typer.Argument(help="The folder of a tokenizer.", metavar="FOLDER", show_default=False)],
    json: Json = False,
) -> None:
    """Report on a tokenizer's chat template: turns, masks, thinking, tools, control strings."""
    raise typer.Exit(check_template(folder, as_json=json))


@app.command()
def convert(
    src: str,
    dst: str,
    to: To = None,
    max_shard_size: ShardSize = None,
    dtype: Dtype = None,
    dequantize: Dequantize = False,
    force: Force = False,
) -> None:
    """Write a checkpoint in another format: safetensors, shards, a memmap folder, or a file of torch.save."""
    target = _target(dst, to, max_shard_size, force)
    rewrite(src, target, Part(), dtype_name=dtype, dequantize=dequantize)


@app.command()
def extract(
    path: Path,
    out: Out,
    include: Include = None,
    exclude: Exclude = None,
    dtype: Dtype = None,
    dequantize: Dequantize = False,
    to: To = None,
    max_shard_size: ShardSize = None,
    force: Force = False,
) -> None:
    """Write the leaves that patterns choose."""
    if not include and not exclude:
        raise typer.BadParameter(
            "no pattern chooses leaves: give --filter GLOB or --exclude GLOB.", param_hint="--filter"
        )
    part = Part(include or (), exclude or ())
    target = _target(out, to, max_shard_size, force)
    rewrite(path, target, part, dtype_name=dtype, dequantize=dequantize)


@app.command()
def cast(
    path: Path,
    out: Out,
    dtype: Annotated[str, typer.Option("--dtype", help="The dtype of floating leaves.", show_default=False)],
    dequantize: Dequantize = False,
    to: To = None,
    max_shard_size: ShardSize = None,
    force: Force = False,
) -> None:
    """Write a checkpoint with its floating leaves in another dtype; integers, bools and complex leaves stay."""
    target = _target(out, to, max_shard_size, force)
    rewrite(path, target, Part(), dtype_name=dtype, dequantize=dequantize)


@app.command()
def average(
    paths: list[str],
    out: Out,
    weights: Annotated[str | None, typer.Option(help="A weight for each, divided by their sum: 1,2,1.")] = None,
    unequal: IfUnequal = Unequal.error,
    include: Include = None,
    exclude: Exclude = None,
    to: To = None,
    max_shard_size: ShardSize = None,
    force: Force = False,
) -> None:
    """Average checkpoints leaf by leaf, computed in float64 and rounded once."""
    numbers = None
    if weights is not None:
        try:
            numbers = [float(part) for part in weights.split(",")]
        except ValueError:
            raise typer.BadParameter(
                f"{weights!r} is not a list of numbers such as 1,2,1.", param_hint="--weights"
            ) from None
    target = _target(out, to, max_shard_size, force)
    part = Part(include or (), exclude or ())
    average_files(paths, target, part, weights=numbers, take_first=unequal is Unequal.first)


@app.command()
def merge(
    out: Out,
    paths: Annotated[list[str] | None, typer.Argument(help="The models, without the base.")] = None,
    config: Annotated[str | None, typer.Option("--config", "-c", help="A configuration file of mergekit.")] = None,
    method: Annotated[str | None, typer.Option(help="The method; `tdfunc methods` shows all.")] = None,
    base: Annotated[str | None, typer.Option(help="The model that the others come from.")] = None,
    weight: Annotated[list[float] | None, typer.Option(help="The weight of a model, in their order; repeated.")] = None,
    option: Annotated[list[str] | None, typer.Option(help="An option of the method: density=0.5.")] = None,
    seed: Annotated[int, typer.Option(help="The seed of methods that use random numbers.")] = 0,
    unequal: IfUnequal = Unequal.error,
    dtype: Dtype = None,
    to: To = None,
    max_shard_size: ShardSize = None,
    force: Force = False,
) -> None:
    """Merge models leaf by leaf, with a method and weights or with a configuration file of mergekit."""
    has_options = bool(paths or base or weight or option)
    if (config is None) == (method is None) or (config is not None and has_options):
        raise typer.BadParameter("give either --config FILE, or --method NAME with models.", param_hint="--config")
    if config is not None:
        with open(config, encoding="utf-8") as file:
            recipe = read_config(file.read())
    else:
        recipe = from_options(str(method), paths or [], base, weight, option or [])
    if dtype is not None:
        recipe = replace(recipe, out_dtype=dtype)
    target = _target(out, to, max_shard_size, force)
    merge_files(recipe, target, seed=seed, take_first=unequal is Unequal.first)


@app.command("methods")
def list_methods() -> None:
    """Show the methods of `merge`: definitions, options and papers."""
    print_table(Table(HEADER, rows()))


def _tolerance(text: str) -> Tolerance:
    """Return the tolerance that RTOL or RTOL/ATOL stands for; one number is both."""
    try:
        numbers = [float(part) for part in text.split("/")]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= 2 or not all(0 <= number < float("inf") for number in numbers):
        raise typer.BadParameter(f"{text!r} is not RTOL or RTOL/ATOL, such as 1e-3/1e-5.", param_hint="--tol")
    return Tolerance(numbers[0], numbers[-1])


def _target(out: str, to: Format | None, max_shard_size: str | None, force: bool) -> Target:
    return Target(out, to.value if to is not None else None, max_shard_size, force)
