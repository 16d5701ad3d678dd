"""Which layer comes after which: guessed from the order of registration, then learnt from the forwards that ran."""

from __future__ import annotations

_MOST_NEEDED = 8
_PAIRS_PER_LAYER = 16  # more of them is no order, and is forgotten


class LearntOrder:
    """The layers of a model by number; a forward is `came` for each of them, then `end`.

    The next layer is looked up by the last two, else by the last one, else it is the next number. After the last one there
    is none. A wrong guess must be made good by right ones in a row, as many as there were wrong ones in this forward, before
    one layer is looked ahead again, and by one more for each further layer. A forward begins with full trust, unless most
    guesses of the one before were wrong.
    """

    _before: int | None
    _current: int | None
    _guessed: int | None
    _right_in_a_row: int
    _right_needed: int

    def __init__(self) -> None:
        self.layers = 0  # how many there are
        self._after_two: dict[tuple[int | None, int], int | None] = {}
        self._after_one: dict[int, int | None] = {}
        self._right = self._wrong = 0  # guesses in this forward
        self._start()

    def came(self, layer: int) -> None:
        """This layer runs now."""
        if self._current is not None:
            self._learn(layer)
        if self._guessed == layer:
            self._right += 1
            self._right_in_a_row += 1
        elif self._guessed is not None:
            self._wrong += 1
            self._right_in_a_row = 0
            self._right_needed = min(self._right_needed + 1, _MOST_NEEDED)
        self._before, self._current = self._current, layer
        self._guessed = self._guess(self._before, layer)

    def end(self) -> None:
        """The forward is over: nothing comes after the layer that ran last."""
        if self._current is not None:
            self._learn(None)
        self._start()

    def next_layers(self, count: int) -> list[int]:
        """The layers that come next, nearest first: `count`, or fewer before the end or a repetition, and without trust."""
        if self._right_needed:
            count = min(count, self._right_in_a_row - self._right_needed + 1)
        found: list[int] = []
        before, current = self._before, self._current
        while current is not None and len(found) < count:
            before, current = current, self._guess(before, current)
            if current is None or current in found:
                break
            found.append(current)
        return found

    def _start(self) -> None:
        self._before = self._current = self._guessed = None
        self._right_in_a_row = 0
        self._right_needed = int(self._wrong > self._right)
        self._right = self._wrong = 0

    def _guess(self, before: int | None, current: int) -> int | None:
        if (before, current) in self._after_two:
            return self._after_two[before, current]
        if current in self._after_one:
            return self._after_one[current]
        return current + 1 if current + 1 < self.layers else None

    def _learn(self, layer: int | None) -> None:
        assert self._current is not None
        if len(self._after_two) > _PAIRS_PER_LAYER * self.layers:
            self._after_two.clear()
        self._after_two[self._before, self._current] = layer
        self._after_one[self._current] = layer
