"""A worker finds torchrun's variables, and nothing of a launcher further up."""

from __future__ import annotations

import os

from acc_trainer.launch.options import LaunchOptions
from acc_trainer.launch.plan import SUPERVISED, LaunchPlan
from acc_trainer.launch.worker import environment, inherited, worker_environ


def test_every_worker_knows_who_it_is_and_where_to_meet():
    plan = LaunchPlan(
        options=LaunchOptions(),
        runner=SUPERVISED,
        script="s.py",
        num_processes=4,
        num_machines=2,
        machine_rank=1,
        main_process_ip="10.0.0.1",
        environ={"ACCELERATE_USE_CPU": "true"},
    )
    found = worker_environ(plan, {"PATH": "/bin", "ACCELERATE_USE_CPU": "false"}, local_rank=1, port=1234)
    assert found["PATH"] == "/bin"
    assert found["ACCELERATE_USE_CPU"] == "true"
    assert [found[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")] == [
        "3",
        "4",
        "1",
        "2",
    ]
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("10.0.0.1", "1234")


def test_the_rank_of_a_worker_that_launches_is_not_handed_on(monkeypatch):
    for name, value in {"LOCAL_RANK": "1", "RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("KEPT", "1")
    found = inherited()
    assert found["KEPT"] == "1"
    assert not {"LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"} & set(
        found
    )


def test_a_cluster_that_names_only_the_machine_keeps_its_variables(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("RANK", "3")
    assert inherited()["RANK"] == "3"


def test_variables_set_for_a_block_are_put_back_even_after_an_error(monkeypatch):
    monkeypatch.setenv("ONE", "before")
    monkeypatch.delenv("TWO", raising=False)
    try:
        with environment(ONE=None, TWO="inside"):
            assert "ONE" not in os.environ
            assert os.environ["TWO"] == "inside"
            raise KeyError
    except KeyError:
        pass
    assert os.environ["ONE"] == "before"
    assert "TWO" not in os.environ
