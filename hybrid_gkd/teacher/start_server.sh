#!/usr/bin/env bash
# Start a teacher on this machine: bash hybrid_gkd/teacher/start_server.sh --ckpt-path MODEL [further options]
# In the environment that run_gkd.sh uses: see there.
set -euo pipefail
root=$(dirname "$(dirname "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")")")
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1
python=$(bash "$root/run_gkd.sh" --install-only)
exec "$python" -m hybrid_gkd.teacher serve "$@"
