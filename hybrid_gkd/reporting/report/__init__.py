"""report.html: what a run folder holds, as one page to look at."""
