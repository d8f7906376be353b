"""`python -m hybrid_gkd.doctor`: check a run and its placement without training. See launch/doctor.py."""

import sys

from hybrid_gkd.launch.doctor import main

if __name__ == "__main__":
    sys.exit(main())
