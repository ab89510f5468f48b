# SPDX-License-Identifier: BSD-3-Clause
"""The two ranks of ``bench pg-transport``: rank 0 is the donor, rank 1 the receiver.

Rules of this file: a memory baseline is taken when the state exists and the ranks have met, just before a heal; what
``_state`` says of the state. A child process of a group has memory of its own, which is not counted.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from ..checkpointing import PGTransport
from ..process_group import (
    ProcessGroup,
    ProcessGroupBabyGloo,
    ProcessGroupBabyNCCL,
    ProcessGroupBabyXCCL,
    ProcessGroupGloo,
    ProcessGroupNCCL,
)
from ._common import MemoryPeak
from ._link import Link, serve
from ._state import State, make_state, sizes_of, spoil, synchronize, verify

Options = dict[str, Any]

_STEP = 1
_RANKS = 2

_GROUPS: dict[str, type[ProcessGroup]] = {
    "baby-gloo": ProcessGroupBabyGloo,
    "gloo": ProcessGroupGloo,
    "baby-nccl": ProcessGroupBabyNCCL,
    "nccl": ProcessGroupNCCL,
    "baby-xccl": ProcessGroupBabyXCCL,
}


def main(link: Link, options: Options) -> None:
    """Be rank ``options["rank"]``."""
    hosted = None
    if options["rank"] == 0:
        hosted = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        link.send("store", address=f"127.0.0.1:{hosted.port}", torch=torch.__version__)
    address = link.expect("meet", options["timeout_s"])["address"]
    device = torch.device(options["device"])
    group = _GROUPS[options["backend"]](options["total_timeout_s"])
    try:
        start_s = time.perf_counter()
        group.configure(f"{address}/heal", f"rank {options['rank']}", options["rank"], _RANKS)
        link.send("met", seconds=time.perf_counter() - start_s)
        start_s = time.perf_counter()
        state = make_state(options, device)
        synchronize(device)
        link.send("created", seconds=time.perf_counter() - start_s, **sizes_of(state))
        (_donate if options["rank"] == 0 else _receive)(link, options, group, device, state)
        link.expect("finish", options["total_timeout_s"])
    finally:
        group.shutdown()


def _donate(link: Link, options: Options, group: ProcessGroup, device: torch.device, state: State) -> None:
    transport: PGTransport[State] = PGTransport(group, options["timeout_s"], device)
    for _ in range(options["runs"]):
        link.expect("heal", options["total_timeout_s"])
        memory = MemoryPeak()
        start_s = time.perf_counter()
        transport.send_checkpoint([1], _STEP, state)
        seconds = time.perf_counter() - start_s
        link.send("sent", seconds=seconds, stages=transport.stages, growth=memory.growth())


def _receive(link: Link, options: Options, group: ProcessGroup, device: torch.device, state: State) -> None:
    own = state if options["inplace"] else None
    state = {}  # where the state comes into fresh memory, no other is held meanwhile
    transport: PGTransport[State] = PGTransport(
        group, options["timeout_s"], device, state_dict=None if own is None else lambda: own
    )
    for _ in range(options["runs"]):
        spoil(own, device)
        link.expect("heal", options["total_timeout_s"])
        memory = MemoryPeak()
        start_s = time.perf_counter()
        got = transport.recv_checkpoint(0, transport.metadata(), _STEP)
        synchronize(device)
        seconds = time.perf_counter() - start_s
        growth = memory.growth()
        verify(got, own, options, device)
        del got
        link.send("received", seconds=seconds, growth=growth)


if __name__ == "__main__":
    sys.exit(serve(main))
