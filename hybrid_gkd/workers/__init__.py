import os

# Read when Ray is imported. Without it, a Ray call of a remaining thread after the end of a run starts a new cluster.
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
