"""A held port is given to nobody else, and the one who knows it may listen there."""

from __future__ import annotations

import socket

import pytest

from acc_trainer.launch.errors import LaunchError
from acc_trainer.launch.port import HeldPort


def _listening(port=0):
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(("127.0.0.1", port))
    server.listen(1)
    return server


def test_the_error_names_where_the_number_came_from():
    with pytest.raises(LaunchError, match="use_port 70000"):
        HeldPort(70000, named="use_port")


def test_rank_0_can_listen_on_the_held_port():
    with HeldPort() as held, _listening(held.number) as server:
        with socket.create_connection(("127.0.0.1", held.number), timeout=5):
            assert server.getsockname()[1] == held.number


def test_two_held_ports_differ():
    with HeldPort() as one, HeldPort() as other:
        assert one.number != other.number


def test_a_port_in_use_is_refused_with_its_number():
    with _listening() as server:
        port = server.getsockname()[1]
        with pytest.raises(LaunchError, match=f"--main_process_port {port} is in use"):
            HeldPort(port)


def test_a_port_that_does_not_exist_is_refused():
    with pytest.raises(LaunchError, match="cannot be used"):
        HeldPort(70000)


def test_a_released_port_can_be_held_again():
    with HeldPort() as held:
        number = held.number
    with HeldPort(number) as again:
        assert again.number == number
