# SPDX-License-Identifier: BSD-3-Clause
"""One peer of a process group: control messages, and messages of bytes, each wait with the rest of one deadline.

Rules: of the group nothing is used but ``send``, ``recv`` and the ``wait`` of what they return. At most one receive of
a control message is outstanding; it stays when a wait for it ends, since some groups cannot take one back, and the next
wait goes on with it. What has been sent and not waited for is kept here with its memory. Threads: one at a time.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any, Protocol

import torch

from .._deadline import Deadline
from .._errors import DeadlineExceeded, FtliteError, IncompleteTransfer
from ._memory import view_of
from ._pg_wire import CONTROL_BYTES, Control, pack, unpack
from ._stream import first_line

_logger = logging.getLogger(__name__)

# A wait of zero means the group's own timeout, to C++.
_LEAST_S = 0.001
# So long for what was said last to arrive where nobody answers it: a peer that is there takes it within milliseconds.
_LAST_WORDS_S = 1.0


class Pending(Protocol):
    """What an op returns, torch's Work or alike."""

    def wait(self, timeout: timedelta = ..., /) -> bool:
        """Wait for the end."""


class Group(Protocol):
    """What is used of a process group; ``empty`` where it has one, as those in a child have."""

    def send(self, tensors: list[torch.Tensor], dst_rank: int, tag: int, /) -> Any:
        """Send a tensor."""

    def recv(self, tensors: list[torch.Tensor], src_rank: int, tag: int, /) -> Any:
        """Receive one."""


class Op:
    """A send or a receive that is on its way, with the memory that it uses."""

    __slots__ = ("_channel", "_work", "tensor", "what")

    def __init__(self, channel: Channel, work: Any, tensor: torch.Tensor, what: str) -> None:
        self._channel = channel
        self._work = work
        self.tensor = tensor
        self.what = what

    def wait(self, deadline: Deadline) -> None:
        """Wait until it is done.

        Raises:
            DeadlineExceeded: the time was up; the op goes on, or has broken the group.
            IncompleteTransfer: it failed.
        """
        try:
            self._work.wait(timedelta(seconds=max(deadline.remaining_s(), _LEAST_S)))
        except Exception as e:  # each group has errors of its own
            raise self._channel.failed(self.what, e, deadline) from e


class Channel:
    """``peer`` over ``group``; ``tags`` are those of what is said and of what is heard.

    Messages are on ``device``, which the group takes tensors of.
    """

    def __init__(self, group: Group, peer: int, tags: tuple[int, int], device: torch.device) -> None:
        self.peer = peer
        self._group = group
        self._say_tag, self._hear_tag = tags
        self._device = device
        self._said: list[Op] = []
        self._hearing: Op | None = None
        # a group in a child copies every message to memory that the child sees, unless it is there
        self._empty = getattr(group, "empty", None) if device.type == "cpu" else None

    @property
    def is_straight(self) -> bool:
        """Whether messages go straight from and to any memory; else those in a ``buffer`` cost one copy less."""
        return self._empty is None

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Memory for a message of up to ``nbytes`` bytes (uint8), its content undefined."""
        if self._empty is not None:
            made: torch.Tensor = self._empty((nbytes,), torch.uint8)
            return made
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def send(self, tensor: torch.Tensor, tag: int, what: str) -> Op:
        """Begin to send ``tensor`` (uint8, contiguous)."""
        try:
            return Op(self, self._group.send([tensor], self.peer, tag), tensor, what)
        except Exception as e:  # each group has errors of its own
            raise self.failed(what, e, None) from e

    def receive(self, tensor: torch.Tensor, tag: int, what: str) -> Op:
        """Begin to receive ``tensor`` (uint8, contiguous)."""
        try:
            return Op(self, self._group.recv([tensor], self.peer, tag), tensor, what)
        except Exception as e:  # each group has errors of its own
            raise self.failed(what, e, None) from e

    def say(self, control: Control) -> None:
        """Begin to send ``control``."""
        data = torch.frombuffer(bytearray(pack(control)), dtype=torch.uint8).to(self._device)
        self._said.append(self.send(data, self._say_tag, f"sending {control.kind.name} to rank {self.peer}"))

    def hear(self, deadline: Deadline) -> Control:
        """The next control message.

        Raises:
            DeadlineExceeded, IncompleteTransfer: as ``Op.wait`` does.
            IntegrityError, NotServing: as ``unpack`` does.
        """
        op, again = self._hearing, self._hearing is not None
        self._hearing = None
        while True:
            if op is None:
                data = torch.empty(CONTROL_BYTES, dtype=torch.uint8, device=self._device)
                op = self.receive(data, self._hear_tag, f"waiting for rank {self.peer}")
            try:
                op.wait(deadline)
            except DeadlineExceeded:
                self._hearing = op
                raise
            except IncompleteTransfer:
                if not again:
                    raise
                op, again = None, False  # of a time before the group was configured anew
                continue
            return unpack(bytes(view_of(op.tensor.cpu())))

    def flush(self, deadline: Deadline) -> None:
        """Wait until what was said has arrived, for a second at most; the rest stays on its way.

        Raises:
            IncompleteTransfer: the peer is gone.
        """
        limit = Deadline(min(_LAST_WORDS_S, deadline.remaining_s()))
        while self._said:
            try:
                self._said[0].wait(limit)
            except DeadlineExceeded:
                return
            except IncompleteTransfer:
                self._said.clear()
                raise
            del self._said[0]

    def try_to_say(self, control: Control, deadline: Deadline) -> None:
        """Say ``control`` for what it is worth: the caller has trouble of its own to report."""
        try:
            self.say(control)
            self.flush(deadline)
        except FtliteError as e:
            _logger.debug("rank %d was not told: %s", self.peer, e)

    def failed(self, what: str, error: Exception, deadline: Deadline | None) -> FtliteError:
        """The error of an op that ended with ``error``."""
        late = isinstance(error, TimeoutError) or "timed out" in str(error).lower()
        if deadline is not None and (deadline.expired() or late):
            if deadline.expired():
                hint = "the group may have to be configured again"
            else:
                hint = f"the group's own limit came first ({first_line(error)}): configure() it again with a longer one"
            return deadline.exceeded(what, hint)
        return IncompleteTransfer(
            f"{what} failed ({type(error).__name__}: {first_line(error)}): configure() the group, and heal again"
        )
