"""Commands whose standard streams are closed, or have no reader any more."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import hybrid_gkd

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(hybrid_gkd.__file__).parent.parent)}
FILES_OF_THE_STREAMS = """
import os, sys
from hybrid_gkd.standard_streams import prepare
prepare()
opened = os.open(sys.argv[1], os.O_RDONLY)
children = os.popen("readlink /proc/self/fd/0 /proc/self/fd/2").read().split()
print(opened > 2, *children, sys.stdin.read() == "", sys.stderr.write("lost") == 4, file=open(sys.argv[1], "w"))
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_output_without_a_reader_is_no_error_of_the_command(stream, unbuffered):
    """The reader is `head`, or a `tee` that Ctrl-C has ended."""
    reader, writer = os.pipe()
    os.close(reader)
    arguments = ["hybrid_gkd.metrics"] if stream == "stdout" else ["hybrid_gkd", "there.is.no.such.key=1"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | {stream: writer}
    done = subprocess.run(
        [sys.executable, "-m", *arguments], **streams, env=ENVIRONMENT | {"PYTHONUNBUFFERED": unbuffered}, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    os.close(writer)
    assert (done.returncode, done.stdout or "", done.stderr or "") == (int(stream == "stderr"), "", "")


def test_a_closed_stream_is_no_file_that_is_opened_later(tmp_path):
    file = tmp_path / "file"
    file.touch()
    code = ["sh", "-c", '"$0" -c "$1" "$2" <&- >&- 2>&-', sys.executable, FILES_OF_THE_STREAMS, str(file)]
    subprocess.run(code, env=ENVIRONMENT, timeout=60, check=True)
    assert file.read_text(encoding="utf-8").split() == ["True", "/dev/null", "/dev/null", "True", "True"]


def test_a_command_with_a_closed_stderr_works(tmp_path):
    """The keys of a service are written before anything else is imported."""
    command = f'"$0" -m hybrid_gkd.teacher keys --out {tmp_path / "keys"} 2>&-'
    done = subprocess.run(["sh", "-c", command, sys.executable], env=ENVIRONMENT, capture_output=True, text=True,
                          timeout=60, check=True)  # fmt: skip
    assert done.stdout.count("\n") == 3


def test_a_character_that_the_encoding_lacks_is_replaced():
    code = "from hybrid_gkd.standard_streams import prepare; prepare(); print(chr(0x4e2d) + 'a')"
    environment = ENVIRONMENT | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("?a\n", "")
