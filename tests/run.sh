#!/usr/bin/env bash
# The test command: lint, types, tests. It installs what is missing first.
#
#   bash tests/run.sh --fast                 lint, types and the unit tests that are not slow: half a minute
#   bash tests/run.sh                        everything that needs no GPU
#   bash tests/run.sh tests/unit -k losses   arguments go to pytest
#   bash tests/run.sh -m gpu                 with marks of your own, one test at a time: what needs a GPU
#
# Without -m, two processes run the tests (-n 0 for a debugger, say); those marked "alone" follow one by one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec </dev/null

python=$(bash run_gkd.sh --install-only dev)
# Compiled anew in each of hundreds of processes, package and tests take seconds; many containers ask for that.
export PYTHONDONTWRITEBYTECODE=
# The matrices are small: a second thread only takes a core from another test. Workers and teachers choose their own.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Threads of two runs at the same time that spin at a barrier keep the other's from coming to theirs.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}

status=0
"$python" -m ruff check . || status=1
"$python" -m mypy || status=1

output=$(mktemp)
trap 'rm -f "$output"' EXIT
closing=() ran=""
run_tests() {
    local code=0
    if [[ -t 1 ]]; then set -- "$@" --color=yes; fi
    "$python" -m pytest "$@" | tee "$output" || code=$?
    # 5: no test was selected, which is a failure only if no other pass ran any.
    if [[ $code == 5 ]]; then return; fi
    ran=yes
    closing+=("$(tail -n 1 "$output")")
    if [[ $code != 0 ]]; then status=$code; fi
}

# A test that hangs ends its process and, as without processes, the run; a new one would only run it again.
two=(-n 2 --max-worker-restart 0)
if [[ ${1:-} == --fast ]]; then
    run_tests "${two[@]}" --dist worksteal -m "not gpu and not slow and not alone" tests/unit "${@:2}"
elif [[ " $*" == *" -m"* ]]; then
    run_tests "$@"
else
    # By file, so that fixtures of a module are made once, and in the order of the files: the longest come first.
    run_tests "${two[@]}" --dist loadfile --no-loadscope-reorder -m "not gpu and not alone" "$@"
    run_tests -m "alone and not gpu" "$@"
fi

if [[ -z $ran && $status == 0 ]]; then status=5; fi
if [[ ${#closing[@]} -gt 1 ]]; then printf '%s\n' "${closing[@]}"; fi
exit "$status"
