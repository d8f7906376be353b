"""`python -m hybrid_gkd.demo [sorting|weak_teacher|solutions|gpu_demo]`: build the models and data of a demo."""

import argparse
import logging
import sys

from hybrid_gkd.demo import gpu_demo, sorting
from hybrid_gkd.demo.use import visible_device
from hybrid_gkd.errors import HybridGKDError
from hybrid_gkd.runtime.signals import handle_signals


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m hybrid_gkd.demo", description="Build a demo's models and data.")
    parser.add_argument("demo", nargs="?", choices=(*sorting.RECIPES, "gpu_demo"), default="sorting")
    parser.add_argument("--out", help="folder to build (default: in the user's cache)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--force", action="store_true", help="rebuild an existing demo")
    parser.add_argument("--device", choices=tuple(gpu_demo.RECIPES), help="device of gpu_demo; small models on cpu")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if args.seed < 0:
        parser.error(f"--seed must not be negative, got {args.seed}")
    if args.device and args.demo != "gpu_demo":
        parser.error("--device is for gpu_demo; the sorting demo is built on the CPU")
    handle_signals(lambda number, _: sys.exit(128 + number))  # through the builds' cleanup
    try:
        if args.demo == "gpu_demo":
            device = args.device or visible_device()
            paths = gpu_demo.build_gpu_demo(device, args.out, args.seed, force=args.force)
        else:
            recipe = sorting.RECIPES[args.demo]
            paths = sorting.build_demo(args.out, args.seed, force=args.force, recipe=recipe)
    except (HybridGKDError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(paths.manifest.read_text(encoding="utf-8"), end="")
    print(paths.root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
