# SPDX-License-Identifier: BSD-3-Clause
"""The checksum of a run of bytes: a crc32 over the int64 sums of its 4 KB rows.

Why not a plain sum: it misses bytes that were shifted or exchanged between rows. Why not crc32 alone: it
runs at 1-3 GB/s, this at the speed of memory. It guards against accidents, not against an attacker. Sums
wrap modulo 2**64. A row that is cut short by the end of the run, or by ``restart``, is padded with zeros;
the length travels beside the checksum, so padding cannot hide a cut.
"""

from __future__ import annotations

import sys
import zlib

import torch

from ._memory import unlocked, view_of

ROW_BYTES = 4096
_WORD = (1 << 64) - 1
_ROW_WORDS = ROW_BYTES // 8
# torch hands a reduction of 32,768 elements or more to OpenMP, whose threads spin beside the threads that
# copy from the sockets and halve the speed of the transfer on a small machine. 63 rows stay below that.
_SERIAL_ROWS = 63


class RowSum:
    """Takes bytes piece by piece, in any sizes. Used by one thread at a time."""

    __slots__ = ("_carry", "_crc", "nbytes")

    def __init__(self) -> None:
        self._crc = 0
        self._carry = bytearray()
        self.nbytes = 0

    def feed(self, view: memoryview) -> None:
        """Add the bytes of ``view``, which is contiguous and writable memory (torch warns of any other)."""
        self.nbytes += len(view)
        if self._carry:
            missing = ROW_BYTES - len(self._carry)
            self._carry += view[:missing]
            view = view[missing:]
            if len(self._carry) < ROW_BYTES:
                return
            self._end_row()
        whole = len(view) // ROW_BYTES * ROW_BYTES
        if whole:
            self._add_rows(view[:whole])
        if whole < len(view):
            self._carry += view[whole:]

    def restart(self) -> None:
        """Begin a new row with the next byte: called where two regions of memory meet, so that neither
        side has to bring the two together before it can add them up."""
        if self._carry:
            self._end_row()

    def value(self) -> int:
        """The checksum of all that was fed; ends a row that is cut short."""
        self.restart()
        return self._crc

    def _end_row(self) -> None:
        """Add the one row that was begun; in Python, since one row is less work than a call of torch."""
        self._carry += bytes(-len(self._carry) % 8)
        total = sum(memoryview(self._carry).cast("q")) & _WORD
        self._crc = zlib.crc32(total.to_bytes(8, sys.byteorder), self._crc)
        self._carry = bytearray()

    def _add_rows(self, view: memoryview) -> None:
        rows = torch.frombuffer(view, dtype=torch.int64).view(-1, _ROW_WORDS)
        sums = torch.cat([block.sum(1) for block in torch.split(rows, _SERIAL_ROWS)])
        self._crc = zlib.crc32(view_of(sums), self._crc)


def checksum_of(data: bytes | bytearray | memoryview) -> int:
    """The checksum of ``data`` as one run."""
    sums = RowSum()
    sums.feed(unlocked(data))
    return sums.value()
