# SPDX-License-Identifier: BSD-3-Clause
"""A bench run in turn in two ways, and the median ratio: absolute times on a shared machine mean little.

Rules of this file: no torch; the two ways alternate and take turns in who goes first, so that a machine that slows
down does not favour one; each side is a fresh process of the same bench, which verifies its bytes itself.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
from collections.abc import Callable
from typing import Any

from .._errors import ChildDied, DeadlineExceeded
from ._workers import module_command

__all__ = ["add_arguments", "compare", "run"]

# The package whose __main__ is the command line.
_ROOT = (__package__ or "").rpartition(".")[0]

# One side is a donor, receivers and their stages: each of these has the bench's own limit, which is found first.
_STAGES = 8

# What is equal in all the runs of a side, and what is timed in each.
_SAME = ("torch", "python", "device", "num_chunks", "inplace", "runs", "readers", "state_bytes", "tensors")
_TIMES = ("publish_s", "first_s", "median_s")

Figures = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that turn a bench into a comparison."""
    against = parser.add_mutually_exclusive_group()
    against.add_argument("--against", metavar="PYTHON", help="alternate with another interpreter, with another torch")
    against.add_argument(
        "--against-single-stream", action="store_true", help="alternate --num-chunks with --num-chunks 0"
    )
    parser.add_argument("--pairs", type=int, default=5, metavar="N", help="alternating pairs of a comparison (5)")


def run(args: argparse.Namespace, line: list[str]) -> int:
    """Compare the command ``line`` of this package in two ways, and print the ratios; 0 when it was done.

    Raises:
        ValueError: the other interpreter is not there.
        ChildDied: one of the runs failed; no ratio is printed then.
        DeadlineExceeded: one of the runs did not end.
    """
    if args.against and shutil.which(args.against) is None:
        raise ValueError(f"--against {args.against}: there is no such program")
    mine = line if args.num_chunks is None else [*line, "--num-chunks", str(args.num_chunks)]
    if args.against:
        names = ("this", "other")
        commands = module_command(_ROOT, *mine), module_command(_ROOT, *mine, python=args.against)
    else:
        names = ("chunked", "single")
        commands = module_command(_ROOT, *mine), module_command(_ROOT, *line, "--num-chunks", "0")
    limit_s = args.timeout * _STAGES * (args.runs + args.readers)

    def measure(side: int) -> Figures:
        found = _run_side(commands[side], limit_s)
        if not args.json:  # a comparison takes minutes: let it be seen that it goes on
            print(f"{names[side]:8s} {found['first_s']:.4f} s", flush=True)
        return found

    rows = compare(measure, max(1, args.pairs))
    figures = summarize(rows, names)
    if args.json:
        print(json.dumps(figures), flush=True)
        return 0
    for name in names:
        side = figures[name]
        median = f", median {side['median_s']:.4f} s" if args.runs > 1 else ""
        print(f"{name:8s} torch {side['torch']}: first heal {side['first_s']:.4f} s{median}")
    # of a single run both are the same
    for what in ("first", "median") if args.runs > 1 else ("first",):
        low, high = figures[f"{what}_spread"]
        print(
            f"speed of {names[1]} over {names[0]}, {what} heal: {figures[f'{what}_ratio']:.2f} "
            f"(median of {len(rows)} pairs, {low:.2f}-{high:.2f})",
            flush=True,
        )
    return 0


def compare(measure: Callable[[int], Figures], pairs: int) -> list[tuple[Figures, Figures]]:
    """Call ``measure(0)`` and ``measure(1)`` in turn, ``pairs`` times each."""
    rows = []
    for i in range(pairs):
        first = i % 2
        sides = {first: measure(first)}
        sides[1 - first] = measure(1 - first)
        rows.append((sides[0], sides[1]))
    return rows


def summarize(rows: list[tuple[Figures, Figures]], names: tuple[str, str]) -> Figures:
    """The medians of both sides, and of the ratio of each pair: above 1 the second side is the faster one."""
    figures: Figures = {"bench": rows[0][0]["bench"], "pairs": len(rows), "verified": True}
    for side, name in enumerate(names):
        figures[name] = {what: rows[0][side][what] for what in _SAME}
        figures[name] |= {what: statistics.median(row[side][what] for row in rows) for what in _TIMES}
    for what in ("first", "median"):
        ratios = [row[0][f"{what}_s"] / row[1][f"{what}_s"] for row in rows]
        figures[f"{what}_ratio"] = statistics.median(ratios)
        figures[f"{what}_spread"] = [min(ratios), max(ratios)]
    return figures


def _run_side(command: list[str], limit_s: float) -> Figures:
    """One fresh run of the bench, to its end; its stderr is the user's."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        raise DeadlineExceeded(f"a run with {command[0]}", limit_s=limit_s, elapsed_s=limit_s) from None
    except OSError as error:
        raise ChildDied(f"{command[0]} could not be started: {error}") from error
    if done.returncode:
        raise ChildDied(f"a run with {command[0]} ended with exit code {done.returncode}")
    figures = json.loads(done.stdout.splitlines()[-1])
    if not figures.get("verified"):
        raise ChildDied(f"a run with {command[0]} reported figures that it did not verify")
    return dict(figures)
