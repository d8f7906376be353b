"""Differences between versions of other libraries, and code that reaches into their private parts."""
