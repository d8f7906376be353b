#!/usr/bin/env bash
# The test command: lint, types, tests. It installs what is missing first.
#
#   bash tests/run.sh                        everything that needs no GPU
#   bash tests/run.sh tests/unit -k losses   arguments go to pytest
#   bash tests/run.sh -m gpu                 what needs a GPU
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec </dev/null

python=$(bash run_gkd.sh --install-only dev)

status=0
"$python" -m ruff check . || status=1
"$python" -m mypy || status=1
# A later -m among the arguments replaces this one.
"$python" -m pytest -m "not gpu" "$@" || status=$?
exit "$status"
