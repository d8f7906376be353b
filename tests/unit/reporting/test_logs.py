"""run.log: what was said, what a failure was, and what becomes of it on a full disk."""

import logging
import os
import re
import subprocess
import sys

import pytest

from hybrid_gkd.errors import ConfigError, WorkerError
from hybrid_gkd.reporting.logs import RunLogFile, failure_logged, run_log

PROGRAM = """
import logging, sys, warnings
from pathlib import Path
from hybrid_gkd.reporting.logs import failure_logged, log_to_console, run_log

log_to_console()
log = logging.getLogger("hybrid_gkd.launch.run")
log.info("checked")
with run_log(Path(sys.argv[1])):
    log.info("loading")
    log.debug("step 1")
    logging.getLogger("other").warning("careful")
    logging.getLogger("other").info("chatter")
    warnings.warn("old")
    with failure_logged():
        raise ValueError("broken")
"""


@pytest.mark.slow
def test_run_log_has_everything_with_the_time_and_the_console_what_is_for_people(tmp_path):
    result = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True)
    text = (tmp_path / "run.log").read_text(encoding="utf-8")
    lines = text.splitlines()
    dated = [line for line in lines if re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d [A-Z]+ ", line)]
    expected = ["INFO checked", "INFO loading", "DEBUG step 1", "WARNING careful", "WARNING <string>"]
    for line, end in zip(dated, [*expected, "ERROR run failed: ValueError: broken"], strict=True):
        assert line.split(" ", 2)[2].startswith(end)
    assert lines[-1] == "ValueError: broken"
    shown = result.stderr.partition("Traceback")[0]
    assert [line.split(" ", 2)[2] for line in shown.splitlines()[:3]] == ["checked", "loading", "careful"]
    for hidden in ("step 1", "run failed", "chatter"):
        assert hidden not in shown


def test_a_second_start_appends_and_a_failure_inside_is_raised_on(tmp_path):
    for number in (1, 2):
        with pytest.raises(WorkerError, match="worker"), run_log(tmp_path), failure_logged():
            raise WorkerError(f"worker {number} died")
    text = (tmp_path / "run.log").read_text(encoding="utf-8")
    assert text.index("run failed: WorkerError: worker 1 died") < text.index("WorkerError: worker 2 died")
    assert text.count("Traceback (most recent call last)") == 2


def test_a_file_that_cannot_be_opened_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match=r"trainer\.default_local_dir.*run\.log"), run_log(tmp_path / "nowhere"):
        pass


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_said_once(tmp_path, caplog, capsys):
    os.symlink("/dev/full", tmp_path / "run.log")
    with run_log(tmp_path):
        for number in range(3):
            logging.getLogger("hybrid_gkd").info("line %d", number)
    assert [r.message for r in caplog.records if "run.log" in r.message] == [
        f"cannot write {tmp_path}/run.log, the run continues without it: [Errno 28] No space left on device"
    ]
    assert capsys.readouterr().err == ""
    assert not [handler for handler in logging.getLogger().handlers if isinstance(handler, RunLogFile)]
