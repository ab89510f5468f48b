# SPDX-License-Identifier: BSD-3-Clause
"""The donor's HTTP server: who may ask, what is answered, and how much a stranger can cost.

Paths, below ``/<secret>/checkpoint/<step>/``:

- ``metadata``: the manifest. ``<number>``: the bytes of one chunk, from ``Range: bytes=N-`` on if given.
- ``full``: the whole state as one stream (see ``_stream``).

200 and 206 carry a body of exactly ``Content-Length`` bytes. 404: the secret is missing or wrong, or there
is no such thing. 400: a request that nobody of ours makes. 503: ask again. 409: it will not come. The last
two say why in one line of text. ``Heal-*`` headers: protocol, torch version, checksum, and the reader's id.

Threads: one accepts, one per connection answers. A connection that has not shown the secret is a stranger;
there are few of those at a time, the oldest is cut off for the newest, and it has a short time to speak.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import io
import itertools
import logging
import os
import re
import socket
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import ThreadingMixIn
from typing import Any

from .._errors import FtliteError, IntegrityError
from ._gate import Answer, ServingGate
from ._manifest import PROTOCOL
from ._offer import Offer
from ._snapshot import Snapshot

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 128  # 16 readers with 8 streams each
MAX_STRANGERS = 32  # a burst of new readers gets in at once; a flood costs no more threads than this
HEAD_S = 10.0  # a request head is one packet; ten seconds forgive a lost one several times over
HEAD_BYTES = 8192  # ours take 300
KEEP_ALIVE_S = 60.0  # a reader that copies a large block to a slow device is silent meanwhile
SEND_S = 30.0  # per piece of 1 MB: who takes less than 35 KB/s has stopped reading
_PIECE_BYTES = 1 << 20
HOLD_S = 0.5  # how long a request waits for the gate before it is told to come back: well below any idle limit
_LOWEST_RANGE = re.compile(r"bytes=(\d{1,19})-\Z", re.ASCII)
_NUMBER = re.compile(r"\d{1,18}\Z", re.ASCII)
_READER = re.compile(r"[0-9a-f]{1,32}\Z", re.ASCII)

PROTOCOL_HEADER = "Heal-Protocol"
TORCH_HEADER = "Heal-Torch"
SUM_HEADER = "Heal-Sum"
READER_HEADER = "Heal-Reader"


class _Head(io.RawIOBase):
    """The receiving side of a connection, with a budget of bytes and seconds for each request head."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._bytes_left = 0
        self._until_s = 0.0

    def allow(self, seconds: float) -> None:
        """A new request may begin."""
        self._bytes_left = HEAD_BYTES
        self._until_s = time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left_s = self._until_s - time.monotonic()
        if left_s <= 0 or self._bytes_left <= 0:  # an end of file would pass for the end of the head
            raise TimeoutError("a head that is slow or does not end")
        self._connection.settimeout(left_s)
        n = self._connection.recv_into(memoryview(buffer)[: self._bytes_left])
        self._bytes_left -= n
        return n


# Those of this process, for its forks. A fork that kept a copy of their sockets, a DataLoader's worker say, would keep
# readers waiting for a donor that is dead, and its port taken.
_servers: weakref.WeakSet[CheckpointServer] = weakref.WeakSet()


@functools.cache  # there is no way to take a hook back
def _forks_leave_it() -> None:
    os.register_at_fork(after_in_child=_leave_to_the_parent)


def _leave_to_the_parent() -> None:
    """In a fork: close the copies."""
    for server in list(_servers):
        server.leave_to_the_parent()


class CheckpointServer(ThreadingMixIn, HTTPServer):
    """Serves what ``gate`` lets through. Made with a listening socket, which it closes at the end."""

    daemon_threads = True
    block_on_close = False  # connections are cut and waited for with a deadline instead

    def __init__(
        self,
        listener: socket.socket,
        secret: str,
        gate: ServingGate[Offer],
        torch_version: str,
    ) -> None:
        HTTPServer.__init__(self, listener.getsockname()[:2], BaseHTTPRequestHandler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.gate = gate
        self.torch_version = torch_version
        self.secret = secret.encode("ascii")
        self._lock = threading.Lock()
        self._strangers: OrderedDict[int, socket.socket] = OrderedDict()
        self._known: dict[int, socket.socket] = {}
        self._answering: dict[int, threading.Thread] = {}
        self._numbers = itertools.count()
        self._closing = False
        self.is_a_copy = False  # in a fork of the process that made it
        _forks_leave_it()
        _servers.add(self)

    def leave_to_the_parent(self) -> None:
        """Give up what a fork has of it, without a word to anybody; no thread is left that could hold a lock."""
        self.is_a_copy = True
        for each in [self.socket, *self._strangers.values(), *self._known.values()]:
            with contextlib.suppress(OSError):
                os.close(each.detach())
        self._strangers.clear()
        self._known.clear()
        self._answering.clear()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give the connection a thread, unless there are too many."""
        number = next(self._numbers)
        with self._lock:
            oldest = None
            if len(self._strangers) >= MAX_STRANGERS:
                _, oldest = self._strangers.popitem(last=False)
            full = len(self._strangers) + len(self._known) >= MAX_CONNECTIONS
            if not full and not self._closing:
                self._strangers[number] = request
                thread = threading.Thread(
                    target=self._serve, args=(number, request, client_address), name=f"heal-serve-{number}", daemon=True
                )
                self._answering[number] = thread
        if oldest is not None:
            cut(oldest)
        if full or self._closing:
            self.shutdown_request(request)
        else:
            thread.start()

    def _serve(self, number: int, request: socket.socket, client_address: Any) -> None:
        try:
            _Handler(request, client_address, self, number)
        except (OSError, ValueError):
            logger.debug("connection from %s ended", client_address[0], exc_info=True)
        except Exception:
            logger.exception("a request from %s failed", client_address[0])
        finally:
            self.gate.leave(number)
            with self._lock:
                self._strangers.pop(number, None)
                self._known.pop(number, None)
                self._answering.pop(number, None)
            self.shutdown_request(request)

    def stop(self) -> None:
        """Accept nobody any more."""
        if self.is_a_copy:
            return  # the thread that would answer is the parent's
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread, which looks up once per poll only
        self.shutdown()

    def know(self, number: int, request: socket.socket) -> None:
        """The connection has shown the secret."""
        with self._lock:
            if self._strangers.pop(number, None) is not None:
                self._known[number] = request

    def is_secret(self, text: str) -> bool:
        """Whether ``text`` is the secret, in time that does not depend on it."""
        return hmac.compare_digest(text.encode("utf-8", "surrogateescape"), self.secret)

    def cut_all(self, wait_s: float) -> None:
        """End every connection, and wait up to ``wait_s`` seconds for their threads."""
        with self._lock:
            self._closing = True
            sockets = [*self._strangers.values(), *self._known.values()]
            threads = list(self._answering.values())
        for each in sockets:
            cut(each)
        until_s = time.monotonic() + wait_s
        for thread in threads:
            if thread.ident is not None:  # else its connection came in this very moment, and finds itself cut
                thread.join(max(0.0, until_s - time.monotonic()))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log; the base class prints to stderr."""
        logger.debug("connection from %s failed", client_address, exc_info=True)


def cut(connection: socket.socket) -> None:
    """End a connection at once, from any thread."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    protocol_version = "HTTP/1.1"
    default_request_version = protocol_version  # or what names no version would be answered without a status line
    server_version = "heal"
    sys_version = ""
    disable_nagle_algorithm = True
    server: CheckpointServer

    def __init__(self, request: socket.socket, client_address: Any, server: CheckpointServer, number: int) -> None:
        self._number = number
        self._body_started = False
        super().__init__(request, client_address, server)

    def setup(self) -> None:
        super().setup()
        self._head = _Head(self.connection)
        self.rfile = io.BufferedReader(self._head)
        self._next_head_s = HEAD_S

    def handle_one_request(self) -> None:
        """Give the next request its budget, and answer it."""
        self._head.allow(self._next_head_s)
        super().handle_one_request()

    def do_GET(self) -> None:
        """Answer, or cut the connection where an answer has begun that cannot be finished."""
        self._body_started = False
        try:
            self._answer()
        except FtliteError as e:  # first, for some of ours are OSErrors as well
            self._say(409, str(e))
        except OSError:
            self.close_connection = True  # the reader has left, or was cut off
        except Exception as e:
            logger.exception("a request could not be answered")
            self._say(500, f"the donor failed ({type(e).__name__}); its log says why")

    def _answer(self) -> None:
        parts = self.path.split("/")
        if len(parts) != 5 or parts[0] or not self.server.is_secret(parts[1]) or parts[2] != "checkpoint":
            self.close_connection = True
            self._say(404, "nothing here")
            return
        self.server.know(self._number, self.connection)
        self._next_head_s = KEEP_ALIVE_S
        step, what = parts[3], parts[4]
        if not _NUMBER.match(step) or not (_NUMBER.match(what) or what in ("metadata", "full")):
            self._say(400, "no such step or part")
            return
        reader = self.headers.get(READER_HEADER, "")
        ours = _READER.match(reader) is not None
        reader = reader if ours else f"connection {self._number}"
        offer, answer, reason = self.server.gate.enter(
            int(step), reader, self._number, lambda: cut(self.connection), HOLD_S
        )
        if offer is None:
            self._say(503 if answer is Answer.WAIT else 409, reason)
        elif what == "metadata":
            self._send_head(200, len(offer.snapshot.document), offer.snapshot.document_sum)
            self._send(offer.snapshot.document)
        elif what == "full":
            self._send_stream(offer, ours)
        else:
            self._send_chunk(offer.snapshot, int(what))

    def _send_stream(self, offer: Offer, ours: bool) -> None:
        # who is not one of ours does not know to ask again
        head = offer.head(HOLD_S if ours else None)
        if head is None:
            self._say(503, "the donor adds up its stream")
            return
        self._send_head(200, *head)
        body = _Body(self._send, head[0])
        with io.BufferedWriter(body, _PIECE_BYTES) as buffered:
            offer.write(buffered)
        body.require_end()

    def _send_chunk(self, snapshot: Snapshot, number: int) -> None:
        if number >= len(snapshot.ends):
            self._say(404, f"no chunk {number}, there are {len(snapshot.ends)}")
            return
        start = snapshot.ends[number - 1] if number else 0
        end = snapshot.ends[number]
        asked = self.headers.get("Range")
        if asked is not None:
            found = _LOWEST_RANGE.match(asked)
            if not found or int(found[1]) >= end - start:
                self._say(400, "no such range")
                return
            start += int(found[1])
        self._send_head(200 if asked is None else 206, end - start)
        for block, _ in snapshot.blocks(start, end):
            self._send(block)

    def _send_head(self, status: int, length: int, checksum: int | None = None) -> None:
        self.connection.settimeout(SEND_S)
        self.send_response_only(status)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(length))
        self.send_header(PROTOCOL_HEADER, str(PROTOCOL))
        self.send_header(TORCH_HEADER, self.server.torch_version)
        if checksum is not None:
            self.send_header(SUM_HEADER, f"{checksum:08x}")
        self.end_headers()
        self._body_started = True

    def _send(self, data: Any) -> None:
        view = memoryview(data)
        for at in range(0, len(view), _PIECE_BYTES):
            self.connection.sendall(view[at : at + _PIECE_BYTES])  # whose time limit is for each call

    def _say(self, status: int, text: str) -> None:
        """Answer with one line of text; a second status line within a body would pass for state."""
        if self._body_started:
            self.close_connection = True
            cut(self.connection)
            return
        body = text.encode("utf-8", "replace")
        self.connection.settimeout(HEAD_S)
        self.send_response_only(status)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header(PROTOCOL_HEADER, str(PROTOCOL))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer what http.server itself refuses, in our form."""
        self.close_connection = True
        self._body_started = False
        self._say(code, message or "refused")

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the base class writes every request, secret included, to stderr."""


class _Body(io.RawIOBase):
    """What a stream of ``length`` bytes is written to, in front of a buffer that gathers its small writes."""

    def __init__(self, send: Callable[[Any], None], length: int) -> None:
        self._send = send
        self._left = length

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        self._left -= len(data)
        if self._left < 0:
            self.require_end()
        self._send(data)
        return len(data)

    def require_end(self) -> None:
        """
        Raises:
            IntegrityError: more or fewer bytes were written than were announced.
        """
        if self._left:
            raise IntegrityError("the state has changed since its stream was summed: its length is another one")
