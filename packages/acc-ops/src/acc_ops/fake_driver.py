"""What torch's C++ side must be told before it takes a device without a driver for real; used by `fake_accelerator.py` only.

[Note: how torch is told] torch knows kinds of devices that this machine's build has no code for; `hip` (a ROCm build says `cuda` instead) is
one of them, and unlike `privateuseone` one whose tensors may replace a CPU tensor's data, as `param.data = ...` and `module.to` do. Torch
asks two objects about a kind: a device guard (which device is current) and, since 2.7, the hooks (is it built). Both are C++ objects without a Python
door, so copies of their tables of functions are made with a few entries replaced, and torch's pointers to them are exchanged. Everything is
put back at the end. `fake_accelerator` tries the result before it hands it out.

[Note: one accelerator] Since 2.7 torch insists on one accelerator that its build is for, used or not, and a backward asks which
(`at::accelerator::getAccelerator`; that it asks place 2 of the hooks was read in the machine code of 2.7 to 2.13). So the hooks of the others say
"not built" meanwhile; `torch.cuda` and what else CUDA's hooks do stay as they are. `fake_support.check` makes sure that no such device can be used.

[Note: the end of a table] A table does not say how long it is; the longest of those copied has 50 words (CUDA's hooks, torch 2.12). Whole words
behind it are copied, never used, and only from pages that can be read: the last table of a library may end where its memory ends. The system is
asked to read each page, since it answers with an error where a read in this process would end it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from acc_ops.fake_support import FakeAcceleratorUnavailable

KIND = "hip"
DISPATCH_KEY = "HIP"
KIND_NUMBER, _META = 6, 14  # numbers of c10::DeviceType
_DLPACK_ROCM = 10
_TABLE_LENGTH = 128  # words, more than any of the tables has; see the note
_WORD = ctypes.sizeof(ctypes.c_void_p)
_HOOKS_SINCE = (2, 7)  # the first torch whose hooks say whether a kind is built
_OTHERS = ("CUDA", "XPU", "MPS")  # the kinds that a build may be for

_current = threading.local()  # .index: the current device of the thread


def current_index() -> int:
    """The current device of this thread."""
    return getattr(_current, "index", 0)


def set_current_index(index: int) -> None:
    """Choose the current device of this thread."""
    _current.index = index


@contextmanager
def driver(count_of_devices: int) -> Iterator[None]:
    """Torch takes the kind `hip` for a device of this machine, and sees so many of them. FakeAcceleratorUnavailable where it cannot be told.

    Call `fake_support.check` first: a torch that it does not know may end the process here.
    """
    libraries = Path(torch.__file__).parent / "lib"
    try:
        core = _library(libraries, "c10")
        guards = (ctypes.c_void_p * (_META + 1)).in_dll(core, "_ZN3c104impl26device_guard_impl_registryE")
        hooks = _hooks(_library(libraries, "torch_cpu"))
    except (OSError, ValueError, AttributeError) as error:
        raise FakeAcceleratorUnavailable(
            f"no fake accelerator here: this torch does not show its devices ({error}); use one of PyPI's"
        ) from error
    if guards[KIND_NUMBER] is not None:
        raise FakeAcceleratorUnavailable(f"no fake accelerator here: this torch has a real {KIND!r}")
    record = _place_of_record(guards)
    count = ctypes.CFUNCTYPE(ctypes.c_int8, _OBJECT)(lambda _: count_of_devices)
    # those after it are: waits for an event, asks for one, counts the devices
    functions = {**_GUARD, record: _nothing_c, record + 1: _nothing_c, record + 3: count}
    with ExitStack() as undo:
        undo.callback(_replaced(guards, KIND_NUMBER, _copied_object(guards[_META], functions)))
        for table, entries in hooks:
            undo.callback(_replaced(table, 0, _copied_table(table[0], entries)))
        yield


def _hooks(library: ctypes.CDLL) -> list[tuple[_Cell, dict[int, Any]]]:
    """Where the address of the table of each kind's hooks stands, and what to replace in that table."""
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < _HOOKS_SINCE:
        return []
    found = []
    for kind in (DISPATCH_KEY, *_OTHERS):
        name = f"get{kind}Hooks"
        ask = getattr(library, f"_ZN2at6detail{len(name)}{name}Ev")
        ask.restype = ctypes.c_void_p
        table = ctypes.c_void_p.from_address(ask())  # an object begins with the address of its table
        found.append((_Cell(table), _HOOKS if kind == DISPATCH_KEY else _HOOKS_OF_OTHERS))
    return found


class _Cell:
    """One pointer, written like an array of one."""

    def __init__(self, pointer: ctypes.c_void_p) -> None:
        self._pointer = pointer

    def __getitem__(self, index: int) -> int | None:
        return self._pointer.value

    def __setitem__(self, index: int, value: int | None) -> None:
        self._pointer.value = value


class Block(ctypes.Structure):
    """The start of one piece of device memory, as DLPack describes it (github.com/dmlc/dlpack, version 0.8)."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_index", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype_code", ctypes.c_uint8),
        ("dtype_bits", ctypes.c_uint8),
        ("dtype_lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("size", ctypes.c_int64),  # what `shape` points to; from here on our own
        ("stride", ctypes.c_int64),
    )


_ALIGNMENT = 64
_HEADER_BYTES = -(-ctypes.sizeof(Block) // _ALIGNMENT) * _ALIGNMENT

_malloc = ctypes.pythonapi.PyMem_RawMalloc
_malloc.restype, _malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype, _capsule.argtypes = (ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p])
_FREE = ctypes.cast(ctypes.pythonapi.PyMem_RawFree, ctypes.c_void_p).value


def allocate(nbytes: int, index: int) -> torch.Tensor:
    """New memory on device `index`, as a row of uint8. Freed without Python, as C++ may drop it while an exception is on its way."""
    start = _malloc(_HEADER_BYTES + _ALIGNMENT + nbytes)
    if not start:
        raise MemoryError(f"no memory for {nbytes} bytes of the fake accelerator")
    block = Block.from_address(start)
    block.data = -(-(start + _HEADER_BYTES) // _ALIGNMENT) * _ALIGNMENT
    block.device_type, block.device_index = _DLPACK_ROCM, index
    block.ndim, block.byte_offset, block.context = 1, 0, None
    block.dtype_code, block.dtype_bits, block.dtype_lanes = (1, 8, 1)  # unsigned, 8 bits, no vector
    block.size, block.stride = nbytes, 1
    block.shape = start + Block.size.offset
    block.strides = start + Block.stride.offset
    block.deleter = _FREE
    return torch.utils.dlpack.from_dlpack(_capsule(start, b"dltensor", None))


def host_view(address: int, nbytes: int) -> torch.Tensor:
    """The bytes of a piece of device memory as a CPU tensor, which is valid as long as the memory is."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)


def _library(folder: Path, name: str) -> ctypes.CDLL:
    for file in (f"lib{name}.so", f"lib{name}.dylib"):
        if (folder / file).is_file():
            return ctypes.CDLL(str(folder / file))
    raise OSError(f"there is no lib{name} in {folder.name}")


# c10::Device is two bytes, the kind and the index, and travels as one number
def _device(index: int) -> int:
    return KIND_NUMBER | index << 8


def _exchange(_: Any, device: int) -> int:
    before = current_index()
    _choose(_, device)
    return _device(before)


def _choose(_: Any, device: int) -> None:
    if device >> 8 >= 0:  # -1: the current one
        set_current_index(device >> 8)


_OBJECT, _DEVICE = ctypes.c_void_p, ctypes.c_int16
_choose_c = ctypes.CFUNCTYPE(None, _OBJECT, _DEVICE)(_choose)
_nothing_c = ctypes.CFUNCTYPE(None, _OBJECT)(lambda _: None)
_true_c = ctypes.CFUNCTYPE(ctypes.c_bool, _OBJECT)(lambda _: True)
_false_c = ctypes.CFUNCTYPE(ctypes.c_bool, _OBJECT)(lambda _: False)
# place in the table -> our function
_GUARD: dict[int, Any] = {  # c10::impl::DeviceGuardImplInterface
    0: ctypes.CFUNCTYPE(ctypes.c_int8, _OBJECT)(lambda _: KIND_NUMBER),  # type
    1: ctypes.CFUNCTYPE(_DEVICE, _OBJECT, _DEVICE)(_exchange),  # exchangeDevice
    2: ctypes.CFUNCTYPE(_DEVICE, _OBJECT)(lambda _: _device(current_index())),  # getDevice
    3: _choose_c,  # setDevice
    4: _choose_c,  # uncheckedSetDevice
    # getStream, a device and a number; the second word of the answer stays as it is, so that streams of a device may differ, which only makes a
    # backward record more events
    5: ctypes.CFUNCTYPE(ctypes.c_int64, _OBJECT, _DEVICE)(lambda _, device: device & 0xFFFF),
}
_HOOKS: dict[int, Any] = {  # at::AcceleratorHooksInterface
    2: _true_c,  # isBuilt
    3: _true_c,  # isAvailable
    4: _true_c,  # hasPrimaryContext
}
_HOOKS_OF_OTHERS: dict[int, Any] = {2: _false_c}  # isBuilt

_made: list[Any] = []  # torch keeps addresses into these


def _place_of_record(guards: Any) -> int:
    """Where in a guard's table the function is that records an event; it differs between versions."""
    called: list[int] = []
    for place in range(6, 24):
        note = ctypes.CFUNCTYPE(None, _OBJECT)(lambda _: called.append(1))
        put_back = _replaced(guards, _META, _copied_object(guards[_META], {place: note}))
        try:
            stream = torch.Stream(stream_id=0, device_index=-1, device_type=_META)
            torch.Event(device="meta").record(stream)
        except RuntimeError:  # the meta device records no events
            pass
        finally:
            put_back()
        if called:
            return place
    raise RuntimeError(
        f"torch {torch.__version__} cannot be told of a fake accelerator: where it records events is not found"
    )


def _copied_object(address: int | None, functions: dict[int, Any]) -> int:
    """The address of a new object without data whose functions are those of the object at `address`, some replaced."""
    if address is None:
        raise FakeAcceleratorUnavailable("no fake accelerator here: torch has no guard for its meta device")
    table = ctypes.c_void_p.from_address(address).value
    made = (ctypes.c_void_p * 4)(_copied_table(table, functions))
    _made.append(made)
    return ctypes.addressof(made)


def _copied_table(address: int | None, functions: dict[int, Any]) -> int:
    assert address is not None
    before = 2 * _WORD  # a table is preceded by two words about the type
    words = _readable(address - before, _TABLE_LENGTH * _WORD)
    made = (ctypes.c_void_p * _TABLE_LENGTH).from_buffer_copy(words.ljust(_TABLE_LENGTH * _WORD, b"\0"))
    for place, function in functions.items():
        made[2 + place] = ctypes.cast(function, ctypes.c_void_p).value
    _made.append(made)
    return ctypes.addressof(made) + before


def _readable(address: int, nbytes: int) -> bytes:
    """The bytes there, up to the first page that cannot be read."""
    found, end = b"", address + nbytes
    reader, writer = os.pipe()
    try:
        while address < end:
            part = min(end, (address // mmap.PAGESIZE + 1) * mmap.PAGESIZE) - address
            try:
                written = os.write(writer, (ctypes.c_char * part).from_address(address))
            except OSError:  # EFAULT
                break
            found += os.read(reader, written)
            address += written
    finally:
        os.close(reader)
        os.close(writer)
    return found


def _replaced(cells: Any, index: int, value: int) -> Callable[[], None]:
    """Write `value`, and return the function that puts back what was there."""
    old = cells[index]
    cells[index] = value

    def put_back() -> None:
        cells[index] = old

    return put_back
