"""`python -m hybrid_gkd.evaluate MODEL ... --data FILE`: validation without training. See launch/evaluate.py."""

import sys

if __name__ == "__main__":  # child processes import this module too
    from hybrid_gkd.launch.evaluate import main

    sys.exit(main())
