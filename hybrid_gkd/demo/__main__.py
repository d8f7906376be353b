"""`python -m hybrid_gkd.demo`: build the models and data of the recipe `demo`."""

import sys

from hybrid_gkd.demo.sorting import main

if __name__ == "__main__":
    sys.exit(main())
