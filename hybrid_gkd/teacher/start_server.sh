#!/usr/bin/env bash
# Start a teacher on this machine: bash hybrid_gkd/teacher/start_server.sh --ckpt-path MODEL [further options]
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
[ -x "$root/.venv/bin/python" ] && default="$root/.venv/bin/python" || default=python3
exec "${PYTHON:-$default}" -m hybrid_gkd.teacher serve "$@"
