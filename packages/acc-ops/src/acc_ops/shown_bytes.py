"""Sizes for people, without torch: commands that list files start at once."""

from __future__ import annotations


def convert_bytes(size: float) -> str:
    """A number of bytes for people: `84.64 MB`, in steps of 1024."""
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if abs(size) < 1024:
            return f"{round(size, 2)} {unit}"
        size /= 1024
    return f"{round(size, 2)} PB"
