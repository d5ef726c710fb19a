"""Ports."""

import socket


def free_port() -> int:
    """A TCP port that nobody listens on now. Bind it soon: the system may hand it out again."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as s:
        s.bind(("", 0))
        return s.getsockname()[1]
