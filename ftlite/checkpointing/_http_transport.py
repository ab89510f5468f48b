# SPDX-License-Identifier: BSD-3-Clause
"""HTTPTransport: the live state of a healthy replica, over parallel HTTP, into the tensors of one that is behind.

See ``_server`` for the protocol, ``_layout`` for the byte space, ``_plan`` for what goes where.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from .. import _interfaces, _net
from .._deadline import Deadline, Timeout, seconds
from .._errors import StateError
from ._client import Donor
from ._device import HostStage
from ._gate import ServingGate
from ._offer import Offer
from ._receive import Options, Receiver
from ._server import CheckpointServer
from ._snapshot import SNAPSHOTS, publish
from ._transport import CheckpointTransport, step_number
from ._tree import MISSING

logger = logging.getLogger(__name__)
T = TypeVar("T")

_BACKLOG = 128  # as many as the server serves at once
_SHUTDOWN_S = 5.0  # connections are cut, so their threads end at once; one that sums a stream looks up once per slice
_SECRET_BYTES = 16
_ONE_TRY_S = 0.05  # what a timeout of 0 allows: a donor that serves answers in a millisecond, this is for a busy one


class HTTPTransport(CheckpointTransport[T]):
    """Serves this replica's state over HTTP, and fetches that of another one.

    Serving starts with the constructor, on threads; ``send_checkpoint`` and ``recv_checkpoint`` run on the
    caller's. Send, disallow and receive are for one thread at a time each; a send and a receive may overlap.

    Args:
        timeout: for every call that gets none of its own, and how long ``disallow_checkpoint`` waits for
            readers; a timedelta or seconds.
        num_chunks: None cuts the state into as many chunks as serve well. N announces N chunks when sending,
            and fetches over at most N connections when receiving. 0 fetches the whole state as one stream in
            torch's format, which is also how a torchft transport is healed from. The two sides need not agree.
        state_dict: called at each receive for the receiver's own state, which is then healed in place: every
            tensor that both sides have, by its key path, is written where it is.
        host: the address, or a name of it, to bind and to advertise; ``interface`` an interface by name. Without
            them the environment decides, in the order FTLITE_INTERFACE, GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME,
            the route to MASTER_ADDR, the default route.
        port: 0 for any, one port, or a ``range`` of which the first free one is taken.
        bind: a numeric address to bind to, where it is not the one to advertise ("0.0.0.0" for all).
        weights_only: how leaves are handled that are neither tensors nor plain values: True lets torch's safe
            loader read them (from torch 2.10 on), False lets pickle, which trusts the donor with code. The
            sender refuses what would be refused.
        snapshot: what host memory is copied at ``send_checkpoint``: the smallest regions up to 32 MB ("small"),
            so that a forward may change statistics meanwhile, "all", or "none". Device memory always is.
        max_bytes: the largest state that is accepted. By default what has to be allocated must fit the memory
            at hand.
        max_readers: how many receivers are served at once; others are told to come back, and do.
        progress: called about ten times a second with the bytes received and in total, on the receiving thread.
        device: where tensors go that only the donor has; the CPU by default.

    Raises:
        ValueError, TypeError: an argument that makes no sense.
        TransferError: no port could be had.
    """

    def __init__(
        self,
        timeout: Timeout = 60.0,
        num_chunks: int | None = None,
        *,
        state_dict: Callable[[], T] | None = None,
        host: str | None = None,
        port: int | range = 0,
        interface: str | None = None,
        bind: str | None = None,
        weights_only: bool = True,
        snapshot: str = "small",
        max_bytes: int | None = None,
        max_readers: int = 16,
        progress: Callable[[int, int], None] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self._timeout_s = seconds(timeout)
        if num_chunks is not None and (type(num_chunks) is not int or num_chunks < 0):
            raise ValueError(f"num_chunks is {num_chunks!r}: give None, 0 for a single stream, or a number of chunks")
        if snapshot not in SNAPSHOTS:
            raise ValueError(f"snapshot is {snapshot!r}: give one of {', '.join(map(repr, SNAPSHOTS))}")
        if max_readers < 1:
            raise ValueError(f"max_readers is {max_readers!r}: give 1 or more")
        if max_bytes is not None and max_bytes < 0:
            raise ValueError(f"max_bytes is {max_bytes!r}: give a number of bytes, or None")
        self._num_chunks = num_chunks
        self._state_dict = state_dict
        self._weights_only = weights_only
        self._snapshot = snapshot
        where = None if device is None else torch.device(device)
        self._receiving = Options(num_chunks, weights_only, max_bytes, progress, where)
        self._gate: ServingGate[Offer] = ServingGate(max_readers)
        self._offer: Offer | None = None
        self._stage = HostStage()
        self._sending = threading.Lock()
        address = _interfaces.choose_address(host, interface)
        listener = _net.listen(bind or address.ip, 0 if bind else address.family, port, _BACKLOG)
        secret = secrets.token_hex(_SECRET_BYTES)
        self._shown = f"{_net.url_host(address.ip)}:{listener.getsockname()[1]}"
        self._url = f"http://{self._shown}/{secret}/checkpoint/"
        self._server = CheckpointServer(listener, secret, self._gate, str(torch.__version__))
        self._acceptor: threading.Thread | None = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="heal-accept", daemon=True
        )
        self._acceptor.start()
        logger.info("serving at %s (%s)", self._shown, address.why)

    # --- the donor ----------------------------------------------------------------------------------------

    def metadata(self) -> str:
        """``http://host:port/<secret>/checkpoint/``. Whoever has it can read the state: do not log it."""
        return self._url

    def send_checkpoint(
        self, dst_ranks: Sequence[int], step: int, state_dict: T, timeout: Timeout | None = None
    ) -> None:
        """Offer ``state_dict`` as the state of ``step``, and return; anybody who has the address may fetch it.

        Until ``disallow_checkpoint`` returns, large CPU tensors are served from where they are and must not be
        changed (see ``snapshot``); a change is found by the receiver and ends its transfer with an error.
        ``dst_ranks`` is only a hint. ``timeout`` bounds the wait for readers of an earlier state.

        Raises:
            LayoutError: a leaf cannot be carried; the text names its key and the way out, and receivers that
                wait for this step are told as well.
            StateError: the transport was shut down, or this is a fork of the process that made it.
            TypeError, ValueError: a step that is no whole number from 0 to 10**18 - 1, or a timeout that makes no
                sense.
        """
        deadline = Deadline(seconds(timeout, self._timeout_s))
        step = step_number(step)
        with self._sending:
            if self._server.is_a_copy:
                raise StateError(
                    "send_checkpoint() in a fork of the process that made the transport: make another one here",
                    state="forked",
                    attempted="send_checkpoint",
                )
            if self._acceptor is None:
                raise StateError("send_checkpoint() after shutdown()", state="shut down", attempted="send_checkpoint")
            self._close(deadline)
            self._gate.stage(step)
            self._offer = None  # the memory of an earlier state goes before that of the next one comes
            began_s = time.perf_counter()
            try:
                snapshot = publish(
                    state_dict,
                    step,
                    weights_only=self._weights_only,
                    snapshot=self._snapshot,
                    num_chunks=self._num_chunks or None,
                    stage=self._stage,
                )
            except BaseException as e:
                self._gate.refuse(f"{type(e).__name__}: {e}"[:1000])
                raise
            self._offer = Offer(snapshot)
            self._gate.publish(self._offer)
            logger.info(
                "step %d published at %s for ranks %s: %d bytes in %d chunks, summed in %.3f s",
                step, self._shown, list(dst_ranks), snapshot.flat.total, len(snapshot.ends),
                time.perf_counter() - began_s,
            )  # fmt: skip

    def allow_checkpoint(self, step: int) -> None:
        """Serve the state of ``step`` again that ``send_checkpoint`` published and ``disallow_checkpoint`` withdrew.

        Raises:
            StateError: another step, or none, was published.
        """
        self._gate.allow(step_number(step))

    def disallow_checkpoint(self) -> None:
        """Stop serving; when this returns, the state may be changed.

        Readers who are in may finish until the constructor's timeout; who is left then is cut off. Raises
        nothing, since it is called between two training steps.
        """
        try:
            self._close(Deadline(self._timeout_s))
        except Exception:  # a training step must not fail for a reader's sake
            logger.exception("disallow_checkpoint() failed at %s", self._shown)

    def _close(self, deadline: Deadline) -> None:
        late = self._gate.close(deadline)
        offer = self._offer
        if offer is not None:
            offer.halt(0.0)
        if late:
            logger.info("%d readers had not finished after %.3g s and were cut off", late, deadline.elapsed_s())

    def shutdown(self, wait: bool = True) -> None:
        """Stop serving and free the port and the memory; readers are cut off. Again is a no-op.

        Args:
            wait: whether to wait, some seconds at most, for the threads to end.
        """
        self._server.cut_all(0.0)  # a send may be waiting for readers
        with self._sending:
            acceptor, self._acceptor = self._acceptor, None
        if acceptor is None:
            return
        self._server.stop()
        self._server.server_close()
        self._close(Deadline(0.0))  # first, since an answer may wait for the stream to be summed
        self._server.cut_all(_SHUTDOWN_S if wait else 0.0)
        self._gate.drop()
        offer, self._offer = self._offer, None
        if offer is not None:
            offer.halt(_SHUTDOWN_S if wait else 0.0)
        if wait:
            acceptor.join(_SHUTDOWN_S)

    # --- the receiver -------------------------------------------------------------------------------------

    def recv_checkpoint(
        self, src_rank: int, metadata: str | Sequence[str], step: int, timeout: Timeout | None = None
    ) -> T:
        """Fetch the state of ``step`` from the donor whose ``metadata()`` is given, verified, and return it.

        In place (``state_dict=``) the result's tensors are the receiver's own, as far as it has them; keys that
        only the receiver has are left alone and are not in the result. ``src_rank`` is for the log. A donor
        that does not serve yet is waited for.

        Args:
            timeout: for everything together, None for the constructor's; 0 tries once, for 50 ms.

        Raises:
            NotServing: the donor has another step, refused its state, or is not at this address.
            LayoutError: the state does not fit; nothing was written.
            IncompleteTransfer, IntegrityError: bytes were missing or wrong. After these, and after
                DeadlineExceeded, ``destination_dirty`` says whether own tensors are undefined now.
            DeadlineExceeded: the time was up.
            ValueError, TypeError: ``metadata`` is not a donor's, or a step or a timeout makes no sense.
        """
        deadline = Deadline(seconds(timeout, self._timeout_s) or _ONE_TRY_S)
        step = step_number(step)
        donor = Donor(_one_of(metadata))
        began_s = time.perf_counter()
        own = MISSING if self._state_dict is None else self._state_dict()
        receiver = Receiver(donor, step, deadline, own, self._receiving)
        state: T = receiver.run()
        took_s = time.perf_counter() - began_s
        logger.info(
            "healed to step %d from rank %d at %s: %d bytes in %.3f s, %.2f GB/s, %d streams, %s",
            step, src_rank, donor.shown, receiver.total, took_s, receiver.total / max(took_s, 1e-9) / 1e9,
            receiver.streams, "checked" if receiver.checked else "unchecked",
        )  # fmt: skip
        return state


def _one_of(metadata: str | Sequence[str]) -> str:
    if isinstance(metadata, str):
        return metadata
    if len(metadata) != 1:
        raise ValueError(f"metadata names {len(metadata)} donors; give one")
    return metadata[0]
