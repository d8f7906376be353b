"""Addresses of servers."""

from __future__ import annotations

import re

HOST = r"(?=[a-zA-Z0-9])[\w-]{1,63}(\.[\w-]{1,63})*\.?"
"""Pattern of a host's name or IPv4 address, for ASCII; resolvers raise other errors than OSError for anything else."""


def is_address(text: str) -> bool:
    """Return whether the text is ``host:port`` with a host's name or IPv4 address, which need not exist."""
    found = re.fullmatch(rf"{HOST}:(?P<port>\d{{1,5}})", text, re.ASCII)
    return found is not None and 0 < int(found["port"]) < 65536


def is_ray_address(text: str) -> bool:
    """Return whether the text is an address of a Ray cluster: ``host:port``, also with ray:// or IPv6, or ``auto``."""
    return text == "auto" or is_address(re.sub(r"\[[0-9a-fA-F:.]+\](?=:\d+$)", "host", text.removeprefix("ray://")))
