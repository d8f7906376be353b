"""`python -m hybrid_gkd.report RUN ...`: a report page of run folders. See reporting/report/command.py."""

import sys

from hybrid_gkd.reporting.report.command import main

if __name__ == "__main__":
    sys.exit(main())
