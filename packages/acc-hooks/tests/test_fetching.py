from __future__ import annotations

import threading

import torch

from acc_hooks.fetching import Job, Wanted

CPU = torch.device("cpu")


def job_for(weights: dict[str, torch.Tensor]) -> Job:
    wanted = Wanted(
        weights_map=weights,
        device=CPU,
        nbytes={name: value.nbytes for name, value in weights.items()},
        staged=frozenset(),
    )
    return Job(wanted, threading.Lock(), lambda: 0.0, None)


def test_a_job_gives_what_it_read_and_the_map_still_has():
    weights = {name: torch.ones(2) for name in ("kept", "written", "replaced", "gone")}
    job = job_for(weights)
    job.run()
    weights["written"].zero_()
    weights["replaced"] = torch.ones(2)
    del weights["gone"]
    found = job.result(weights, CPU)
    assert list(found) == ["kept"]
    assert found["kept"].value is weights["kept"]


def test_a_job_gives_nothing_to_who_reads_another_map_or_runs_elsewhere():
    weights = {"w": torch.ones(2)}
    job = job_for(weights)
    job.run()
    assert job.result(dict(weights), CPU) == {}
    assert job.result(weights, torch.device("cuda", 0)) == {}


def test_a_job_that_is_claimed_or_dropped_does_not_run():
    claimed, dropped = job_for({}), job_for({})
    assert claimed.claim()
    dropped.drop()
    for job in (claimed, dropped):
        job.run()
        assert not job._ended.is_set()


def test_an_error_is_kept_and_the_layer_reads_for_itself():
    job = job_for({"w": torch.ones(2)})
    job._wanted.weights_map.clear()
    job.run()
    assert isinstance(job.error, KeyError)
    assert job.result(job._wanted.weights_map, CPU) == {}
