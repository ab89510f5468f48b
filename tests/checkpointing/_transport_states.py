# SPDX-License-Identifier: BSD-3-Clause
"""States to move, and the comparison that a moved state has to pass: types, strides, flags, and every bit."""

from __future__ import annotations

import math
import random
import struct
import warnings
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import torch

Point = namedtuple("Point", ["x", "y"])


# --- comparing -----------------------------------------------------------------------------------------


def elements(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor's elements, in the order of its indices, as a new uint8 tensor of one dimension.

    Works for dtypes of which torch knows no more than the size, and never interprets a value.
    """
    size = tensor.dtype.itemsize
    raw = torch.empty(0, dtype=torch.uint8)
    shape = (*tensor.shape, size)
    stride = (*(step * size for step in tensor.stride()), 1)
    raw.set_(tensor.untyped_storage(), tensor.storage_offset() * size, shape, stride)
    return raw.reshape(-1).clone()


def span_bytes(tensor: torch.Tensor) -> int:
    """How much of its storage a tensor uses."""
    return tensor.untyped_storage().nbytes()


def differences(a: Any, b: Any, path: str = "state") -> Iterator[str]:
    """How ``b`` differs from ``a``, one line each."""
    if type(a) is not type(b):
        yield f"{path}: {type(a).__name__} became {type(b).__name__}"
    elif isinstance(a, torch.Tensor):
        yield from _tensor_differences(a, b, path)
    elif isinstance(a, dict):
        if list(a) != list(b):
            yield f"{path}: keys {list(a)[:8]} became {list(b)[:8]}"
        if isinstance(a, defaultdict) and a.default_factory is not b.default_factory:
            yield f"{path}: another default_factory"
        for key in a.keys() & b.keys():
            yield from differences(a[key], b[key], f"{path}[{key!r}]")
    elif isinstance(a, (list, tuple, deque)):
        if len(a) != len(b) or getattr(a, "maxlen", None) != getattr(b, "maxlen", None):
            yield f"{path}: {len(a)} items became {len(b)}, or maxlen changed"
        for i, (x, y) in enumerate(zip(a, b)):
            yield from differences(x, y, f"{path}[{i}]")
    elif isinstance(a, float):
        if struct.pack(">d", a) != struct.pack(">d", b):
            yield f"{path}: {a!r} became {b!r}"
    elif a != b:
        yield f"{path}: {a!r:.60} became {b!r:.60}"


def _tensor_differences(a: torch.Tensor, b: torch.Tensor, path: str) -> Iterator[str]:
    for name, x, y in (
        ("shape", tuple(a.shape), tuple(b.shape)),
        ("dtype", a.dtype, b.dtype),
        ("stride", a.stride(), b.stride()),
        ("requires_grad", a.requires_grad, b.requires_grad),
        ("conj", a.is_conj(), b.is_conj()),
        ("neg", a.is_neg(), b.is_neg()),
    ):
        if x != y:
            yield f"{path}: {name} {x} became {y}"
            return
    if not torch.equal(elements(a), elements(b)):
        yield f"{path}: other bits"


def clone(state: Any) -> Any:
    """A copy that shares no memory, with ties undone; containers of builtin kinds only."""
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return type(state)((key, clone(value)) for key, value in state.items())
    if isinstance(state, (list, tuple)):
        return type(state)(clone(value) for value in state)
    return state


def scrambled(state: Any) -> Any:
    """A state of the same form whose tensors hold something else."""
    other = clone(state)
    for tensor in tensors(other):
        elements_of = torch.empty(0, dtype=torch.uint8)
        elements_of.set_(tensor.untyped_storage())
        elements_of.bitwise_not_()
    return other


def tensors(state: Any) -> Iterator[torch.Tensor]:
    """Every tensor of a state."""
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from tensors(value)
    elif isinstance(state, (list, tuple)):
        for value in state:
            yield from tensors(value)


# --- making --------------------------------------------------------------------------------------------


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    """float32 numbers that depend on ``seed`` only."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def block(nbytes: int, seed: int = 0) -> torch.Tensor:
    """``nbytes`` bytes of noise, quickly."""
    return torch.randint(-(1 << 62), 1 << 62, (-(-nbytes // 8),), generator=torch.Generator().manual_seed(seed)).view(
        torch.uint8
    )[:nbytes]


def of_dtype(dtype: torch.dtype, count: int = 6) -> torch.Tensor:
    """A tensor of ``dtype`` with bytes that follow no rule of it (NaN payloads among them)."""
    raw = torch.arange(count * dtype.itemsize, dtype=torch.int64).mul(37).add(0xF1).to(torch.uint8)
    if dtype is torch.bool:
        raw = raw % 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # complex32 is called experimental
        return torch.empty(0, dtype=dtype).set_(raw.untyped_storage(), 0, (count,), (1,))


def whole_byte_dtypes() -> list[torch.dtype]:
    """Every dtype of this torch whose elements are whole bytes and need no quantizer."""
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    packed = ("int1", "int2", "int3", "int4", "int5", "int6", "int7", "bit")
    return sorted(
        (d for d in found if "qint" not in str(d) and "quint" not in str(d) and not str(d).endswith(packed)), key=str
    )


def _nan(bits: int) -> float:
    number: float = struct.unpack(">d", bits.to_bytes(8, "big"))[0]
    return number


def fresh_states() -> dict[str, Callable[[], Any]]:
    """States that every transport moves into fresh memory, by what they are about."""
    return {
        "one tensor": lambda: noise(17),
        "nothing": dict,
        "None": lambda: None,
        "only plain values": lambda: {"step": 3, "name": "x", "none": None, "flag": True, "rate": 1e-3},
        "odd shapes": _odd_shapes,
        "one leaf of one byte": lambda: {"x": torch.tensor([7], dtype=torch.uint8)},
        "large and small": lambda: {"big": block(3 << 20), "small": [noise(5, seed=i) for i in range(40)]},
        "many small": lambda: {f"w{i}": noise(i % 7, 3, seed=i) for i in range(300)},
        "containers": _containers,
        "plain leaves": _plain_leaves,
        "flags": _flags,
        "one memory as two dtypes": _two_dtypes,
        "strides": _strides,
        "dtypes": lambda: {str(d): of_dtype(d) for d in whole_byte_dtypes()},
        "random generators": lambda: {"torch": torch.get_rng_state(), "python": random.Random(3).getstate()},
        "deep": _deep,
    }


def _odd_shapes() -> dict[str, Any]:
    shapes = [(0,), (0, 3), (3, 0, 2), (), (1,), (1, 1, 1), (2, 1, 3)]
    return {"tensors": {str(s): torch.full(s, 2.5) for s in shapes}, "empty": {}, "list": [], "tuple": ()}


def _containers() -> dict[str, Any]:
    ordered = OrderedDict([("b", noise(2)), ("a", noise(3))])
    ordered.move_to_end("b")
    default = defaultdict(list, {"k": [noise(1)]})
    return {
        "ordered": ordered,
        "defaultdict": default,
        "counter": Counter("abca"),
        "deque": deque([1, noise(2), 3], maxlen=5),
        "set": {1, 2, 3},
        "frozenset": frozenset("ab"),
        "tuple": (1, (2, noise(2)), []),
        "size": torch.Size([2, 3]),
        (1, "a", (2.5, None)): "a key that is a tuple",
        7: "a key that is a number",
        True: "a key that is a truth value",
        b"raw": "a key of bytes",
        "": {"": noise(1)},
        "t": ["t", 0],
    }


def _plain_leaves() -> dict[str, Any]:
    return {
        "ints": [0, -1, 1 << 62, 1 << 63, -(1 << 63), 10**40, -(10**40)],
        "floats": [0.0, -0.0, 1e308, math.inf, -math.inf, _nan(0x7FF8000000000001), _nan(0xFFF0000000000001)],
        "complex": complex(-0.0, math.nan).real,
        "bytes": b"\x00\xff",
        "bytearray": bytearray(b"\x00\xff"),
        "text": "käse \U0001f9c0 \x00 \ud800",
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "long": "x" * 100_000,
    }


def _flags() -> dict[str, Any]:
    spiral = torch.complex(noise(4), noise(4, seed=1))
    return {
        "parameter": torch.nn.Parameter(noise(3)),
        "frozen": torch.nn.Parameter(noise(3, seed=1), requires_grad=False),
        "needs grad": noise(3, seed=2).requires_grad_(),
        "conj": spiral.conj(),
        "neg": spiral.clone().conj().imag,
        "scalar": torch.tensor(3.5, dtype=torch.float64),
    }


def _two_dtypes() -> dict[str, Any]:
    flat = noise(16)
    return {"floats": flat, "ints": flat.view(torch.int32)[4:], "bytes": flat.view(torch.uint8)[6:11]}


def _strides() -> dict[str, Any]:
    wide = noise(64, 64)
    return {
        "transposed": noise(5, 7).t(),
        "channels last": noise(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "column": wide[:, 3],
        "every second": noise(100)[::2],
        "expanded": noise(1, 5).expand(1000, 5),
        "expanded scalar": noise(1)[0].expand(3, 3),
    }


def _deep() -> Any:
    state: Any = noise(2)
    for i in range(60):
        state = {"k": state} if i % 2 else [state]
    return state


class Tiny(torch.nn.Module):
    """A model with a BatchNorm, tied weights and a buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = torch.nn.Linear(8, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.last = torch.nn.Linear(8, 8)
        self.last.weight = self.first.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.last(self.norm(self.first(x)))
