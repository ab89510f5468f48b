# SPDX-License-Identifier: BSD-3-Clause
"""The two child processes of ``bench http``: the donor, and a receiver.

Rules of this file: a memory baseline is taken when the state exists and the imports are done, just before the phase
that it is about; before every run the receiver's state is made wrong, after it every byte is compared with a state
made anew; an unequal byte is an error, so that no figure of the run gets out.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from ..checkpointing import HTTPTransport
from ._common import MemoryPeak
from ._link import Link, serve

Options = dict[str, Any]
State = dict[str, torch.Tensor]

_STEP = 1
# Tensors differ by this much modulo a prime, so that a tensor in the wrong place is seen.
_CYCLE = 97
# Never in the state: its values are 0 or more.
_WRONG = -1.0
# One float32.
_ITEM = 4


def main(link: Link, options: Options) -> None:
    """Be the donor or a receiver, as ``options["role"]`` says."""
    (_donor if options["role"] == "donor" else _receiver)(link, options)


def _donor(link: Link, options: Options) -> None:
    device = torch.device(options["device"])
    start_s = time.perf_counter()
    state = {f"w{i}": tensor for i, tensor in enumerate(_tensors(options, device))}
    _synchronize(device)
    link.send("created", seconds=time.perf_counter() - start_s, torch=torch.__version__, **_sizes(state))
    transport: HTTPTransport[State] = HTTPTransport(
        options["timeout_s"], options["num_chunks"], host="127.0.0.1", max_readers=options["max_readers"]
    )
    try:
        link.expect("publish", options["timeout_s"])
        memory = MemoryPeak()
        start_s = time.perf_counter()
        transport.send_checkpoint([1], _STEP, state, options["timeout_s"])
        _synchronize(device)
        link.send("published", seconds=time.perf_counter() - start_s, metadata=transport.metadata())
        link.expect("finish", options["total_timeout_s"])
        link.send("finished", growth=memory.growth())
    finally:
        transport.shutdown(wait=False)


def _receiver(link: Link, options: Options) -> None:
    device = torch.device(options["device"])
    own: State | None = None
    if options["inplace"]:
        own = {f"w{i}": torch.full_like(tensor, _WRONG) for i, tensor in enumerate(_tensors(options, device))}
    transport: HTTPTransport[State] = HTTPTransport(
        options["timeout_s"],
        options["num_chunks"],
        state_dict=None if own is None else lambda: own,
        host="127.0.0.1",
        # what a joiner wants: the state where it trains
        device=None if device.type == "cpu" else device,
    )
    _synchronize(device)
    link.send("ready")
    try:
        for run in range(options["runs"]):
            if own is not None:
                for tensor in own.values():
                    tensor.fill_(_WRONG)
                _synchronize(device)
            command = link.expect("fetch", options["total_timeout_s"])
            memory = MemoryPeak()
            start_s = time.perf_counter()
            got = transport.recv_checkpoint(0, command["metadata"], _STEP, options["timeout_s"])
            _synchronize(device)
            seconds = time.perf_counter() - start_s
            growth = memory.growth()
            _verify(got, own, options, device)
            del got
            link.send("fetched", run=run, seconds=seconds, growth=growth)
    finally:
        transport.shutdown(wait=False)


def _tensors(options: Options, device: torch.device) -> Iterator[torch.Tensor]:
    """The donor's tensors, one after the other: the same in every process."""
    count = max(1, options["total_size"] // options["chunk_size"])
    numel = max(1, options["chunk_size"] // _ITEM)
    base = torch.rand(numel, generator=torch.Generator().manual_seed(1)).to(device)
    return (base + i % _CYCLE for i in range(count))


def _sizes(state: State) -> dict[str, int]:
    return {"state_bytes": sum(tensor.nbytes for tensor in state.values()), "tensors": len(state)}


def _verify(got: State, own: State | None, options: Options, device: torch.device) -> None:
    """Compare every bit of ``got`` and, in place, of the receiver's ``own`` tensors; one tensor at a time."""
    count = 0
    for i, want in enumerate(_tensors(options, device)):
        for where, state in (("returned", got), ("in place", own)):
            if state is None:
                continue
            tensor = state[f"w{i}"].to(device)
            # as integers: equal floats may differ in bits
            if tensor.shape != want.shape or not torch.equal(tensor.view(torch.int32), want.view(torch.int32)):
                raise ValueError(f"wrong bytes in tensor w{i} ({where}): no figure of this run is reported")
        count += 1
    if len(got) != count:
        raise ValueError(f"{len(got)} tensors came, {count} were sent: no figure of this run is reported")


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


if __name__ == "__main__":
    sys.exit(serve(main))
