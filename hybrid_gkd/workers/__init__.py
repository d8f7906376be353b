import os

# Read when Ray is imported. A thread that still asks Ray for something when a run has ended would start a new cluster.
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
