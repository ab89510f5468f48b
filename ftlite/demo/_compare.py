# SPDX-License-Identifier: BSD-3-Clause
"""Comparing two states in two processes, bit for bit: each lists its leaves, and the parent compares.

Rules of this file: a tensor is its dtype, its shape and the SHA-256 of its bytes in row order; any other leaf is its
type and its text, floats in hex, so that no rounding hides a difference; nothing of the transport is used.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping

import torch

__all__ = ["fingerprint", "tensors"]


def fingerprint(state: object) -> dict[str, str]:
    """Path -> text of every leaf of ``state``, in the order of the state."""
    return {path: _leaf(value) for path, value in _leaves(state, "")}


def tensors(state: object) -> dict[str, torch.Tensor]:
    """Path -> tensor, of those leaves of ``state`` that are tensors."""
    return {path: value for path, value in _leaves(state, "") if isinstance(value, torch.Tensor)}


def _leaves(value: object, path: str) -> list[tuple[str, object]]:
    if isinstance(value, Mapping) and value:
        return [leaf for key, part in value.items() for leaf in _leaves(part, _below(path, key))]
    if isinstance(value, (list, tuple)) and value:
        kind = type(value).__name__
        return [leaf for i, part in enumerate(value) for leaf in _leaves(part, f"{path}.{kind}[{i}]")]
    return [(path, value)]


def _below(path: str, key: object) -> str:
    if not isinstance(key, str):  # the key 0 is not the key "0"
        return f"{path}[{key!r}]"
    return f"{path}.{key}" if path else key


def _leaf(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {_sha256(value)}"
    text = value.hex() if isinstance(value, float) else repr(value)
    return f"{type(value).__name__} {text}"


def _sha256(tensor: torch.Tensor) -> str:
    plain = tensor.detach().cpu().contiguous()
    # the bytes where they are: torch has no way to them without numpy, and a list of them costs a minute
    raw = (ctypes.c_ubyte * plain.nbytes).from_address(plain.data_ptr()) if plain.nbytes else b""
    digest = hashlib.sha256(raw).hexdigest()
    del raw, plain  # in this order: the array must not outlive the memory
    return digest
