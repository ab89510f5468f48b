# SPDX-License-Identifier: BSD-3-Clause
"""Views of tensors' memory, and how much memory is left."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import unittest
from pathlib import Path
from unittest import mock

import torch

from tests import load

memory = load("checkpointing._memory")


class Views(unittest.TestCase):
    def test_a_view_is_the_memory_itself(self) -> None:
        tensor = torch.zeros(4, dtype=torch.int32)
        view = memory.view_of(tensor)
        self.assertEqual((len(view), view.readonly), (16, False))
        view[4:8] = (77).to_bytes(4, "little")
        self.assertEqual(tensor.tolist(), [0, 77, 0, 0])

    def test_every_dtype_without_numpy(self) -> None:
        for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.complex128, torch.bool, torch.uint64):
            self.assertEqual(len(memory.view_of(torch.zeros(3, dtype=dtype))), 3 * dtype.itemsize)

    def test_no_memory(self) -> None:
        self.assertEqual(len(memory.view_of(torch.empty(0, 3))), 0)
        self.assertEqual(len(memory.view_at(0, 0)), 0)

    def test_offsets_are_bytes(self) -> None:
        base = torch.arange(10, dtype=torch.int16)
        self.assertEqual(memory.offset_bytes(base[3:]), 6)
        self.assertEqual(memory.byte_tensor(base[3:].untyped_storage(), 6, 4).tolist(), [3, 0, 4, 0])
        self.assertEqual(memory.byte_tensor(base.untyped_storage(), 0, 20).data_ptr(), base.data_ptr())

    def test_a_tensor_in_a_storage(self) -> None:
        base = torch.arange(6, dtype=torch.int16)
        out = memory.tensor_in(base.untyped_storage(), torch.int16, 2, (2, 2), (1, 3))
        self.assertEqual(out.tolist(), [[1, 4], [2, 5]])
        self.assertEqual(out.data_ptr(), base.data_ptr() + 2)

    def test_unlocked_reads_any_buffer(self) -> None:
        for data in (b"abc", bytearray(b"abc"), memoryview(b"_abc")[1:]):
            view = memory.unlocked(data)
            self.assertEqual((bytes(view), view.readonly), (b"abc", False))
        self.assertEqual(bytes(memory.unlocked(b"")), b"")

    def test_unlocked_holds_no_lock_on_the_buffer(self) -> None:
        data = bytearray(b"abc")
        memory.unlocked(data)
        data.append(1)  # a buffer that is still exported could not grow


PAGE = mmap.PAGESIZE


@unittest.skipUnless(sys.platform == "linux", "asks Linux which pages are there")
class Populate(unittest.TestCase):
    def setUp(self) -> None:
        # nobody has touched it, and it begins with a page
        self.map = mmap.mmap(-1, 64 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.bytes = (ctypes.c_char * (64 * PAGE)).from_buffer(self.map)
        self.addCleanup(self.map.close)
        self.addCleanup(self.__dict__.pop, "bytes")
        self.address = ctypes.addressof(self.bytes)

    def there(self) -> list[int]:
        """The numbers of the pages that are there."""
        found = ctypes.create_string_buffer(64)
        self.assertEqual(memory._libc.mincore(self.address, 64 * PAGE, found), 0)
        return [number for number, byte in enumerate(found.raw) if byte & 1]

    def populate(self, start: int, nbytes: int) -> list[int]:
        memory.populate(self.address + start, nbytes)
        return self.there()

    def test_whole_pages(self) -> None:
        try:
            memory._libc.madvise(self.address, PAGE, memory._POPULATE_WRITE)
        finally:
            if self.there() != [0]:
                self.skipTest("a kernel before 5.14")
        # what is not a whole page may belong to others
        self.assertEqual(self.populate(10 * PAGE + 1, 3 * PAGE), [0, 11, 12])
        self.assertEqual(self.populate(20 * PAGE, 2 * PAGE), [0, 11, 12, 20, 21])

    def test_not_one_page(self) -> None:
        for start, nbytes in ((0, 0), (1, PAGE), (PAGE - 1, 2), (5, 100)):
            self.assertEqual(self.populate(start, nbytes), [])

    def test_what_is_there_stays(self) -> None:
        self.map[30 * PAGE : 30 * PAGE + 3] = b"abc"
        self.assertEqual(self.populate(30 * PAGE, 4 * PAGE), [30])
        self.populate(29 * PAGE, 4 * PAGE)
        self.assertEqual(self.map[30 * PAGE : 30 * PAGE + 4], b"abc\0")

    def test_a_kernel_that_refuses(self) -> None:
        with mock.patch.object(memory, "_POPULATE_WRITE", 250):
            self.assertEqual(self.populate(0, 4 * PAGE), [])

    def test_elsewhere(self) -> None:
        with mock.patch.object(memory, "_libc", None):
            memory.populate(self.address, 4 * PAGE)
        self.assertEqual(self.there(), [])


MACHINE = {"/proc/meminfo": "MemTotal: 900 kB\nMemAvailable:     500 kB\nSwapFree: 1 kB\n"}
GROUP = "/sys/fs/cgroup/memory."


class AtHand(unittest.TestCase):
    """What can still be allocated is the least of what the machine and the container say."""

    def at_hand(self, files: dict[str, str], sysconf: bool = False) -> int | None:
        def read_text(path: Path) -> str:
            if str(path) not in files:
                raise FileNotFoundError(str(path))
            return files[str(path)]

        names = os.sysconf_names if sysconf else {}
        with mock.patch.object(Path, "read_text", read_text), mock.patch.object(os, "sysconf_names", names):
            found: int | None = memory.memory_at_hand()
            return found

    def test_here(self) -> None:
        found = memory.memory_at_hand()
        self.assertIs(type(found), int)
        self.assertGreater(found, 0)

    def test_the_machine(self) -> None:
        self.assertEqual(self.at_hand(MACHINE), 500 * 1024)

    def test_a_container_without_a_limit(self) -> None:
        self.assertEqual(self.at_hand({**MACHINE, GROUP + "max": "max\n"}), 500 * 1024)

    def test_the_containers_limit(self) -> None:
        files = {**MACHINE, GROUP + "max": "5000\n", GROUP + "current": "2000\n"}
        self.assertEqual(self.at_hand(files), 3000)
        self.assertEqual(self.at_hand({**files, GROUP + "current": "6000"}), 0)

    def test_what_the_container_only_caches_can_be_had(self) -> None:
        files = {
            **MACHINE, GROUP + "max": "5000", GROUP + "current": "4900",
            GROUP + "stat": "anon 900\nfile 4000\nactive_file 700\ninactive_file 3300\n",
        }  # fmt: skip
        self.assertEqual(self.at_hand(files), 5000 - 4900 + 3300)

    def test_what_is_unreadable_is_left_out(self) -> None:
        files = {**MACHINE, GROUP + "max": "5000", GROUP + "current": "many"}
        self.assertEqual(self.at_hand(files), 500 * 1024)
        self.assertEqual(self.at_hand({"/proc/meminfo": "MemAvailable:\n"}), None)

    def test_not_linux(self) -> None:
        self.assertIsNone(self.at_hand({}))
        found = self.at_hand({}, sysconf=True)
        self.assertTrue(found is None or found > 0)
