# SPDX-License-Identifier: BSD-3-Clause
"""What has come through a socket: read as much at a time as there is, and taken piece by piece.

A descriptor comes with a byte of its own, beyond which the kernel does not read in the same call (unix(7)); so a count
of bytes says which byte that is. One thread at a time.
"""

from __future__ import annotations

import array
import collections
import os
import socket

__all__ = ["Inbox"]

# An op's frame and its reply have 20 to 200 bytes: as many as either side may be behind by.
_AHEAD_BYTES = 16 * 1024
_FD_ROOM = socket.CMSG_LEN(array.array("i").itemsize)
_CLOEXEC = int(socket.MSG_CMSG_CLOEXEC)


class Inbox:
    """The bytes that were read and have not been taken, and the descriptors among them.

    Args:
        is_greedy: whether to read beyond what is asked for: not where somebody waits for the socket to become readable,
            or has a fork inherit what was read.

    ``lost_fd``: a descriptor came, and this process had none free for it.
    """

    def __init__(self, is_greedy: bool) -> None:
        self.lost_fd = False
        self._ahead = _AHEAD_BYTES if is_greedy else 0
        self._data = b""
        self._at = 0  # so many of these have been taken
        self._read = 0  # and so many bytes in all
        self._taken = 0
        # each with the count of bytes that its own was the last of
        self._fds: collections.deque[tuple[int, int]] = collections.deque()

    def __len__(self) -> int:
        """How many bytes there are."""
        return len(self._data) - self._at

    def peek(self, size: int) -> bytes:
        """The next ``size`` bytes, or as many as there are; they stay."""
        return self._data[self._at : self._at + size]

    def take(self, size: int, source: socket.socket) -> bytes:
        """The next ``size`` bytes, if need be from ``source``.

        Raises:
            EOFError: the other side has left before it had sent them.
            OSError: they cannot be read.
        """
        at, end = self._at, self._at + size
        if end > len(self._data):
            self._fill(size, source)
            at, end = 0, size
        self._taken += size
        data = self._data
        if end == len(data):  # all of it: nothing is kept, and one that fills it is not copied
            self._data, self._at = b"", 0
            return data[at:] if at else data
        self._at = end
        return data[at:end]

    def take_fd(self) -> int | None:
        """The descriptor that the byte just taken has brought, which is the caller's now; None if it has not."""
        if self._fds and self._fds[0][0] == self._taken:
            return self._fds.popleft()[1]
        return None

    def close(self) -> None:
        """Close the descriptors that nobody has taken."""
        while self._fds:
            os.close(self._fds.popleft()[1])

    def _fill(self, size: int, source: socket.socket) -> None:
        parts = [self.peek(size)]
        missing = size - len(parts[0])
        while missing > 0:
            # room for one descriptor, so that the kernel itself closes what is too many
            data, found, flags, _ = source.recvmsg(max(missing, self._ahead), _FD_ROOM, _CLOEXEC)
            if not data:
                raise EOFError
            parts.append(data)
            missing -= len(data)
            self._read += len(data)
            if found:
                self._fds.append((self._read, array.array("i", found[0][2])[0]))
            elif flags & socket.MSG_CTRUNC:
                self.lost_fd = True
        self._data = b"".join(parts) if parts[0] or len(parts) > 2 else parts[-1]
        self._at = 0
