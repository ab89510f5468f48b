# SPDX-License-Identifier: BSD-3-Clause
"""Copying bytes between two addresses of host memory. Any thread may call."""

from __future__ import annotations

import ctypes

__all__ = ["copy_bytes"]

# Up to here a copy holds on to the GIL: it is done in 2 us, and whoever lets go of the GIL while another thread wants
# it gets it back after as much as 5 ms.
_SHORT_BYTES = 1 << 16

# One thread either way, since OpenMP's spinning threads double the cost of a copy. 0.3 us for few bytes: a memoryview
# over the two addresses costs 0.5, torch's copy_ 0.6. By index the function is our own, not the one that all share.
_memmove_with_gil = ctypes.pythonapi["memmove"]
_memmove_with_gil.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memmove_with_gil.restype = None


def copy_bytes(target: int, source: int, nbytes: int) -> None:
    """Copy ``nbytes`` bytes from address ``source`` to address ``target``, both host memory; they may overlap.

    The GIL is released meanwhile, above 64 KB. Whoever calls keeps both memories alive.
    """
    if nbytes <= _SHORT_BYTES:
        _memmove_with_gil(target, source, nbytes)
    else:
        ctypes.memmove(target, source, nbytes)
