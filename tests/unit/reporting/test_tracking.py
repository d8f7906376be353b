import configparser
import contextlib
import importlib.util
import io
import json
import logging
import os
import re
import resource
import shutil
import signal
import sqlite3
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes import stop_process

from hybrid_gkd.config import WandbConfig
from hybrid_gkd.errors import ConfigError
from hybrid_gkd.reporting import console as console_module
from hybrid_gkd.reporting import trackers as trackers_module
from hybrid_gkd.reporting import wandb_tracker as wandb_module
from hybrid_gkd.reporting.console import Console
from hybrid_gkd.reporting.logs import ConsoleHandler, silence_console
from hybrid_gkd.reporting.trackers import EXTRAS, Tracking, load_trackers
from hybrid_gkd.runtime.files import read_json_lines
from hybrid_gkd.testing import tiny_config
from hybrid_gkd.types import Generation, RunInfo

SAMPLE = Generation(prompt="12+30=", response="The sum is 42.", answer="42", reward=1.0, data_source="sums", sample=3)


def info(
    run_dir: Path = Path("unused"), *, total_steps=10, start_step=0, resume=False, console="auto", log_report=False
) -> RunInfo:
    return RunInfo(
        project_name="gkd", experiment_name="unit", run_dir=run_dir,
        config={
            "distillation": {"topk": 64},
            "trainer": {"console": console, "wandb": asdict(WandbConfig(notes="n", log_report=log_report))},
            "data": {"max_response_length": 120},
        },
        total_steps=total_steps, start_step=start_step, resume=resume,
    )


def make(run_dir: Path, loggers=("jsonl",), **kwargs) -> Tracking:
    return Tracking(list(loggers), info(run_dir, **kwargs))


def run_steps(run_dir: Path, steps, **kwargs) -> None:
    with make(run_dir, **kwargs) as tracker:
        for step in steps:
            tracker.log_generations([SAMPLE], step)
            tracker.log_lengths([1, 3, 3], step)
            tracker.log_tokens([{"prompt": "", "response": "", "num_tokens": 0, "tokens": []}], step)
            tracker.log({"actor/kl_loss": step / 10}, step)


def steps_of(path: Path) -> list[int]:
    return [row["step"] for row in read_json_lines(path)]


# --- trainer.logger


OWN_TRACKER = """
import json

class MyTracker:
    def __init__(self, info):
        self.file = open(info.run_dir / "own.txt", "w")

    def log(self, metrics, step):
        print(step, metrics["actor/kl_loss"], sorted(metrics), file=self.file)

    def log_generations(self, samples, step):
        print(step, *(sample.response for sample in samples), file=self.file)

    def close(self, *, failed):
        print("failed" if failed else "done", file=self.file)
        self.file.close()
"""


def test_a_tracker_of_ones_own_is_named_by_its_import_path(tmp_path):
    (tmp_path / "mine.py").write_text(OWN_TRACKER, encoding="utf-8")
    config = tiny_config(f"trainer.logger=[{tmp_path / 'mine.py'}:MyTracker,jsonl]")
    run_steps(tmp_path, [1, 2], loggers=config.trainer.logger)
    assert (tmp_path / "own.txt").read_text(encoding="utf-8").splitlines() == [
        "1 The sum is 42.", "1 0.1 ['actor/kl_loss', 'timing/elapsed']", "2 The sum is 42.",
        "2 0.2 ['actor/kl_loss', 'timing/elapsed']", "done",
    ]
    assert steps_of(tmp_path / "metrics.jsonl") == [1, 2]
    with pytest.raises(ConfigError, match=r"^trainer\.logger: must be importable, but raised ModuleNotFoundError"):
        make(tmp_path, ["jsonl", "nothere:MyTracker"])


def test_tracker_that_cannot_start_is_a_config_error_and_closes_the_others(tmp_path, monkeypatch):
    closed = []
    monkeypatch.setattr(Console, "close", lambda self, failed: closed.append(failed))
    (tmp_path / "run").write_text("a file where the folder should be", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"^trainer\.default_local_dir: cannot be written to: .*run"):
        make(tmp_path / "run", ["console", "jsonl"])
    assert closed == [True]


def test_names_outside_the_table_are_refused(tmp_path):
    with make(tmp_path) as tracker, pytest.raises(AssertionError, match="actor/typo"):
        tracker.log({"actor/typo": 1.0}, 1)


def test_metrics_and_generations_are_written_whatever_the_loggers(tmp_path):
    for loggers in ([], ["console"]):
        run_steps(tmp_path / str(len(loggers)), [1, 2], loggers=loggers)
        for name in ("metrics.jsonl", "generations.jsonl"):
            assert steps_of(tmp_path / str(len(loggers)) / name) == [1, 2]


def test_a_step_is_reported_once(tmp_path):
    with make(tmp_path) as tracker:
        tracker.log({"actor/loss": 1.0}, 1)
        with pytest.raises(AssertionError, match="step 1 is reported after step 1"):
            tracker.log({"val/accuracy": 1.0}, 1)


def test_failing_tracker_warns_once_and_the_others_go_on(tmp_path, monkeypatch, caplog):
    def fail(self, metrics, step):
        raise OSError("no space left")

    monkeypatch.setattr(Console, "log", fail)
    with caplog.at_level(logging.WARNING):
        run_steps(tmp_path, [1, 2, 3], loggers=["console", "jsonl"])
    assert steps_of(tmp_path / "metrics.jsonl") == [1, 2, 3]
    assert [record.message for record in caplog.records] == [
        "trainer.logger: console failed, training continues without it: OSError: no space left"
    ]


# --- jsonl


def test_jsonl_rows_are_on_file_after_every_step(tmp_path, monkeypatch):
    now = iter([100.0, 102.5])
    monkeypatch.setattr(trackers_module, "time", SimpleNamespace(monotonic=lambda: next(now)))
    with make(tmp_path) as tracker:
        tracker.log({"actor/kl_loss": 0.5, "training/global_step": 1}, 1)
        assert json.loads((tmp_path / "metrics.jsonl").read_text(encoding="utf-8")) == {
            "step": 1,
            "actor/kl_loss": 0.5,
            "training/global_step": 1.0,
            "timing/elapsed": 2.5,
        }
        tracker.log_generations([SAMPLE], 2)
        assert json.loads((tmp_path / "generations.jsonl").read_text(encoding="utf-8")) == {
            "step": 2,
            "prompt": "12+30=",
            "response": "The sum is 42.",
            "answer": "42",
            "reward": 1.0,
            "data_source": "sums",
            "sample": 3,
        }


def test_jsonl_keeps_text_that_has_no_utf8_form(tmp_path):
    with make(tmp_path) as tracker:
        tracker.log_generations([Generation(prompt="\ud800 \u2028 é", response="")], 2)
    (sample,) = read_json_lines(tmp_path / "generations.jsonl")
    assert sample["prompt"] == "? \u2028 é"
    assert sample["answer"] is None


def test_resume_drops_later_steps_and_a_line_cut_short(tmp_path):
    run_steps(tmp_path, [1, 2, 3, 4, 5])
    for name in ("metrics.jsonl", "generations.jsonl"):
        with (tmp_path / name).open("a", encoding="utf-8") as file:
            file.write('{"step": 6, "actor/kl')
    run_steps(tmp_path, [4, 5, 6], start_step=3, resume=True)
    for name in ("metrics.jsonl", "generations.jsonl", "lengths.jsonl", "tokens.jsonl"):
        rows = [json.loads(line) for line in (tmp_path / name).read_text(encoding="utf-8").splitlines()]
        assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "generations.jsonl", "lengths.jsonl", "metrics.jsonl", "tokens.jsonl",
        ]  # fmt: skip


def test_lengths_are_counted_in_bins(tmp_path):
    with make(tmp_path) as tracker:
        tracker.log_lengths([1, 2, 3, 120, 120], 7)
    (row,) = read_json_lines(tmp_path / "lengths.jsonl")
    assert (row["step"], row["bin"], row["counts"]) == (7, 3, [2, 1] + 38 * [0] + [2])


def test_the_time_of_a_run_goes_on_where_it_was(tmp_path):
    rows = [{"step": 3, "timing/elapsed": 50.0}, {"step": 4, "timing/elapsed": 70.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    run_steps(tmp_path, [4], start_step=3, resume=True)
    times = [row["timing/elapsed"] for row in read_json_lines(tmp_path / "metrics.jsonl")]
    assert times[0] == 50.0
    assert 50.0 < times[1] < 70.0


def test_new_run_keeps_the_files_of_an_earlier_one(tmp_path):
    for _ in range(3):
        run_steps(tmp_path, [0, 1])
    assert steps_of(tmp_path / "metrics.jsonl") == [0, 1]
    assert steps_of(tmp_path / "metrics.1.jsonl") == [0, 1]
    assert steps_of(tmp_path / "metrics.2.jsonl") == [0, 1]


@pytest.fixture
def room():
    """`room(file)`: no file may have more than ten bytes more than this one; `room(None)`: any may."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(file):
        soft = before[0] if file is None else file.stat().st_size + 10
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, before[1]))

    yield limit
    limit(None)


def test_full_disk_leaves_no_part_of_a_row_and_rows_wait_for_room(tmp_path, caplog, room):
    with make(tmp_path) as tracker:
        tracker.log({"actor/kl_loss": 1.0}, 1)
        room(tmp_path / "metrics.jsonl")
        tracker.log({"actor/kl_loss": 2.0}, 2)
        room(None)
        tracker.log({"actor/kl_loss": 3.0}, 3)
    lines = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
    assert "cannot write metrics.jsonl and generations.jsonl, will retry: OSError" in caplog.text
    with make(tmp_path / "to the end") as tracker:
        room(tmp_path / "to the end" / "metrics.jsonl")
        tracker.log({"actor/kl_loss": 1.0}, 1)
    room(None)
    assert "metrics.jsonl: lost the rows that could not be written: [Errno 27] File too large" in caplog.text
    files = [os.readlink(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd") if number_is_open(number)]
    assert not [file for file in files if file.startswith(str(tmp_path))]


def number_is_open(number):
    """The listing has a number that was its own."""
    return os.path.lexists(f"/proc/self/fd/{number}")


# --- console


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_console_on_a_terminal_is_a_bar(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    console = Console(info(total_steps=4, start_step=1))
    console.log({"actor/kl_loss": 0.12345, "perf/tokens_per_second": 1234.5, "val/accuracy": 0.5}, 2)
    console.log({"reward/mean": 0.25}, 3)
    console.close(failed=False)
    text = stream.getvalue()
    assert "2/4" in text
    assert "3/4" in text
    assert "KL 0.1235  1234 tokens/s" in text
    assert "reward 0.2500" in text
    assert "step 2: held-out accuracy 50.0%" in text


def test_console_shows_a_reward_of_your_own_as_a_number(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    run = info(total_steps=4)
    run.config["reward"] = {"name": "exact_match", "custom_reward_function": {"path": "f.py"}}
    console = Console(run)
    console.log({"val/accuracy": -1.25}, 2)
    console.close(failed=False)
    assert "step 2: held-out reward -1.2500" in stream.getvalue()


def test_a_terminal_shows_one_sample_of_a_validation_cut_to_its_width(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    console = Console(info())
    long = Generation(prompt="12+30=", response="The sum\nis " + "4" * 300, answer="42", reward=0.0)
    console.log_generations([long, SAMPLE], 2)
    console.close(failed=False)
    lines = stream.getvalue().splitlines()
    title, prompt, answer, reference = [line for line in lines if re.match("step 2|  [pcr]", line)]
    assert title == "step 2, one of 2 samples, reward 0:"
    assert prompt.split() == ["prompt", "12+30="]
    assert answer.startswith("  completion  The sum is 444")
    assert answer.endswith("4...")
    assert len(answer) == shutil.get_terminal_size().columns
    assert reference.split() == ["reference", "42"]


def test_a_terminal_shows_the_prompt_that_went_worst_at_first_all_along(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    console = Console(info())
    for step, rewards in enumerate([(1.0, 0.25, 0.5), (0.0, 1.0, 0.5), (None, None, None)]):
        samples = [Generation(prompt=f"p{row}", response="", reward=reward) for row, reward in enumerate(rewards)]
        console.log_generations(samples, step)
    console.log_generations([Generation(prompt=name, response="") for name in ("new", "newer")], 3)
    console.close(failed=False)
    assert re.findall(r"prompt +(\w+)", stream.getvalue()) == ["p1", "p1", "p1", "new"]
    assert re.findall(r"reward (.*):", stream.getvalue()) == ["0.25", "1"]


def test_a_quiet_console_says_nothing(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    console = Console(info(console="quiet"))
    console.log({"actor/kl_loss": 0.5}, 1)
    console.log_generations([SAMPLE], 1)
    console.close(failed=True)
    assert stream.getvalue() == ""


def test_quiet_logs_are_warnings_and_errors(monkeypatch):
    stream, root = io.StringIO(), logging.getLogger()
    monkeypatch.setattr(sys, "stderr", stream)
    handler = ConsoleHandler()
    root.addHandler(handler)
    try:
        silence_console()
        logging.getLogger("hybrid_gkd").info("worker 0: cpu")
        logging.getLogger("hybrid_gkd").warning("the teacher is slow")
    finally:
        root.removeHandler(handler)
    assert "worker 0" not in stream.getvalue()
    assert "the teacher is slow" in stream.getvalue()


def test_console_in_a_file_has_a_line_of_every_step_with_the_time_and_all_metrics(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    console = Console(info(total_steps=3))
    console.log({"val/accuracy": 0.25}, 0)
    console.log({"actor/kl_loss": 0.5, "timing/wait_prev_teacher": 12.3456789}, 1)
    console.log({"actor/kl_loss": 0.25}, 2)
    console.close(failed=True)
    time = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "
    expected = [
        "step 0/3  val/accuracy=0.25", r"step 1/3  00:0\d left  actor/kl_loss=0.5 timing/wait_prev_teacher=12.3457",
        r"step 2/3  00:0\d left  actor/kl_loss=0.25", "stopped at step 2/3",
    ]
    lines = stream.getvalue().splitlines()
    for line, pattern in zip(lines, expected, strict=True):
        assert re.fullmatch(time + pattern, line)


def test_a_validation_before_training_is_not_in_the_pace_of_the_steps(monkeypatch):
    clock, stream = [0.0], io.StringIO()
    monkeypatch.setattr(console_module.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(sys, "stderr", stream)
    console = Console(info(console="progress"))
    for step in range(2):
        clock[0] += 300.0 if step == 0 else 6.0
        console.log({"actor/sft_loss": 2.0}, step)
    assert stream.getvalue().splitlines()[-1].endswith("step 1/10  00:54 left  SFT loss 2.0000")


def test_a_bar_whose_run_ends_early_shows_no_time_left(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    console = Console(info(total_steps=4))
    console.log({}, 1)
    console.close(failed=True)
    assert re.search(r"step: stopped at 1/4 after 00:0\d\s*$", stream.getvalue())


def test_a_message_stands_on_a_line_above_the_bar(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    console = Console(info(total_steps=4))
    ConsoleHandler().handle(logging.makeLogRecord({"msg": "wandb is offline", "levelno": logging.INFO}))
    console.close(failed=False)
    before, _, after = stream.getvalue().partition("wandb is offline\n")
    assert before.rpartition("\r")[2] == ""  # the bar was wiped
    assert "0/4" in after


def test_progress_without_a_terminal_is_a_line_every_few_seconds(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(console_module.time, "monotonic", lambda: clock[0])
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    console = Console(info(console="progress"))
    for step in range(1, 11):
        clock[0] += 2.0
        console.log({"actor/kl_loss": 1.0 / step, "perf/tokens_per_second": 100.0}, step)
    console.close(failed=False)
    lines = [line.split(" ", 2)[2] for line in stream.getvalue().splitlines()]
    assert lines[0] == "step 1/10  00:18 left  KL 1.0000  100 tokens/s"
    assert [line.split()[1] for line in lines] == ["1/10", "4/10", "7/10", "10/10"]
    assert lines[-1] == "step 10/10  KL 0.1000  100 tokens/s"


# --- wandb, for real, offline


@pytest.fixture
def no_wandb_login(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith("WANDB_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "wandb-config"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "wandb-cache"))
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "wandb-data"))


def test_login_is_found_where_wandb_finds_it(no_wandb_login, monkeypatch, tmp_path):
    public, own = "https://api.wandb.ai", "https://wandb.example.org"
    assert not wandb_module.has_wandb_login(public)
    netrc = tmp_path / "netrc"
    monkeypatch.setenv("NETRC", str(netrc))
    netrc.write_text("machine wandb.example.org\n  login user\n  password " + "0" * 40 + "\n", encoding="utf-8")
    assert wandb_module.has_wandb_login(own)
    assert not wandb_module.has_wandb_login(public)
    netrc.write_text("machine api.wandb.ai\n  login user\n  password " + "0" * 40 + "\n", encoding="utf-8")
    assert wandb_module.has_wandb_login("https://api.forge.coreweave.com")
    assert not wandb_module.has_wandb_login(own)
    netrc.unlink()
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert wandb_module.has_wandb_login(public)


def wandb_records(path: Path) -> Iterator[bytes]:
    """The records of a .wandb file: the LevelDB log format after a header of seven bytes.

    Blocks of 32 KiB; in them chunks of crc (4 bytes), length (2), type (1: whole record, 2: first,
    3: middle, 4: last part) and data. A block's last bytes are padding when no chunk header fits.
    """
    data = path.read_bytes()
    record, at = b"", 7
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def wandb_history(folder: Path) -> tuple[dict[str, object], list[dict[str, object]], int]:
    """Config, history rows and exit code of an offline run, from the file that `wandb sync` uploads."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("run-*.wandb")
    config, rows, exit_code = {}, [], -1
    for data in wandb_records(path):
        record = Record.FromString(data)
        config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        if record.HasField("history"):
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
        if record.HasField("exit"):
            exit_code = record.exit.exit_code
    return config, rows, exit_code


def wandb_artifacts(folder: Path) -> list[tuple[str, str, list[str]]]:
    """Name, type and files of the artifacts that `wandb sync` uploads."""
    from wandb.proto.wandb_internal_pb2 import Record

    records = [Record.FromString(data) for path in folder.glob("run-*.wandb") for data in wandb_records(path)]
    found = [record.request.log_artifact.artifact for record in records if record.HasField("request")]
    found += [record.artifact for record in records if record.HasField("artifact")]
    return [(each.name, each.type, [file.local_path for file in each.manifest.contents]) for each in found]


def wandb_processes() -> list[int]:
    """Child processes of this one that belong to wandb."""
    listing = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(os.getpid())], capture_output=True, text=True)
    return [int(line.split()[0]) for line in listing.stdout.splitlines() if "wandb" in line]


def fail_after_step_3(run_dir: Path) -> None:
    with make(run_dir, ["jsonl", "wandb"]) as tracker:
        for step in (1, 2, 3):
            tracker.log_generations([SAMPLE], step)
            tracker.log({"actor/kl_loss": step / 10}, step)
        assert wandb_processes() != []
        raise RuntimeError("training broke")


@pytest.mark.slow
def test_wandb_offline_holds_every_step_once_also_after_a_resume(no_wandb_login, tmp_path, caplog):
    pytest.importorskip("wandb")
    caplog.set_level(logging.INFO, "hybrid_gkd")
    with pytest.raises(RuntimeError, match="training broke"):
        fail_after_step_3(tmp_path)
    run_steps(tmp_path, [3, 4], loggers=["jsonl", "wandb"], start_step=2, resume=True, log_report=True)
    assert wandb_processes() == []

    first, second = sorted((tmp_path / "wandb").glob("offline-run-*"), key=lambda path: path.stat().st_mtime)
    assert first.name.split("-")[3] == second.name.split("-")[3], "a resumed run has another id"
    config, rows, exit_code = wandb_history(first)
    assert exit_code == 1
    assert config["distillation"] == {"topk": 64}
    assert [row["_step"] for row in rows] == [1, 2, 3]
    assert rows[0]["actor/kl_loss"] == 0.1
    assert [row["val/generations/nrows"] for row in rows] == [1, 2, 3], "the table does not grow"
    _, rows, exit_code = wandb_history(second)
    assert exit_code == 0
    assert [row["_step"] for row in rows] == [1, 2, 3, 4]
    assert rows[3]["actor/kl_loss"] == 0.4
    assert [row.get("val/generations/nrows") for row in rows[2:]] == [3, 4], "the earlier samples are not in the table"
    assert f"wandb sync {second}" in caplog.text

    page, run_id = second / "report.html", second.name.split("-")[3]
    reports = [[each for each in wandb_artifacts(folder) if each[1] == "report"] for folder in (first, second)]
    assert reports == [[], [(f"report-{run_id}", "report", [str(page)])]]
    assert '"step":4' in page.read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_report_that_cannot_be_written_costs_the_artifact_and_not_the_run(no_wandb_login, tmp_path, caplog):
    pytest.importorskip("wandb")
    with make(tmp_path, ["jsonl", "wandb"], log_report=True) as tracker:
        tracker.log({"actor/kl_loss": 0.1}, 1)
        (folder,) = (tmp_path / "wandb").glob("offline-run-*")
        (folder / "report.html").mkdir()
    assert "trainer.wandb.log_report: cannot log the report: IsADirectoryError" in caplog.text
    _, rows, exit_code = wandb_history(folder)
    assert (len(rows), exit_code) == (1, 0)


@pytest.mark.slow
def test_wandb_ended_by_a_signal_does_not_choose_the_exit_code_of_the_run(no_wandb_login, tmp_path):
    wandb = pytest.importorskip("wandb")
    tracker = make(tmp_path, ["wandb"])
    wandb.run.finish()
    (pid,) = wandb_processes()
    stop_process(pid)
    killer = threading.Timer(0.5, os.kill, (pid, signal.SIGKILL))
    killer.start()  # while close() waits for that process
    tracker.close()
    killer.join()
    assert wandb_processes() == []


@pytest.mark.slow
def test_wandb_that_cannot_start_is_a_config_error(no_wandb_login, monkeypatch, tmp_path):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_API_KEY", "not a key")
    with pytest.raises(ConfigError, match=r"^trainer\.logger: wandb cannot start: "):
        make(tmp_path, ["jsonl", "wandb"])


# --- TensorBoard and trackio


@pytest.mark.slow
def test_tensorboard_shows_every_step_once_also_after_a_resume(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_steps(tmp_path, [0, 1, 2, 3, 4, 5], loggers=["tensorboard"])  # killed before its first checkpoint
    run_steps(tmp_path, [0, 1, 2, 3], loggers=["tensorboard"])
    run_steps(tmp_path, [3, 4], loggers=["tensorboard"], start_step=2, resume=True)
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [(event.step, round(event.value, 6)) for event in found.Scalars("actor/kl_loss")] == [
        (0, 0.0), (1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4),
    ]  # fmt: skip
    text = found.Tensors("val/generations/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert "    The sum is 42." in text


@pytest.mark.slow
def test_trackio_keeps_every_step_and_a_resumed_run_goes_on(tmp_path):
    """In an own process: trackio reads its folder from the environment when it is imported."""
    pytest.importorskip("trackio")
    code = (
        "import sys; from pathlib import Path; from test_tracking import run_steps\n"
        "run_steps(Path(sys.argv[1]), [1, 2], loggers=['trackio'])\n"
        "run_steps(Path(sys.argv[1]), [3], loggers=['trackio'], start_step=2, resume=True)\n"
    )
    environment = os.environ | {"TRACKIO_DIR": str(tmp_path / "db"), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == b""
    with contextlib.closing(sqlite3.connect(tmp_path / "db" / "gkd.db")) as database:
        rows = database.execute("select run_name, step, metrics from metrics order by step, id").fetchall()
    found = [(name, step, json.loads(metrics)) for name, step, metrics in rows]
    scalars = [(name, step, row["actor/kl_loss"]) for name, step, row in found if "actor/kl_loss" in row]
    assert scalars == [("unit", 1, 0.1), ("unit", 2, 0.2), ("unit", 3, 0.3)]
    assert sum("val/generations" in row for _, _, row in found) == 3


def test_a_tracker_without_its_package_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^trainer\.logger: trackio needs .*: uv pip install .* 'trackio>=0\.43'"):
        load_trackers(["console", "trackio"])


def test_the_packages_of_trackers_are_those_of_their_extras():
    setup = configparser.ConfigParser()
    setup.read(Path(__file__).parents[3] / "setup.cfg")
    extras = setup["options.extras_require"]
    assert {name: [package] for name, package in EXTRAS.items()} == {name: extras[name].split() for name in EXTRAS}


@pytest.mark.slow
def test_import_needs_neither_torch_nor_wandb():
    code = "import sys, hybrid_gkd.reporting.trackers; sys.exit(bool({'torch', 'wandb', 'ray'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)
