#!/usr/bin/env bash
# Add a worker to a running teacher: bash hybrid_gkd/teacher/join_server.sh --proxy-addr HOST:15556 --ckpt-path MODEL
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
[ -x "$root/.venv/bin/python" ] && default="$root/.venv/bin/python" || default=python3
exec "${PYTHON:-$default}" -m hybrid_gkd.teacher join "$@"
