# SPDX-License-Identifier: BSD-3-Clause
"""Views of tensors' memory, and how much memory is left."""

from __future__ import annotations

import os
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
