# SPDX-License-Identifier: BSD-3-Clause
"""The checksum. What must hold: it depends on the bytes and on where rows begin, not on how they were fed; and
accidents (a flipped byte, exchanged rows, shifted data) change it."""

from __future__ import annotations

import random
import unittest
import warnings
import zlib

from tests import load

checksum = load("checkpointing._checksum")

ROW = checksum.ROW_BYTES
LENGTHS = (0, 1, 7, 8, ROW - 1, ROW, ROW + 1, 3 * ROW, 3 * ROW + 17, 63 * ROW, 64 * ROW, 130 * ROW + 5)


def plain(data: bytes) -> int:
    """The definition, in slow words."""
    crc = 0
    for start in range(0, len(data), ROW):
        row = data[start : start + ROW].ljust(ROW, b"\0")
        total = sum(int.from_bytes(row[i : i + 8], "little") for i in range(0, ROW, 8)) % (1 << 64)
        crc = zlib.crc32(total.to_bytes(8, "little"), crc)
    return crc


class Sums(unittest.TestCase):
    def setUp(self) -> None:
        self.rng = random.Random(1)

    def in_pieces(self, data: bytes) -> int:
        sums = checksum.RowSum()
        at = 0
        while at < len(data):
            n = self.rng.choice((0, 1, 5, 100, ROW - 1, ROW, ROW + 1, 10 * ROW))
            sums.feed(memoryview(bytearray(data[at : at + n])))
            at += n
        self.assertEqual(sums.nbytes, len(data))
        return sums.value()

    def test_as_defined(self) -> None:
        for length in LENGTHS[:-2]:
            data = self.rng.randbytes(length)
            self.assertEqual(checksum.checksum_of(data), plain(data), length)

    def test_equal_however_it_is_fed(self) -> None:
        for length in LENGTHS:
            data = self.rng.randbytes(length)
            wanted = checksum.checksum_of(data)
            for _ in range(10):
                self.assertEqual(self.in_pieces(data), wanted, length)

    def test_any_flipped_byte_changes_it(self) -> None:
        for length in (1, 100, ROW, 2 * ROW + 3):
            data = bytearray(self.rng.randbytes(length))
            wanted = checksum.checksum_of(data)
            for at in {0, length - 1, *(self.rng.randrange(length) for _ in range(200))}:
                kept = data[at]
                data[at] ^= 1 << self.rng.randrange(8)
                self.assertNotEqual(checksum.checksum_of(data), wanted)
                data[at] = kept

    def test_exchanged_rows_change_it(self) -> None:
        rows = [self.rng.randbytes(ROW) for _ in range(200)]
        wanted = checksum.checksum_of(b"".join(rows))
        for _ in range(50):
            i, j = self.rng.sample(range(200), 2)
            rows[i], rows[j] = rows[j], rows[i]
            self.assertNotEqual(checksum.checksum_of(b"".join(rows)), wanted)
            rows[i], rows[j] = rows[j], rows[i]

    def test_shifted_data_changes_it(self) -> None:
        data = self.rng.randbytes(20 * ROW)
        wanted = checksum.checksum_of(data)
        for by in (1, 7, 8, 64, ROW, ROW + 8):
            self.assertNotEqual(checksum.checksum_of(data[by:] + data[:by]), wanted, by)
            self.assertNotEqual(checksum.checksum_of(data[by:] + bytes(by)), wanted, by)

    def test_restart_begins_a_new_row(self) -> None:
        for first, second in ((b"", b"x"), (b"abc", b"defg"), (bytes(ROW), b"x"), (self.rng.randbytes(ROW + 9), b"yz")):
            sums = checksum.RowSum()
            sums.feed(memoryview(bytearray(first)))
            sums.restart()
            sums.restart()  # nothing was fed in between: no further row
            sums.feed(memoryview(bytearray(second)))
            padded = first + bytes(-len(first) % ROW) + second
            self.assertEqual(sums.value(), plain(padded))
            self.assertEqual(sums.nbytes, len(first) + len(second))

    def test_value_may_be_asked_twice(self) -> None:
        sums = checksum.RowSum()
        sums.feed(memoryview(bytearray(b"abc")))
        self.assertEqual(sums.value(), sums.value())

    def test_nothing(self) -> None:
        self.assertEqual(checksum.checksum_of(b""), 0)
        self.assertEqual(checksum.RowSum().value(), 0)

    def test_any_kind_of_memory_and_no_warning(self) -> None:
        data = self.rng.randbytes(3 * ROW + 11)
        wanted = plain(data)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for kind in (bytes, bytearray, memoryview):
                self.assertEqual(checksum.checksum_of(kind(data)), wanted)
            self.assertEqual(checksum.checksum_of(memoryview(b"_" + data)[1:]), wanted)  # not aligned
