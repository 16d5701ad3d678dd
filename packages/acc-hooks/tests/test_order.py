from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from acc_hooks.order import LearntOrder


def run(order: LearntOrder, layers: list[int], count: int = 2) -> list[list[int]]:
    """One forward; what was looked ahead at each layer."""
    ahead = []
    for layer in layers:
        order.came(layer)
        ahead.append(order.next_layers(count))
    order.end()
    return ahead


def of(layers: int) -> LearntOrder:
    order = LearntOrder()
    order.layers = layers
    return order


def test_the_first_guess_is_the_order_of_registration():
    assert run(of(4), [0, 1, 2, 3]) == [[1, 2], [2, 3], [3], []]


def test_nothing_is_expected_before_the_first_layer_and_after_the_last():
    order = of(3)
    assert order.next_layers(2) == []
    assert run(order, [0, 1, 2])[-1] == []
    assert order.next_layers(2) == []


def test_an_order_is_known_after_one_forward():
    order = of(4)
    run(order, [3, 1, 0, 2])
    run(order, [3, 1, 0, 2])
    assert run(order, [3, 1, 0, 2]) == [[1, 0], [0, 2], [2], []]


def test_the_way_to_a_layer_tells_where_it_goes_on():
    order = of(6)
    for _ in range(4):
        run(order, [0, 1, 2])
        run(order, [5, 1, 4])
    assert run(order, [0, 1, 2])[1:] == [[2], []]
    assert run(order, [5, 1, 4])[1:] == [[4], []]


def test_a_forward_that_ends_early_and_one_that_goes_on_are_both_learnt():
    order = of(4)
    run(order, [0, 1])
    assert run(order, [0, 1]) == [[1], []]
    run(order, [0, 1, 2, 3])
    assert run(order, [0, 1, 2, 3]) == [[1, 2], [2, 3], [3], []]


def test_wrong_guesses_cost_trust_and_right_ones_bring_it_back():
    order = of(8)
    order.came(0)
    assert order.next_layers(2) == [1, 2]
    order.came(4)  # wrong
    assert order.next_layers(2) == []
    order.came(5)  # right: as many as there were wrong ones
    assert order.next_layers(2) == [6]
    order.came(6)
    assert order.next_layers(2) == [7]
    order.came(2)  # wrong again: two right ones are needed now
    order.came(3)
    assert order.next_layers(2) == []
    order.came(4)
    assert order.next_layers(2) == [5]


def test_a_forward_of_wrong_guesses_makes_the_next_one_wait_for_a_right_one():
    order = of(4)
    run(order, [3, 2, 1, 0])
    assert run(order, [3, 2, 1, 0]) == [[], [1], [0], []]
    assert run(order, [3, 2, 1, 0])[0] == [2, 1]


@settings(max_examples=60)
@given(st.permutations(range(6)), st.lists(st.permutations(range(6)), max_size=3))
def test_any_order_is_looked_ahead_completely_from_its_third_forward_on(layers, before):
    order = of(6)
    for other in before:
        run(order, other)
    run(order, layers)
    run(order, layers)
    ahead = run(order, layers)
    assert ahead[:-1] == [layers[i + 1 : i + 3] for i in range(5)]
    assert ahead[-1] == []


@settings(max_examples=40)
@given(st.lists(st.lists(st.integers(0, 4), max_size=30), max_size=8))
def test_what_is_remembered_is_bounded_and_every_guess_is_a_layer(forwards):
    order = of(5)
    for layers in forwards:
        for ahead in run(order, layers):
            assert set(ahead) <= set(range(5))
            assert len(set(ahead)) == len(ahead) <= 2
    assert len(order._after_two) <= 16 * 5 + 1
