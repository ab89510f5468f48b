# SPDX-License-Identifier: BSD-3-Clause
"""One connection to a donor: requests, answers, and what their failures mean.

A ``Link`` is used by one thread at a time; only ``cut`` may come from another. Everything that http.client
or a socket can raise becomes one of ours here:

- *broken*: the connection failed, and another one may do better (``Broken``, internal);
- *refused*: the donor answered that it will not, or not now (NotServing; ``Later``, internal);
- the donor is not one of ours, or says what makes no sense (IntegrityError, LayoutError).
"""

from __future__ import annotations

import contextlib
import http.client
import io
import re
import socket
import sys
import time
from typing import Any

from .. import _net
from .._deadline import Deadline
from .._errors import DeadlineExceeded, IncompleteTransfer, IntegrityError, LayoutError, NotServing, TransferError
from ._checksum import RowSum
from ._manifest import PROTOCOL
from ._memory import unlocked
from ._server import PROTOCOL_HEADER, READER_HEADER, SUM_HEADER, TORCH_HEADER

# A donor that is silent for so long is given up. A live one never is: its longest pause is a request that waits for
# the gate (half a second). Longer than TCP takes to send a lost packet again a few times (0.2, 0.4, ... 6.4 s).
IDLE_S = 15.0
_REASON_BYTES = 1000  # as much as a donor of ours says
_OURS = re.compile(r"/[0-9a-f]{32}/checkpoint/")
CHANGED = (
    "damaged on the way, or changed by the donor while it was served; a donor that trains on while it serves needs "
    'snapshot="all", or disallow_checkpoint() first'
)


class Broken(Exception):
    """The connection failed; what was received until then counts."""


class Later(Exception):
    """The donor says to ask again."""


class Donor:
    """Where a donor is, looked up once."""

    def __init__(self, url: str) -> None:
        """``url`` is what the donor's ``metadata()`` returned.

        Raises:
            ValueError: it is no such URL; the text does not show the path, which holds the secret.
        """
        self.host, self.port, self.path = _net.split_url(url)
        # by its secret; a peer's address has none, and neither has its stream a checksum
        self.is_ours = _OURS.fullmatch(self.path) is not None
        self.shown = f"{_net.url_host(self.host)}:{self.port}"
        self._candidates: list[_net.Candidate] | None = None

    def connect(self, deadline: Deadline) -> socket.socket:
        """A new connection.

        Raises:
            DeadlineExceeded, TransferError: none could be made.
        """
        if self._candidates is None:
            self._candidates = _net.resolve(self.host, self.port, deadline)
        return _net.connect(self._candidates, deadline, IDLE_S, self.shown)


class Link:
    """A connection to ``donor``, made when it is first needed and again after it broke."""

    def __init__(self, donor: Donor, reader: str, deadline: Deadline) -> None:
        self.donor = donor
        self._reader = reader
        self._deadline = deadline
        self._http: http.client.HTTPConnection | None = None
        # kept apart, since http.client forgets both with an answer that will end with the connection
        self._sock: socket.socket | None = None
        self._response: http.client.HTTPResponse | None = None
        self._closed = False
        self.hear()

    def hear(self) -> None:
        """Something came from the donor, or is waited for from now on."""
        self._heard_s = time.monotonic()

    @property
    def silent(self) -> bool:
        """Whether the donor is given up: nothing has come for as long as the idle limit, over however many tries."""
        return time.monotonic() - self._heard_s >= IDLE_S

    def get(self, step: int, what: str, start: int = 0) -> Answer:
        """Ask for ``what`` of ``step``, from byte ``start`` on.

        Raises:
            Broken, Later: see above.
            NotServing: the donor will not serve it, with its reason.
            DeadlineExceeded: there was no answer in time.
        """
        headers = {READER_HEADER: self._reader, "Accept-Encoding": "identity"}
        if start:
            headers["Range"] = f"bytes={start}-"
        try:
            connection = self._connection()
            connection.request("GET", f"{self.donor.path}{step}/{what}", headers=headers)
            response = self._response = connection.getresponse()
        except (OSError, http.client.HTTPException) as e:
            self.close()
            if isinstance(e, (DeadlineExceeded, TransferError)):
                raise
            raise Broken(_said(e)) from e
        self.hear()
        if self.donor.is_ours and response.getheader(PROTOCOL_HEADER) is None:
            # a head that is cut short looks like a short one to http.client
            self.close()
            raise Broken("the answer has a head that none of ours has, or half of one")
        if response.status not in (200, 206):
            self._refused(response, step)
        if response.status != (206 if start else 200) or response.chunked:
            self.close()
            raise IntegrityError(f"{self.donor.shown} answered in another form or range than was asked for")
        return Answer(self, response)

    def close(self) -> None:
        """Close the connection; the next request makes a new one."""
        if self._http is not None:
            self._shut()  # a process that was forked meanwhile has it open as well
            self._http.close()
            if self._response is not None:
                self._response.close()
            self._http = self._sock = self._response = None

    def cut(self) -> None:
        """End whatever the connection is waiting for, from any thread, for good."""
        self._closed = True
        self._shut()

    def _shut(self) -> None:
        sock = self._sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _connection(self) -> http.client.HTTPConnection:
        if self._http is not None and self._http.sock is None:
            self.close()  # the donor ended it with its last answer
        if self._closed:
            raise Broken("the transfer has ended")
        if self._http is None:
            connection = http.client.HTTPConnection(self.donor.host, self.donor.port)
            self._sock = connection.sock = self.donor.connect(self._deadline)
            connection.auto_open = 0  # http.client would look the name up again
            self._http = connection
            if self._closed:  # cut() came while the connection was being made
                self._shut()
        sock: socket.socket = self._http.sock
        sock.settimeout(IDLE_S)  # at the deadline the connection is cut
        return self._http

    def _refused(self, response: http.client.HTTPResponse, step: int) -> None:
        try:
            said = response.read(_REASON_BYTES).decode("utf-8", "replace").strip()
        except (OSError, http.client.HTTPException) as e:
            self.close()
            raise Broken(_said(e)) from e
        if response.getheader(PROTOCOL_HEADER) is None:
            said = ""  # the page of some other server is no reason
        reason = printable(said)
        if not response.isclosed():
            self.close()
        if response.status == 503:
            raise Later(reason)
        hint = "check the address: it must be what the donor's metadata() returned" if response.status == 404 else ""
        why = ": ".join(part for part in (reason, hint) if part) or f"HTTP status {response.status}"
        raise NotServing(f"{self.donor.shown} does not serve step {step}: {why}")


class Answer(io.BufferedIOBase):
    """The body of an answer: exactly ``length`` bytes, or Broken. A file that torch's loader can read.

    ``length`` is None where the donor does not say, and the body ends with the connection, as torchft's does;
    ``most`` is what will be read at most, ``done`` how many bytes were.
    """

    def __init__(self, link: Link, response: http.client.HTTPResponse) -> None:
        self._link = link
        self._response = response
        self.length: int | None = response.length
        self.most = sys.maxsize if self.length is None else self.length
        self.done = 0
        self.sums: RowSum | None = None
        self._ahead = True  # whether http.client may have read bytes of the body already

    @property
    def left(self) -> int:
        """How many bytes are still to come, at most."""
        return self.most - self.done

    def require_protocol(self) -> None:
        """
        Raises:
            LayoutError: the donor does not speak our protocol.
        """
        spoken = self._response.getheader(PROTOCOL_HEADER)
        if spoken != str(PROTOCOL):
            self._link.close()
            raise LayoutError(
                f"{self._link.donor.shown} speaks no chunk protocol of ours "
                f"({'none' if spoken is None else spoken[:20]}, here {PROTOCOL}); num_chunks=0 heals from a donor that "
                "streams its whole state"
            )

    @property
    def torch_version(self) -> str | None:
        """The donor's torch, where it says."""
        text = self._response.getheader(TORCH_HEADER)
        return None if text is None else text[:40]

    @property
    def announced_sum(self) -> int | None:
        """The checksum of the whole body, where the donor says."""
        text = self._response.getheader(SUM_HEADER)
        try:
            return None if text is None else int(text, 16)
        except ValueError as e:
            raise IntegrityError(f"{self._link.donor.shown} announced the checksum {text!r:.40}") from e

    def fill(self, view: memoryview) -> None:
        """Read exactly ``len(view)`` bytes into ``view``."""
        wanted = len(view)
        if wanted > self.left:
            raise IntegrityError(
                f"{self._link.donor.shown} sends a body that asks for {wanted} bytes where {self.left} are left"
            )
        try:
            while view:
                # One read of the socket at a time, so that what came before a break or a time-out is counted. A reader
                # that has bytes at hand returns them by themselves only where its buffer is as large as what is asked.
                part = view[: io.DEFAULT_BUFFER_SIZE] if self._ahead else view
                n = self._response.fp.readinto1(part) if self._response.fp is not None else 0
                if not n:
                    raise Broken("the donor closed the connection in the middle")
                self._ahead = len(part) < io.DEFAULT_BUFFER_SIZE
                view = view[n:]
                self.done += n
                self._link.hear()
        except (OSError, http.client.HTTPException) as e:
            self._link.close()
            raise Broken(_said(e)) from e
        except Broken:
            self._link.close()
            raise
        if not self.left:
            self._response.close()  # the connection is free for the next request

    # --- for a loader; bytearrays, since torch takes them over where it warns of bytes

    def readable(self) -> bool:
        return True

    def read(self, n: int | None = -1, /) -> Any:
        """``n`` bytes, all that is left for -1; allocates no more than was announced."""
        if n is None or n < 0:
            if self.length is None:
                return self._rest()
            n = self.left
        wanted = n
        if wanted > self.left:
            raise IntegrityError(
                f"{self._link.donor.shown} sends a stream that asks for {wanted} bytes where {self.left} are left"
            )
        data = bytearray(wanted)
        self.fill(memoryview(data))
        if self.sums is not None:
            self.sums.feed(unlocked(data))
        return data

    def _rest(self) -> bytearray:
        """What comes until the donor closes the connection."""
        data = bytearray()
        try:
            while more := self._response.read(min(1 << 20, self.left + 1)):
                data += more
                self.done += len(more)
                self._link.hear()
                if self.left < 0:
                    raise IntegrityError(
                        f"{self._link.donor.shown} sends more than the {self.most} bytes that may come"
                    )
        except (OSError, http.client.HTTPException) as e:
            self._link.close()
            if isinstance(e, IntegrityError):
                raise
            raise Broken(_said(e)) from e
        return data

    def readline(self, size: int | None = -1, /) -> bytes:
        """Up to a newline."""
        line = bytearray()
        while self.left and not line.endswith(b"\n") and len(line) != size:
            line += self.read(1)
        return bytes(line)


def lost(donor: Donor, why: object, done: int, total: int) -> IncompleteTransfer:
    """The error for a donor that left."""
    return IncompleteTransfer(
        f"the donor {donor.shown} was lost after {done} of {total} bytes ({why}); heal again from another donor",
        bytes_done=done,
        bytes_total=total,
    )


def _said(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"it was silent for {IDLE_S:g} s, the idle limit"
    return f"{type(error).__name__}: {printable(f'{error!s:.200}')}" if str(error) else type(error).__name__


def printable(said: str) -> str:
    """What a peer said, for a log or a terminal."""
    return "".join(c if c.isprintable() else " " for c in said)
