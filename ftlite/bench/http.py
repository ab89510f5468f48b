# SPDX-License-Identifier: BSD-3-Clause
"""``bench http``: how fast a state is healed over HTTP on this machine, and how much memory that takes.

Rules of this file: no torch; it starts the donor and the receivers (``_http_worker``), puts their figures together
and prints them; the arithmetic is apart from the printing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from typing import Any

from .._deadline import Deadline
from . import _pairs
from ._common import Stages, counted, in_bytes, largest, not_negative, parse_size, positive, rate, require_memory
from ._workers import Crew, Worker

__all__ = ["add_arguments", "measure", "run"]

# One stage of the default 1 GB takes a second; importing torch from a cold disk can take a minute.
_TIMEOUT_S = 300.0
# The server's own default; more readers than that are asked for only by --readers.
_MAX_READERS = 16

_MODULE = f"{__package__}._http_worker"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``bench http`` to ``parser``."""
    parser.add_argument(
        "--num-chunks", type=not_negative, default=None, metavar="N", help="0: one stream; default: the fast one"
    )
    parser.add_argument("--device", choices=("cpu", "cuda", "xpu"), default="cpu", help="where the state lives")
    parser.add_argument("--total-size", type=parse_size, default=10**9, metavar="SIZE", help="of the state (1GB)")
    parser.add_argument("--chunk-size", type=parse_size, default=10**6, metavar="SIZE", help="of each tensor (1MB)")
    parser.add_argument("--inplace", action="store_true", help="receive into tensors that exist")
    parser.add_argument("--runs", type=positive, default=3, metavar="N", help="heals per receiver (3)")
    parser.add_argument("--readers", type=positive, default=1, metavar="K", help="receivers at once (1)")
    parser.add_argument("--timeout", type=float, default=_TIMEOUT_S, metavar="S", help="seconds for each stage (300)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    _pairs.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the bench; 0 means that every byte of every run was verified.

    Raises:
        FtliteError: a child failed, died, or did not answer in time, or a byte was wrong.
        ValueError: it needs more memory than there is.
    """
    if args.against or args.against_single_stream:
        return _pairs.run(args, _command_line(args))
    if args.device == "cpu":
        require_memory(args.readers + 1, args.total_size, "lower --total-size or --readers")
    figures = measure(args, Stages(None if args.json else _say))
    if args.json:
        print(json.dumps(figures), flush=True)
    else:
        for line in _summary(figures):
            _say(line)
    return 0


def measure(args: argparse.Namespace, stages: Stages) -> dict[str, Any]:
    """Start the processes, run the stages, which are added to ``stages``, and return the figures."""
    options = {
        name: getattr(args, name) for name in ("device", "total_size", "chunk_size", "inplace", "num_chunks", "runs")
    }
    # a child waits while the others work: its own patience is that of the whole bench
    total_s = args.timeout * (args.runs * args.readers + 4)
    options |= {"timeout_s": args.timeout, "total_timeout_s": total_s, "max_readers": max(_MAX_READERS, args.readers)}
    with Crew() as crew:
        donor = crew.start("donor", _MODULE, {**options, "role": "donor"})
        created = crew.expect(donor, "created", Deadline(args.timeout))
        size = created["state_bytes"]
        stages.add("create state_dict", created["seconds"])
        readers = [crew.start(f"receiver {i}", _MODULE, {**options, "role": "receiver"}) for i in range(args.readers)]
        start = Deadline(args.timeout * args.readers)
        for reader in readers:
            crew.expect(reader, "ready", start)
        donor.send("publish")
        published = crew.expect(donor, "published", Deadline(args.timeout))
        rows = []
        for i in range(args.runs):
            rows.append(_fetch(crew, readers, published["metadata"], args.timeout))
            # only now is known that what was published, and fetched, were the right bytes
            if i == 0:
                stages.add("transferring state_dict to CPU", published["seconds"], size)
            slowest_s = max(got["seconds"] for got in rows[-1])
            note = f"{args.readers} receivers together" if args.readers > 1 else ""
            stages.add("fetching checkpoint", slowest_s, size * args.readers, note)
        donor.send("finish")
        finished = crew.expect(donor, "finished", Deadline(args.timeout))
    return {
        "bench": "http",
        "torch": created["torch"],
        "python": ".".join(map(str, sys.version_info[:3])),
        "verified": True,
        **{name: getattr(args, name) for name in ("device", "num_chunks", "inplace", "runs", "readers")},
        **{name: created[name] for name in ("state_bytes", "tensors")},
        **_timings(stages, size),
        "receiver_peak_growth_bytes": largest([got["growth"] for row in rows for got in row]),
        "donor_peak_growth_bytes": finished["growth"],
    }


def _fetch(crew: Crew, readers: list[Worker], metadata: str, timeout_s: float) -> list[dict[str, Any]]:
    """One heal of all receivers at once; each message comes after its receiver has compared every byte."""
    for reader in readers:
        reader.send("fetch", metadata=metadata)
    # they share the cores, for the heal and for the comparison
    deadline = Deadline(timeout_s * (len(readers) + 1))
    return [crew.expect(reader, "fetched", deadline) for reader in readers]


def _timings(stages: Stages, size: int) -> dict[str, Any]:
    fetches = stages.seconds["fetching checkpoint"]
    median_s = statistics.median(fetches)
    return {
        "create_s": stages.seconds["create state_dict"][0],
        "publish_s": stages.seconds["transferring state_dict to CPU"][0],
        "fetch_s": fetches,
        # the first heal of a fresh process is what a joiner does
        "first_s": fetches[0],
        "median_s": median_s,
        "first_GBps": size / fetches[0] / 1e9,
        "median_GBps": size / median_s / 1e9,
    }


def _summary(figures: dict[str, Any]) -> list[str]:
    size, many = figures["state_bytes"], figures["readers"] > 1
    each = f", {figures['readers']} receivers at once, for each" if many else ""
    first_s, median_s = figures["first_s"], figures["median_s"]
    where = counted(figures["runs"], "run") + (f" of {figures['readers']} receivers" if many else "")
    lines = [f"verified: {counted(figures['tensors'], 'tensor')}, {in_bytes(size)}, bit for bit, in {where}"]
    first, median = f"{first_s:.4f} s ({rate(size, first_s)})", f"{median_s:.4f} s ({rate(size, median_s)})"
    lines.append(f"first heal {first}{f', median {median}' if figures['runs'] > 1 else ''}{each}")
    grown = figures["receiver_peak_growth_bytes"]
    if grown is None:
        lines.append("memory: this system does not tell a process's peak")
    elif figures["inplace"]:
        lines.append(f"receiver peak +{in_bytes(grown)} over its {in_bytes(size)} state (in place)")
    else:
        lines.append(f"receiver peak +{in_bytes(grown)}, {grown / size:.3f} of the state (into fresh memory)")
    if figures["donor_peak_growth_bytes"] is not None:
        lines.append(
            f"donor peak +{in_bytes(figures['donor_peak_growth_bytes'])} with {counted(figures['readers'], 'reader')}"
        )
    return lines


def _command_line(args: argparse.Namespace) -> list[str]:
    """The options of one side of a pair; what the two sides differ in is added by ``_pairs``."""
    line = [
        "bench",
        "http",
        "--json",
        "--device",
        args.device,
        "--total-size",
        str(args.total_size),
        "--chunk-size",
        str(args.chunk_size),
    ]
    line += ["--runs", str(args.runs), "--readers", str(args.readers), "--timeout", str(args.timeout)]
    return line + (["--inplace"] if args.inplace else [])


def _say(line: str) -> None:
    print(line, flush=True)
