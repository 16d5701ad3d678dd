"""How parts travel from rank 0: one collective a step, whatever is in them."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from acc_ops.testing import run_threads
from acc_ops.world import current_world
from acc_trainer.data.rows import Form, News, Note, Opening, Receiver, Sender
from acc_trainer.data.shard import Tail

Pair = namedtuple("Pair", "left right")
DTYPES = [
    torch.float32,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.int16,
]


def equal(one, two):
    if isinstance(one, torch.Tensor):
        return (
            isinstance(two, torch.Tensor)
            and one.dtype == two.dtype
            and one.shape == two.shape
            and torch.equal(one, two)
        )
    if isinstance(one, dict):
        return (
            type(one) is type(two)
            and list(one) == list(two)
            and all(equal(one[key], two[key]) for key in one)
        )
    if isinstance(one, (list, tuple)):
        return type(one) is type(two) and len(one) == len(two) and all(map(equal, one, two))
    return one == two


def sent(steps, ranks=2, copy=True):
    """What the ranks receive of `steps` (each one part for all, or a list of parts), and how many collectives each of them made in each step."""

    def work():
        world = current_world()
        made = []
        for name in ("scatter", "broadcast"):
            call = getattr(world.comm, name)
            setattr(
                world.comm, name, lambda *args, _call=call, _name=name: (made.append(_name), _call(*args))[1]
            )
        got = []
        if world.is_main:
            sender = Sender(world)
            ready = sender.step(steps[0])
            sender.open(Opening(0, ready.form.text))
            for number, parts in enumerate(steps, start=1):
                following = sender.step(steps[number]) if number < len(steps) else None
                same = following is None or following.form is ready.form
                made.clear()
                sender.send(
                    ready, Note(number, following is None), News(form=None if same else following.form.text)
                )
                got.append((parts[0], list(made)))
                ready = following
        else:
            receiver = Receiver(world)
            receiver.open()
            for number in range(1, len(steps) + 1):
                made.clear()
                part, note, _ = receiver.receive(number, copy=copy)
                assert note.is_last == (number == len(steps))
                got.append((part, list(made)))
        return got

    return run_threads(ranks, work)


shapes = st.lists(st.integers(0, 3), max_size=3)
tensors = st.builds(
    lambda dtype, shape: torch.randint(0, 2, shape).to(dtype), st.sampled_from(DTYPES), shapes
)
leaves = tensors | st.integers() | st.text(max_size=3) | st.none()
batches = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.tuples(inner, inner)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=8,
)


@settings(max_examples=60)
@given(steps=st.lists(st.lists(batches, min_size=2, max_size=2), min_size=1, max_size=3), copy=st.booleans())
def test_everything_arrives_as_it_was_sent(steps, copy):
    for rank, got in enumerate(sent(steps, copy=copy)):
        assert all(equal(part, parts[rank]) for (part, _), parts in zip(got, steps, strict=True))
        assert all(len(collectives) <= 2 for _, collectives in got)


@pytest.mark.parametrize(
    "part",
    [
        {"ids": torch.arange(6).view(2, 3), "mask": torch.ones(2, dtype=torch.bool)},
        [torch.ones(2), torch.zeros(3)],
        torch.ones(4),
        {"deep": [{"a": torch.ones(2)}], "name": "constant"},
    ],
)
def test_steps_of_one_form_take_one_collective(part):
    for got in sent([[part, part]] * 3):
        assert [collectives for _, collectives in got] == [["scatter"]] * 3


def test_another_form_is_told_with_the_step_before():
    short, long = torch.ones(2, 3), torch.ones(2, 5)
    for got in sent([[short, short], [short, long], [long, long], [long, long]]):
        assert [len(collectives) for _, collectives in got] == [2, 2, 1, 1]


def test_a_row_is_the_tensors_and_a_note():
    def bytes_of(part):
        return Sender(current_world()).step([part]).form.num_bytes

    assert bytes_of({"a": torch.ones(10), "b": torch.ones(3, dtype=torch.bool)}) == 64 + 43
    assert bytes_of("no tensor") == 64


def test_what_is_handed_to_the_user_is_not_shared_between_steps():
    part = {"x": torch.ones(2), "meta": ["a"]}
    _, got = sent([[part, part]] * 2)
    (first, _), (second, _) = got
    assert first["meta"] is not second["meta"]
    first["x"].zero_()
    assert second["x"].tolist() == [1.0, 1.0]


def test_a_received_tensor_has_memory_of_its_own():
    part = {"x": torch.ones(2), "y": torch.ones(1000)}
    _, got = sent([[part, part]])
    assert got[0][0]["x"].untyped_storage().nbytes() == 8


def test_what_cannot_travel_is_refused_before_anything_is_sent():
    with pytest.raises(TypeError, match="dispatch_batches"):
        Sender(current_world()).step([torch.ones(2, 2).to_sparse()])
    with pytest.raises((AttributeError, TypeError), match="pickle"):
        Sender(current_world()).step([{"x": torch.ones(1), "f": lambda: 1}])


def test_ranks_that_are_not_in_step_are_told():
    def work():
        world = current_world()
        if world.is_main:
            sender = Sender(world)
            step = sender.step([torch.ones(1)] * 2)
            sender.open(Opening(0, step.form.text))
            sender.send(step, Note(3, False), News())
            return True
        receiver = Receiver(world)
        receiver.open()
        with pytest.raises(
            RuntimeError, match="rank 1 waits for step 1 of a dispatching loader, rank 0 sends step 3"
        ):
            receiver.receive(1, copy=True)
        return True

    assert all(run_threads(2, work))


def test_errors_and_tails_come_as_news():
    def work():
        world = current_world()
        tail = Tail(real=(1, 0), sizes=(1, 1))
        if world.is_main:
            sender = Sender(world)
            step = sender.step([torch.ones(1)] * 2)
            sender.open(Opening(0, step.form.text))
            sender.send(step, Note(1, False, samples=1), News(tail=tail))
            sender.send(step, Note(2, True), News(error="OSError: disk gone"))
            return True
        receiver = Receiver(world)
        receiver.open()
        _, note, news = receiver.receive(1, copy=True)
        assert (note.samples, news.tail) == (1, tail)
        with pytest.raises(
            RuntimeError, match="rank 0 failed while reading the next batch: OSError: disk gone"
        ):
            receiver.receive(2, copy=True)
        return True

    assert all(run_threads(2, work))


def test_a_flat_form_is_read_once_and_others_anew():
    def skeletons(part):
        form = Form(Sender(current_world()).step([part]).form.text)
        return form.skeleton(0) is form.skeleton(0)

    assert skeletons({"x": torch.ones(1)})
    assert not skeletons({"x": [torch.ones(1)]})
