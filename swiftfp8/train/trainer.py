"""The training stage: model, data and plan in, a run directory with checkpoints and a log out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console

from swiftfp8 import inject
from swiftfp8.config.absolute import with_absolute_paths
from swiftfp8.config.schema import Config
from swiftfp8.errors import RunFailed, SwiftFP8Error
from swiftfp8.plan import Plan
from swiftfp8.report.images import draw_images
from swiftfp8.tasks import uses_reference
from swiftfp8.train import checkpoint as store
from swiftfp8.train.arguments import count_steps, training_arguments
from swiftfp8.train.batches import STREAM, data_shape
from swiftfp8.train.callbacks import AtFirstStep, Cadence, EarlyStop, PrecisionWatch
from swiftfp8.train.changes import changes, changes_training, describe_job
from swiftfp8.train.coverage import record_coverage
from swiftfp8.train.damage import require_readable
from swiftfp8.train.failing import RowsFailed, broken_off, out_of_rows
from swiftfp8.train.flops import flops_per_token, peak_flops
from swiftfp8.train.log_probs import offer_log_probs
from swiftfp8.train.loop import FP8Trainer
from swiftfp8.train.losses import fuse_loss, weigh_loss
from swiftfp8.train.metrics import (
    Meter,
    Progress,
    RunLog,
    peak_memory_gib,
    read_log,
    require_reporters,
)
from swiftfp8.train.objectives import build_objective
from swiftfp8.train.progress import Display, open_display
from swiftfp8.train.reference import add_reference
from swiftfp8.train.run_dir import RECORDS, confirm_run, write_json
from swiftfp8.train.run_place import RESULT_FILE, resume_command
from swiftfp8.train.separation import require_separate_rows
from swiftfp8.train.session import Session
from swiftfp8.train.signals import StopRequest
from swiftfp8.train.weights import check_fingerprint, fingerprint


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What came of a run. Losses are those of `logging.jsonl`: its first, its last.

    `metrics` are the last evaluation's, by the log's names (`eval_accuracy`), without its loss.
    `steps` are optimizer steps in all, those before a resume included. `tokens_per_second` and
    `seconds_per_step` leave warm-up, evaluation and saving out. `interrupted`: a signal ended the
    run early, after saving. `left_out`: rows of a stream that gave nothing to train on, by reason,
    in all sessions and passes; of other data the report before training says it.
    """

    run_dir: Path
    steps: int
    first_loss: float | None
    last_loss: float | None
    eval_loss: float | None
    best_checkpoint: Path | None
    last_checkpoint: Path | None
    tokens_per_second: float | None
    seconds_per_step: float | None
    peak_memory_gib: float
    interrupted: bool
    metrics: dict[str, float] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)


def run_training(
    model: Any,
    tokenizer: Any,
    datasets: Any,
    plan: Plan,
    config: Config,
    run_dir: Path,
    resume_from: Path | None = None,
    *,
    console: Console | None = None,
    warmup_steps: int = 1,
    saves: bool = True,
) -> TrainResult:
    """Train an injected model and return what came of it.

    Args:
        model: what `inject_precision` returned, on its device.
        tokenizer: saved beside each checkpoint; None saves none.
        datasets: `train`, `eval` (or None) and `collator`.
        plan: obeyed to the letter.
        config: the training options.
        run_dir: what `start_run` returned.
        resume_from: a checkpoint or run directory to go on from.
        console: where progress is shown; standard output where left out.
        warmup_steps: how many steps `tokens_per_second` and `seconds_per_step` leave out.
        saves: write checkpoints; a trial does not.

    Raises:
        SwiftFP8Error: nothing was begun: a missing reporter, an empty data set, a checkpoint of
            another job.
        RunFailed: training broke off; the run directory is kept.
    """
    require_reporters(config.report_to)
    rows = None if config.data.streaming else len(datasets.train)
    if rows == 0:
        raise SwiftFP8Error(
            "the training data set is empty", where="dataset", fix="give it at least one row"
        )
    mark = fingerprint(plan, model, config.optim.name)
    job = describe_job(with_absolute_paths(config), plan)
    start = _StartPoint.find(resume_from, run_dir, mark, job)
    total = count_steps(rows, config, int(os.environ.get("WORLD_SIZE", "1")))
    if plan.recipe is not None and plan.start_step >= total:
        raise SwiftFP8Error(
            f"FP8 would never run: it switches on after step {plan.start_step}, and the run has "
            f"{total}",
            where="precision.start_step",
            fix=f"set precision.start_step below {total}, or dtype={plan.compute_dtype}",
        )
    start.require_left(total)
    arguments = training_arguments(config, plan, run_dir, total)
    meter = Meter(
        flops_per_token=flops_per_token(plan),
        peak_flops=peak_flops(torch.cuda.get_device_name()) if plan.device == "cuda" else None,
        device=plan.device,
        warmup_steps=warmup_steps,
    )
    display = open_display(console or Console(), total, start.step)
    log = RunLog(run_dir)
    if rows is None and start.data.get(STREAM):
        datasets.train.start_at(start.data[STREAM])
    start.announce(display, data_shape(rows, config), total)
    with StopRequest() as stop, _finishing(display, log, run_dir, images=config.train.images):
        session = Session(
            plan=plan,
            config=config,
            run_dir=run_dir,
            tokenizer=tokenizer,
            fingerprint=mark,
            job=job,
            meter=meter,
            log=log,
            display=display,
            stop=stop,
            objective=build_objective(model, plan, config),
        )
        _prepare_loss(model, plan, weighted=bool(config.data.loss_weights))
        if start.step < total:
            if uses_reference(config) and config.rlhf.precompute_ref:
                datasets = add_reference(model, datasets, session)
            _train(model, datasets, session, arguments, start, saves=saves)
            _require_taken_steps(session, total)
        else:
            start.accept(session)
        result = _result(session, meter)
        if result.left_out:
            reasons = ", ".join(f"{n:,} x {reason}" for reason, n in result.left_out.items())
            display.note(f"rows left out of the stream: {reasons}")
        if stop.requested:
            display.note(f"interrupted at step {result.steps}, a checkpoint is saved; go on with:")
            display.note(f"  {resume_command(run_dir)}")
        else:
            write_json(run_dir / RESULT_FILE, asdict(result))
    return result


@dataclass(frozen=True, kw_only=True)
class _StartPoint:
    """Where a run begins: at nothing, or at a checkpoint."""

    checkpoint: Path | None
    step: int
    same_run: bool
    progress: Progress
    data: dict[str, Any]
    changed: dict[str, list[str]] = field(default_factory=dict)
    said: bool = True  # the checkpoint says what job wrote it

    @classmethod
    def find(
        cls, resume_from: Path | None, run_dir: Path, mark: dict[str, Any], job: dict[str, Any]
    ) -> _StartPoint:
        if resume_from is None:
            return cls(checkpoint=None, step=0, same_run=True, progress=Progress(), data={})
        checkpoint = store.find_resume(resume_from)
        require_readable(checkpoint)
        check_fingerprint(checkpoint, mark)
        manifest = store.read_manifest(checkpoint)
        return cls(
            checkpoint=checkpoint,
            step=manifest["step"],
            same_run=checkpoint.resolve().parent == run_dir.resolve(),
            progress=Progress.from_dict(manifest["progress"]),
            data=manifest["data"],
            changed=changes(manifest.get("job"), job),
            said="job" in manifest,
        )

    def require_left(self, total: int) -> None:
        """Refuse another job's options where they leave nothing to train under them."""
        if self.step < total or not changes_training(self.changed):
            return
        raise SwiftFP8Error(
            f"nothing is left to train: the checkpoint is at step {self.step}, and with these "
            f"options the run ends at step {total}; against the checkpoint's job, "
            + "; ".join(", ".join(lines) for lines in self.changed.values()),
            where=f"resume_from_checkpoint={self.checkpoint}",
            fix=f"set max_steps over {self.step}, or start a new run without "
            "resume_from_checkpoint",
        )

    def accept(self, session: Session) -> None:
        """Write down what the run is told now, and take its directory back to this step.

        Called once nothing can refuse the resume any more: until then the run is as it was.
        """
        confirm_run(session.run_dir)
        self._rewind(session.run_dir)
        session.log.drop_after(self.step if self.same_run else 0)
        if self.changed and self.same_run:
            session.display.note(f"the earlier session's records are in {RECORDS}/")

    def _rewind(self, run_dir: Path) -> None:
        """Take the run directory back to the state that it had at this step."""
        (run_dir / RESULT_FILE).unlink(missing_ok=True)
        if self.checkpoint is None or not self.same_run:
            return
        store.set_aside_after(run_dir, self.step)
        store.link(run_dir, "last", self.checkpoint)
        best = run_dir / f"checkpoint-{self.progress.best_step}"
        store.link(run_dir, "best", best if best.is_dir() else None)

    def announce(self, display: Display, data: dict[str, Any], total: int) -> None:
        """Say where the run goes on, and what keeps it from being an exact continuation."""
        if self.checkpoint is None:
            return
        display.note(f"resuming at step {self.step} from {self.checkpoint}")
        if not self.said:
            display.note("the checkpoint, of an older version, does not say which job wrote it")
        for kind, lines in self.changed.items():
            display.note(f"changed since the checkpoint, {kind}: {', '.join(lines)}")
        # Checkpoints of old don't mention packing, and streams have other things to mention.
        before = {"packing": False, "streaming": False, **self.data}
        changed = [f"{k} {before.get(k)} -> {data[k]}" for k in data if data[k] != before.get(k)]
        if changed:
            display.note(
                "WARNING: the data is not read as before (" + ", ".join(changed) + "): rows may "
                "be seen twice or not at all"
            )
        if self.step >= total:
            display.note(f"nothing is left to train: the run ends at step {total}")


def _prepare_loss(model: Any, plan: Plan, *, weighted: bool) -> None:
    """Let the model compute its loss, or log-probabilities, as the plan says."""
    if plan.task == "dpo":
        offer_log_probs(model, chunked=plan.loss.fused)
    elif plan.loss.fused and (unfused := fuse_loss(model)):
        raise SwiftFP8Error(
            f"the plan fuses the loss with the head, but {unfused}",
            where="train.fused_loss",
            fix="set train.fused_loss=off",
        )
    elif weighted and not plan.loss.fused:
        weigh_loss(model)


def _train(
    model: Any,
    datasets: Any,
    session: Session,
    arguments: transformers.TrainingArguments,
    start: _StartPoint,
    *,
    saves: bool,
) -> None:
    config, plan = session.config, session.plan
    if config.packing:
        collator = datasets.collator.inner if config.data.streaming else datasets.collator
        require_separate_rows(model, plan, collator)
    verbosity = transformers.logging.get_verbosity()
    trainer = FP8Trainer(
        session,
        model=model,
        args=arguments,
        data_collator=datasets.collator,
        train_dataset=datasets.train,
        eval_dataset=datasets.eval,
        callbacks=[
            AtFirstStep(partial(start.accept, session)),
            Cadence(
                config.train,
                evaluates=datasets.eval is not None and len(datasets.eval) > 0,
                begin=partial(session.meter.begin, start.progress),
                stop_requested=lambda: session.stop.requested,
                saves=saves,
            ),
            EarlyStop(
                config.train.early_stopping_patience,
                progress=lambda: session.meter.progress,
                note=session.display.note,
                saves=saves,
            ),
            PrecisionWatch(
                plan.start_step,
                partial(_switch_fp8, model),
                lambda step: record_coverage(model, plan, session.run_dir, step, session.display),
            ),
        ],
    )
    try:
        trainer.train(resume_from_checkpoint=str(start.checkpoint) if start.checkpoint else None)
    except RowsFailed as failed:
        error = failed.__cause__ or failed
        raise out_of_rows(error, trainer, start.step, saves=saves) from error
    except SwiftFP8Error:
        raise
    except Exception as error:
        raise broken_off(error, trainer.state.global_step, session.run_dir) from error
    finally:
        trainer.worker_deaths.release()
        transformers.logging.set_verbosity(verbosity)


def _require_taken_steps(session: Session, total: int) -> None:
    """Fail where FP16's loss scaler skipped every step: the weights are those it began with."""
    if session.meter.progress.skipped_steps < total:
        return
    raise RunFailed(
        f"nothing was trained: FP16's loss scaler skipped each of {total} steps, as no gradient "
        "was ever finite",
        where=str(session.run_dir),
        fix="lower learning_rate, train for more steps (the scale halves with each that is "
        "skipped), or take dtype=bf16 or fp32 where the hardware has it",
    )


def _switch_fp8(model: Any, on: bool) -> None:
    inject.set_fp8_enabled(model, on)
    inject.reset_coverage(model)


@contextmanager
def _finishing(display: Display, log: RunLog, run_dir: Path, *, images: bool) -> Iterator[None]:
    """Close what is open and draw the pictures, however the run ends but by a second Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        images = False
        raise
    finally:
        display.close()
        log.close()
        if images:
            try:
                draw_images(run_dir)
            except OSError as error:
                display.note(f"WARNING: could not write images/: {error.strerror or error}")


def _result(session: Session, meter: Meter) -> TrainResult:
    lines = read_log(session.run_dir)
    losses = [line["loss"] for line in lines if "loss" in line]
    evaluations = [line["eval_loss"] for line in lines if "eval_loss" in line]
    metrics = [
        {key: value for key, value in line.items() if key.startswith("eval_")}
        for line in lines
        if "eval_loss" in line
    ]
    last = store.newest_checkpoint(session.run_dir)
    manifest = store.read_manifest(last) if last else {"step": 0, "data": {}}
    best = session.run_dir / "best"
    return TrainResult(
        run_dir=session.run_dir,
        steps=manifest["step"],
        first_loss=losses[0] if losses else None,
        last_loss=losses[-1] if losses else None,
        eval_loss=evaluations[-1] if evaluations else None,
        best_checkpoint=session.run_dir / best.readlink() if best.is_symlink() else None,
        last_checkpoint=last,
        tokens_per_second=meter.steady_rate(),
        seconds_per_step=meter.seconds_per_step(),
        peak_memory_gib=peak_memory_gib(cuda=session.plan.device == "cuda"),
        interrupted=session.stop.requested,
        metrics={k: v for k, v in metrics[-1].items() if k != "eval_loss"} if metrics else {},
        left_out=(manifest["data"].get(STREAM) or {}).get("left_out", {}),
    )
