# SPDX-License-Identifier: BSD-3-Clause
"""What a state consists of: its tree, its leaves, and where their bytes lie. Nothing is copied here.

A leaf that is neither plain nor a tensor becomes a *blob*: the bytes that torch.save makes of it, as one more
tensor. What the receiver's loader would refuse is refused here, by key, before anybody waits for it.
"""

from __future__ import annotations

import io
from typing import Any, NamedTuple

import torch

from .. import _compat
from .._errors import LayoutError
from . import _dtensor, _stream, _tree
from ._layout import Layout, View, lay_out
from ._manifest import BUFFER, CONJ, NEG, NOT_PERSISTENT, PACKED, PARAMETER, REQUIRES_GRAD, Manifest, Spec
from ._memory import has_memory, offset_bytes

# Whose bytes say all of them; a DTensor, also one that is a parameter, is of a class of its own.
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Leaf(NamedTuple):
    """A leaf of the state and the tensor whose bytes travel for it: itself, its local shard, or its blob."""

    obj: Any
    tensor: torch.Tensor
    flags: int
    dtensor: dict[str, Any] | None


class _Collector:
    """Gathers the leaves of a state that are not plain: tensors, and blobs for what needs a loader."""

    def __init__(self, weights_only: bool) -> None:
        self._weights_only = weights_only
        self._numbers: dict[int, int] = {}
        self.leaves: list[Leaf] = []

    def leaf(self, obj: Any, path: _tree.Path) -> _tree.Node:
        """The node of ``obj``, a tensor or something else that is not plain."""
        if not isinstance(obj, torch.Tensor):
            return ["p", self._blob(obj, path)]
        number = self._numbers.get(id(obj))
        if number is not None:
            return ["t", number]
        local, whole = obj, None
        if type(obj) not in _PLAIN and _dtensor.is_dtensor(obj):
            local, whole = _dtensor.local_shard(obj), _dtensor.describe(obj)
        if local.device.type == "meta":
            raise LayoutError(
                f"{_tree.show_path(path)}: a tensor on the meta device has no bytes; materialize it first"
            )
        if not is_plain(local):
            return ["p", self._blob(obj, path)]
        if not has_memory(local):
            where = _tree.show_path(path)
            raise LayoutError(
                f"{where}: the storage of this tensor of shape {tuple(local.shape)} has only "
                f"{local.untyped_storage().nbytes()} bytes, as one that was freed; take the state while it is "
                "gathered, or leave it out",
                keys=(where,),
            )
        self._numbers[id(obj)] = len(self.leaves)
        return ["t", self._add(Leaf(obj, local, flags_of(obj, local), whole))]

    def _add(self, leaf: Leaf) -> int:
        self.leaves.append(leaf)
        return len(self.leaves) - 1

    def _blob(self, obj: Any, path: _tree.Path) -> int:
        where, kind = _tree.show_path(path), f"{type(obj).__module__}.{type(obj).__qualname__}"
        way_out = (
            "store it as plain values or tensors, leave it out, or give weights_only=False on both sides (which trusts "
            "the donor with code)"
        )
        if self._weights_only and not _compat.SAFE_LOADER_IS_SOUND:
            raise LayoutError(
                f"{where}: a {kind} needs torch's safe loader, which is not safe before torch 2.10 "
                f"(here {torch.__version__}); {way_out}",
                keys=(where,),
            )
        buffer = io.BytesIO()
        try:
            torch.save(obj, buffer)
            if self._weights_only:
                _stream.load_object(buffer.getvalue(), weights_only=True)
        except Exception as e:  # whatever the object's own pickling raises is a refusal of this leaf
            raise LayoutError(
                f"{where}: a {kind} cannot be carried ({_stream.first_line(e)}); {way_out}, or allow its class with "
                "torch.serialization.add_safe_globals on both sides",
                keys=(where,),
            ) from e
        data = bytearray(buffer.getvalue())
        return self._add(Leaf(obj, torch.frombuffer(data, dtype=torch.uint8), 0, None))


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the bytes of ``tensor`` say it all: strided, not quantized, and of no subclass."""
    return (
        type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested
    )


def flags_of(tensor: torch.Tensor, local: torch.Tensor) -> int:
    """The record's flags of ``tensor``, whose bytes are those of ``local``."""
    # what torch's isinstance asks of parameters and buffers, at a tenth of its cost
    return (
        (REQUIRES_GRAD if tensor.requires_grad else 0)
        | (PARAMETER if type(tensor) is torch.nn.Parameter or getattr(tensor, "_is_param", False) else 0)
        | (CONJ if local.is_conj() else 0)
        | (NEG if local.is_neg() else 0)
        | (BUFFER if getattr(tensor, "_is_buffer", False) else 0)
        | (0 if getattr(tensor, "persistent", True) else NOT_PERSISTENT)
    )


def describe(state: Any, step: int, weights_only: bool) -> tuple[Manifest, Layout, list[Leaf]]:
    """Walk and lay out ``state``: a manifest without chunks yet, the layout, and its leaves.

    Raises:
        LayoutError: a leaf that cannot be carried, by its key and with the way out.
    """
    collector = _Collector(weights_only)
    tree = _tree.encode(state, collector.leaf)
    layout = lay_out(_views(collector.leaves))
    kinds: dict[tuple[Any, ...], Spec] = {}
    specs = []
    for leaf, place in zip(collector.leaves, layout.places):
        t, flags = leaf.tensor, leaf.flags
        if place.region >= 0 and layout.regions[place.region].view is not None:
            flags |= PACKED
        kind = (t.dtype, tuple(t.shape), t.stride(), flags)
        spec = kinds.get(kind)
        if spec is None:
            spec = kinds[kind] = Spec(*kind)
        specs.append(spec)
    manifest = Manifest(
        step,
        tree,
        [place.region for place in layout.places],
        [place.offset for place in layout.places],
        specs,
        [region.nbytes for region in layout.regions],
        layout.large,
        dtensors={i: leaf.dtensor for i, leaf in enumerate(collector.leaves) if leaf.dtensor is not None},
        leads={i: region.lead for i, region in enumerate(layout.regions) if region.lead},
    )
    return manifest, layout, collector.leaves


def _views(leaves: list[Leaf]) -> list[View]:
    """Where the leaves' tensors lie. Most have one of a few shapes, of which one object is enough."""
    shapes: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    views = []
    for leaf in leaves:
        t = leaf.tensor
        shape = tuple(t.shape), t.stride()
        address = t.untyped_storage().data_ptr()
        views.append(
            View(
                address if t.is_cpu else (t.device, address),
                offset_bytes(t),
                t.element_size(),
                *shapes.setdefault(shape, shape),
            )
        )
    return views
