# SPDX-License-Identifier: BSD-3-Clause
"""What runs in child interpreters: ``python -m tests.checkpointing._transport_child COMMAND ...``.

- ``donor MEGABYTES``: serve ``process_state`` of step 4, print the address, stay until stdin ends.
- ``receiver``: read an address from stdin, heal into fresh memory, print a digest; then in place, and again.
- ``stream``: read an address from stdin, heal as one stream, print the digest or the error's name and text.
- ``confined``: in a network namespace of its own: IPv6 off, no numpy, another user; some transfers.
"""

from __future__ import annotations

import hashlib
import os
import socket
import struct
import sys
from pathlib import Path
from typing import Any

STEP = 4
NOBODY = 65534


def process_state(megabytes: int) -> dict[str, Any]:
    import torch

    from tests.checkpointing._transport_states import block, noise

    return {
        "big": block(megabytes << 20),
        "weights": [noise(100, 30, seed=i) for i in range(20)],
        "half": noise(50).to(torch.bfloat16),
        "tied": [shared := noise(9), shared],
        "step": torch.tensor(3.0),
        "note": "käse",
        "rate": 0.1,
        (1, 2): None,
    }


def digest(state: Any) -> str:
    """A number that is equal for equal states, in any interpreter."""
    from tests import load
    from tests.checkpointing._transport_states import elements, tensors

    view_of = load("checkpointing._memory").view_of
    total = hashlib.sha256()
    for tensor in tensors(state):
        total.update(f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}".encode())
        data = elements(tensor)  # which the view does not keep
        total.update(view_of(data))
    total.update(repr([(key, value) for key, value in state.items() if isinstance(value, (str, float))]).encode())
    return total.hexdigest()


def _transport(**options: Any) -> Any:
    from tests import load

    return load("checkpointing").HTTPTransport(**{"timeout": 30, "host": "127.0.0.1", **options})


def donor(megabytes: str) -> None:
    state = process_state(int(megabytes))
    served = _transport()
    served.send_checkpoint([], STEP, state)
    print(served.metadata(), flush=True)
    print(digest(state), flush=True)
    sys.stdin.read()
    served.shutdown()


def receiver() -> None:
    url = sys.stdin.readline().strip()
    state = _transport().recv_checkpoint(0, url, STEP)
    print(digest(state), flush=True)
    for _ in range(2):
        healed = _transport(state_dict=lambda: state).recv_checkpoint(0, url, STEP)
        print(digest(healed), flush=True)


def stream() -> None:
    url = sys.stdin.readline().strip()
    try:
        print(digest(_transport(num_chunks=0).recv_checkpoint(0, url, STEP)), flush=True)
    except OSError as e:
        print(type(e).__name__, e, flush=True)


def _round_trips(count: int, **options: Any) -> None:
    import torch

    state, own = process_state(1), process_state(1)
    for i in range(count):
        kind = {"num_chunks": (None, 0, 3)[i % 3]}
        served = _transport(**kind, **options)
        reader = _transport(**kind, **({"state_dict": lambda: own} if i % 2 else {}), **options)
        served.send_checkpoint([1], i, state)
        moved = reader.recv_checkpoint(0, served.metadata(), i)
        if not torch.equal(moved["big"], state["big"]):
            raise SystemExit("wrong bits")
        served.disallow_checkpoint()
        served.shutdown()
        reader.shutdown()


def confined() -> None:
    Path("/proc/sys/net/ipv6/conf/all/disable_ipv6").write_text("1")
    import fcntl

    with socket.socket() as control:
        up = struct.pack("16sh14x", b"lo", 0x1 | 0x40)  # IFF_UP, IFF_RUNNING
        fcntl.ioctl(control, 0x8914, up)  # SIOCSIFFLAGS
    sys.modules["numpy"] = None  # type: ignore[assignment]
    _round_trips(
        3
    )  # all that is imported, torch's own late imports too, comes from folders the other user may not read
    socket.getaddrinfo("127.0.0.1", 0)  # imports a codec
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    os.environ["HOME"] = "/nonexistent"
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        raise SystemExit("IPv6 is on")
    except OSError:
        pass
    _round_trips(6)
    for master in ("127.0.0.1", "203.0.113.5"):  # no route leads to the other one, which it warns of
        os.environ["MASTER_ADDR"] = master
        made = _transport(host=None)
        print(made.metadata().split("/")[2].split(":")[0], os.getuid(), flush=True)
        made.shutdown()


if __name__ == "__main__":
    {"donor": donor, "receiver": receiver, "stream": stream, "confined": confined}[sys.argv[1]](*sys.argv[2:])
