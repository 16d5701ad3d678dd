"""The random generators of one rank in a file: under our names, and again under those of the specification, so that accelerate goes on with them too.

[Note: the names of the specification] `random_state` is what `random.getstate` gives, `torch_manual_seed` torch's state on the CPU, and
`numpy_random_seed` NumPy's five values (name, key, position, and of the normal distribution whether a number is left over, and which). The key is a
list here, which NumPy takes as well, so that the file can be read where NumPy is not installed. Both names of a state share one object, which
is in the file once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from acc_ops.callers import warn_caller
from acc_ops.random import capture_rng, restore_rng

_SAME = {"python": "random_state", "torch": "torch_manual_seed"}
_NUMPY = "numpy_random_seed"
_MERSENNE = "MT19937"  # the generator that NumPy's five values can be of


def states_to_save(step: int) -> dict[str, Any]:
    """Where the generators are, and the run's step, as `random_states_N.pkl` holds them."""
    ours = capture_rng()
    theirs = {name: ours[own] for own, name in _SAME.items()}
    numpy = ours.get("numpy")
    if numpy is not None and numpy["bit_generator"] == _MERSENNE:
        inner = numpy["state"]
        theirs[_NUMPY] = (_MERSENNE, inner["key"], inner["pos"], numpy["has_gauss"], numpy["gauss"])
    return {"step": step, **theirs, **ours}


def states_from(saved: Mapping[str, Any]) -> dict[str, Any]:
    """What `restore_rng` takes, from a file of either kind; what it cannot know stays, under the name it has."""
    found = {name: state for name, state in saved.items() if name not in ("step", _NUMPY, *_SAME.values())}
    for own, name in _SAME.items():
        if own not in found and name in saved:
            found[own] = saved[name]
    if "numpy" not in found and _NUMPY in saved:
        found["numpy"] = _of_five(saved[_NUMPY])
    return found


def restore_generators(saved: Mapping[str, Any]) -> None:
    """Let the generators go on from the content of such a file. What does not fit is told in a warning: the rest of a run is loaded by then."""
    try:
        restore_rng(states_from(saved))  # warns of missing ones
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, RuntimeError) as error:
        warn_caller(f"not all random generators could be restored ({error}): they go on as they are")


def _of_five(state: Any) -> Any:
    """NumPy's five values as the mapping that `capture_rng` makes; anything else as it is, for the error that names it."""
    if not (isinstance(state, Sequence) and len(state) == 5):
        return state
    name, key, position, has_gauss, gauss = state
    key = key.tolist() if hasattr(key, "tolist") else list(key)
    inner = {"key": key, "pos": int(position)}
    return {"bit_generator": name, "state": inner, "has_gauss": int(has_gauss), "gauss": float(gauss)}
