"""How a lab run can end, as exit codes and errors."""

from __future__ import annotations

__all__ = ["EXIT_FAILED", "EXIT_GUEST_DIED", "EXIT_OK", "EXIT_UNAVAILABLE", "Stopped", "Unavailable"]

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_GUEST_DIED = 3
EXIT_UNAVAILABLE = 77  # the automake convention for a skipped test


class Unavailable(Exception):
    """The lab cannot run on this machine; the message says what is missing."""


class Stopped(Exception):
    """The run was interrupted from outside."""
