"""The error a launcher answers with: one clear line and exit code 2."""

from __future__ import annotations


class LaunchError(ValueError):
    """What was asked of the launcher cannot be done; the message says what to change."""
