# SPDX-License-Identifier: BSD-3-Clause
"""The state that the transports' benches move.

Rules: before every run the receiver's state is made wrong, after it every byte is compared with a state made anew; an
unequal byte is an error, so that no figure of the run gets out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["State", "make_state", "sizes_of", "spoil", "synchronize", "verify"]

Options = dict[str, Any]
State = dict[str, torch.Tensor]

# Tensors differ by this much modulo a prime, so that a tensor in the wrong place is seen.
_CYCLE = 97
# Never in the state: its values are 0 or more.
_WRONG = -1.0
# One float32.
_ITEM = 4


def make_state(options: Options, device: torch.device) -> State:
    """``total_size`` bytes of float32 in tensors of ``chunk_size`` bytes: the same in every process."""
    return {f"w{i}": tensor for i, tensor in enumerate(_tensors(options, device))}


def spoil(own: State | None, device: torch.device) -> None:
    """Make every element of ``own`` wrong."""
    for tensor in (own or {}).values():
        tensor.fill_(_WRONG)
    synchronize(device)


def _tensors(options: Options, device: torch.device) -> Iterator[torch.Tensor]:
    """The donor's tensors, one after the other: the same in every process."""
    count = max(1, options["total_size"] // options["chunk_size"])
    numel = max(1, options["chunk_size"] // _ITEM)
    base = torch.rand(numel, generator=torch.Generator().manual_seed(1)).to(device)
    return (base + i % _CYCLE for i in range(count))


def sizes_of(state: State) -> dict[str, int]:
    """What there is to tell of ``state``."""
    return {"state_bytes": sum(tensor.nbytes for tensor in state.values()), "tensors": len(state)}


def verify(got: State, own: State | None, options: Options, device: torch.device) -> None:
    """Compare every bit of ``got`` and, in place, of the receiver's ``own`` tensors; one tensor at a time.

    Raises:
        ValueError: one is wrong.
    """
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


def synchronize(device: torch.device) -> None:
    """Wait until ``device`` has done all that was asked of it."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
