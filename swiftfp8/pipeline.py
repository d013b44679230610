"""config → plan → load → inject → train → export: the diagram, as code.

Each public function runs one command. A stage takes plain values from the one before it; nothing
reaches back. Heavy imports sit inside the functions, so that a plan for a mistyped recipe fails
at once.
"""

from __future__ import annotations

import gc
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from swiftfp8.config.compose import Composed, apply_overrides, sources_named
from swiftfp8.config.schema import Config
from swiftfp8.errors import SwiftFP8Error, collected, raise_all
from swiftfp8.hardware import Hardware, parse_hardware, probe
from swiftfp8.plan import Plan, build_plan
from swiftfp8.report.plan_table import plan_to_dict, precision_report, print_plan
from swiftfp8.requests import (
    DeployRequest,
    EvalRequest,
    ExportRequest,
    InferRequest,
    VerifyRequest,
)
from swiftfp8.steps import describe_steps, size_steps, warn_of_warm_up
from swiftfp8.tasks import REWARD_HEAD, Head, read_task_file
from swiftfp8.threads import limited_threads, threads_for

if TYPE_CHECKING:
    from swiftfp8.bench import BenchRequest, Row
    from swiftfp8.data.dataset import Datasets
    from swiftfp8.evaluate import Evaluation
    from swiftfp8.export.report import ExportReport
    from swiftfp8.export.request import ExportJob
    from swiftfp8.models.source import ModelSource
    from swiftfp8.train.trainer import TrainResult


def train(
    composed: Composed,
    *,
    console: Console | None = None,
    warmup_steps: int = 1,
    saves: bool = True,
    shows_plan: bool = True,
) -> TrainResult:
    """Plan, load, inject and train; then export, where the configuration asks for it.

    A trial's throughput leaves `warmup_steps` out, and without `saves` it writes no checkpoint.
    Without `shows_plan` the plan is not printed: the user has seen it.
    """
    _refuse_several_processes()
    with sources_named(composed):
        result = _train(
            composed,
            console or Console(),
            warmup_steps=warmup_steps,
            saves=saves,
            shows_plan=shows_plan,
        )
    from swiftfp8.export.request import exports_after_training

    if result.interrupted or not saves:
        return result
    if exports_after_training(composed.config):
        _free_memory()
        with _export_told(result.run_dir):
            export(ExportRequest(run=str(result.run_dir)), console=console)
    else:
        run = shlex.quote(f"run={result.run_dir}")
        said = (f"ask it:    swiftfp8 infer {run}", f"export it: swiftfp8 export {run}")
        _print_lines(console or Console(), [f"trained: {result.run_dir}", *said])
    return result


def dry_run(composed: Composed, *, console: Console | None = None) -> Plan:
    """What `train` would do, printed, and its rows read and checked. Nothing is loaded or made."""
    console = console or Console()
    with sources_named(composed):
        config = composed.config
        source, made = _prepare(config)
        print_plan(made, console)
        _print_lines(console, [*_name_note(config), describe_steps(config)])
        if config.train.tokens_per_step and _all_here(config):  # the rows' lengths tell the steps
            _, datasets = _read_rows(config, source, made)
            _print_lines(console, ["", *datasets.report.summary_lines()])
            size_steps(config, datasets, console)
        elif (rows := check_rows(composed, console=console)) is not None:
            warn_of_warm_up(config, rows, console)
    return made


def _train(
    composed: Composed, console: Console, *, warmup_steps: int, saves: bool, shows_plan: bool
) -> TrainResult:
    from transformers import set_seed

    from swiftfp8.inject import inject_precision
    from swiftfp8.models.load import load_model
    from swiftfp8.train.checkpoint import find_resume
    from swiftfp8.train.run_dir import start_run
    from swiftfp8.train.trainer import run_training

    config = composed.config
    source, made = _prepare(config)
    resume_from = (
        find_resume(Path(config.resume_from_checkpoint)) if config.resume_from_checkpoint else None
    )
    if shows_plan:
        print_plan(made, console)
    _print_lines(console, _name_note(config))
    with limited_threads(made.cpu_threads):
        tokenizer, datasets = _read_rows(config, source, made)
        _print_lines(console, datasets.report.summary_lines())
        config = size_steps(config, datasets, console)

        run_dir = start_run(
            composed, source.name, plan=plan_to_dict(made), precision_report=precision_report(made)
        )
        with _kept_once_begun(run_dir):
            _print_lines(console, [f"run directory: {run_dir}"])
            set_seed(config.seed)  # the adapter's first weights are drawn below
            model = load_model(
                source,
                made.weight_dtype,
                attn_implementation=config.attn_implementation,
                trust_remote_code=config.trust_remote_code,
                task=made.task,
                head=made.head,
                pad_token_id=tokenizer.pad_token_id,
            )
            model = inject_precision(model, made, made.device)
            return run_training(
                model,
                tokenizer,
                datasets,
                made,
                config,
                run_dir,
                resume_from,
                console=console,
                warmup_steps=warmup_steps,
                saves=saves,
            )


def plan(
    composed: Composed, hardware: str | None = None, *, console: Console | None = None
) -> Plan:
    """What `train` would do here, or on `hardware`, printed. Nothing is loaded."""
    machine = parse_hardware(hardware) if hardware else probe()
    with sources_named(composed):
        _, made = _plan(composed.config, machine)
    print_plan(made, console or Console())
    return made


def check_rows(composed: Composed, *, console: Console | None = None) -> int | None:
    """Read and check the rows as `train` would, without tokenizing them, and print their number.

    Returns how many are trained on, where that can be told without tokenizing.
    """
    from swiftfp8.data.dataset import check_rows as stage

    found = stage(composed.config)
    _print_lines(console or Console(), ["", *found.lines])
    return found.train_rows


def export(request: ExportRequest, *, console: Console | None = None) -> ExportReport:
    """Merge, quantize, write and verify what a run, or a model and an adapter, hold."""
    from swiftfp8.export.export import export_checkpoint
    from swiftfp8.export.request import resolve_request

    console = console or Console()
    job = resolve_request(request, console=console)
    report = _write_export(job, export_checkpoint)
    console.print(report)
    return report


def merge(request: ExportRequest, *, console: Console | None = None) -> ExportReport:
    """`export` in BF16: the adapter merged into the model, nothing quantized.

    Raises:
        SwiftFP8Error: another format was asked for.
    """
    from swiftfp8.export.export import merge_checkpoint
    from swiftfp8.export.request import resolve_request

    console = console or Console()
    asked = apply_overrides(Config(), request.overrides)
    if asked.export.format not in ("auto", "bf16") or asked.export_quantization_bit == 8:
        raise SwiftFP8Error(
            "merge writes BF16, and another format was asked for",
            where="export.format",
            fix="swiftfp8 export, with the same options, writes it",
        )
    job = resolve_request(request, console=console, default_name="merged")
    report = _write_export(job, merge_checkpoint)
    console.print(report)
    return report


def verify(request: VerifyRequest, *, console: Console | None = None) -> bool:
    """Check a checkpoint directory that anybody wrote; print its faults. True where it is sound."""
    from swiftfp8.export.check import check_checkpoint

    result = check_checkpoint(
        Path(request.dir), reload=request.reload, trust_remote_code=request.trust_remote_code
    )
    (console or Console()).print(result)
    return result.sound


def infer(request: InferRequest) -> None:
    """Ask a run, an adapter on its base, or an export; a chat's reply is streamed."""
    from swiftfp8.config.compose import read_resolved
    from swiftfp8.export.request import locate
    from swiftfp8.infer import Sampling, chat
    from swiftfp8.infer_task import judge

    model_dir, adapter_dir = locate(request, hub=request.hub)
    trusted = request.run is not None and read_resolved(Path(request.run)).trust_remote_code
    trained = read_task_file(adapter_dir or model_dir)
    with threads_for(model_dir):
        if trained is not None:
            judge(
                model_dir,
                adapter_dir,
                trained,
                prompt=request.prompt,
                trust_remote_code=request.trust_remote_code or trusted,
            )
            return
        chat(
            model_dir,
            adapter_dir,
            prompt=request.prompt,
            system=request.system,
            sampling=Sampling(
                max_new_tokens=request.max_new_tokens,
                temperature=request.temperature,
                top_p=request.top_p,
                seed=request.seed,
                enable_thinking=request.enable_thinking,
            ),
            trust_remote_code=request.trust_remote_code or trusted,
        )


def evaluate(request: EvalRequest, *, console: Console | None = None) -> Evaluation:
    """Generate answers to held-out questions, compare them with those wanted, and print that."""
    from swiftfp8 import evaluate as stage
    from swiftfp8.config.compose import read_resolved
    from swiftfp8.export.request import locate
    from swiftfp8.infer import Sampling, check_sampling

    sampling = Sampling(
        max_new_tokens=request.max_new_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        seed=request.seed,
    )
    check_sampling(sampling)
    if request.limit < 0:
        raise SwiftFP8Error("limit must not be negative; 0 asks all rows", where="limit")
    if request.batch_size < 1:
        raise SwiftFP8Error("batch_size must be at least 1", where="batch_size")
    if request.out is not None:
        stage.check_writable(Path(request.out))
    console = console or Console()
    model_dir, adapter_dir = locate(request, hub=request.hub)
    trained = read_task_file(adapter_dir or model_dir)
    if trained is not None:
        raise SwiftFP8Error(
            f"what task={trained.task} trained puts out no words",
            where=str(adapter_dir or model_dir),
            fix="its metrics on evaluation rows are in the run's logging.jsonl (eval_...)",
        )
    run = read_resolved(Path(request.run)) if request.run else Config()
    entries = [name.strip() for name in (request.dataset or "").strip("[]").split(",")]
    with threads_for(model_dir):
        found = stage.evaluate(
            stage.rows_of(run, list(filter(None, entries))),
            model_dir,
            adapter_dir,
            sampling=sampling,
            limit=request.limit,
            batch_size=request.batch_size,
            trust_remote_code=request.trust_remote_code or run.trust_remote_code,
            console=console,
        )
    stage.print_evaluation(found, console)
    if request.out is not None:
        stage.write_evaluation(found, Path(request.out))
    return found


def bench(
    request: BenchRequest, composed: Composed, *, console: Console | None = None
) -> list[Row]:
    """Time the job's own steps beside its peers', each in a process of its own."""
    from swiftfp8 import bench as stage

    with sources_named(composed):
        _, made = _plan(composed.config, probe())
    console = console or Console()
    print_plan(made, console)
    console.print()
    return stage.bench(request, composed, console)


def deploy(request: DeployRequest, extra: Sequence[str] = ()) -> None:
    """Hand over to an engine that serves an export; `extra` are arguments of its own."""
    from swiftfp8.deploy import deploy as stage

    stage(
        Path(request.dir),
        request.engine,
        python=request.python,
        host=request.host,
        port=request.port,
        extra=extra,
    )


def doctor(console: Console | None = None) -> int:
    """Report what this machine can do: 0 where FP8 is ready, 3 where it is not."""
    from swiftfp8 import doctor as stage

    return stage.doctor(console or Console())


def _write_export(job: ExportJob, write: Callable[..., ExportReport]) -> ExportReport:
    from swiftfp8.export.task_base import task_base

    trusted = job.context.trust_remote_code
    with (
        threads_for(job.model_dir),
        task_base(
            job.model_dir, job.adapter_dir, job.export_dir, trust_remote_code=trusted
        ) as base,
    ):
        return write(base, job.adapter_dir, job.export_dir, job.settings, job.context)


def _prepare(config: Config) -> tuple[ModelSource, Plan]:
    """The model and the plan of a run that nothing known beforehand keeps from ending well.

    Raises:
        SwiftFP8Error: a checkpoint, an export or a run directory that can't be used, a package that
            is missing, and what the plan finds: all of them together.
    """
    from swiftfp8.export.request import check_export_after_training, check_export_of_model
    from swiftfp8.models.load import require_attention
    from swiftfp8.train.metrics import require_reporters
    from swiftfp8.train.run_place import check_run_directory

    problems: list[SwiftFP8Error] = []
    with collected(problems):
        check_run_directory(config)
    with collected(problems):
        check_export_after_training(config)
    with collected(problems):
        require_reporters(config.report_to)
    with collected(problems):
        require_attention(config.attn_implementation)
    with collected(problems):
        source, made = _plan(config, probe())
    raise_all(problems)
    check_export_of_model(config, source.path)
    return source, made


def _name_note(config: Config) -> list[str]:
    from swiftfp8.train.run_place import unused_name

    said = unused_name(config)
    return [f"  note: {said}"] if said else []


def _read_rows(config: Config, source: ModelSource, made: Plan) -> tuple[Any, Datasets]:
    """The tokenizer and the rows in its tokens."""
    from swiftfp8.data.dataset import load_datasets
    from swiftfp8.models.load import load_tokenizer

    tokenizer = load_tokenizer(source, config.template, config.trust_remote_code)
    return tokenizer, load_datasets(
        config, tokenizer, made.fp8_token_multiple, head=made.head, pooling=made.pooling
    )


def _all_here(config: Config) -> bool:
    from swiftfp8.data.sources import entry_files

    return all(entry_files(entry) for entry in (*config.dataset, *config.val_dataset))


def _plan(config: Config, hardware: Hardware) -> tuple[ModelSource, Plan]:
    from swiftfp8.models.load import load_meta
    from swiftfp8.models.source import resolve_source

    source = resolve_source(config)
    return source, build_plan(config, hardware, load_meta(source, config, _head(config)))


def _head(config: Config) -> Head | None:
    """What the model puts out, where the task gives it a head of its own; rows may tell."""
    if config.task == "reward":
        return REWARD_HEAD
    if config.task != "seq_cls":
        return None
    from swiftfp8.data.labels import find_head

    return find_head(config)


def _refuse_several_processes() -> None:
    """Under torchrun every process would begin a run of its own."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise SwiftFP8Error(
            "a run is one process on one GPU, and this one was started as part of several",
            where=f"WORLD_SIZE={os.environ['WORLD_SIZE']}",
            fix="start swiftfp8 without torchrun or accelerate launch",
        )


@contextmanager
def _kept_once_begun(run_dir: Path) -> Iterator[None]:
    """Remove a run directory in which nothing was trained yet when an error ends the run."""
    from swiftfp8.train.checkpoint import newest_checkpoint
    from swiftfp8.train.run_dir import discard_run, release_run
    from swiftfp8.train.run_place import resume_command

    try:
        yield
    except BaseException as error:
        kept = not discard_run(run_dir)
        if kept and isinstance(error, KeyboardInterrupt) and newest_checkpoint(run_dir):
            print(f"its last checkpoint goes on with: {resume_command(run_dir)}", file=sys.stderr)
        raise
    finally:
        release_run(run_dir)


@contextmanager
def _export_told(run_dir: Path) -> Iterator[None]:
    """Say that training is done, and how to get its export, where that fails or is interrupted."""
    try:
        yield
    except BaseException:
        command = f"swiftfp8 export {shlex.quote(f'run={run_dir}')}"
        print(f"training is done, its export is not: {command}", file=sys.stderr)
        raise


def _print_lines(console: Console, lines: list[str]) -> None:
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _free_memory() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
