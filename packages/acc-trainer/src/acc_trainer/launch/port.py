"""A port for the rendezvous without a race: bound but not listened on, and held while the workers start."""

from __future__ import annotations

import _socket as socket  # the module below `socket`, whose enums would cost every launch 4 ms
import errno

from .errors import LaunchError


class HeldPort:
    """A TCP port on which rank 0 can listen and which nobody else is given meanwhile; `number` 0 chooses a free one.

    `named` is where the number came from, for the error.

    The socket is bound with SO_REUSEADDR and never listens: the system then hands the port to no other `bind(0)`, while
    the store of rank 0 (which sets SO_REUSEADDR too) may listen on it. `LaunchError` when `number` is in use.
    """

    def __init__(self, number: int = 0, *, named: str = "--main_process_port") -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind(("", number))
        except (OSError, OverflowError) as error:
            self._socket.close()
            raise LaunchError(_why(named, number, error)) from error
        self.number: int = self._socket.getsockname()[1]

    def __enter__(self) -> HeldPort:
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()


def _why(named: str, number: int, error: OSError | OverflowError) -> str:
    code = getattr(error, "errno", None)
    if code == errno.EADDRINUSE:
        return (
            f"{named} {number} is in use by another program; "
            "choose another port, or leave the option out to have a free one chosen"
        )
    return f"{named} {number} cannot be used: {error}"
