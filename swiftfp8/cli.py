"""The command line: parse, call the pipeline, print.

Everything heavy is imported inside the commands, so that `--help` and completion answer at once.
Tokens are `key=value`; `swiftfp8.config` gives them their meaning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swiftfp8 import __version__
from swiftfp8.cli_config import config_app
from swiftfp8.cli_data import data_app
from swiftfp8.cli_tokens import (
    KeyValueCommand,
    Tokens,
    check_keys,
    print_notes,
    read_count,
    read_values,
)
from swiftfp8.failures import guarded, interrupt_on_sigterm

if TYPE_CHECKING:
    from swiftfp8.config.compose import Composed

app = typer.Typer(
    name="swiftfp8",
    help="Fine-tune large language models in FP8, and export checkpoints that inference engines "
    "load. Options are key=value tokens: swiftfp8 train config=quickstart lora_rank=16",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its markup would swallow the [key=value] of the help texts
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(config_app, name="config")
app.add_typer(data_app, name="data")

BENCH_KEYS = ("config", "stacks", "steps", "warmup", "out")
SOURCE_KEYS = ("run", "model", "adapter", "checkpoint")


def main() -> None:
    """Run the command line."""
    interrupt_on_sigterm()
    app(prog_name="swiftfp8")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"swiftfp8 {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print it."),
    ] = False,
) -> None:
    """Hold the options of the program itself."""


@app.command(cls=KeyValueCommand)
@guarded
def train(
    tokens: Tokens = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan, check the rows and stop.")
    ] = False,
) -> int:
    """Fine-tune a model: config=<recipe or path> [key=value ...]

    A comma list of values is a sweep: learning_rate=1e-4,2e-4 trains twice.
    """
    from rich.console import Console

    from swiftfp8.config.compose import require_inputs
    from swiftfp8.sweep import dry_run_sweep, run_sweep

    members = _compose_members(tokens or [])
    for member in members:
        require_inputs(member)
    console = Console()
    if len(members) > 1:
        return (dry_run_sweep if dry_run else run_sweep)(members, console)
    from swiftfp8 import pipeline

    if dry_run:
        pipeline.dry_run(members[0], console=console)
        return 0
    result = pipeline.train(members[0])
    return 130 if result.interrupted else 0


@app.command(cls=KeyValueCommand)
@guarded
def plan(tokens: Tokens = None) -> None:
    """Print what each layer would get, and why: config=... [hardware=a100]

    hardware= plans for another machine: a name such as h200, or <name>:<sm>:<GiB>.
    """
    from swiftfp8.config.tokens import take

    taken, rest = take(tokens or [], ("hardware",))
    members = _compose_members(rest)
    from swiftfp8 import pipeline

    for member in members:
        pipeline.plan(member, taken.get("hardware"))


@app.command(cls=KeyValueCommand)
@guarded
def export(tokens: Tokens = None) -> int:
    """Write a checkpoint for inference: run=<run directory>

    Or of a model and an adapter: model=<directory or hub id> [adapter=<dir>] export_dir=<new
    directory>. Of a run the best checkpoint is taken, or checkpoint=last. Options:
    export.format=bf16 and others. `export verify dir=<directory> [reload=true]` checks a
    checkpoint that anybody wrote: 0 where it is sound, 1 where it has faults.
    """
    if tokens and tokens[0] == "verify":
        return _verify(tokens[1:])
    request = _export_request(tokens or [])
    from swiftfp8 import pipeline

    pipeline.export(request)
    return 0


@app.command(cls=KeyValueCommand)
@guarded
def merge(tokens: Tokens = None) -> None:
    """Merge an adapter into its BF16 model: run=<run directory>

    Or model=<dir> adapter=<dir> export_dir=<new directory>.
    """
    request = _export_request(tokens or [])
    from swiftfp8 import pipeline

    pipeline.merge(request)


@app.command(context_settings={"ignore_unknown_options": True})
@guarded
def deploy(tokens: Tokens = None) -> None:
    """Serve an export: dir=<export> [engine=vllm] [host=] [port=]

    Hands over to the engine's own server: vllm, sglang, lmdeploy, tensorrt_llm or transformers.
    Other arguments go to it as they are: deploy dir=out --max-model-len 4096. python=<python of
    an environment> says where it is installed. Where it is not, the command is printed and the
    exit code is 2.
    """
    request, extra = _deploy_request(tokens or [])
    from swiftfp8 import pipeline

    pipeline.deploy(request, extra)


@app.command(cls=KeyValueCommand)
@guarded
def infer(tokens: Tokens = None) -> None:
    """Chat: run=<run directory>, or model=<directory, an export's too, or hub id>

    Keys: adapter= checkpoint= hub= prompt= system= max_new_tokens= temperature= top_p= seed=.
    Without prompt= the chat is interactive. enable_thinking=false asks a template that knows it
    for answers without reasoning. What task=seq_cls, reward or embedding trained answers prompt=
    with labels, a score or a vector; a reward model wants question and answer as turns.
    """
    from swiftfp8.requests import InferRequest

    request = read_values(InferRequest, tokens or [])
    from swiftfp8 import pipeline

    pipeline.infer(request)


@app.command("eval", cls=KeyValueCommand)
@guarded
def evaluate(tokens: Tokens = None) -> None:
    """Ask held-out questions: run=<run directory>, or model=<directory or hub id> dataset=<rows>

    Answers are generated for the last turns of the run's evaluation rows, or of dataset=, and
    compared with those wanted: exact match, ROUGE, and the loss. Keys: adapter= checkpoint=
    hub= limit=200 batch_size=8 max_new_tokens=256 temperature= top_p= seed= out=<file.json>
    """
    from swiftfp8.requests import EvalRequest

    request = read_values(EvalRequest, tokens or [])
    from swiftfp8 import pipeline

    pipeline.evaluate(request)


@app.command(cls=KeyValueCommand)
@guarded
def bench(tokens: Tokens = None) -> None:
    """Time your own job beside its peers: config=<recipe or path> [key=value ...]

    stacks=plan,hf,compiled are run one after the other: by the plan, as transformers + PEFT, and
    that compiled with Liger's loss; bf16 is the plan's engine without FP8. steps=10 are timed
    after warmup=3. Prints tokens a second, ms a step, peak memory and MFU, and writes them to
    out=<file.json>.
    """
    from swiftfp8.bench import BenchRequest
    from swiftfp8.config.compose import compose_config, require_inputs
    from swiftfp8.config.tokens import take

    taken, rest = take(tokens or [], BENCH_KEYS)
    stacks = [part.strip() for part in taken.get("stacks", "").strip("[]").split(",")]
    request = BenchRequest(
        config=taken.get("config"),
        overrides=tuple(rest),
        out=taken.get("out"),
        **{name: read_count(name, taken[name]) for name in ("steps", "warmup") if name in taken},
        **({"stacks": tuple(filter(None, stacks))} if "stacks" in taken else {}),
    )
    composed = compose_config(request.config, rest)
    print_notes([composed])
    require_inputs(composed)
    from swiftfp8 import pipeline

    pipeline.bench(request, composed)


@app.command()
@guarded
def doctor() -> int:
    """Say what this machine can do, and what to install

    The exit code is 0 where FP8 is ready, 3 where it is not.
    """
    from swiftfp8 import pipeline

    return pipeline.doctor()


@app.command()
@guarded
def models() -> None:
    """List the model families that model_type= takes."""
    from swiftfp8.models.family import load_families

    families = load_families().values()
    rows = [
        (family.name, ", ".join(family.aliases), family.default_model or "", family.notes)
        for family in families
    ]
    _print_table(("model_type", "also", "default model", "notes"), rows)


@app.command()
@guarded
def datasets() -> None:
    """List the registered data sets that dataset= takes."""
    import yaml

    from swiftfp8.config.paths import configs_dir, yaml_names

    folder = configs_dir() / "dataset"
    rows = []
    for name in yaml_names(folder):
        entry: dict[str, Any] = yaml.safe_load((folder / f"{name}.yaml").read_text("utf-8"))
        rows.append((name, entry.get("description", ""), entry.get("licence", "")))
    _print_table(("dataset", "what it holds", "licence"), rows)


def _compose_members(tokens: Sequence[str]) -> list[Composed]:
    from swiftfp8.config.compose import compose_sweep
    from swiftfp8.config.tokens import take

    taken, rest = take(tokens, ("config",))
    members = compose_sweep(taken.get("config"), rest)
    print_notes(members)
    return members


def _export_request(tokens: Sequence[str]) -> Any:
    from swiftfp8.config.tokens import take
    from swiftfp8.requests import ExportRequest

    taken, rest = take(tokens, SOURCE_KEYS)
    check_keys(rest, also=SOURCE_KEYS, group="export")
    return ExportRequest(**taken, overrides=tuple(rest))


def _deploy_request(tokens: Sequence[str]) -> tuple[Any, Sequence[str]]:
    """Our keys up to the first argument that is none; the rest is the engine's."""
    from swiftfp8.errors import SwiftFP8Error
    from swiftfp8.requests import DeployRequest

    count = next((n for n, token in enumerate(tokens) if token.startswith("-")), len(tokens))
    ours, extra = tokens[:count], tokens[count:]
    if not any(token.startswith("dir=") for token in ours):
        fix = "swiftfp8 deploy dir=<export directory>"
        raise SwiftFP8Error("no directory to serve", where="command line", fix=fix)
    return read_values(DeployRequest, ours), extra


def _verify(tokens: Sequence[str]) -> int:
    from swiftfp8.errors import SwiftFP8Error
    from swiftfp8.requests import VerifyRequest

    if not any(token.startswith("dir=") for token in tokens):
        fix = "swiftfp8 export verify dir=<checkpoint directory>"
        raise SwiftFP8Error("no directory to check", where="command line", fix=fix)
    request = read_values(VerifyRequest, tokens)
    from swiftfp8 import pipeline

    return 0 if pipeline.verify(request) else 1


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
