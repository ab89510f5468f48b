# SPDX-License-Identifier: BSD-3-Clause
"""The document that says what a donor serves, and its checked way back.

One JSON object: protocol, step, the donor's torch and byte order, the tree (see ``_tree``), one record per
tensor, the sizes of all regions in flat order (see ``_layout``), and the ends and checksums of the chunks.
What ``parse`` returns has been checked number by number, so that nothing later can index outside of a
region or allocate more than the sizes say; what it refuses allocates nothing.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from .._errors import IntegrityError, LayoutError
from . import _tree
from ._layout import ALIGNMENT, FlatSpace, is_dense, packed_stride, span

# Raised whenever the bytes of a chunk, the checksum or this document change their meaning.
PROTOCOL = 1
# About 700,000 tensors; a text of this size takes some 30 times the memory when it is parsed.
MAX_MANIFEST_BYTES = 64 << 20

REQUIRES_GRAD, PARAMETER, CONJ, NEG, PACKED, BUFFER, NOT_PERSISTENT = (1 << bit for bit in range(7))
_MAX_DIMS = 64  # torch's own limit
_INT64_END = 1 << 63


class Spec:
    """What kind of tensor it is; most tensors of a state share few of these. ``stride`` counts elements."""

    __slots__ = ("dense", "dtype", "flags", "shape", "stride", "wire_bytes", "wire_stride")

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], flags: int) -> None:
        self.dtype = dtype
        self.shape = shape
        self.stride = stride
        self.flags = flags
        # the strides of its bytes on the wire, and how many bytes of its region it spans
        self.wire_stride = packed_stride(shape, stride) if flags & PACKED else stride
        self.wire_bytes = span(shape, self.wire_stride) * dtype.itemsize
        self.dense = is_dense(shape, self.wire_stride)

    @property
    def fresh_bytes(self) -> int:
        """How many bytes a tensor of this kind spans where it is made anew."""
        return span(self.shape, self.stride) * self.dtype.itemsize


class Record(NamedTuple):
    """One tensor: its kind, and where its bytes are (region -1: it has none).

    ``dtensor`` describes the whole of which the tensor is the local shard, as JSON (see ``_dtensor``).
    """

    region: int
    offset: int
    spec: Spec
    dtensor: dict[str, Any] | None = None


@dataclass
class Manifest:
    """All that a receiver has to know before the first byte of state.

    Tensor n is ``regions[n]``, ``offsets[n]``, ``specs[n]`` (see ``Record``): columns, since a heal that is over in a
    tenth of a second would spend two more in Python's cycle collector if each tensor were some objects more.
    """

    step: int
    tree: Any
    regions: list[int]
    offsets: list[int]
    specs: list[Spec]
    sizes: list[int]
    large: int
    dtensors: dict[int, dict[str, Any]] = field(default_factory=dict)
    leads: dict[int, int] = field(default_factory=dict)
    ends: list[int] = field(default_factory=list)
    sums: list[int] = field(default_factory=list)
    torch_version: str = str(torch.__version__)

    def record(self, number: int) -> Record:
        """Tensor ``number``."""
        return Record(self.regions[number], self.offsets[number], self.specs[number], self.dtensors.get(number))

    def flat(self) -> FlatSpace:
        """The flat byte space of the regions."""
        return FlatSpace(self.sizes, self.large)

    def to_bytes(self) -> bytes:
        """The document."""
        specs = list({id(spec): spec for spec in self.specs}.values())
        numbers = {id(spec): i for i, spec in enumerate(specs)}
        document = {
            "protocol": PROTOCOL, "step": self.step, "torch": self.torch_version, "byteorder": sys.byteorder,
            "tree": self.tree, "sizes": self.sizes, "large": self.large,
            "specs": [[str(s.dtype).removeprefix("torch."), s.shape, s.stride, s.flags] for s in specs],
            "regions": [region + 1 for region in self.regions], "offsets": self.offsets,
            "kinds": [numbers[id(spec)] for spec in self.specs], "dtensors": list(self.dtensors.items()),
            "leads": list(self.leads.items()), "ends": self.ends, "sums": self.sums,
        }  # fmt: skip
        return json.dumps(document, allow_nan=False, separators=(",", ":")).encode("ascii")


def parse(document: bytes) -> Manifest:
    """Read and check a document.

    Raises:
        IntegrityError: it is not what a donor of ours writes.
        LayoutError: it is, and this receiver cannot take it: another protocol or byte order, a dtype that
            this torch does not have.
    """
    try:
        fields = json.loads(document, parse_constant=_refuse_constant)
        _expect(type(fields) is dict, "no object")
        if fields.get("protocol") != PROTOCOL or fields.get("byteorder") != sys.byteorder:
            raise LayoutError(
                f"the donor speaks protocol {fields.get('protocol')!r:.20} in {fields.get('byteorder')!r:.20}-endian "
                f"order, this side protocol {PROTOCOL} in {sys.byteorder!r}: run the same version on both sides"
            )
        return _checked(fields)
    except _tree.BUILD_ERRORS as e:
        if isinstance(e, LayoutError):
            raise
        raise IntegrityError(
            f"the donor's metadata ({len(document)} bytes) is not a manifest of ours ({type(e).__name__}: {e!s:.200}); "
            "nothing was written; heal again, or from another donor"
        ) from e


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"the constant {name}")


def _expect(ok: bool, what: str) -> None:
    if not ok:
        raise ValueError(what)


def _ints(values: Any, end: int = _INT64_END) -> list[int]:
    _expect(type(values) is list and all(type(v) is int and 0 <= v < end for v in values), "a list of numbers")
    return list(values)


def _checked(fields: dict[str, Any]) -> Manifest:
    _expect(type(fields["step"]) is int and type(fields["torch"]) is str, "step or torch")
    sizes = _ints(fields["sizes"])
    _expect(sum(sizes) < _INT64_END - ALIGNMENT, "sizes out of range")
    large = fields["large"]
    _expect(type(large) is int and 0 <= large <= len(sizes), "large")
    leads = {}
    for pair in fields["leads"]:
        region, lead = _ints(pair)
        _expect(region < len(sizes) and lead < ALIGNMENT, "leads")
        leads[region] = lead
    ends, sums = _ints(fields["ends"]), _ints(fields["sums"], 1 << 32)
    _expect(len(ends) == len(sums) and ends == sorted(set(ends)) and 0 not in ends, "ends")
    _expect((ends[-1] if ends else 0) == sum(sizes), "chunks that do not cover the state")
    kinds = [_spec(row) for row in fields["specs"]]
    regions = [region - 1 for region in _ints(fields["regions"], len(sizes) + 1)]
    offsets = _ints(fields["offsets"])
    specs = [kinds[kind] for kind in _ints(fields["kinds"], len(kinds))]
    _expect(len(regions) == len(offsets) == len(specs), "columns of unequal length")
    _check_places(regions, offsets, specs, sizes, leads)
    dtensors = {}
    for number, whole in fields["dtensors"]:
        _expect(type(number) is int and type(whole) is dict, "dtensors")
        dtensors[number] = whole
    manifest = Manifest(
        fields["step"], fields["tree"], regions, offsets, specs, sizes, large, dtensors, leads, ends, sums
    )
    manifest.torch_version = fields["torch"][:40]
    return manifest


def _spec(row: Any) -> Spec:
    name, shape, stride, flags = row
    shape, stride = tuple(_ints(shape)), tuple(_ints(stride))
    _expect(len(shape) == len(stride) <= _MAX_DIMS and type(flags) is int, "a kind of tensor")
    return Spec(_tree.dtype_of(name), shape, stride, flags)


def _check_places(
    regions: list[int], offsets: list[int], specs: list[Spec], sizes: list[int], leads: dict[int, int]
) -> None:
    filled = [0] * len(sizes)
    for region, offset, spec in zip(regions, offsets, specs):
        if region < 0 or spec.wire_bytes == 0:
            _expect(region < 0 and offset == 0 and spec.wire_bytes == 0, "an empty tensor with a place")
            continue
        filled[region] = max(filled[region], offset + spec.wire_bytes)
        if offset or leads:
            _expect((offset + leads.get(region, 0)) % spec.dtype.itemsize == 0, "a tensor that is not aligned")
            _expect(not offset or not spec.flags & PACKED, "a packed tensor with an offset")
    # more would be written behind the tensors of a receiver in place, less read from behind the region
    _expect(filled == sizes and 0 not in sizes, "a region that is not what its tensors fill")


def with_bits(tensor: torch.Tensor, spec: Spec) -> torch.Tensor:
    """``tensor``, over the plain bytes of ``spec``, with the conjugate and negative bits that it has."""
    if spec.flags & CONJ:
        tensor = tensor.conj()
    return torch._neg_view(tensor) if spec.flags & NEG else tensor


def of_its_kind(tensor: torch.Tensor, spec: Spec) -> torch.Tensor:
    """``tensor`` as the Parameter or Buffer that it was, with its requires_grad."""
    grad = bool(spec.flags & REQUIRES_GRAD)
    if spec.flags & PARAMETER:
        return torch.nn.Parameter(tensor, requires_grad=grad)
    if spec.flags & BUFFER:
        tensor = torch.nn.Buffer(tensor, persistent=not spec.flags & NOT_PERSISTENT)
    return tensor.requires_grad_() if grad else tensor
