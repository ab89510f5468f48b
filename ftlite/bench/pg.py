# SPDX-License-Identifier: BSD-3-Clause
"""``bench pg``: what a collective costs when its backend runs in a child process, and how fast a group is made anew.

Rules of this file: no torch; it starts two ranks (``_pg_worker``) that run every part on both kinds of groups in
turn, so that a ratio compares what was measured within seconds; the arithmetic is apart from the printing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from typing import Any

from .._deadline import Deadline
from ._common import Bar, counted, in_bytes, in_time, parse_size, positive
from ._workers import Crew, Message, Worker

__all__ = ["add_arguments", "measure", "run"]

_RANKS = 2
# Two processes and a template each import torch, from a cold disk too; the ops themselves take seconds.
_TIMEOUT_S = 120.0

_MODULE = f"{__package__}._pg_worker"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``bench pg`` to ``parser``."""
    parser.add_argument("--size", type=parse_size, default=20_000_000, metavar="SIZE", help="of a large tensor (20MB)")
    parser.add_argument("--small-ops", type=positive, default=200, metavar="N", help="small ops in a row (200)")
    parser.add_argument("--large-ops", type=positive, default=10, metavar="N", help="large ops in a row (10)")
    parser.add_argument("--burst", type=positive, default=100, metavar="N", help="ops before the first wait (100)")
    parser.add_argument("--configures", type=positive, default=5, metavar="N", help="of each kind (5)")
    parser.add_argument("--runs", type=positive, default=3, metavar="N", help="repetitions, both kinds in turn (3)")
    parser.add_argument("--timeout", type=float, default=_TIMEOUT_S, metavar="S", help="seconds for each wait (120)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")


def run(args: argparse.Namespace) -> int:
    """Run the bench; 0 means that every result was verified.

    Raises:
        FtliteError: a rank failed, died, or did not answer in time, or a sum was wrong.
    """
    figures = measure(args)
    if args.json:
        print(json.dumps(figures), flush=True)
    else:
        for line in _summary(figures):
            print(line, flush=True)
    return 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks, collect what rank 0 tells, and return the figures."""
    names = ("size", "small_ops", "large_ops", "burst", "configures", "runs")
    options = {name: getattr(args, name) for name in names} | {"timeout_s": args.timeout}
    bar = Bar()

    def progress(sender: Worker, message: Message) -> None:
        bar.show(str(message["what"]), int(message["done"]), int(message["total"]))

    with Crew(progress) as crew:
        ranks = [crew.start(f"rank {i}", _MODULE, {**options, "rank": i}) for i in range(_RANKS)]
        # the first part begins with the imports of both ranks
        host = crew.expect(ranks[0], "store", Deadline(args.timeout))
        for rank in ranks:
            rank.send("meet", address=host["address"])
        for rank in ranks:
            crew.expect(rank, "finished", Deadline(args.timeout * (args.runs + 1)))
        bar.clear()
        parts = [message for message in ranks[0].waiting if message["event"] == "part"]
    return {
        "bench": "pg",
        "torch": host["torch"],
        "python": ".".join(map(str, sys.version_info[:3])),
        "verified": True,
        **{name: getattr(args, name) for name in names},
        "parts": _together(parts),
    }


def _together(parts: list[Message]) -> list[dict[str, Any]]:
    """One row per part: the median seconds on either kind of group, and how the repetitions' ratios lie."""
    times: dict[str, dict[str, list[float]]] = {}
    sizes: dict[str, int] = {}
    for message in parts:
        times.setdefault(message["part"], {}).setdefault(message["kind"], []).extend(message["seconds"])
        sizes[message["part"]] = message.get("size", 0)
    rows = []
    for part, kinds in times.items():
        row: dict[str, Any] = {"part": part, "size": sizes[part]}
        for kind, seconds in kinds.items():
            row[kind.replace(" ", "_") + "_s"] = statistics.median(seconds)
        if len(kinds) > 1:
            ratios = [other / child for child, other in zip(kinds["child"], kinds["in process"])]
            row |= {"ratio": statistics.median(ratios), "ratios": [min(ratios), max(ratios)]}
        rows.append(row)
    return rows


def _summary(figures: dict[str, Any]) -> list[str]:
    lines = [f"{'':30s} {'in a child':>12s} {'in process':>12s} {'speed':>7s}"]
    for row in figures["parts"]:
        size = f" ({in_bytes(row['size'])})" if row["size"] else ""
        times = [in_time(row.get(name)) for name in ("child_s", "in_process_s")]
        ratio = f"{row['ratio']:6.2f}x" if "ratio" in row else ""
        lines.append(f"{row['part'] + size:30s} {times[0]:>12s} {times[1]:>12s} {ratio:>7s}".rstrip())
    lines.append(f"verified: every sum, on torch {figures['torch']}, {counted(figures['runs'], 'run')}, two ranks")
    return lines
