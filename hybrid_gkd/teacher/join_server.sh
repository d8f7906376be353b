#!/usr/bin/env bash
# Add a worker to a running teacher: bash hybrid_gkd/teacher/join_server.sh --proxy-addr HOST:15556 --ckpt-path MODEL
# In the environment that run_gkd.sh uses: see there.
set -euo pipefail
root=$(dirname "$(dirname "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")")")
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1
python=$(bash "$root/run_gkd.sh" --install-only)
exec "$python" -m hybrid_gkd.teacher join "$@"
