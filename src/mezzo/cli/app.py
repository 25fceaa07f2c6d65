"""The command's options and what they call."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

import mezzo
from mezzo import tables
from mezzo.builtin import resolve_policy
from mezzo.cli.ops_view import explanation_text, ops_table
from mezzo.cli.run_plan import STEPS, RunScript, plan_of
from mezzo.cli.script_runner import Target
from mezzo.errors import MezzoError

__all__ = ["app"]

app = typer.Typer(
    name="mezzo",
    help="Automatic mixed precision with one readable policy model.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _fail(error: Exception) -> NoReturn:
    Console(stderr=True, soft_wrap=True, highlight=False).print(f"mezzo: {error}", markup=False)
    raise typer.Exit(2)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mezzo {mezzo.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Automatic mixed precision with one readable policy model."""


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="Folder for the plots and the numbers.")] = Path("demo-output"),
    device: Annotated[str | None, typer.Option(help="Device to train on; by default a GPU if there is one.")] = None,
    framework: Annotated[
        str, typer.Option("--framework", "-f", help="torch, jax, tensorplay, or all: those that are installed.")
    ] = "all",
    epochs: Annotated[int | None, typer.Option(help="Epochs per run.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few seconds on a part of the data.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the order of the data.")] = 0,
) -> None:
    """Train two small networks on real data in float32, and in bfloat16 and float16 under autocast, and compare."""
    try:
        from mezzo.demo import run_demo  # noqa: PLC0415 - it imports scikit-learn and matplotlib
    except ModuleNotFoundError as error:
        _fail(
            ModuleNotFoundError(f"the demo needs {error.name}, which is not installed; run: pip install 'mezzo[demo]'")
        )
    try:
        run_demo(output, device=device, epochs=epochs, quick=quick, seed=seed, framework=framework, console=Console())
    except (MezzoError, ModuleNotFoundError, ValueError, OSError) as error:
        _fail(error)


@app.command()
def ops(
    op: Annotated[
        str | None,
        typer.Argument(
            help=(
                "An op, in any spelling: softmax, F.softmax, aten::softmax.int; lax.exp, jnp.matmul for JAX; F.softmax, "
                "tensorplay.matmul for TensorPlay."
            )
        ),
    ] = None,
    device: Annotated[str | None, typer.Option("--device", "-d", help="Show this device's table.")] = None,
    policy: Annotated[
        str, typer.Option("--policy", "-p", help="A built-in policy, or the path of a .toml file.")
    ] = "default",
    framework: Annotated[
        str | None,
        typer.Option(
            "--framework", "-f", help="Whose ops: torch, jax or tensorplay; by default a policy file's, else torch."
        ),
    ] = None,
) -> None:
    """Print which op runs in which dtype, or explain one op."""
    console = Console()
    try:
        if framework is None:
            framework = mezzo.Policy.load(policy).framework if policy.endswith(".toml") else "torch"
        chosen = resolve_policy(policy, framework=framework)
        shown = (device,) if device else tables.devices(framework)
        if op is None:
            console.print(ops_table(chosen, shown))
        else:
            console.print(explanation_text(chosen, op, shown), highlight=False, soft_wrap=True)
    except (MezzoError, OSError) as error:
        _fail(error)


@app.command(context_settings={"allow_interspersed_args": False})  # options after SCRIPT are the script's
def run(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="The script; with -m the name of a module.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="What the script gets, options included.")
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module's name, as after python -m.")] = False,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Record what mixed precision does to each op. So does a call without options."),
    ] = False,
    numerics: Annotated[
        bool, typer.Option("--numerics", help="Record ranges too, and what float16 and bfloat16 lose.")
    ] = False,
    shadow: Annotated[
        bool,
        typer.Option(
            "--shadow", help="Carry a run in float32 along, and record how far each op is from it: --numerics too."
        ),
    ] = False,
    find_nonfinite: Annotated[
        bool, typer.Option("--find-nonfinite", help="Name the first op that makes NaN or Inf of finite numbers.")
    ] = False,
    lint: Annotated[
        bool, typer.Option("--lint", help="Look for faults in the model's and optimizer's settings.")
    ] = False,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            "-p",
            help="Steer the script's torch.autocast regions: a built-in policy, or the path of a .toml file.",
            show_default=False,
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option("--report", help="Save the report: a path that ends in .html, .json or .txt.", show_default=False),
    ] = None,
    steps: Annotated[
        str | None,
        typer.Option(
            "--steps", help=f"Record so many steps of an optimizer, or all; by default {STEPS}.", show_default=False
        ),
    ] = None,
) -> None:
    """Run a PyTorch script as it is, and report on stderr what mixed precision did when it has ended."""
    try:
        plan = plan_of(
            Target(script, tuple(arguments or ()), module),
            explain=explain,
            numerics=numerics,
            shadow=shadow,
            find_nonfinite=find_nonfinite,
            lint=lint,
            policy=policy,
            report=report,
            steps=steps,
        )
    except (MezzoError, OSError) as error:
        _fail(error)
    raise RunScript(plan)
