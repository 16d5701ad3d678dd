"""What a rank says about itself, and what it learns of others; two ranks of one process, which meet in a store as processes do."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from acc_ops import desk, watch
from acc_ops.comm import CommError, TorchComm
from acc_ops.desk import Silence, ask
from acc_ops.testing import count_calls
from acc_ops.watch import Peers, Watch, WatchOptions, watch_of


@pytest.fixture(autouse=True)
def _desk_of_its_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(desk, "_desks", {})
    yield
    desk.close_desk()


class Work:
    """A collective that is done at once, fails at once, or is interrupted at once and never ends."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error

    def is_completed(self) -> bool:
        return not isinstance(self.error, KeyboardInterrupt)

    def wait(self, timeout: timedelta) -> None:
        if self.error is not None:
            raise self.error


class Store:
    """A store that counts, and that may have gone with its keeper."""

    def __init__(self) -> None:
        self.store, self.calls, self.gone = dist.HashStore(), 0, False

    def __call__(self) -> Store:
        return self

    def __getattr__(self, name: str) -> Any:
        if name not in ("set", "check", "multi_get"):
            raise AttributeError(name)
        self.calls += 1
        if self.gone:
            raise RuntimeError("Connection reset")
        return getattr(self.store, name)


def ranks(size: int, store: Any, **changes: Any) -> list[Watch]:
    """`size` ranks of a group, all of them in this process."""
    values: dict[str, Any] = {"size": size, "names": [f"rank {r}" for r in range(size)], "store": store}
    values.update(alive=lambda: True, abandon=lambda: None)
    return [Watch(Peers(**{**values, **changes, "rank": r}), WatchOptions()) for r in range(size)]


CLOSED = "Connection closed by peer [127.0.0.1]:1. This is typically caused by a remote worker crashing"


def test_a_rank_says_which_calls_it_made_and_where_it_is() -> None:
    (one,) = ranks(1, Store())
    assert one.respond({})["made"] == "0 calls"
    one.wait(Work(), "all_gather")
    said = one.respond({})
    assert (said["number"], said["made"], said["waits"]) == (1, "1 call, the last all_gather,", "")
    assert said["at"].partition(" in ")[0].rpartition(":")[0].endswith(".py")
    one.leave("called leave_world() at a.py:1")
    one.leave("something later")
    assert one.respond({})["left"] == "called leave_world() at a.py:1"


def test_a_destroyed_group_counts_as_left() -> None:
    (one,) = ranks(1, Store(), alive=lambda: False)
    assert one.respond({})["left"] == "destroyed its process group"


def test_a_main_thread_that_ended_while_another_lives_counts_as_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, two = ranks(2, Store())
    one.wait(Work(), "all_gather")
    worker = threading.Thread(target=two.wait, args=(Work(), "all_gather"))  # may well make its next call
    worker.start()
    worker.join()
    main = threading.main_thread()
    monkeypatch.setattr(main, "is_alive", lambda: False)
    assert one.respond({})["left"] == "ended its main thread"
    assert two.respond({})["left"] == ""
    monkeypatch.setattr(watch.sys, "last_value", KeyError("lost"), raising=False)
    assert one.respond({})["left"] == "ended its main thread with KeyError: 'lost'"


def test_the_store_is_asked_once_and_not_again_for_calls_that_go_well() -> None:
    store = Store()
    first, *_ = ranks(3, store)
    published = store.calls
    for _ in range(20):
        first.wait(Work(), "all_gather")
    assert published == 3
    assert store.calls == published + 2


def test_a_call_that_is_soon_over_pays_for_next_to_nothing() -> None:
    one, _ = ranks(2, Store())
    one.wait(Work(), "all_gather")
    work = Work()
    assert (
        count_calls(lambda: one.wait(work, "all_gather")) <= 5
    )  # the lambda, wait, its thread, and the work's own wait


def test_an_address_of_the_group_before_is_not_taken_for_one_of_this_group() -> None:
    store = Store()
    _, slow = ranks(2, store, generation="1.1")
    slow.leave("called leave_world() at a.py:1")
    first, *_ = [
        Watch(
            Peers(
                rank=0,
                size=2,
                names=["rank 0", "rank 1"],
                store=store,
                alive=lambda: True,
                abandon=lambda: None,
                generation="2.1",
            ),
            WatchOptions(),
        )
    ]
    assert first._ask(1) is Silence.UNKNOWN  # rank 1 has not come to the second group yet
    _, come = ranks(2, store, generation="2.1")
    come.wait(Work(), "barrier")
    assert first._ask(1)["made"].startswith("1 call,")


def test_ranks_that_count_their_groups_differently_find_each_other_after_the_first_call() -> None:
    store = Store()
    one, _ = ranks(2, store, generation="1.1")
    ranks(2, store, generation="2.1")
    assert one._ask(1) is Silence.UNKNOWN
    one.wait(Work(), "barrier")
    assert isinstance(one._ask(1), dict)


def test_others_are_found_and_asked_even_when_the_store_has_gone_meanwhile() -> None:
    store = Store()
    one, two, three = ranks(3, store)
    one.wait(Work(), "all_gather")
    store.gone = True
    two.wait(Work(), "all_gather")
    two.leave("called leave_world() at a.py:1")
    three.wait(Work(), "all_gather")
    with pytest.raises(
        CommError,
        match=r"^rank 0 waits in .* \(call 2, .*test_watch.py:\d+\) for rank 1, which called leave_world\(\) at a.py:1$",
    ):
        one.wait(Work(RuntimeError(CLOSED)), "all_gather")
    assert "which called leave_world()" in one.respond({})["gave_up"]
    asked = store.calls
    assert two._ask(0) is Silence.UNKNOWN  # it never knew, and now cannot
    assert store.calls == asked  # nor does it try again: torch prints a warning each time


def test_a_rank_that_gave_up_and_went_on_is_not_held_to_it() -> None:
    one, two = ranks(2, Store())
    two.leave("called leave_world() at a.py:1")
    one.wait(Work(), "all_gather")
    with pytest.raises(CommError):
        one.wait(Work(RuntimeError(CLOSED)), "all_gather")
    assert one.respond({})["gave_up"]
    one.wait(Work(), "all_gather")
    assert one.respond({})["gave_up"] == ""


def test_a_goodbye_reaches_those_that_are_known() -> None:
    one, two, _ = ranks(3, Store())
    one.wait(Work(), "all_gather")
    two.wait(Work(), "all_gather")
    two.tell_others("raised KeyError: 'x'", follows=False, deadline_s=time.monotonic() + 5)
    with pytest.raises(CommError, match=r"for rank 1, which raised KeyError: 'x'$"):
        one.wait(Work(RuntimeError(CLOSED)), "all_gather")


def test_a_rank_that_never_said_its_address_is_unknown_and_others_are_found() -> None:
    store = Store()
    one, two = ranks(3, store)[:2]
    store.store.delete_key("acc_ops/desk/2")
    one.wait(Work(), "all_gather")
    assert one._ask(2) is Silence.UNKNOWN
    assert one._ask(1) == two.respond({}) | {"at": one._ask(1)["at"]}


def test_without_a_store_a_failure_keeps_the_backends_words() -> None:
    (one, _) = ranks(2, lambda: None)
    with pytest.raises(CommError, match=r"rank 0 failed in .* \(call 1, .*: no route"):
        one.wait(Work(RuntimeError("Timed out: no route")), "all_gather")


def test_an_interrupted_wait_holds_the_group_so_that_leaving_waits_for_nothing() -> None:
    abandoned: list[int] = []
    (one,) = ranks(1, Store(), abandon=lambda: abandoned.append(1))
    with pytest.raises(KeyboardInterrupt):
        one.wait(Work(KeyboardInterrupt()), "all_gather")
    assert abandoned == [1]


def test_an_abandoned_group_is_never_taken_apart() -> None:
    class Group:
        pass

    group = Group()
    alive = weakref.ref(group)
    watch._keep_for_ever(group)
    del group
    gc.collect()
    assert alive() is not None


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_the_time_before_a_warning_must_be_one(seconds: float) -> None:
    with pytest.raises(ValueError, match="warn_after_s must be a number of seconds above 0"):
        WatchOptions(warn_after_s=seconds)


def test_all_who_speak_in_a_group_share_its_watch(gloo_group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACC_WARN_AFTER", "7.5")
    comm = TorchComm()
    assert comm.watch is TorchComm().watch is watch_of(dist.group.WORLD)
    assert comm.watch.options.warn_after_s == 7.5
    assert TorchComm(warn_after_s=9).watch.options.warn_after_s == 9
    part = TorchComm(dist.new_group([0]))
    assert part.watch is not comm.watch
    comm.barrier()
    assert comm.all_reduce(torch.ones(2)).tolist() == [1.0, 1.0]
    assert (comm.watch.respond({})["number"], part.watch.respond({})["number"]) == (2, 0)
    dist.destroy_process_group()
    assert comm.watch.respond({})["left"] == "destroyed its process group"


def test_what_an_accelerator_sends_is_not_waited_for_in_slices(gloo_group: None) -> None:
    waited: list[tuple[Any, ...]] = []

    class Queued:
        def wait(self, *timeout: Any) -> None:  # would block the host if it were given a timeout
            waited.append(timeout)

    comm = TorchComm()
    comm._finish(Queued(), "all_gather", torch.empty(1, device="meta"))
    assert waited == [()]
    assert comm.watch.respond({})["number"] == 0


def test_a_rank_is_asked_over_its_own_address(gloo_group: None) -> None:
    comm = TorchComm()
    said = watch._store_of(dist.group.WORLD).get("acc_ops/desk/0").decode()
    address = desk.Address.from_text(said.partition(" ")[2])
    assert ask(address, {}) == comm.watch.respond({}) | {"at": ask(address, {})["at"]}


def test_a_group_that_has_gone_is_answered_for_until_the_next_one_is_made() -> None:
    store = dist.HashStore()  # as torchrun's, it outlives the groups
    said, kept = [], []
    for _ in range(3):
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        said.append(TorchComm().watch)
        dist.destroy_process_group()
        (answering,) = desk._desks.values()
        kept.append(len(answering._responders))
        assert ask(said[-1]._address, {})["left"] == "destroyed its process group"
    assert kept == [1, 1, 1]
    assert ask(said[0]._address, {}) is Silence.MUTE
    numbers = [int(one._peers.generation.partition(".")[0]) for one in said]
    assert numbers == list(range(numbers[0], numbers[0] + 3))


def test_ranks_of_one_machine_can_be_asked_from_that_machine_only(
    gloo_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert TorchComm().watch._address is not None
    (bound,) = [one._socket.getsockname()[0] for one in desk._desks.values()]
    assert bound == "127.0.0.1"
