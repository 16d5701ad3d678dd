"""A process answers others from a thread of its own, and what silence means."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Iterator

import pytest

from acc_ops import desk
from acc_ops.desk import Address, Silence, ask, close_desk, forget_address, open_desk


@pytest.fixture(autouse=True)
def _desk_of_its_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(desk, "_desks", {})
    yield
    close_desk()


def opened(answer: object = "here") -> Address:
    address = open_desk(lambda question: {"said": answer, "asked": question})
    assert address is not None
    return Address.from_text(address.to_text())


def test_each_token_is_answered_by_its_own_responder() -> None:
    one, two = opened("one"), opened("two")
    assert one.port == two.port
    assert ask(one, {"x": 1}) == {"said": "one", "asked": {"x": 1}}
    assert ask(two, {}) == {"said": "two", "asked": {}}


def test_a_stranger_is_not_answered_and_does_no_harm() -> None:
    address = opened()
    for sent in (
        b"",
        b"\n",
        b"x" * 100_000,
        f"{'0' * 32}{{}}\n".encode(),
        f"{address.token}no json\n".encode(),
    ):
        with socket.create_connection((address.host, address.port), 5) as link:
            link.settimeout(5)
            try:
                link.sendall(sent)
                link.shutdown(socket.SHUT_WR)
                assert link.recv(100) == b""
            except OSError:  # hung up while we still spoke
                pass
    assert ask(address, {}) == {"said": "here", "asked": {}}


def test_a_closed_desk_has_ended_and_one_of_another_machine_only_if_it_was_reached_before() -> None:
    address = opened()
    close_desk()
    assert ask(address, {}) is Silence.ENDED
    elsewhere = address._replace(machine="another one", name="localhost")
    assert ask(elsewhere, {}) is Silence.UNREACHABLE
    assert ask(elsewhere, {}, trusted=True) is Silence.ENDED
    assert ask(elsewhere._replace(name="no.such.host.invalid"), {}) is Silence.UNREACHABLE


def test_a_process_that_takes_the_call_but_is_stuck_is_mute() -> None:
    address = opened()
    with socket.create_server(("127.0.0.1", 0)) as stuck:  # its system accepts; nobody reads
        assert ask(address._replace(port=stuck.getsockname()[1]), {}, timeout_s=0.1) is Silence.MUTE


def test_a_process_that_has_forgotten_an_address_is_there_and_answers_at_others() -> None:
    one, two = opened("one"), opened("two")
    forget_address(one)
    assert ask(one, {}) is Silence.MUTE
    assert ask(two, {}) == {"said": "two", "asked": {}}


def test_for_ranks_of_one_machine_no_other_machine_is_listened_to() -> None:
    near, far = open_desk(dict, ("192.0.2.1", 9), one_machine=True), opened()
    assert near is not None
    assert near.host == "127.0.0.1"
    bound = {one: each._socket.getsockname()[0] for one, each in desk._desks.items()}
    assert bound[True] == "127.0.0.1"
    assert bound[False] in ("::", "0.0.0.0")
    assert (ask(near, {}), ask(far, {})["said"]) == ({}, "here")


def test_answering_keeps_no_process_alive_and_runs_beside_a_busy_main_thread() -> None:
    before = set(threading.enumerate())  # a process group of this process may have a desk, too
    address = opened()
    (thread,) = [t for t in set(threading.enumerate()) - before if t.name == "acc answers other ranks"]
    assert thread.daemon
    assert ask(address, {}) == {"said": "here", "asked": {}}
    close_desk()
    assert not thread.is_alive()


def test_a_machine_without_sockets_has_no_desk(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise PermissionError

    monkeypatch.setattr(desk.socket, "create_server", refuse)
    assert open_desk(lambda question: question) is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_holds_no_copy_of_the_socket() -> None:
    address = opened()
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:  # as a worker of a data loader, which outlives its parent for a moment
        os.close(theirs)
        os.read(ours, 1)
        os._exit(0)
    os.close(ours)
    try:
        assert ask(address, {}) == {"said": "here", "asked": {}}
        close_desk()
        assert ask(address, {}) is Silence.ENDED
    finally:
        os.close(theirs)
        os.waitpid(child, 0)


@pytest.mark.skipif(sys.platform == "win32", reason="addresses differ")
def test_the_published_address_is_the_one_that_the_peer_sees() -> None:
    address = open_desk(dict, ("localhost", 9))
    assert address is not None
    assert address.host.startswith("127.")
    assert json.loads(address.to_text())[1] == socket.gethostname()
    assert desk._own_host(("no.such.host.invalid", 9)) == "127.0.0.1"
