# SPDX-License-Identifier: BSD-3-Clause
"""What crosses a process group, without one: control messages, the table of checksums, how a state is cut."""

from __future__ import annotations

import random
import unittest

from tests import load

errors = load("_errors")
layout = load("checkpointing._layout")
wire = load("checkpointing._pg_wire")

MESSAGE, STRAIGHT = wire.MESSAGE_BYTES, wire.STRAIGHT_BYTES


class Controls(unittest.TestCase):
    def test_there_and_back(self) -> None:
        for control in (
            wire.Control(wire.Kind.GO, 0),
            wire.Control(wire.Kind.OFFER, (1 << 63) - 1, -5, 1 << 60, 1 << 40, (1 << 32) - 1, 3, "käse"),
        ):
            data = wire.pack(control)
            self.assertEqual(len(data), wire.CONTROL_BYTES)
            self.assertEqual(wire.unpack(data), control)

    def test_a_text_of_any_length(self) -> None:
        text = "ü" * 5000
        back = wire.unpack(wire.pack(wire.Control(wire.Kind.REPLY, 1, text=text))).text
        self.assertTrue(len(back) > 900 and text.startswith(back.rstrip("\ufffd")))

    def test_damage_at_any_byte(self) -> None:
        data = wire.pack(wire.Control(wire.Kind.OFFER, 7, 3, 100, text="a reason"))
        for at in range(len(data)):
            broken = bytearray(data)
            broken[at] ^= 0x10
            with self.assertRaises(errors.IntegrityError):
                wire.unpack(bytes(broken))

    def test_another_version(self) -> None:
        data = wire.pack(wire.Control(wire.Kind.GO, 1))
        rest = b"\x63\x00" + data[14:]
        other = data[:8] + wire.zlib.crc32(rest).to_bytes(4, "little") + rest
        with self.assertRaisesRegex(errors.NotServing, "version 99"):
            wire.unpack(other)

    def test_bytes_of_anybody(self) -> None:
        for seed in range(100):
            with self.assertRaises(errors.IntegrityError):
                wire.unpack(random.Random(seed).randbytes(wire.CONTROL_BYTES))

    def test_errors_by_code(self) -> None:
        for kind in (errors.NotServing, errors.LayoutError, errors.IntegrityError, errors.IncompleteTransfer):
            self.assertIs(wire.error_of(wire.code_of(kind("x"))), kind)
        self.assertIs(wire.error_of(wire.code_of(KeyError("x"))), errors.TransferError)
        self.assertIs(wire.error_of(60_000), errors.TransferError)

    def test_sums(self) -> None:
        sums = [0, 1, (1 << 32) - 1]
        self.assertEqual(wire.unpack_sums(wire.pack_sums(sums)), sums)


class Messages(unittest.TestCase):
    def ends(self, large: list[int], small: int = 0) -> list[int]:
        flat = layout.FlatSpace([*large, *([small] if small else [])], len(large))
        found: list[int] = wire.cut_messages(flat)
        return found

    def test_nothing(self) -> None:
        self.assertEqual(self.ends([]), [])

    def test_large_ones_go_alone(self) -> None:
        three = 3_000_000
        self.assertEqual(self.ends([three] * 4), [three * (i + 1) for i in range(4)])

    def test_a_huge_one_is_cut(self) -> None:
        ends = self.ends([5 * MESSAGE + 1])
        self.assertEqual((len(ends), ends[-1]), (6, 5 * MESSAGE + 1))

    def test_those_beside_each_other_share(self) -> None:
        ends = self.ends([300_000] * 100)
        self.assertEqual(len(ends), -(-100 // (MESSAGE // 300_000)))

    def test_small_ones_are_one_message(self) -> None:
        self.assertEqual(self.ends([STRAIGHT, 300_000], 16_000), [STRAIGHT, STRAIGHT + 316_000])

    def test_all_alike_where_none_goes_straight(self) -> None:
        flat = layout.FlatSpace([STRAIGHT, 3 * MESSAGE, 40_000], 2)
        total = STRAIGHT + 3 * MESSAGE + 40_000
        ends = wire.cut_messages(flat, is_straight=False)
        self.assertEqual(ends, [MESSAGE, 2 * MESSAGE, 3 * MESSAGE, total])
        self.assertEqual(wire.cut_messages(layout.FlatSpace([MESSAGE], 1), is_straight=False), [MESSAGE])
        self.assertEqual(wire.cut_messages(layout.FlatSpace([], 0), is_straight=False), [])

    def test_the_largest(self) -> None:
        self.assertEqual([wire.largest_of(ends) for ends in ([], [3], [3, 10, 12])], [0, 3, 7])

    def test_any_sizes(self) -> None:
        dice = random.Random(3)
        for _ in range(300):
            sizes = [dice.choice([1, 5, 300_000, STRAIGHT - 1, STRAIGHT, MESSAGE, 3 * MESSAGE + 7]) for _ in range(9)]
            flat = layout.FlatSpace(sizes, dice.randrange(10))
            ends = wire.cut_messages(flat)
            parts = [end - start for start, end in zip([0, *ends], ends)]
            self.assertEqual(sum(parts), flat.total)
            self.assertTrue(all(0 < n <= MESSAGE for n in parts), parts)
            for start, end in zip([0, *ends], ends):
                pieces = list(flat.pieces(start, end))
                self.assertTrue(len(pieces) == 1 or all(flat.extents[p[0]] < STRAIGHT for p in pieces))


if __name__ == "__main__":
    unittest.main()
