"""Run the teacher service under faults at full length: real processes on the CPU, about a quarter of an hour.

    python benchmarks/teacher_faults.py
    python benchmarks/teacher_faults.py --only kill_workers fuzz_client

Each scenario ends with an error if a sequence is lost, wrong or delivered twice, if a process ends that should
not, or if memory grows; its observations are printed.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import faults
import fuzz

from hybrid_gkd.testing import make_tiny_model

RESUME_SECONDS = 5.0


def kill_service_workers(num_kills: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "model")
        return faults.kill_service_workers(num_kills, str(model), Path(folder))


def restart_broker(num_restarts: int, pause: float) -> dict[str, object]:
    seen = faults.restart_broker(num_restarts, pause)
    slowest = max(seen["seconds until the next scores"])
    assert slowest < RESUME_SECONDS, f"{slowest:.1f} s until the client resumed"
    return seen


def scenarios(args: argparse.Namespace) -> dict[str, functools.partial]:
    """Name of each and the call that runs it."""
    return {
        "kill_workers": functools.partial(faults.kill_workers, args.kills),
        "kill_service_workers": functools.partial(kill_service_workers, args.kills),
        "restart_broker at once": functools.partial(restart_broker, args.restarts, 0.0),
        "restart_broker after 10 s": functools.partial(restart_broker, max(args.restarts // 5, 1), 10.0),
        "stop_worker": functools.partial(faults.stop_worker),
        "hang_engine": functools.partial(faults.hang_engine),
        "hang_only_engine": functools.partial(faults.hang_only_engine),
        "deaf_client": functools.partial(faults.deaf_client, max(args.messages // 10, 2000)),
        "fuzz_broker": functools.partial(fuzz.fuzz_broker, args.messages),
        "fuzz_worker": functools.partial(fuzz.fuzz_worker, args.messages),
        "fuzz_client": functools.partial(fuzz.fuzz_client, args.messages),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--restarts", type=int, default=10)
    parser.add_argument("--messages", type=int, default=1_000_000, help="bad ones, for each of the three receivers")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="the first word of a scenario's name")
    args = parser.parse_args()
    for name, run in scenarios(args).items():
        if args.only and name.split()[0] not in args.only:
            continue
        started = time.monotonic()
        print(f"{name} ...", flush=True)
        for what, value in run().items():
            values = value if isinstance(value, list) else [value]
            print(f"    {what:36}", *(f"{each:.2f}" if isinstance(each, float) else each for each in values))
        print(f"    passed in {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
