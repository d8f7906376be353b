"""Everything is declared in setup.cfg; this file is there for tools that still look for a setup.py."""

from setuptools import setup

setup()
