"""The errors of acc-compat."""

from __future__ import annotations

from acc_compat.names import INTERFACE_VERSION, Home


class NotBuiltError(Exception):
    """A name of the interface that acc does not build yet.

    What is raised is also an AttributeError (`hasattr` is False, `getattr` takes its default) when an attribute was
    read, and also an ImportError when a name was imported.
    """


class NotBuiltAttributeError(NotBuiltError, AttributeError):
    """A name that is not built yet was read from a module."""


class NotBuiltImportError(NotBuiltError, ImportError):
    """A name that is not built yet was imported."""


class NameTakenError(RuntimeError):
    """Something else answers to the name already, and nobody said that it may be replaced."""


def not_built(home: Home) -> str:
    """The text that tells which name is missing, and what to do."""
    return (
        f"{home.public} is part of the interface of version {INTERFACE_VERSION}, but acc does not build it yet. "
        f"`{home.owner}` lists with dir() what it has; until the name is built, do without it or keep the original."
    )
