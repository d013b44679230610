"""Rows tokenized by several processes: the same rows, reports and errors as by one."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from swiftfp8.config.schema import Config
from swiftfp8.data import processes
from swiftfp8.data.cache import token_cache
from swiftfp8.data.chat import Example
from swiftfp8.data.dataset import load_datasets
from swiftfp8.data.processes import count_processes, spread
from swiftfp8.errors import RunFailed, SwiftFP8Error

linux = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")
DPO = "quickstart-preferences"


def load(tokenizer, num_proc, **config):
    data = {"num_proc": num_proc, **config.pop("data", {})}
    return load_datasets(Config(data=data, **config), tokenizer, 8)


def rows_of(datasets):
    return [{k: np.asarray(v).tolist() for k, v in row.items()} for row in datasets.train]


@linux
@pytest.mark.parametrize(
    "config",
    [
        {"dataset": ["quickstart", "quickstart-reworded"], "max_length": 64},
        {"dataset": "quickstart", "packing": True, "max_length": 256},
        {"dataset": DPO, "task": "dpo", "max_length": 128},
    ],
    ids=["sft", "packed", "dpo"],
)
def test_three_processes_make_the_rows_and_report_of_one(tokenizer, config, monkeypatch):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    one, three = load(tokenizer, 1, **config), load(tokenizer, 3, **config)
    assert rows_of(one) == rows_of(three)
    assert one.report == three.report
    assert "TOKENIZERS_PARALLELISM" not in os.environ


@linux
def test_bad_rows_of_the_template_are_named_as_by_one_process(tokenizer, tmp_path):
    tokenizer.chat_template = (
        "{% for m in messages %}{% if 'no' in m.content %}{{ raise_exception('not this') }}"
        "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    path = tmp_path / "rows.jsonl"
    said = ["no" if k in (3, 40, 77) else "yes" for k in range(90)]
    path.write_text("".join(f'{{"instruction": "q", "output": "{s}"}}\n' for s in said))
    told = []
    for num_proc in (1, 4):
        with pytest.raises(SwiftFP8Error) as caught:
            load(tokenizer, num_proc, dataset=str(path))
        told.append(str(caught.value))
    assert told[0] == told[1]
    assert all(f"{path}:{k}: the chat template refuses the row" in told[0] for k in (4, 41, 78))


def refuse(rows):
    for row in rows:
        if row == 57:
            raise SwiftFP8Error("no", where=f"file:{row}", fix="change it")
        yield row


@linux
def test_an_error_keeps_its_place_and_its_fix():
    with pytest.raises(SwiftFP8Error) as caught:
        list(spread(refuse, range(100), 2))
    assert (caught.value.where, caught.value.fix) == ("file:57", "change it")


@linux
def test_a_killed_process_is_a_failed_run_that_names_the_option():
    def die(rows):
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RunFailed, match="2 processes that tokenize was killed") as caught:
        list(spread(die, range(100), 2))
    assert caught.value.where == "data.num_proc"


@linux
def test_each_process_has_four_megabytes_of_rows_to_do(monkeypatch, caplog):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    small, large = ([Example(content="x" * n, where="f:1")] * 1000 for n in (1_000, 30_000))
    assert [count_processes(None, rows) for rows in (small, large)] == [1, 7]
    assert count_processes(None, large * 20) == 16
    assert count_processes(5, small) == 5
    assert count_processes(5, small[:2]) == 2
    monkeypatch.setattr(processes.sys, "platform", "darwin")
    assert count_processes(None, large) == count_processes(5, large) == 1
    assert "Linux alone" in caplog.text


def test_the_cache_key_does_not_see_how_many_processes(tokenizer):
    keys = {
        token_cache(
            Config(dataset="quickstart", data={"cache": True, "num_proc": n}), tokenizer
        ).path
        for n in (None, 1, 2)
    }
    assert len(keys) == 1


@linux
@pytest.mark.parametrize("signals", [1, 2])
def test_ctrl_c_ends_all_processes(signals):
    """A second Ctrl-C comes while the first one's exception is on its way: nothing may hang."""
    script = (
        "import time, os\n"
        "from swiftfp8.data.processes import spread\n"
        "def slow(rows):\n"
        "    os.write(1, b'%d\\n' % os.getpid())\n"
        "    time.sleep(0.2)\n"
        "    return rows\n"
        "list(spread(slow, range(400_000), 2))\n"
    )
    job = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    workers = {int(job.stdout.readline()) for _ in range(4)}
    for _ in range(signals):
        os.killpg(job.pid, signal.SIGINT)
        time.sleep(0.05)
    _, errors = job.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors and (signals > 1 or errors.count("Traceback") == 1)
    assert not any(alive(worker) for worker in workers)


@linux
def test_workers_do_not_outlive_a_killed_parent():
    script = (
        "import time, os\n"
        "from swiftfp8.data.processes import spread\n"
        "def slow(rows):\n"
        "    os.write(1, b'%d\\n' % os.getpid())\n"
        "    time.sleep(60)\n"
        "list(spread(slow, range(100), 2))\n"
    )
    job = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    workers = {int(job.stdout.readline()) for _ in range(2)}
    job.kill()
    job.wait()
    until = time.monotonic() + 30
    while any(alive(worker) for worker in workers) and time.monotonic() < until:
        time.sleep(0.1)
    assert not any(alive(worker) for worker in workers)


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
