"""Programs run as users run them, most of them without the seconds that importing the frameworks takes each time."""

from .starting import COMPILER, IN_ADVANCE, Server, run_python, started

__all__ = ["COMPILER", "IN_ADVANCE", "Server", "run_python", "started"]
