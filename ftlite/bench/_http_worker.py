# SPDX-License-Identifier: BSD-3-Clause
"""The two child processes of ``bench http``: the donor, and a receiver.

Rules of this file: a memory baseline is taken when the state exists and the imports are done, just before the phase
that it is about; what ``_state`` says of the state.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

from ..checkpointing import HTTPTransport
from ._common import MemoryPeak
from ._link import Link, serve
from ._state import State, make_state, sizes_of, spoil, synchronize, verify

Options = dict[str, Any]

_STEP = 1


def main(link: Link, options: Options) -> None:
    """Be the donor or a receiver, as ``options["role"]`` says."""
    (_donor if options["role"] == "donor" else _receiver)(link, options)


def _donor(link: Link, options: Options) -> None:
    device = torch.device(options["device"])
    start_s = time.perf_counter()
    state = make_state(options, device)
    synchronize(device)
    link.send("created", seconds=time.perf_counter() - start_s, torch=torch.__version__, **sizes_of(state))
    transport: HTTPTransport[State] = HTTPTransport(
        options["timeout_s"], options["num_chunks"], host="127.0.0.1", max_readers=options["max_readers"]
    )
    try:
        link.expect("publish", options["timeout_s"])
        memory = MemoryPeak()
        start_s = time.perf_counter()
        transport.send_checkpoint([1], _STEP, state, options["timeout_s"])
        synchronize(device)
        link.send("published", seconds=time.perf_counter() - start_s, metadata=transport.metadata())
        link.expect("finish", options["total_timeout_s"])
        link.send("finished", growth=memory.growth())
    finally:
        transport.shutdown(wait=False)


def _receiver(link: Link, options: Options) -> None:
    device = torch.device(options["device"])
    own = make_state(options, device) if options["inplace"] else None
    transport: HTTPTransport[State] = HTTPTransport(
        options["timeout_s"],
        options["num_chunks"],
        state_dict=None if own is None else lambda: own,
        host="127.0.0.1",
        # what a joiner wants: the state where it trains
        device=None if device.type == "cpu" else device,
    )
    synchronize(device)
    link.send("ready")
    try:
        for run in range(options["runs"]):
            spoil(own, device)
            command = link.expect("fetch", options["total_timeout_s"])
            memory = MemoryPeak()
            start_s = time.perf_counter()
            got = transport.recv_checkpoint(0, command["metadata"], _STEP, options["timeout_s"])
            synchronize(device)
            seconds = time.perf_counter() - start_s
            growth = memory.growth()
            verify(got, own, options, device)
            del got
            link.send("fetched", run=run, seconds=seconds, growth=growth)
    finally:
        transport.shutdown(wait=False)


if __name__ == "__main__":
    sys.exit(serve(main))
