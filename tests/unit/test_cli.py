"""The command line: commands reach the pipeline, errors are one screen, nothing heavy is loaded."""

from __future__ import annotations

import errno
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from cli_kit import run_cli
from typer.testing import CliRunner, Result

from swiftfp8 import cli, pipeline
from swiftfp8.errors import RunFailed, SwiftFP8Error
from swiftfp8.failures import guarded, interrupt_on_sigterm
from swiftfp8.requests import ExportRequest, InferRequest

GOLDEN = Path(__file__).parent.parent / "golden" / "cli.txt"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SWIFTFP8_DEBUG", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Pipeline functions that note how they were called; `train` may be replaced again."""
    noted: list[tuple[Any, ...]] = []

    def noting(name: str, result: Any) -> Callable[..., Any]:
        def stand_in(*args: Any, **_: Any) -> Any:
            noted.append((name, *args))
            return result

        return stand_in

    result = SimpleNamespace(run_dir=Path("run"), last_loss=1.5, eval_loss=None, interrupted=False)
    for name in ("train", "plan", "dry_run", "export", "merge", "infer"):
        monkeypatch.setattr(pipeline, name, noting(name, result))
    monkeypatch.setattr(pipeline, "doctor", noting("doctor", 3))
    return noted


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments), prog_name="swiftfp8")


def test_train_composes_and_trains(calls: list[tuple[Any, ...]]) -> None:
    assert call("train", "config=quickstart", "lora_rank=4").exit_code == 0
    ((name, composed),) = calls
    assert name == "train"
    assert composed.config.lora_rank == 4 and composed.overrides == ("lora_rank=4",)


def test_one_of_several_processes_begins_no_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = call("train", "config=quickstart")
    assert (result.exit_code, list(folder.iterdir())) == (2, [])
    assert "WORLD_SIZE=2" in result.stderr and "without torchrun" in result.stderr


def test_dry_run_plans_and_stops(calls: list[tuple[Any, ...]]) -> None:
    assert call("train", "config=quickstart", "--dry-run").exit_code == 0
    assert [name for name, *_ in calls] == ["dry_run"]


def test_a_dry_run_of_a_sweep_heads_each_plan(calls: list[tuple[Any, ...]]) -> None:
    result = call("train", "config=quickstart", "learning_rate=1e-4,2e-4", "--dry-run")
    assert [composed.config.learning_rate for _, composed in calls] == [1e-4, 2e-4]
    assert "run 1 of 2: learning_rate=0.0001" in result.stdout
    assert "run 2 of 2: learning_rate=0.0002" in result.stdout


def test_plan_takes_hardware(calls: list[tuple[Any, ...]]) -> None:
    assert call("plan", "config=quickstart", "hardware=a100", "dtype=fp8").exit_code == 0
    ((name, composed, hardware),) = calls
    assert (name, composed.config.dtype, hardware) == ("plan", "fp8", "a100")


@pytest.mark.parametrize("command", ["export", "merge"])
def test_export_and_merge_pass_what_they_are_asked(
    calls: list[tuple[Any, ...]], command: str
) -> None:
    tokens = ["run=r", "checkpoint=last", "export.verify=false", "export_dir=out"]
    assert call(command, *tokens).exit_code == 0
    request = ExportRequest(
        run="r", checkpoint="last", overrides=("export.verify=false", "export_dir=out")
    )
    assert calls == [(command, request)]


def test_infer_takes_text_as_typed(calls: list[tuple[Any, ...]]) -> None:
    tokens = ["run=r", "prompt=What's 2+2, or a=b #1?", "temperature=0.7", "max_new_tokens=9"]
    assert call("infer", *tokens).exit_code == 0
    request = InferRequest(
        run="r", prompt="What's 2+2, or a=b #1?", temperature=0.7, max_new_tokens=9
    )
    assert calls == [("infer", request)]


@pytest.mark.parametrize(("typed", "value"), [("true", True), ("False", False), ("null", None)])
def test_thinking_is_on_off_or_the_templates_choice(
    calls: list[tuple[Any, ...]], typed: str, value: bool | None
) -> None:
    assert call("infer", "run=r", f"enable_thinking={typed}").exit_code == 0
    assert calls == [("infer", InferRequest(run="r", enable_thinking=value))]


def test_doctors_answer_is_the_exit_code(calls: list[tuple[Any, ...]]) -> None:
    assert call("doctor").exit_code == 3


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("train", "config=quickstart", "lora_rnk=8"), ["did you mean lora_rank?"]),
        (
            ("train", "config=quickstart", "lora_rnk=8", "dtype=fp9"),
            ["error: unknown key 'lora_rnk'", "error: unknown dtype 'fp9'", "did you mean fp8?"],
        ),
        (("train",), ["error: no model to train", "error: no dataset to train on"]),
        (("train", "quickstart"), ["config=quickstart"]),
        (("export", "rn=x"), ["did you mean run?"]),
        (("export", "run=x", "format=fp8"), ["did you mean export.format?"]),
        (("train", "--config", "my.yaml"), ["fix:   write swiftfp8 train config=my.yaml\n"]),
        (
            ("train", "config=my", "--lora-rank", "16", "--lr=1e-4", "--packing", "--dry-run"),
            ["write swiftfp8 train config=my lora_rank=16 learning_rate=1e-4 packing=true --dry-"],
        ),
        (("infer", "--run", "output/r"), ["write swiftfp8 infer run=output/r"]),
        (("train", "--dryrun"), ["No such option", "--dry-run"]),
        (("data", "inspect", "--dataset", "x"), ["write swiftfp8 data inspect dataset=x"]),
        (("data", "inspect", "config=quickstart", "show=a"), ["such as show=3"]),
        (("train", "lora_rank", "=", "16"), ["write lora_rank=16"]),
        (("infer", "max_new_tokens=abc"), ["max_new_tokens must be a whole", "max_new_tokens=512"]),
        (("bench", "config=quickstart", "steps=no"), ["steps must be", "steps=10"]),
        (("infer", "rn=x", "seed=a"), ["did you mean run?", "whole number"]),
        (("config", "explain", "lora_rnk"), ["did you mean lora_rank?"]),
        (("config", "show", "lora_rank=1,2"), ["a comma list is a sweep"]),
        (("trian",), ["train"]),
    ],
)
def test_a_mistake_is_exit_code_2_and_no_traceback(
    calls: list[tuple[Any, ...]], arguments: tuple[str, ...], expected: list[str]
) -> None:
    result = call(*arguments)
    assert result.exit_code == 2 and not calls
    assert all(text in result.stderr for text in expected), result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (SwiftFP8Error("wrong", where="here", fix="so"), 2, "error: wrong\n  where: here\n"),
        (RunFailed("loss is not finite"), 1, "error: loss is not finite"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (ZeroDivisionError("division"), 1, "error: ZeroDivisionError: division\n"),
    ],
)
def test_exit_codes(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, text: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(pipeline, "train", fail)
    result = call("train", "config=quickstart")
    assert (result.exit_code, "Traceback" in result.stderr) == (code, False)
    assert text in result.stderr
    monkeypatch.setenv("SWIFTFP8_DEBUG", "1")
    again = call("train", "config=quickstart")
    assert (again.exit_code, "Traceback" in again.stderr) == (code, True)


def test_an_interrupted_run_that_saved_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "train", lambda *_: SimpleNamespace(interrupted=True))
    assert call("train", "config=quickstart").exit_code == 130


def test_a_sweep_over_lists_shows_them(calls: list[tuple[Any, ...]]) -> None:
    result = call("train", "config=quickstart", "target_modules=[q_proj],[k_proj]")
    assert result.exit_code == 0
    assert result.stdout.count("target_modules=[k_proj]") == 3  # the list, the rule, the summary


def test_a_sweep_goes_on_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def train(composed: Any, **_: Any) -> Any:
        seen.append(composed.config.lora_rank)
        if seen[-1] == 2:
            raise RunFailed("loss is not finite")
        return SimpleNamespace(
            run_dir=Path(f"output/r{seen[-1]}"), last_loss=0.25, eval_loss=0.5, interrupted=False
        )

    monkeypatch.setattr(pipeline, "train", train)
    result = call("train", "config=quickstart", "lora_rank=1,2,3", "seed=5")
    assert (result.exit_code, seen) == (1, [1, 2, 3])
    first_run = result.stdout.index("run 1 of 3")
    assert result.stdout.index("a sweep of 3 runs") < first_run
    summary = result.stdout[result.stdout.index("what came of it") :]
    assert summary.count("done") == 2 and summary.count("failed") == 1
    assert "output/r3" in summary and "0.2500" in summary and "seed=5" not in summary
    assert "loss is not finite" in result.stderr


def test_a_sweep_with_a_member_that_can_not_begin_begins_none(
    calls: list[tuple[Any, ...]],
) -> None:
    result = call("train", "model_type=tiny", "dataset=quickstart,null")
    assert (result.exit_code, calls) == (2, [])
    assert "no dataset to train on" in result.stderr


def test_an_interrupted_sweep_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    def train(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "train", train)
    result = call("train", "config=quickstart", "lora_rank=1,2")
    assert result.exit_code == 130 and "not run" in result.stdout


def test_the_looking_commands(folder: Path) -> None:
    assert "lora_rank: 4" in call("config", "show", "config=quickstart", "lora_rank=4").stdout
    explained = call("config", "explain", "lora_rank", "config=quickstart").stdout
    assert "lora_rank = 32" in explained and "recipes/quickstart.yaml:" in explained
    assert "quickstart" in call("config", "list").stdout
    assert call("config", "copy", "quickstart").exit_code == 0
    assert call("config", "diff", "quickstart", "quickstart.yaml").stdout == "no difference\n"
    assert "tiny" in call("models").stdout
    assert "quickstart" in call("datasets").stdout
    assert call("--version").stdout.startswith("swiftfp8 ")
    assert (folder / "quickstart.yaml").is_file()


def test_a_note_goes_to_stderr() -> None:
    result = call("config", "show", "precision.interval=1")
    assert result.exit_code == 0 and "note: precision.interval" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "limit"),
    [(("--help",), 0.6), (("config", "show", "config=quickstart"), 1.0)],
)
def test_it_answers_at_once(arguments: tuple[str, ...], limit: float) -> None:
    """Processor time, the best of three: other work on the machine does not count."""
    spent = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert run_cli(*arguments).returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    assert min(spent) < limit


@pytest.mark.parametrize(
    ("arguments", "absent"),
    [
        (("--help",), ("torch", "transformers", "hydra", "pydantic", "datasets")),
        (("config", "show"), ("torch", "transformers", "datasets")),
    ],
)
def test_it_imports_nothing_heavy(arguments: tuple[str, ...], absent: tuple[str, ...]) -> None:
    result = run_cli(*arguments, env={"PYTHONPROFILEIMPORTTIME": "1"})
    assert result.returncode == 0
    imported = {line.split("|")[-1].strip() for line in result.stderr.splitlines()}
    assert "swiftfp8.cli" in imported
    assert not {name for name in imported if name.split(".")[0] in absent}


def test_sigterm_ends_a_command_as_ctrl_c_does(capsys: pytest.CaptureFixture[str]) -> None:
    cleaned = []

    @guarded
    def command() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        finally:
            cleaned.append(True)

    before = signal.getsignal(signal.SIGTERM)
    try:
        interrupt_on_sigterm()
        with pytest.raises(typer.Exit) as caught:
            command()
        helper = os.fork()
        if not helper:  # a helper process that inherits the handler dies as before
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        status = os.waitpid(helper, 0)[1]
    finally:
        signal.signal(signal.SIGTERM, before)
    assert caught.value.exit_code == 130 and cleaned
    assert "interrupted" in capsys.readouterr().err
    assert os.WTERMSIG(status) == signal.SIGTERM


def test_the_real_command_exits_2_on_a_mistake(folder: Path) -> None:
    result = run_cli("train", "config=quickstart", "lora_rnk=8", cwd=folder)
    assert result.returncode == 2
    assert result.stderr == (
        "error: unknown key 'lora_rnk'\n"
        "  where: command line, lora_rnk=8\n"
        "  fix:   did you mean lora_rank?\n"
    )
    assert list(folder.iterdir()) == []


def test_the_command_line_is_the_frozen_one() -> None:
    """tests/golden/cli.txt is what users script against: change it on purpose, with a changelog."""
    assert "\n".join(_surface(typer.main.get_command(cli.app), "swiftfp8")) == GOLDEN.read_text()


def _surface(command: Any, name: str) -> list[str]:
    """Names, parameters and help of a command and those below it, whatever typer's layout."""
    lines = [f"$ {name}", *(f"  {line}".rstrip() for line in (command.help or "").splitlines())]
    for param in command.params:
        if param.name in ("install_completion", "show_completion"):
            continue
        option = param.param_type_name == "option"
        lines.append(
            f"  - {', '.join(param.opts)}: {param.help}" if option else f"  - {param.name}"
        )
    lines.append("")
    for child, below in sorted(getattr(command, "commands", {}).items()):
        lines += _surface(below, f"{name} {child}")
    return lines


def test_a_file_that_may_not_be_read_is_the_users_to_mend(folder: Path) -> None:
    @guarded
    def reading() -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(folder / "config.json"))

    app = typer.Typer()
    app.command()(reading)
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 2
    assert "a file can't be used: Permission denied" in result.output
    assert f"where: {folder / 'config.json'}" in result.output and "bug" not in result.output
