"""Loggers that know the rank."""

from __future__ import annotations

import logging
import threading
import time
import uuid

import pytest
import torch

from acc_ops import logging as acc_logging
from acc_ops.collectives import MismatchError, gather
from acc_ops.logging import MultiProcessAdapter, get_logger
from acc_ops.testing import run_threads
from acc_ops.world import current_world, join_world


class Recorder(logging.Handler):
    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append(record)

    @property
    def texts(self):
        return [record.getMessage() for record in self.records]


@pytest.fixture
def log():
    logger = get_logger(f"test.{uuid.uuid4()}", log_level="info")
    logger.recorder = Recorder()
    logger.logger.addHandler(logger.recorder)
    return logger


def test_before_any_world_it_logs_as_rank_0(log):
    log.info("hello %s", "there")
    assert log.recorder.texts == ["[RANK 0] hello there"]


def test_only_the_main_rank_speaks(log):
    run_threads(3, lambda: log.info("x"))
    assert log.recorder.texts == ["[RANK 0] x"]


def test_every_rank_speaks_when_asked(log):
    run_threads(3, lambda: log.info("x", main_process_only=False))
    assert sorted(log.recorder.texts) == ["[RANK 0] x", "[RANK 1] x", "[RANK 2] x"]


@pytest.mark.parametrize("main_process_only", [True, False])
def test_in_order_is_in_order(log, main_process_only):
    def work():
        time.sleep(0.02 * (3 - current_world().rank))  # the last rank arrives first
        for text in "ab":
            log.info(text, in_order=True, main_process_only=main_process_only)

    run_threads(4, work)
    assert log.recorder.texts == [f"[RANK {rank}] {text}" for text in "ab" for rank in range(4)]


def test_in_order_does_not_hang_where_levels_differ(log):
    quiet = get_logger(f"test.{uuid.uuid4()}", "ERROR")
    run_threads(2, lambda: (log if current_world().rank else quiet).info("x", in_order=True))
    assert log.recorder.texts == ["[RANK 1] x"]


def test_a_handler_that_raises_does_not_hang_the_others(log):
    class Broken(logging.Handler):
        def handle(self, record):
            if "RANK 0" in record.getMessage():
                raise OSError("disk full")
            return True

    log.logger.addHandler(Broken())
    spoken = threading.Event()

    def work():
        try:
            log.info("x", in_order=True)
        except OSError:
            assert current_world().rank == 0
            spoken.set()

    run_threads(3, work, timeout_s=10)
    assert spoken.is_set()


def test_the_record_names_the_callers_line(log):
    log.info("here")
    log.log(logging.INFO, "here")
    log.warning_once("here")
    log.info("here", in_order=True)
    assert {record.funcName for record in log.recorder.records} == {"test_the_record_names_the_callers_line"}


def test_every_way_of_speaking_names_the_callers_line(log):
    def speak():
        log.error("x")
        log.critical("x", main_process_only=False)
        log.warning("x", in_order=True)
        try:
            raise KeyError("y")
        except KeyError:
            log.exception("x")

    run_threads(1, speak)
    assert {record.funcName for record in log.recorder.records} == {"speak"}
    assert len(log.recorder.records) == 4
    assert log.recorder.records[-1].exc_info[0] is KeyError


def test_extra_of_the_adapter_and_of_the_call_reach_the_record(log):
    log.info("x", extra={"step": 3})
    adapter = MultiProcessAdapter(log.logger, {"run": "a", "step": 1})
    adapter.info("x", extra={"step": 4})
    adapter.info("x")
    one, two, three = log.recorder.records
    assert one.step == 3
    assert (two.run, two.step) == ("a", 4)
    assert (three.run, three.step) == ("a", 1)


def test_a_line_that_nobody_sees_asks_for_no_world(log, monkeypatch):
    monkeypatch.setattr(acc_logging, "current_world", lambda: pytest.fail("costly"))
    log.debug("x")
    log.debug("x", main_process_only=False)
    assert log.recorder.texts == []


def test_worker_threads_of_a_process_log_as_its_rank(log, no_launcher):
    join_world(cpu=True)
    threads = [threading.Thread(target=log.info, args=("x %d", index)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(log.recorder.texts) == [f"[RANK 0] x {index}" for index in range(4)]


def test_in_order_does_not_hang_where_a_filter_drops_one_ranks_line(log):
    log.logger.addFilter(lambda record: "RANK 1" not in record.getMessage())
    run_threads(3, lambda: log.info("x", in_order=True))
    assert log.recorder.texts == ["[RANK 0] x", "[RANK 2] x"]


def test_a_given_stacklevel_is_kept(log):
    _, options = log.process("x", {"stacklevel": 7})
    assert options["stacklevel"] == 7


def test_warning_once_is_once_per_arguments_and_adapter(log):
    for _ in range(3):
        log.warning_once("a %s", [1])
        log.warning_once("a %s", [2])
    assert log.recorder.texts == ["[RANK 0] a [1]", "[RANK 0] a [2]"]
    other = MultiProcessAdapter(log.logger)
    other.warning_once("a %s", [1])
    assert len(log.recorder.texts) == 3


def test_warning_once_in_order_speaks_on_every_rank(log):
    def work():
        for _ in range(2):
            log.warning_once("x", in_order=True)

    run_threads(3, work)
    assert log.recorder.texts == ["[RANK 0] x", "[RANK 1] x", "[RANK 2] x"]


def test_the_level_is_the_loggers_alone(monkeypatch):
    root = logging.getLogger().level
    assert get_logger("test.level.a", "debug").logger.level == logging.DEBUG
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "error")
    assert get_logger("test.level.b").logger.level == logging.ERROR
    assert get_logger("test.level.c", "INFO").logger.level == logging.INFO
    monkeypatch.delenv("ACCELERATE_LOG_LEVEL")
    assert get_logger("test.level.d").logger.level == logging.NOTSET
    assert logging.getLogger().level == root


def test_an_unknown_level_is_refused():
    with pytest.raises(ValueError, match="log_level='loud' is no log level"):
        get_logger("test.level.e", "loud")
    with pytest.raises(ValueError, match=r"log_level=1\.5 is no log level"):
        get_logger("test.level.e", 1.5)
    assert get_logger("test.level.e", logging.ERROR).logger.level == logging.ERROR


def test_an_unknown_level_of_the_environment_names_the_variable(monkeypatch):
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "bogus")
    with pytest.raises(ValueError, match="ACCELERATE_LOG_LEVEL='bogus' is no log level: use debug, info"):
        get_logger("test.level.f")
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", " Info ")
    assert get_logger("test.level.g").logger.level == logging.INFO


def test_logging_in_order_beside_another_collective_is_an_error_on_every_rank(log):
    def work():
        with pytest.raises(MismatchError, match="operation: rank 0 barrier, rank 1 gather"):
            log.info("x", in_order=True) if current_world().rank == 0 else gather(torch.ones(1))

    run_threads(2, work, timeout_s=10)
