# SPDX-License-Identifier: BSD-3-Clause
"""The child processes of ``bench all`` that measure what the machine itself can do: copy, send, answer.

Rules of this file: no torch, nothing but what a plain program does; the memory is written to and a run is thrown
away before the first that counts; each run's bytes are compared before its time is told. The sockets block: the
parent's deadline ends a child that waits for ever.
"""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import time
from typing import Any

from ._link import Link, serve

Options = dict[str, Any]

_HOST = "127.0.0.1"
# Repeated to make a buffer: prime, so that what arrives at the wrong place is seen.
_BLOCK_BYTES = 1_000_003
# About what one small command and its answer take.
_MESSAGE_BYTES = 64
_GO = b"g"

# The other end of the round trip: a process of its own, which ends when this one closes its end or is gone.
_ECHO = """
import socket, sys
peer = socket.socket(fileno=int(sys.argv[1]))
while got := peer.recv(4096):
    peer.sendall(got)
"""


def main(link: Link, options: Options) -> None:
    """Do the part that ``options["role"]`` names."""
    {"copy": _copy, "receiver": _receive, "sender": _send, "round trip": _round_trip}[options["role"]](link, options)


def _buffer(size: int) -> bytes:
    """``size`` bytes, the same in every process."""
    block = random.Random(1).randbytes(_BLOCK_BYTES)
    return (block * (size // _BLOCK_BYTES + 1))[:size]


def _require(got: bytearray, want: bytes) -> None:
    if got != want:
        raise ValueError("wrong bytes: no figure of this run is reported")


def _copy(link: Link, options: Options) -> None:
    """Memory to memory in one process, one thread."""
    want = _buffer(options["bytes"])
    blank, target = bytes(len(want)), bytearray(len(want))
    view = memoryview(target)
    seconds = []
    for _ in range(1 + options["runs"]):
        view[:] = blank
        start_s = time.perf_counter()
        view[:] = want
        seconds.append(time.perf_counter() - start_s)
        _require(target, want)
    link.send("copied", seconds=seconds[1:])


def _receive(link: Link, options: Options) -> None:
    """From one connection into memory that exists."""
    want = _buffer(options["bytes"])
    blank, target = bytes(len(want)), bytearray(len(want))
    view = memoryview(target)
    with socket.create_server((_HOST, 0)) as server:
        link.send("listening", port=server.getsockname()[1])
        peer, _ = server.accept()
    seconds = []
    with peer:
        for _ in range(1 + options["runs"]):
            view[:] = blank
            start_s = time.perf_counter()
            peer.sendall(_GO)
            done = 0
            while done < len(view):
                got = peer.recv_into(view[done:])
                if not got:
                    raise ConnectionError(f"the sender has gone after {done} of {len(view)} bytes")
                done += got
            seconds.append(time.perf_counter() - start_s)
            _require(target, want)
    link.send("received", seconds=seconds[1:])


def _send(link: Link, options: Options) -> None:
    """The same bytes for every ``_GO``, until the receiver has enough."""
    want = _buffer(options["bytes"])
    with socket.create_connection((_HOST, options["port"])) as peer:
        while peer.recv(len(_GO)):
            peer.sendall(want)


def _round_trip(link: Link, options: Options) -> None:
    """One small message to another process and back, again and again."""
    near, far = socket.socketpair()
    seconds = []
    with near:
        with far:
            echo = subprocess.Popen([sys.executable, "-c", _ECHO, str(far.fileno())], pass_fds=[far.fileno()])
        for i in range(options["trips"] + 1):
            message = i.to_bytes(_MESSAGE_BYTES, "big")
            start_s = time.perf_counter()
            near.sendall(message)
            got = near.recv(_MESSAGE_BYTES, socket.MSG_WAITALL)
            seconds.append(time.perf_counter() - start_s)
            if got != message:
                raise ValueError(f"a wrong answer, of {len(got)} bytes: no figure of this run is reported")
    echo.wait()
    # the first one waited for the other process to start
    link.send("answered", seconds=seconds[1:], bytes=_MESSAGE_BYTES)


if __name__ == "__main__":
    sys.exit(serve(main))
