# SPDX-License-Identifier: BSD-3-Clause
"""``bench pg-transport``: how fast a state is healed over a process group here, and how much memory that takes.

Rules of this file: no torch; it starts the two ranks (``_pg_transport_worker``), puts their figures together and prints
them; the arithmetic is apart from the printing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from typing import Any

from .._deadline import Deadline
from ._common import Stages, counted, in_bytes, largest, parse_size, positive, rate, require_memory
from ._workers import Crew, Message

__all__ = ["BACKENDS", "add_arguments", "measure", "run"]

# The process groups by the names of their backends; "baby" ones run in a child process.
BACKENDS = ("baby-gloo", "gloo", "baby-nccl", "nccl", "baby-xccl")
# One stage of the default 1 GB takes a second; importing torch from a cold disk can take a minute.
_TIMEOUT_S = 300.0
_RANKS = 2

_MODULE = f"{__package__}._pg_transport_worker"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``bench pg-transport`` to ``parser``."""
    parser.add_argument("--device", choices=("cpu", "cuda", "xpu"), default="cpu", help="where the state lives")
    parser.add_argument("--backend", choices=BACKENDS, default=BACKENDS[0], help=f"of the group ({BACKENDS[0]})")
    parser.add_argument("--total-size", type=parse_size, default=10**9, metavar="SIZE", help="of the state (1GB)")
    parser.add_argument("--chunk-size", type=parse_size, default=3 * 10**6, metavar="SIZE", help="of each tensor (3MB)")
    parser.add_argument("--inplace", action="store_true", help="receive into tensors that exist")
    parser.add_argument("--runs", type=positive, default=3, metavar="N", help="heals (3)")
    parser.add_argument("--timeout", type=float, default=_TIMEOUT_S, metavar="S", help="seconds for each stage (300)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")


def run(args: argparse.Namespace) -> int:
    """Run the bench; 0 means that every byte of every run was verified.

    Raises:
        FtliteError: a rank failed, died, or did not answer in time, or a byte was wrong.
        ValueError: it needs more memory than there is.
    """
    if args.device == "cpu":
        require_memory(_RANKS, args.total_size, "lower --total-size")
    figures = measure(args, Stages(None if args.json else _say))
    if args.json:
        print(json.dumps(figures), flush=True)
    else:
        for line in _summary(figures):
            _say(line)
    return 0


def measure(args: argparse.Namespace, stages: Stages) -> dict[str, Any]:
    """Start the ranks, run the stages, which are added to ``stages``, and return the figures."""
    names = ("device", "backend", "total_size", "chunk_size", "inplace", "runs")
    # a rank waits while the other works: its own patience is that of the whole bench
    options = {name: getattr(args, name) for name in names} | {
        "timeout_s": args.timeout,
        "total_timeout_s": args.timeout * (args.runs + 4),
    }
    with Crew() as crew:
        ranks = [crew.start(f"rank {i}", _MODULE, {**options, "rank": i}) for i in range(_RANKS)]
        host = crew.expect(ranks[0], "store", Deadline(args.timeout))
        for rank in ranks:
            rank.send("meet", address=host["address"])
        met = [crew.expect(rank, "met", Deadline(args.timeout)) for rank in ranks]
        stages.add("init_pg", max(message["seconds"] for message in met))
        created, _ = [crew.expect(rank, "created", Deadline(args.timeout)) for rank in ranks]
        size = created["state_bytes"]
        stages.add("create state_dict", created["seconds"])
        sent: list[Message] = []
        received: list[Message] = []
        for _ in range(args.runs):
            for rank in ranks:
                rank.send("heal")
            # which comes once the receiver has compared every byte, and so do the donor's figures below
            received.append(crew.expect(ranks[1], "received", Deadline(2 * args.timeout)))
            sent.append(crew.expect(ranks[0], "sent", Deadline(args.timeout)))
            for name, seconds in sent[-1]["stages"].items():
                stages.add(name, seconds, size if name == "send tensors" else 0)
            stages.add("send_checkpoint", sent[-1]["seconds"], size)
            stages.add("recv_checkpoint", received[-1]["seconds"], size)
        for rank in ranks:
            rank.send("finish")
    heals = [message["seconds"] for message in received]
    median_s = statistics.median(heals)
    return {
        "bench": "pg-transport",
        "torch": host["torch"],
        "python": ".".join(map(str, sys.version_info[:3])),
        "verified": True,
        **{name: getattr(args, name) for name in ("device", "backend", "inplace", "runs")},
        **{name: created[name] for name in ("state_bytes", "tensors")},
        "stages": stages.seconds,
        # the first heal of a fresh process is what a joiner does
        "first_s": heals[0],
        "median_s": median_s,
        "first_GBps": size / heals[0] / 1e9,
        "median_GBps": size / median_s / 1e9,
        "receiver_peak_growth_bytes": largest(message["growth"] for message in received),
        "donor_peak_growth_bytes": largest(message["growth"] for message in sent),
    }


def _summary(figures: dict[str, Any]) -> list[str]:
    size, runs = figures["state_bytes"], figures["runs"]
    first_s, median_s = figures["first_s"], figures["median_s"]
    what = f"{counted(figures['tensors'], 'tensor')}, {in_bytes(size)}, bit for bit"
    lines = [f"verified: {what}, in {counted(runs, 'run')} over {figures['backend']}"]
    first, median = f"{first_s:.4f} s ({rate(size, first_s)})", f"{median_s:.4f} s ({rate(size, median_s)})"
    lines.append(f"first heal {first}{f', median {median}' if runs > 1 else ''}")
    for who in ("receiver", "donor"):
        grown = figures[f"{who}_peak_growth_bytes"]
        if grown is not None:
            lines.append(f"{who} peak +{in_bytes(grown)} over its state")
    return lines


def _say(line: str) -> None:
    print(line, flush=True)
