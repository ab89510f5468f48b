# SPDX-License-Identifier: BSD-3-Clause
"""One end of the socketpair between the trainer and a child: frames, and descriptors.

- A frame is what a ``multiprocessing.connection.Connection`` reads and writes (four bytes of length, the
  bytes), so that one may stand at the other end. It is read and written here because a Connection can
  neither give up a write that makes no progress nor refuse a long frame without dropping the whole pipe.
- A write that does not end in time, or fails, is the end of the pipe: nobody could find the beginning of the
  next frame. So is a read that was broken off.
- A descriptor is one byte of its own, after the frame that announces it; it is read by one ``receive_fd``.
- Threads: ``send``, ``cut`` and ``close`` from any; ``poll``, ``receive`` and ``receive_fd`` from one at a
  time, whichever that is. ``close`` never takes a descriptor from under a thread that uses it: the number
  would be another file's by the next call. It wakes that thread, which closes on its way out.
- A fork of this process has a copy of the pipe, and may drop or close it: that ends nothing here.
"""

from __future__ import annotations

import array
import contextlib
import math
import os
import select
import socket
import struct
import threading
from collections.abc import Sequence

from .._deadline import Deadline
from .._errors import DeadlineExceeded, ProtocolError
from ._inbox import Inbox

__all__ = ["MAX_FRAME_BYTES", "Pipe", "PipeBroken"]

# No frame carries a tensor's bytes. The longest are a coalesced op over every tensor of a model (40 bytes each,
# so a million fit) and a traceback; a length beyond is not a length but damage, and is not allocated.
MAX_FRAME_BYTES = 64 * 1024 * 1024

_LENGTH = struct.Struct("!i")
# A write neither blocks nor signals: the wait is ours, and a host may have given SIGPIPE back its default. As a number,
# since each union of the two would be made in Python.
_AT_ONCE = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


class PipeBroken(Exception):
    """The pipe is of no use any more, and ``reason`` says why; it stays inside the package.

    ``ended`` is true when the other side has left: what it said before can still be read. Where a limit was
    exceeded, the DeadlineExceeded is the cause.
    """

    def __init__(self, reason: str, *, ended: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.ended = ended


class Pipe:
    """One end.

    Args:
        end: a stream socket, which it owns from now on.
        write_limit_s: seconds for each ``send``.
        is_greedy: whether to read all there is, which ``poll`` here knows of, and a poll of the descriptor does not.
    """

    def __init__(self, end: socket.socket, write_limit_s: float, *, is_greedy: bool = False) -> None:
        end.setblocking(True)
        self.write_limit_s = write_limit_s
        self._socket = end
        self._sending = threading.Lock()
        self._incoming = select.poll()
        self._incoming.register(end, select.POLLIN)
        self._wake_fd = -1
        self._unsendable: PipeBroken | None = None
        self._unreadable: PipeBroken | None = None
        self._inbox = Inbox(is_greedy)
        # It guards the two below. Re-entrant, for the garbage collector may close this pipe (with the group that
        # owns it) in a thread that is just there.
        self._using = threading.RLock()
        self._users = 0
        self._closed = False
        self._pid = os.getpid()

    @classmethod
    def pair(cls, write_limit_s: float, *, is_greedy: bool = False) -> tuple[Pipe, socket.socket]:
        """A pipe and the socket at its other end, which is to be handed to the child and then closed here.

        As long as a copy of that socket is open here, the child's death is no end of file.
        """
        ours, theirs = socket.socketpair()
        return cls(ours, write_limit_s, is_greedy=is_greedy), theirs

    def fileno(self) -> int:
        """The descriptor, to wait for; -1 once it is closed."""
        return self._socket.fileno()

    # --- writing ---------------------------------------------------------------------------------------

    def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Write the frame ``data``, then each of the descriptors ``fds`` (which stay the caller's).

        Blocks for at most ``write_limit_s`` (the turn of other threads included).

        Raises:
            PipeBroken: it was not written whole, now or earlier; nothing can be sent any more.
            ProtocolError: ``data`` is longer than MAX_FRAME_BYTES; nothing was written.
        """
        if len(data) > MAX_FRAME_BYTES:
            raise ProtocolError(
                f"a frame of {len(data)} bytes is longer than the pipe takes ({MAX_FRAME_BYTES}): "
                "give the op fewer tensors at a time"
            )
        deadline = Deadline(self.write_limit_s)
        self._enter()
        try:
            if not self._sending.acquire(timeout=self.write_limit_s):
                raise self._late(deadline)
            try:
                if self._unsendable is not None:
                    raise _again(self._unsendable)
                self._write(_LENGTH.pack(len(data)) + data, fds, deadline)
            finally:
                self._sending.release()
        finally:
            self._leave()

    def _write(self, data: bytes, fds: Sequence[int], deadline: Deadline) -> None:
        try:
            sent = self._write_some(data, ())
            while sent < len(data):
                self._wait_writable(deadline)
                sent += self._write_some(memoryview(data)[sent:], ())
            for fd in fds:
                while not self._write_some(b"\0", (fd,)):
                    self._wait_writable(deadline)
        except OSError as error:
            broken = PipeBroken(
                f"the pipe cannot be written: {error}",
                ended=isinstance(error, (BrokenPipeError, ConnectionResetError)),
            )
            # it is kept: without its traceback, which holds this pipe
            broken.__cause__ = error.with_traceback(None)
            first = self._give_up(broken)
            raise first from first.__cause__
        except PipeBroken:
            raise
        except BaseException:  # Ctrl-C between two halves of a frame
            self._give_up(PipeBroken("a write to the pipe was broken off"))
            raise

    def _write_some(self, data: bytes | memoryview, fds: Sequence[int]) -> int:
        """Write what there is room for; how many bytes that was."""
        try:
            if not fds:
                return self._socket.send(data, _AT_ONCE)
            # as socket.send_fds does, which ignores its flags on Python 3.10
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
            return self._socket.sendmsg([data], rights, _AT_ONCE)
        except BlockingIOError:
            return 0

    def has_room(self, wait_s: float = 0.0) -> bool:
        """Whether something can be written at once; waits for that for ``wait_s`` seconds."""
        room = select.poll()
        room.register(self._socket, select.POLLOUT)
        return bool(room.poll(_milliseconds(wait_s)))

    def _wait_writable(self, deadline: Deadline) -> None:
        if not self.has_room(deadline.remaining_s()):
            raise self._late(deadline)

    def _late(self, deadline: Deadline) -> PipeBroken:
        """Give the pipe up, since the other side does not read; the error to raise."""
        late = deadline.exceeded("writing to the pipe", "the other side does not read")
        broken = PipeBroken(str(late))
        broken.__cause__ = late
        return self._give_up(broken)

    def _give_up(self, broken: PipeBroken) -> PipeBroken:
        """Nothing can be sent any more, because of ``broken``, or of what came before it; the error to raise.

        If the other side has left, what it said last can still be read. Otherwise both ends are told.
        """
        with self._using:
            if self._unsendable is None:
                self._unsendable = broken
            if not broken.ended:
                self.cut()
            return _again(self._unsendable)

    # --- reading ---------------------------------------------------------------------------------------

    def poll(self, timeout_s: float, wake_fd: int = -1) -> bool:
        """Wait up to ``timeout_s`` seconds for something to receive: a frame or the end.

        ``wake_fd`` is a descriptor that ends the wait once it can be read (an eventfd); it is not read here. It is the
        same one each time, or none yet.

        Returns whether ``receive`` would now say something; false after the time, or a wake alone.

        Raises:
            PipeBroken: it was closed here.
        """
        self._enter()
        try:
            if self.is_ahead():
                return True
            if wake_fd not in (-1, self._wake_fd):
                self._incoming.register(wake_fd, select.POLLIN)
                self._wake_fd = wake_fd
            found = self._incoming.poll(_milliseconds(timeout_s))
            # an error or a hang-up, which poll reports unasked, is for receive to put in words
            return bool(found) and self._socket.fileno() in [fd for fd, _ in found]
        finally:
            self._leave()

    def receive(self) -> bytes:
        """The next frame; waits for it, until the other side leaves or another thread cuts or closes.

        Raises:
            PipeBroken: there will be no further frame.
            ProtocolError: its length is none; nothing can be received any more.
        """
        self._enter()
        try:
            if self._unreadable is not None:
                raise _again(self._unreadable)
            try:
                (size,) = _LENGTH.unpack(self._take(_LENGTH.size, "between two frames"))
                if 0 <= size <= MAX_FRAME_BYTES:
                    return self._take(size, "inside a frame")
            except PipeBroken as error:
                # without its traceback, which holds this pipe
                self._unreadable = PipeBroken(error.reason, ended=error.ended)
                self._unreadable.__cause__ = error.__cause__ if isinstance(error.__cause__, DeadlineExceeded) else None
                raise
            except BaseException:  # Ctrl-C between the length and the rest
                self._unreadable = PipeBroken("a read from the pipe was broken off")
                raise
            self._unreadable = PipeBroken("the pipe was left after a frame that could not be read")
            raise ProtocolError(f"a frame of {size} bytes is announced, and {MAX_FRAME_BYTES} is the most there can be")
        finally:
            self._leave()

    def receive_fd(self) -> int:
        """The descriptor that follows the frame just received; the caller owns it. Raises as ``receive`` does."""
        self._enter()
        try:
            self._take(1, "before a descriptor")
            fd = self._inbox.take_fd()
            if fd is not None:
                return fd
            if self._inbox.lost_fd:
                raise PipeBroken("no descriptor is free for the one that came: raise RLIMIT_NOFILE (ulimit -n)")
            raise ProtocolError("a descriptor was due on the pipe, and a byte of something else came")
        finally:
            self._leave()

    def is_ahead(self) -> bool:
        """Whether the next frame has been read already, or what ``receive`` will say of it is known."""
        left = len(self._inbox) - _LENGTH.size
        if left < 0:
            return False
        size: int = _LENGTH.unpack(self._inbox.peek(_LENGTH.size))[0]
        return not left < size <= MAX_FRAME_BYTES

    def _take(self, size: int, where: str) -> bytes:
        try:
            return self._inbox.take(size, self._socket)
        except EOFError:
            pass  # the error of that has another cause
        except OSError as error:
            raise PipeBroken(f"the pipe cannot be read: {error}", ended=True) from error
        raise self._end(where)

    def _end(self, where: str) -> PipeBroken:
        """The error of an end of file: the other side's, unless the pipe was given up here."""
        if self._unsendable is not None and not self._unsendable.ended:
            return _again(self._unsendable)
        return PipeBroken(f"the other side has closed the pipe {where}", ended=True)

    # --- the end ---------------------------------------------------------------------------------------

    def cut(self) -> None:
        """End the pipe in both directions, from any thread: whoever reads or waits here or there sees the end.

        What has arrived before can still be received. The descriptor stays open until ``close``.
        """
        if self._in_fork():
            return  # it would be cut for the process that owns it
        with self._using, contextlib.suppress(OSError):  # the other side is gone already
            if self._unsendable is None:
                self._unsendable = PipeBroken("the pipe was cut on this side")
            if self._socket.fileno() >= 0:
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Cut, and close the descriptor: now, or when the last thread that uses it is out. Again is a no-op."""
        if self._in_fork():
            self._shut()  # past the lock, which a thread may have held that is not here
            return
        with self._using:
            self._closed = True
            self.cut()
            if not self._users:
                self._shut()

    def _in_fork(self) -> bool:
        return os.getpid() != self._pid

    def _enter(self) -> None:
        with self._using:
            if self._closed:
                raise PipeBroken("the pipe was closed on this side")
            self._users += 1

    def _leave(self) -> None:
        with self._using:
            self._users -= 1
            if self._closed and not self._users:
                self._shut()

    def _shut(self) -> None:
        self._socket.close()
        self._inbox.close()


def _again(first: PipeBroken) -> PipeBroken:
    """The same to be raised: what was raised before has the traceback of another thread, and holds its frames."""
    again = PipeBroken(first.reason, ended=first.ended)
    again.__cause__ = first.__cause__
    return again


def _milliseconds(seconds: float) -> int:
    """For poll: rounded up, so that it does not spin through the last part of one."""
    return max(0, math.ceil(seconds * 1000))
