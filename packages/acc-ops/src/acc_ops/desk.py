"""Where a process answers the other ranks' questions about it: one socket and a thread that sleeps until somebody asks.

[Note: why a socket] A rank that waits must learn whether another one is alive and what it does, also when that one is stuck in a call of its own, holds
the interpreter lock, or is dead together with the store that it kept. The store of a process group cannot tell: its
client is locked while any thread waits for a key. A connection can: the system of a dead process refuses it at once, and that of
a stuck one accepts it. Whoever asks shows a random token that it read from the store; nobody else is answered.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import socket
import threading
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

Answer = dict[str, Any]  # what JSON can hold
Responder = Callable[[Answer], Answer]


class Silence(Enum):
    """Why a process did not answer."""

    ENDED = "its process has ended"
    MUTE = "its process is there, but does not answer"
    UNREACHABLE = "it cannot be reached"
    UNKNOWN = "nothing is known of it"  # it has not said where to ask


class Address(NamedTuple):
    """Where to ask a process about one thing."""

    host: str
    name: str  # of its machine, for those to whom `host` is a loopback address of their own
    port: int
    token: str
    machine: str

    def to_text(self) -> str:
        """For a store."""
        return json.dumps(self)

    @classmethod
    def from_text(cls, text: str) -> Address:
        """What `to_text` made."""
        return cls(*json.loads(text))


def open_desk(
    respond: Responder, peer: tuple[str, int] | None = None, *, one_machine: bool = False
) -> Address | None:
    """Answer whoever asks at the returned address with what `respond` makes of the question, in another thread, until this process ends.

    `peer` is a host and port that the askers reach as well; this process's address is the one it has towards it. With `one_machine` only
    this machine can ask. None when this machine allows no listening socket.
    """
    with _lock:
        desk = _desks.get(one_machine)
        if desk is None:
            try:
                desk = _desks[one_machine] = _Desk(one_machine)
            except OSError:
                return None
        return desk.address(respond, None if one_machine else peer)


def forget_address(address: Address) -> None:
    """Answer nobody at `address` any more, but at the others of this process."""
    with _lock:
        for desk in _desks.values():
            desk.forget(address)


def ask(
    address: Address, question: Answer, timeout_s: float = 2.0, trusted: bool = False
) -> Answer | Silence:
    """What the process at `address` answers.

    A refused connection means that it has ended if it is one of this machine, or `trusted`: reached there before.
    """
    here = address.machine == this_machine()
    host = address.host if here or not address.host.startswith("127.") else address.name
    try:
        link = socket.create_connection((host, address.port), timeout_s)
    except ConnectionRefusedError:
        return Silence.ENDED if here or trusted else Silence.UNREACHABLE
    except OSError:
        return Silence.UNREACHABLE
    with link:
        try:
            link.settimeout(timeout_s)
            link.sendall(f"{address.token}{json.dumps(question)}\n".encode())
            return dict(json.loads(_read_line(link)))
        except (
            ConnectionError
        ):  # it ended or closed its desk with this question in its queue, or has forgotten this address
            return Silence.MUTE if _is_open(host, address.port, timeout_s) else Silence.ENDED
        except (OSError, ValueError):
            return Silence.MUTE


def this_machine() -> str:
    """A text that processes share if and only if they run on the same machine and in the same network."""
    global _machine
    if not _machine:
        try:
            network = os.readlink("/proc/self/ns/net")  # containers of one machine have several
        except OSError:
            network = ""
        _machine = f"{socket.gethostname()} {network}"
    return _machine


def close_desk() -> None:
    """Answer nobody any more: a connection is refused from now on."""
    with _lock:
        desks = list(_desks.values())
        _desks.clear()
    for desk in desks:
        desk.close()


_lock = threading.Lock()
_desks: dict[bool, _Desk] = {}  # for one machine only, for all
_machine = ""
_TOKEN_LENGTH = 32
_LONGEST = 1 << 16  # bytes of a question or an answer
_PATIENCE_S = 2.0  # with somebody who connected


class _Desk:
    def __init__(self, one_machine: bool) -> None:
        self._responders: dict[str, Responder] = {}
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=128) if one_machine else _listening()
        self._socket.setblocking(False)
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="acc answers other ranks", daemon=True)
        self._thread.start()

    def address(self, respond: Responder, peer: tuple[str, int] | None) -> Address:
        token = secrets.token_hex(_TOKEN_LENGTH // 2)
        self._responders[token] = respond
        port = int(self._socket.getsockname()[1])
        return Address(_own_host(peer), socket.gethostname(), port, token, this_machine())

    def forget(self, address: Address) -> None:
        self._responders.pop(address.token, None)

    def close(self) -> None:
        self._wake.close()
        self._thread.join(_PATIENCE_S + 1)
        self.drop()

    def drop(self) -> None:
        """Let go of the sockets, in a forked child as well: while one of its copies is open, no connection is refused."""
        for end in (self._socket, self._wake, self._woken, self._selector):
            end.close()

    def _serve(self) -> None:
        while True:
            ready = [key.fileobj for key, _ in self._selector.select()]
            if self._woken in ready:
                return
            try:
                link, _ = self._socket.accept()
            except OSError:  # who asked has gone away
                continue
            with link:
                self._answer(link)

    def _answer(self, link: socket.socket) -> None:
        try:
            link.settimeout(_PATIENCE_S)
            line = _read_line(link)
            respond = self._responders.get(line[:_TOKEN_LENGTH])
            if respond is not None:
                link.sendall(f"{json.dumps(respond(json.loads(line[_TOKEN_LENGTH:])))}\n".encode())
        except (OSError, ValueError):  # no question of ours, or it hung up
            return


def _listening() -> socket.socket:
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=128, dualstack_ipv6=True)
        except OSError:  # known to the system, and switched off
            pass
    return socket.create_server(("", 0), backlog=128)


def _is_open(host: str, port: int, timeout_s: float) -> bool:
    try:
        socket.create_connection((host, port), timeout_s).close()
    except OSError:
        return False
    return True


def _read_line(link: socket.socket) -> str:
    data = b""
    while not data.endswith(b"\n"):
        more = link.recv(4096)
        if not more:
            raise ConnectionResetError
        data += more
        if len(data) > _LONGEST:
            raise ValueError
    return data.decode()


def _own_host(peer: tuple[str, int] | None) -> str:
    """This machine's address towards `peer`; nothing is sent to find out."""
    if peer is None:
        return "127.0.0.1"
    try:
        kind, _, _, _, target = socket.getaddrinfo(*peer, family=socket.AF_INET, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    for desk in _desks.values():
        desk.drop()
    _desks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
