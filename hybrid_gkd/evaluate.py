"""`python -m hybrid_gkd.evaluate MODEL ... --data FILE`: validation without training. See launch/evaluate.py."""

import sys

from hybrid_gkd.launch.evaluate import main

if __name__ == "__main__":
    sys.exit(main())
