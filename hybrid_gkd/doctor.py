"""`python -m hybrid_gkd.doctor`: would this run start, and what goes where? See launch/doctor.py."""

import sys

from hybrid_gkd.launch.doctor import main

if __name__ == "__main__":
    sys.exit(main())
