# SPDX-License-Identifier: BSD-3-Clause
"""One receive, from the first question to the result: the chunk path, and the single stream.

Both end in a ``Plan``: what arrives as one stream is loaded first, and then put where a chunk would have
gone, so that both paths heal in place alike.
"""

from __future__ import annotations

import os
import pickle
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from .._deadline import Deadline
from .._errors import (
    DeadlineExceeded,
    FtliteError,
    IncompleteTransfer,
    IntegrityError,
    LayoutError,
    TransferError,
)
from . import _stream, _tree
from ._checksum import RowSum, checksum_of
from ._client import CHANGED, Answer, Broken, Donor, Later, Link, lost
from ._device import HostStage
from ._fetch import FIRST_PAUSE_S, LONGEST_PAUSE_S, TRIES, Transfer
from ._incoming import load_blob, log_left_alone, plan_for
from ._manifest import MAX_MANIFEST_BYTES, Manifest, parse
from ._memory import collector_paused, memory_at_hand
from ._plan import Plan
from ._snapshot import publish
from ._watch import Watch

T = TypeVar("T")

# A stream keeps a core busy at either end, so more of them than half the cores only take turns; but into new memory the
# kernel spends more on handing out pages than on copying, and that goes on beside the interpreter, so there every core
# has one. Four fill any wire that one process can fill. num_chunks= overrides it, up to what does not merely contend.
_MAX_DEFAULT_STREAMS = 4
_MAX_STREAMS = 16
_REST_BYTES = 1 << 20  # of a stream that is read for its checksum alone


@dataclass(frozen=True)
class Options:
    """How a transport receives: the arguments of its constructor that say so."""

    num_chunks: int | None
    weights_only: bool
    max_bytes: int | None
    progress: Callable[[int, int], None] | None
    device: torch.device | None


class Receiver:
    """``run`` once; afterwards ``total`` bytes, ``streams`` and ``checked`` say what it was."""

    def __init__(self, donor: Donor, step: int, deadline: Deadline, own: Any, options: Options) -> None:
        """``own`` is the receiver's state, ``_tree.MISSING`` to allocate all of the donor's."""
        self.total = 0
        self.streams = 1
        self.checked = True
        self._donor = donor
        self._step = step
        self._deadline = deadline
        self._own = own
        self._options = options
        self._reader = secrets.token_hex(8)

    def run(self) -> Any:
        """Fetch, verify and build the state.

        Raises:
            TransferError, DeadlineExceeded: with how far it got, and whether own tensors were written to.
        """
        try:
            return self._run()
        except DeadlineExceeded as e:
            for name, value in (("bytes_done", 0), ("bytes_total", 0), ("destination_dirty", False), ("keys", ())):
                e.__dict__.setdefault(name, value)
            raise

    def _run(self) -> Any:
        first = self._link()
        links = [first]
        try:
            if self._options.num_chunks == 0:
                return self._placed(self._stream_of(first))
            document = self._document_of(first)
            with collector_paused():
                manifest = self._parsed(document)
                plan = plan_for(
                    manifest,
                    self._own,
                    weights_only=self._options.weights_only,
                    device=self._options.device,
                    max_bytes=self._options.max_bytes,
                )
            self.total = manifest.flat().total
            cores = os.cpu_count() or 1
            fitting = max(1, cores if plan.new_bytes > self.total // 2 else cores // 2)
            wanted = self._options.num_chunks or min(fitting, _MAX_DEFAULT_STREAMS)
            self.streams = max(1, min(wanted, len(manifest.ends), _MAX_STREAMS))
            links += [self._link() for _ in range(self.streams - 1)]
            plan.settle()
            Transfer(links, manifest, plan, self._deadline).run(self._options.progress)
            try:
                with collector_paused():
                    return plan.finish(self._load_blob)
            except TransferError as e:  # every byte has arrived, and the state cannot be built all the same
                e.bytes_done = e.bytes_total = self.total
                e.destination_dirty, e.keys = plan.in_place, plan.keys if plan.in_place else ()
                raise
        finally:
            for link in links:
                link.close()

    def _link(self) -> Link:
        return Link(self._donor, self._reader, self._deadline)

    # --- asking -------------------------------------------------------------------------------------------

    def _watched(self, link: Link, job: Callable[[Watch], Any], tick: Callable[[], None], what: str) -> Any:
        watch = Watch([link], self._deadline)
        found: list[Any] = []
        self._reason = ""
        self._answer: Answer | None = None

        def late() -> FtliteError:
            answer, hint = self._answer, "the donor has not answered"
            if answer is not None:
                hint = f"{answer.done} of {answer.length or 'an unknown number of'} bytes so far, the limit is for all"
            elif self._reason:
                hint = f"the donor said: {self._reason}"
            error = self._deadline.exceeded(f"{what} of step {self._step} from {self._donor.shown}", hint)
            if answer is not None:
                error.__dict__.update(bytes_done=answer.done, bytes_total=answer.length or 0)
            return error

        watch.run([lambda: found.append(job(watch))], tick, late)
        return found[0]

    def _ask(self, watch: Watch, link: Link, what: str, use: Callable[[Answer], T]) -> T:
        """What ``use`` makes of the answer. A donor that does not serve yet is waited for, one that is gone is not."""
        tries, pause_s = 0, FIRST_PAUSE_S
        link.hear()
        while True:
            try:
                self._answer = link.get(self._step, what)
                return use(self._answer)
            except (Broken, Later, IncompleteTransfer) as e:
                tries += 1
                if isinstance(e, Later):
                    tries, self._reason = 0, str(e)
                if tries >= TRIES or link.silent:
                    raise self._lost(e) from e
                if watch.over:
                    raise
                watch.pause(pause_s)
                pause_s = min(pause_s * 2, LONGEST_PAUSE_S)

    def _lost(self, why: Exception) -> IncompleteTransfer:
        answer = self._answer
        return lost(self._donor, why, *((0, 0) if answer is None else (answer.done, answer.length or 0)))

    def _document_of(self, link: Link) -> bytes:
        def job(watch: Watch) -> bytes:
            return self._ask(watch, link, "metadata", self._document)

        document: bytes = self._watched(link, job, lambda: None, "asking for the metadata")
        return document

    def _document(self, answer: Answer) -> bytes:
        answer.require_protocol()
        if answer.length is None:
            raise IntegrityError(f"{self._donor.shown} does not say how long its metadata is")
        if answer.length > MAX_MANIFEST_BYTES:
            raise LayoutError(
                f"{self._donor.shown} announces {answer.length} bytes of metadata, more than the {MAX_MANIFEST_BYTES} "
                "that are accepted"
            )
        document = answer.read()
        if answer.announced_sum != checksum_of(document):
            raise IntegrityError(
                f"the metadata from {self._donor.shown} arrived with another checksum than it announced; nothing was "
                "written; heal again"
            )
        return bytes(document)

    def _parsed(self, document: bytes) -> Manifest:
        manifest = parse(document)
        if manifest.step != self._step:
            raise IntegrityError(f"{self._donor.shown} sent step {manifest.step} where step {self._step} was asked for")
        return manifest

    # --- the single stream --------------------------------------------------------------------------------

    def _stream_of(self, link: Link) -> Any:
        def job(watch: Watch) -> Any:
            answer = self._ask(watch, link, "full", self._accepted)
            return self._load(answer)

        def tick() -> None:
            answer = self._answer
            if self._options.progress is not None and answer is not None:
                self._options.progress(answer.done, answer.length or answer.done)

        return self._watched(link, job, tick, "receiving the stream")

    def _accepted(self, answer: Answer) -> Answer:
        theirs, ours = answer.torch_version, str(torch.__version__)
        if theirs is not None and theirs.split(".")[:2] != ours.split(".")[:2]:
            raise LayoutError(
                f"the single stream is good between equal torch versions only, and the donor has {theirs}, this side "
                f"{ours}: leave num_chunks at None"
            )
        most = memory_at_hand() if self._options.max_bytes is None else self._options.max_bytes
        if most is not None and (answer.length or 0) > most:
            limit = "are at hand" if self._options.max_bytes is None else "are allowed by max_bytes"
            raise LayoutError(
                f"the donor's stream has {answer.length} bytes, and {most} {limit}; set max_bytes if this is the state "
                "you expect",
                bytes_total=answer.length or 0,
            )
        if answer.length is None and most is not None:
            answer.most = most
        self.checked = answer.announced_sum is not None
        if self._donor.is_ours and not self.checked:
            raise IntegrityError(
                f"{self._donor.shown} announces no checksum of its stream, which every donor of ours does: its head is "
                "damaged; nothing was written; heal again"
            )
        answer.sums = RowSum()
        return answer

    def _load(self, answer: Answer) -> Any:
        try:
            state = _stream.load(answer, weights_only=self._options.weights_only)
            answer.read()  # what a loader leaves unread belongs to the checksum
        except FtliteError:
            raise
        except Broken as e:
            raise self._lost(e) from e
        except pickle.UnpicklingError as e:
            self._require_sum(answer)  # damage is no reason to trust the donor with more
            raise LayoutError(
                f"torch's safe loader refuses the stream of {self._donor.shown} ({_stream.first_line(e)}); "
                "weights_only=False trusts the donor with code, or allow the class with "
                "torch.serialization.add_safe_globals"
            ) from e
        except MemoryError:
            raise
        except Exception as e:  # whatever bytes that are no stream make a loader raise
            raise IntegrityError(
                f"the stream of {self._donor.shown} cannot be loaded ({type(e).__name__}: {_stream.first_line(e)})"
            ) from e
        self._require_sum(answer)
        self.total = answer.done
        return state

    def _require_sum(self, answer: Answer) -> None:
        """Take what is left of the stream, and compare."""
        try:
            while answer.left and answer.length is not None:
                answer.read(min(answer.left, _REST_BYTES))
        except Broken as e:
            raise self._lost(e) from e
        if answer.sums is not None and answer.announced_sum not in (None, answer.sums.value()):
            raise IntegrityError(
                f"the stream of {self._donor.shown} ({answer.done} bytes) arrived with another checksum than "
                f"announced: {CHANGED}"
            )

    def _placed(self, state: Any) -> Any:
        """Put a state that has arrived whole where its chunks would have gone."""
        if self._own is _tree.MISSING and self._options.device is None:
            return state
        loaded = publish(state, self._step, weights_only=False, snapshot="none", num_chunks=1, stage=HostStage())
        plan = Plan(loaded.manifest, self._own, device=self._options.device)
        log_left_alone(plan)
        plan.settle()
        loaded.copy_to(plan.intervals)
        return plan.finish(lambda data, _path: _stream.load_object(data, weights_only=False))

    def _load_blob(self, data: bytes, path: _tree.Path) -> Any:
        return load_blob(data, path, weights_only=self._options.weights_only, device=self._options.device)
