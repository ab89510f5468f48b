# SPDX-License-Identifier: BSD-3-Clause
"""The donor's tree beside the receiver's own: which tensor is healed by which, by key path.

Tensors that both sides have must agree, or it is a LayoutError by key; what only the donor has will be made;
what only the receiver has is left alone and named. Nothing is written here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .._errors import IntegrityError, LayoutError
from . import _dtensor, _tree
from ._describe import is_plain
from ._layout import overlaps_itself
from ._manifest import CONJ, NEG, Manifest, Spec
from ._memory import has_memory

_TEXT = 1000  # characters of what a donor says in one message


class Twin(NamedTuple):
    """One more of the receiver's tensors that the same donor's tensor heals: tied there, perhaps not here."""

    own: torch.Tensor
    local: torch.Tensor
    path: _tree.Path = None


class Match:
    """The result, by the donor's number of each tensor.

    ``own`` is the receiver's tensor, None where it has none; ``local`` its memory (the shard, of a DTensor);
    ``path`` its key path at the donor; ``twins`` further tensors of the receiver; ``only_here`` the keys of
    tensors that the donor does not have.
    """

    def __init__(self, manifest: Manifest, own: Any, *, loader: bool) -> None:
        """Match ``manifest`` with the receiver's state ``own`` (``_tree.MISSING``: there is none).

        ``loader`` says whether leaves may come that need torch's loader.

        Raises:
            LayoutError: a tensor that does not fit, by key, with both sides' shape, stride and dtype.
            IntegrityError: a tree that none of ours has made.
        """
        count = len(manifest.specs)
        self.own: list[torch.Tensor | None] = [None] * count
        self.local: list[torch.Tensor | None] = [None] * count
        self.path: list[_tree.Path] = [None] * count
        self.twins: dict[int, list[Twin]] = {}
        self.only_here: list[str] = []
        self._manifest = manifest
        self._loader = loader
        self._seen = bytearray(count)
        try:
            self._walk(manifest.tree, own, None, 0)
            for number in manifest.dtensors:
                if self._seen[number] and self.own[number] is None:
                    raise self._misfit(
                        self.path[number],
                        "a DTensor is rebuilt on the receiver's own mesh, and the receiver has none here; give "
                        "state_dict= with the same DTensor",
                    )
        except _tree.BUILD_ERRORS as e:
            raise IntegrityError(
                f"the donor's tree is none of ours ({type(e).__name__}: {e!s:.200}); nothing was written; heal again, "
                "or from another donor"
            ) from e

    def _walk(self, node: Any, own: Any, path: _tree.Path, depth: int) -> None:
        if type(node) is list:
            if node[0] == "t" or node[0] == "p":
                self._tensor(node[0], node[1], own, path)
                return
            if depth > _tree.MAX_DEPTH:
                raise _tree.Malformed(f"nesting deeper than {_tree.MAX_DEPTH}")
            _tree.check(node, own, path)
        if isinstance(own, torch.Tensor):
            raise self._misfit(
                path, f"the receiver has {_shown(own)} here, and the donor no tensor; build both states alike"
            )
        mine: dict[Any, Any] = (_tree.own_children(own) or {}) if own is not _tree.MISSING else {}
        seen = set()
        for key, child in _tree.children(node):
            seen.add(key)
            here = mine.get(key, _tree.MISSING)
            if type(child) is list and child[0] == "t":  # nearly always, so without another call
                self._tensor("t", child[1], here, (path, key))
            else:
                self._walk(child, here, (path, key), depth + 1)
        if len(seen) < len(mine):
            for key in mine.keys() - seen:
                self._note_only_here(mine[key], (path, key), depth + 1)

    def _note_only_here(self, own: Any, path: _tree.Path, depth: int) -> None:
        if isinstance(own, torch.Tensor):
            self.only_here.append(_tree.show_path(path))
        elif depth < _tree.MAX_DEPTH:
            for key, child in (_tree.own_children(own) or {}).items():
                self._note_only_here(child, (path, key), depth + 1)

    def _tensor(self, tag: str, number: Any, own: Any, path: _tree.Path) -> None:
        if type(number) is not int or not 0 <= number < len(self.own):
            raise _tree.Malformed("a tensor that has no record")
        if not self._seen[number]:
            self._seen[number] = True
            self.path[number] = path
        if tag == "p":
            self._blob(self._manifest.specs[number], own, path)
        elif isinstance(own, torch.Tensor):
            local = self._checked(number, own, path)
            if self.own[number] is None:
                self.own[number], self.local[number] = own, local
            else:
                self.twins.setdefault(number, []).append(Twin(own, local, path))
        elif own is not _tree.MISSING and own is not None:
            self._note_only_here(own, path, 0)

    def _blob(self, spec: Spec, own: Any, path: _tree.Path) -> None:
        if spec.dtype is not torch.uint8 or spec.flags or spec.shape != (spec.wire_bytes,):
            raise _tree.Malformed("an object that is no run of bytes")
        if isinstance(own, torch.Tensor):
            raise self._misfit(
                path,
                "the donor's tensor (sparse, quantized or of a subclass) comes as a new object and cannot be written "
                f"into the receiver's ({_shown(own)}); leave it out of state_dict= and take it from the result",
            )
        if not self._loader:
            raise self._misfit(
                path,
                "the donor sends an object for torch's safe loader, which is not safe before torch 2.10 (here "
                f"{torch.__version__}); weights_only=False trusts the donor with code, or leave it out",
            )

    def _checked(self, number: int, own: torch.Tensor, path: _tree.Path) -> torch.Tensor:
        """The memory of ``own``, which tensor ``number`` of the donor fits."""
        spec = self._manifest.specs[number]
        local, whole = own, None
        if type(own) is not torch.Tensor and type(own) is not torch.nn.Parameter and _dtensor.is_dtensor(own):
            local, whole = _dtensor.local_shard(own), _dtensor.describe(own)
        theirs = self._manifest.dtensors.get(number)
        if whole != theirs:
            raise self._misfit(
                path,
                f"the donor has {str(theirs or 'a plain tensor')[:_TEXT]}, the receiver {whole or 'a plain tensor'}; a "
                "shard is healed by the same shard of an equal mesh",
            )
        if not is_plain(local) or local.is_meta:
            raise self._misfit(
                path,
                f"the receiver's {type(local).__name__} ({local.layout}, {local.device}) cannot be written in place; "
                "make it a plain strided tensor, or leave it out of state_dict=",
            )
        if local.shape != spec.shape or local.dtype != spec.dtype:
            raise self._misfit(
                path,
                f"the donor has shape {spec.shape}, stride {spec.stride}, {spec.dtype}, the receiver {_shown(local)}; "
                "nothing was written: make both replicas build the same model",
            )
        if not has_memory(local):
            raise self._misfit(
                path,
                f"the storage of the receiver's tensor ({_shown(local)}) has only {local.untyped_storage().nbytes()} "
                "bytes, as one that was freed; give it its memory before it is healed",
            )
        steps = local.stride()
        if 0 in steps and any(by == 0 and n > 1 and their for n, by, their in zip(local.shape, steps, spec.stride)):
            raise self._misfit(
                path,
                f"the receiver's expanded tensor ({_shown(local)}) has one element for several of the donor's (stride "
                f"{spec.stride}); make it contiguous",
            )
        if steps != spec.stride and not local.is_contiguous() and overlaps_itself(local.shape, steps):
            raise self._misfit(
                path,
                f"the receiver's tensor ({_shown(local)}) overlaps itself and the donor's (stride {spec.stride}) does "
                "not lie like it; make it contiguous",
            )
        return local

    @staticmethod
    def _misfit(path: _tree.Path, text: str) -> LayoutError:
        where = _tree.show_path(path)[:_TEXT]  # keys are the donor's, and may be of any length
        return LayoutError(f"{where}: {text}", keys=(where,))


def lies_alike(local: torch.Tensor, spec: Spec) -> bool:
    """Whether the bytes of ``spec`` on the wire are those of ``local``'s memory, one by one."""
    return (
        local.stride() == spec.wire_stride
        and spec.dense
        and local.is_conj() == bool(spec.flags & CONJ)
        and local.is_neg() == bool(spec.flags & NEG)
    )


def _shown(tensor: torch.Tensor) -> str:
    stride = f"stride {tensor.stride()}" if tensor.layout is torch.strided else str(tensor.layout)
    return f"shape {tuple(tensor.shape)}, {stride}, {tensor.dtype} on {tensor.device}"
