"""Differences between versions of other libraries, and uses of their private interfaces."""
