# SPDX-License-Identifier: BSD-3-Clause
"""What stands between or in place of the two sides in tests: a proxy that counts and stops, a donor that lies."""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import torch

from tests._support import WAIT_S

_BLOCK = 64 << 10


class OneThread:
    """Mix into a test case whose tensors are small: threads that spin on two cores take longer than their sums."""

    def setUp(self) -> None:
        super().setUp()
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)


def through(metadata: str, port: int) -> str:
    """A donor's address with another port."""
    return re.sub(r":\d+/", f":{port}/", metadata, count=1)


def address(metadata: str) -> tuple[str, int]:
    """Host and port of a donor's address."""
    parts = urlsplit(metadata)
    return str(parts.hostname), int(parts.port or 0)


def close_at_once(sock: socket.socket) -> None:
    """Close with a reset."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


class _Server:
    """A listening socket of loopback, a thread that accepts, one more for each connection; use with ``with``."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._stopped = threading.Event()
        self._start(self._accept)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self.refuse()
        self.cut()
        for thread in list(self._threads):
            thread.join(WAIT_S)

    def refuse(self) -> None:
        """Accept nobody any more: who connects is refused."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def cut(self) -> None:
        """End all connections."""
        with self._lock:
            for sock in self._open:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def _start(self, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self._start(self._serve, sock)

    def _serve(self, sock: socket.socket) -> None:
        with self._lock:
            self._open.add(sock)
        try:
            if not self._stopped.is_set():
                self.talk(sock)
        except OSError:
            pass
        finally:
            with self._lock:
                self._open.discard(sock)
            sock.close()

    def talk(self, sock: socket.socket) -> None:
        raise NotImplementedError


class Proxy(_Server):
    """Passes bytes on to ``upstream`` and back; ``passed`` counts those that came back.

    ``on_bytes(block, passed) -> block | None`` sees each block before it goes to the receiver and the count so
    far; None cuts that connection instead.
    """

    def __init__(self, upstream: tuple[str, int], on_bytes: Callable[[bytes, int], bytes | None] | None = None) -> None:
        self.passed = 0
        self._upstream = upstream
        self._on_bytes = on_bytes
        super().__init__()

    def talk(self, sock: socket.socket) -> None:
        far = socket.create_connection(self._upstream, WAIT_S)
        far.settimeout(None)
        with self._lock:
            self._open.add(far)
        up = threading.Thread(target=self._up, args=(sock, far), daemon=True)
        up.start()
        try:
            while block := far.recv(_BLOCK):
                if self._on_bytes is not None:
                    changed = self._on_bytes(block, self.passed)
                    if changed is None:
                        break
                    block = changed
                with self._lock:
                    self.passed += len(block)
                sock.sendall(block)
        except OSError:
            pass
        finally:
            for each in (sock, far):
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
            up.join(WAIT_S)
            with self._lock:
                self._open.discard(far)
            far.close()

    @staticmethod
    def _up(sock: socket.socket, far: socket.socket) -> None:
        try:
            while block := sock.recv(_BLOCK):
                far.sendall(block)
        except OSError:
            pass
        finally:  # a reset is an end as well: a connection that waits for the next request learns of it only here
            with contextlib.suppress(OSError):
                far.shutdown(socket.SHUT_WR)


def ask(metadata: str, step: int, what: str) -> bytes:
    """The body of one answer of a donor."""
    connection = http.client.HTTPConnection(*address(metadata), timeout=WAIT_S)
    try:
        connection.request("GET", f"{urlsplit(metadata).path}{step}/{what}")
        return connection.getresponse().read()
    finally:
        connection.close()


@dataclass
class Asked:
    """A request that came to the fake donor: its number, what it is for, and its range's first byte."""

    number: int
    what: str
    start: int = 0


@dataclass
class Reply:
    """What the fake donor does: a head, ``body`` up to byte ``cut_at``, and then the end of the connection.

    ``pace`` sends so many bytes at a time and waits for so many seconds in between, ``hold`` waits before the
    rest is sent, ``reset`` ends with a reset.
    """

    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    status: int = 200
    length: int | None = None
    cut_at: int | None = None
    pace: tuple[int, float] | None = None
    hold: threading.Event | None = None
    reset: bool = False


class FakeDonor(_Server):
    """Answers what ``answer`` says; ``asked`` has all requests, ``sent`` the bytes of bodies by what they were for."""

    def __init__(self, answer: Callable[[Asked], Reply | None]) -> None:
        self.asked: list[Asked] = []
        self.sent: dict[str, int] = {}
        self._answer = answer
        super().__init__()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/s3cr3t/checkpoint/"

    def talk(self, sock: socket.socket) -> None:
        with sock.makefile("rb") as lines:
            while (line := lines.readline()).endswith(b"\n"):
                start = 0
                while (header := lines.readline()) not in (b"\r\n", b""):
                    if found := re.match(rb"range: bytes=(\d+)-", header, re.IGNORECASE):
                        start = int(found[1])
                with self._lock:
                    asked = Asked(len(self.asked), line.split()[1].decode().rpartition("/")[2], start)
                    self.asked.append(asked)
                reply = self._answer(asked)
                if reply is None or not self._send(sock, reply, asked):
                    return

    def _send(self, sock: socket.socket, reply: Reply, asked: Asked) -> bool:
        """Whether the connection goes on."""
        length = len(reply.body) if reply.length is None else reply.length
        head = {"Content-Length": str(length), **reply.headers}
        lines = [f"HTTP/1.1 {reply.status} x", *(f"{name}: {value}" for name, value in head.items()), "", ""]
        sock.sendall("\r\n".join(lines).encode())
        body = memoryview(reply.body)[: reply.cut_at]
        step, pause_s = reply.pace or (max(1, len(body)), 0.0)
        for at in range(0, len(body), step):
            if at and self._stopped.wait(pause_s):
                return False
            sock.sendall(body[at : at + step])
            with self._lock:
                self.sent[asked.what] = self.sent.get(asked.what, 0) + len(body[at : at + step])
        if reply.hold is not None:
            reply.hold.wait(WAIT_S)
        if reply.reset:
            close_at_once(sock)
        return reply.cut_at is None and reply.hold is None and length == len(body)


@dataclass
class Recording:
    """All that a donor answers about one step: what -> (headers, body)."""

    answers: dict[str, tuple[dict[str, str], bytes]]

    @property
    def chunks(self) -> list[str]:
        return [what for what in self.answers if what.isdigit()]

    @property
    def total(self) -> int:
        return sum(len(self.answers[what][1]) for what in self.chunks)

    def reply(self, asked: Asked, **changes: Any) -> Reply:
        """The donor's own answer, with ``changes``."""
        headers, body = self.answers[asked.what]
        reply = Reply(body[asked.start :], dict(headers), 206 if asked.start else 200)
        for name, value in changes.items():
            setattr(reply, name, value)
        return reply

    def with_body(self, asked: Asked, body: bytes) -> Reply:
        """The donor's answer with another body."""
        return Reply(body[asked.start :], dict(self.answers[asked.what][0]), 206 if asked.start else 200)


def record(metadata: str, step: int) -> Recording:
    """Ask a donor for everything about ``step``."""
    host, port = address(metadata)
    path = urlsplit(metadata).path
    connection = http.client.HTTPConnection(host, port, timeout=WAIT_S)
    answers = {}

    def ask(what: str) -> bool:
        connection.request("GET", f"{path}{step}/{what}")
        response = connection.getresponse()
        body = response.read()
        if response.status != 200:
            return False
        headers = {name: value for name, value in response.getheaders() if name.lower() != "content-length"}
        answers[what] = (headers, body)
        return True

    try:
        ask("metadata")
        ask("full")
        number = 0
        while ask(str(number)):
            number += 1
    finally:
        connection.close()
    return Recording(answers)
