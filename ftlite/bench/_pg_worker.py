# SPDX-License-Identifier: BSD-3-Clause
"""One rank of ``bench pg``: the same ops on a group in a child process and on one in this process, in turn.

Rules of this file: the ranks meet before every part, so that no rank's clock runs while another is not there yet; a
part's results are compared with the sum that they must be before its time is told.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import AllreduceOptions, TCPStore

from ..process_group import ProcessGroup, ProcessGroupBabyGloo, ProcessGroupGloo, create_store_client
from ._link import Link, serve

Options = dict[str, Any]

_WORLD = 2
_WARM_UP = 20
# One lasts some milliseconds, and whether the scheduler is kind to it is chance.
_BURSTS = 7
# Different values for tensors of one burst, so that a result in the wrong tensor is seen.
_CYCLE = 7


class _Rank:
    """What one rank needs for a part: the group, who it is, where the others are met."""

    def __init__(self, link: Link, options: Options, address: str) -> None:
        self.link = link
        self.rank: int = options["rank"]
        self.options = options
        self.address = address
        self.timeout = timedelta(seconds=options["timeout_s"])
        self._store = create_store_client(f"{address}/meet", self.timeout)
        self._meetings = 0

    def meet(self) -> None:
        """Wait for the other ranks."""
        self._meetings += 1
        key = f"meeting {self._meetings}"
        if self._store.add(key, 1) == _WORLD:
            self._store.set(f"{key} is on", "1")
        self._store.wait([f"{key} is on"], self.timeout)

    def tell(self, part: str, kind: str, seconds: list[float], **more: object) -> None:
        """Tell the parent what ``part`` took on the group of ``kind``: a time for each repetition."""
        self.link.send("part", part=part, kind=kind, seconds=seconds, **more)


def main(link: Link, options: Options) -> None:
    """Be rank ``options["rank"]``."""
    hosted = None
    if options["rank"] == 0:
        hosted = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        link.send("store", address=f"127.0.0.1:{hosted.port}", torch=torch.__version__)
    rank = _Rank(link, options, link.expect("meet", options["timeout_s"])["address"])
    child, in_process = ProcessGroupBabyGloo(rank.timeout), ProcessGroupGloo(rank.timeout)
    groups: dict[str, ProcessGroup] = {"child": child, "in process": in_process}
    try:
        _configure(rank, child)
        _configure_in_process(rank, in_process)
        for repetition in range(options["runs"]):
            for kind, group in groups.items():
                link.progress("measuring", repetition, options["runs"])
                _small(rank, kind, group)
                _large(rank, kind, group)
        rank.meet()  # a group that leaves takes the peer's connections with it
        link.send("finished")
    finally:
        for group in groups.values():
            group.shutdown()


# --- configure -----------------------------------------------------------------------------------------


def _meet_in(rank: _Rank, group: Any, prefix: str) -> float:
    """Seconds from the call of ``configure`` to the first result."""
    rank.meet()
    start_s = time.perf_counter()
    group.configure(f"{rank.address}/{prefix}", f"rank {rank.rank}", rank.rank, _WORLD)
    tensor = torch.full((1,), float(rank.rank + 1))
    group.allreduce([tensor]).wait()
    seconds = time.perf_counter() - start_s
    _require(tensor, 3.0)
    return seconds


def _configure(rank: _Rank, group: ProcessGroupBabyGloo) -> None:
    rank.tell("configure cold", "child", [_meet_in(rank, group, "child/cold")])
    warm = [_meet_in(rank, group, f"child/warm/{i}") for i in range(rank.options["configures"])]
    rank.tell("configure warm", "child", warm)
    killed = []
    for i in range(rank.options["configures"]):
        rank.meet()
        pid = group.child_pid()
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
        killed.append(_meet_in(rank, group, f"child/killed/{i}"))
    rank.tell("configure after kill -9", "child", killed)


def _configure_in_process(rank: _Rank, group: ProcessGroupGloo) -> None:
    first = _meet_in(rank, group, "in process/cold")
    rank.tell("configure cold", "in process", [first])
    warm = [_meet_in(rank, group, f"in process/warm/{i}") for i in range(rank.options["configures"])]
    rank.tell("configure warm", "in process", warm)


# --- ops -----------------------------------------------------------------------------------------------


def _timed(rank: _Rank, body: Callable[[], None], count: int) -> float:
    """Seconds of ``body`` for each of the ``count`` ops in it."""
    rank.meet()
    start_s = time.perf_counter()
    body()
    return (time.perf_counter() - start_s) / count


def _small(rank: _Rank, kind: str, group: Any) -> None:
    """One float: its latency by ``wait`` and by future, and many at once."""
    options, count, burst = AllreduceOptions(), rank.options["small_ops"], rank.options["burst"]
    zero = torch.zeros(1)
    for _ in range(_WARM_UP):
        group.allreduce([zero], options).wait()

    def waits() -> None:
        for _ in range(count):
            group.allreduce([zero], options).wait()

    def futures() -> None:
        for _ in range(count):
            group.allreduce([zero], options).get_future().wait()

    rank.tell("1 float, wait", kind, [_timed(rank, waits, count)])
    rank.tell("1 float, future", kind, [_timed(rank, futures, count)])
    _require(zero, 0.0)
    tensors = [torch.full((1,), float(rank.rank + 1 + i % _CYCLE)) for i in range(burst)]

    def all_at_once() -> None:
        for work in [group.allreduce([tensor], options) for tensor in tensors]:
            work.wait()

    all_at_once()  # a training step is one of many, and its tensors are those of the step before
    for i, tensor in enumerate(tensors):
        _require(tensor, 3.0 + 2 * (i % _CYCLE))
    seconds = [_timed(rank, all_at_once, burst) for _ in range(_BURSTS)]
    for i, tensor in enumerate(tensors):
        _require(tensor, (3.0 + 2 * (i % _CYCLE)) * _WORLD**_BURSTS)
    rank.tell(f"{burst} at once, 1 float each", kind, seconds)


def _large(rank: _Rank, kind: str, group: Any) -> None:
    """Large tensors: never seen before, the same again and again, and, with a child, one in its memory."""
    numel, count = rank.options["size"] // 4, rank.options["large_ops"]
    fresh = [torch.full((numel,), float(rank.rank + 1 + i % _CYCLE)) for i in range(count)]

    def one_after_the_other() -> None:
        for tensor in fresh:
            group.allreduce([tensor]).wait()

    seconds = _timed(rank, one_after_the_other, count)
    for i, tensor in enumerate(fresh):
        _require(tensor, 3.0 + 2 * (i % _CYCLE))
    rank.tell("large, fresh", kind, [seconds], size=4 * numel)
    fresh.clear()  # its memory, before more is asked for
    _again(rank, "large, same", kind, group, torch.zeros(numel))
    if isinstance(group, ProcessGroupBabyGloo):
        _again(rank, "large, shared", kind, group, group.empty((numel,)).zero_())


def _again(rank: _Rank, part: str, kind: str, group: Any, tensor: torch.Tensor) -> None:
    count = rank.options["large_ops"]
    group.allreduce([tensor]).wait()
    tensor.fill_(float(rank.rank + 1))

    def body() -> None:
        for _ in range(count):
            group.allreduce([tensor]).wait()

    seconds = _timed(rank, body, count)
    _require(tensor, 3.0 * 2.0 ** (count - 1))  # each sum of two equal ranks doubles
    rank.tell(part, kind, [seconds], size=tensor.nbytes)


def _require(tensor: torch.Tensor, value: float) -> None:
    if not bool((tensor == value).all()):
        raise ValueError(f"a wrong sum ({tensor.reshape(-1)[:3].tolist()}, not {value}): no figure is reported")


if __name__ == "__main__":
    sys.exit(serve(main))
