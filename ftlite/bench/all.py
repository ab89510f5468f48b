# SPDX-License-Identifier: BSD-3-Clause
"""``bench all``: every bench at several shapes, what a tensor and a byte cost each, and what the machine could do.

Rules of this file: no torch; it measures by the other benches' ``measure`` and nothing else, one after the other;
the limits (``_limits_worker``) are of the same minutes, since they change with whatever else the machine does. Files
are written when everything was measured and verified, and each as a whole.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import stat
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from .._deadline import Deadline
from . import http, pg, pg_transport
from ._common import Bar, Stages, counted, in_bytes, in_percent, in_time, require_memory
from ._fit import fit_op, fit_transport
from ._page import page
from ._workers import Crew

__all__ = ["add_arguments", "measure", "run"]

Figures = dict[str, Any]

# As each bench has it: the large states take a second, importing torch from a cold disk can take a minute.
_TIMEOUT_S = 300.0
_PROCESSES = 2

_LIMITS = f"{__package__}._limits_worker"
_STDOUT = "-"

_TRANSPORTS = (
    ("http", http, ()),
    ("pg-transport, baby-gloo", pg_transport, ("--backend", "baby-gloo")),
    ("pg-transport, gloo", pg_transport, ("--backend", "gloo")),
)
# The op of one float whose tensor is the same each time, as that of "large, same".
_ONE_FLOAT, _ONE_FLOAT_BYTES = "1 float, wait", 4
_OPS = ("same", "fresh", "shared")


class Sizes(NamedTuple):
    """How much is measured."""

    copy_bytes: int
    trips: int
    runs: int
    shapes: tuple[tuple[int, int], ...]
    """Of a state: tensors, and bytes of each. A fixed cost, one per tensor and one per byte need three."""
    ops: tuple[int, ...]
    """Bytes of a large tensor of ``bench pg``."""
    pg: tuple[str, ...]


FULL = Sizes(
    copy_bytes=256_000_000,
    trips=5000,
    runs=5,
    shapes=((1, 4000), (4000, 4000), (1000, 100_000), (100, 3_000_000)),
    ops=(200_000, 2_000_000, 20_000_000),
    pg=("--configures", "3"),
)
QUICK = Sizes(
    copy_bytes=1_000_000,
    trips=20,
    runs=1,
    shapes=((50, 4000), (10, 100_000)),
    ops=(100_000, 400_000),
    pg=("--configures", "1", "--runs", "1", "--small-ops", "5", "--large-ops", "2", "--burst", "9"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``bench all`` to ``parser``."""
    parser.add_argument("--json", metavar="FILE", help="write all figures as one JSON object (-: stdout, and no table)")
    parser.add_argument("--html", metavar="FILE", help="write a page with plots, which needs nothing but itself")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: to see that it works, not how fast it is")
    parser.add_argument("--timeout", type=float, default=_TIMEOUT_S, metavar="S", help="seconds for each stage (300)")


def run(args: argparse.Namespace) -> int:
    """Run everything; 0 means that every byte of every run was verified.

    Raises:
        FtliteError: a child failed, died, or did not answer in time, or a byte was wrong; no file is written.
        ValueError: it needs more memory than there is, or a FILE cannot be one.
    """
    files = [name for name in (args.html, None if args.json == _STDOUT else args.json) if name is not None]
    for name in files:  # a wrong name is told before the minutes of measuring
        _require_place(Path(name))
    figures = measure(args)
    text = json.dumps(figures, allow_nan=False)
    if args.json not in (None, _STDOUT):
        _write(Path(args.json), text + "\n")
    if args.html is not None:
        _write(Path(args.html), page(figures))
    for line in [text] if args.json == _STDOUT else _table(figures):
        print(line, flush=True)
    return 0


# --- measuring -----------------------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> Figures:
    """Measure the limits and each bench at each of its sizes, and return the figures."""
    sizes = QUICK if args.quick else FULL
    largest = max(tensors * size for tensors, size in sizes.shapes)
    require_memory(_PROCESSES, max(largest, 3 * sizes.copy_bytes), "give --quick, which needs next to none")
    timeout, start_s, bar = ("--timeout", str(args.timeout)), time.perf_counter(), Bar()
    total, done = 1 + len(_TRANSPORTS) * len(sizes.shapes) + len(sizes.ops), 0

    def step(what: str) -> None:
        nonlocal done
        bar.show(what[:24], done, total)
        done += 1

    step("limits")
    limits = _limits(sizes, args.timeout)
    transports = []
    for name, bench, more in _TRANSPORTS:
        found = []
        for tensors, size in sizes.shapes:
            step(name)
            line = ("--inplace", "--total-size", str(tensors * size), "--chunk-size", str(size), *more, *timeout)
            found.append(bench.measure(_options(bench, *line, "--runs", str(sizes.runs)), Stages()))
        transports.append(_transport(name, found, limits))
    groups = []
    for size in sizes.ops:
        step("pg")
        bar.clear()  # it draws its own
        groups.append(pg.measure(_options(pg, "--size", str(size), *sizes.pg, *timeout)))
    bar.clear()
    ops, latency = _ops(groups), _latency(groups, limits["round_trip"]["seconds"])
    return {
        "bench": "all",
        "package": (__package__ or "").rpartition(".")[0],
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": _machine(),
        "torch": groups[0]["torch"],
        "python": ".".join(map(str, sys.version_info[:3])),
        "verified": True,
        "quick": args.quick,
        "runs": sizes.runs,
        "took_s": time.perf_counter() - start_s,
        "limits": limits | _gloo(ops, latency),
        "transports": transports,
        "pg": {"latency": latency, "ops": ops},
    }


def _options(bench: Any, *line: str) -> argparse.Namespace:
    """What ``bench`` would get from this command line."""
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(line)


def _limits(sizes: Sizes, timeout_s: float) -> Figures:
    """What a plain program gets out of this machine, in processes of its own."""
    options = {"bytes": sizes.copy_bytes, "runs": sizes.runs, "trips": sizes.trips}
    with Crew() as crew:
        copier = crew.start("copier", _LIMITS, {**options, "role": "copy"})
        copied = crew.expect(copier, "copied", Deadline(timeout_s))
        caller = crew.start("caller", _LIMITS, {**options, "role": "round trip"})
        answered = crew.expect(caller, "answered", Deadline(timeout_s))
        receiver = crew.start("receiver", _LIMITS, {**options, "role": "receiver"})
        port = crew.expect(receiver, "listening", Deadline(timeout_s))["port"]
        crew.start("sender", _LIMITS, {**options, "role": "sender", "port": port})
        received = crew.expect(receiver, "received", Deadline(timeout_s))
    return {
        "copy": _limit(sizes.copy_bytes, statistics.median(copied["seconds"])),
        "socket": _limit(sizes.copy_bytes, statistics.median(received["seconds"])),
        "round_trip": {"bytes": answered["bytes"], "seconds": statistics.median(answered["seconds"])},
    }


def _limit(size: int, seconds: float) -> Figures:
    return {"bytes": size, "seconds": seconds, "GBps": size / seconds / 1e9}


def _machine() -> Figures:
    """What it is, as far as the system tells; its name is nobody's business."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": models[0] if models else platform.processor() or "unknown processor",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


# --- putting together ----------------------------------------------------------------------------------


def _transport(name: str, found: Sequence[Figures], limits: Figures) -> Figures:
    """One transport at all shapes: measured, fitted, and against the limits."""
    fit = fit_transport([(it["tensors"], it["state_bytes"]) for it in found], [it["median_s"] for it in found])
    shapes = []
    for it, fitted_s, off in zip(found, fit.pop("fitted_s"), fit.pop("off")):
        row = {key: it[key] for key in ("tensors", "state_bytes", "first_s", "median_s")}
        row |= {"tensor_bytes": it["state_bytes"] // it["tensors"], "fitted_s": fitted_s, "off": off}
        row |= {"GBps": it["median_GBps"], "of_socket": it["median_GBps"] / limits["socket"]["GBps"]}
        shapes.append(row | {"of_copy": it["median_GBps"] / limits["copy"]["GBps"]})
    for what in ("socket", "copy"):
        fit[f"of_{what}"] = fit["GBps"] and fit["GBps"] / limits[what]["GBps"]
    return {"name": name, "inplace": True, "shapes": shapes, "fit": fit}


def _ops(groups: Sequence[Figures]) -> list[Figures]:
    """An allreduce by its size, for each way to give the tensor and each kind of group."""
    parts = [{row["part"]: row for row in found["parts"]} for found in groups]
    ops = []
    for op in _OPS:
        for kind in ("child", "in_process"):
            points = [
                (row["size"], row[f"{kind}_s"]) for row in (it[f"large, {op}"] for it in parts) if f"{kind}_s" in row
            ]
            if points and op == "same":
                points.insert(0, (_ONE_FLOAT_BYTES, statistics.median(it[_ONE_FLOAT][f"{kind}_s"] for it in parts)))
            if points:
                sizes, seconds = [size for size, _ in points], [second for _, second in points]
                fit = fit_op(sizes, seconds)
                ops.append({"op": op, "kind": kind, "sizes": sizes, "seconds": seconds, "fit": fit})
    return ops


def _latency(groups: Sequence[Figures], round_trip_s: float) -> list[Figures]:
    """The parts that have no size, which every run of the bench measured: the medians."""
    rows = []
    for part in [row["part"] for row in groups[0]["parts"] if not row["size"]]:
        found = [row for it in groups for row in it["parts"] if row["part"] == part]
        names = [name for name in ("child_s", "in_process_s") if name in found[0]]
        row = {"part": part, **{name: statistics.median(it[name] for it in found) for name in names}}
        if "in_process_s" in row:
            row["ratio"] = row["in_process_s"] / row["child_s"]
        rows.append(row | {"round_trips": row["child_s"] / round_trip_s})
    return rows


def _gloo(ops: Sequence[Figures], latency: Sequence[Figures]) -> Figures:
    """What a group in the process does, which one in a child could at best do."""
    same = next(it for it in ops if (it["op"], it["kind"]) == ("same", "in_process"))
    one_s = next(row["in_process_s"] for row in latency if row["part"] == _ONE_FLOAT)
    return {
        "gloo_float": {"bytes": _ONE_FLOAT_BYTES, "seconds": one_s},
        "gloo_large": _limit(same["sizes"][-1], same["seconds"][-1]),
    }


# --- telling -------------------------------------------------------------------------------------------


def _table(figures: Figures) -> list[str]:
    machine, limits = figures["machine"], figures["limits"]
    cores, memory = counted(machine["cores"], "core"), in_bytes(machine["memory_bytes"])
    lines = [f"{machine['cpu']}, {cores}, {memory}, {machine['system']}"]
    lines += [f"torch {figures['torch']}, Python {figures['python']}, {figures['date']}", ""]
    lines.append(f"{'limits of this machine':44s} {'time':>9s} {'speed':>10s}")
    for key, what in (
        ("copy", "copy of {} of memory"),
        ("socket", "raw socket, loopback, {}, one connection"),
        ("round_trip", "{} to another process and back"),
        ("gloo_float", "allreduce of 1 float, Gloo in process"),
        ("gloo_large", "allreduce of {}, Gloo in process"),
    ):
        it = limits[key]
        lines.append(
            f"{what.format(in_bytes(it['bytes'])):44s} {in_time(it['seconds']):>9s} {_speed(it):>10s}".rstrip()
        )
    lines += ["", f"{'heal in place':44s} {'time':>9s} {'fitted':>9s} {'off':>6s} {'speed':>10s} of socket of copy"]
    for it in figures["transports"]:
        for row in it["shapes"]:
            what = f"{it['name']:24s} {row['tensors']} x {in_bytes(row['tensor_bytes'])}"
            times = f"{in_time(row['median_s']):>9s} {in_time(row['fitted_s']):>9s} {in_percent(row['off']):>6s}"
            lines.append(f"{what:44s} {times} {_speed(row):>10s} {row['of_socket']:8.2f}x {row['of_copy']:6.2f}x")
    lines += ["", f"{'of which':44s} {'fixed':>9s} {'/ tensor':>9s} {'off <=':>6s} {'speed':>10s} of socket of copy"]
    for it in figures["transports"]:
        fit = it["fit"]
        costs = f"{in_time(fit['fixed_s']):>9s} {in_time(fit['per_tensor_s']):>9s} {fit['largest_off']:6.0%}"
        ratios = f" {fit['of_socket']:8.2f}x {fit['of_copy']:6.2f}x" if fit["GBps"] else ""
        lines.append(f"{it['name']:44s} {costs} {_speed(fit):>10s}{ratios}")
        if not fit["determined"]:
            lines.append(f"  {counted(len(it['shapes']), 'shape')} cannot tell these costs apart: one choice of many")
    return [*lines, "", *_table_of_groups(figures["pg"])]


def _table_of_groups(groups: Figures) -> list[str]:
    lines = [f"{'process groups':44s} {'child':>9s} {'in proc.':>9s} {'speed':>6s} child in round trips"]
    for row in groups["latency"]:
        ratio = f"{row['ratio']:.2f}x" if "ratio" in row else ""
        times = f"{in_time(row['child_s']):>9s} {in_time(row.get('in_process_s')):>9s}"
        lines.append(f"{row['part']:44s} {times} {ratio:>6s} {row['round_trips']:10,.0f}")
    lines += ["", f"{'allreduce, of which':44s} {'fixed':>9s} {'':9s} {'off <=':>6s} {'speed':>10s}"]
    for it in groups["ops"]:
        fit, what = it["fit"], f"{it['op']} tensor, {it['kind'].replace('_', ' ')}"
        lines.append(f"{what:44s} {in_time(fit['fixed_s']):>9s} {'':9s} {fit['largest_off']:6.0%} {_speed(fit):>10s}")
    return [*lines, "", "verified: every byte of every run, every sum"]


def _speed(figures: Figures) -> str:
    known = figures.get("GBps")
    return f"{in_bytes(known * 1e9)}/s" if known else "-" if "GBps" in figures else ""


def _require_place(path: Path) -> None:
    """Raise unless a file can be put there: a device or a folder is not to be replaced by one."""
    if not path.resolve().parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.resolve().parent}")
    if not os.access(path.resolve().parent, os.W_OK):
        raise ValueError(f"{path}: the folder {path.resolve().parent} cannot be written to")
    if path.exists() and not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(f"{path} is no regular file: give another name")


def _write(path: Path, text: str) -> None:
    """Put ``text`` there, whole or not at all: a file that is there already stays until this one is complete."""
    place = path.resolve()  # a link stays a link
    part = place.with_name(f".{place.name}.{os.getpid()}.part")
    file = part.open("x", encoding="utf-8")
    try:
        with file:
            file.write(text)
        os.replace(part, place)
    finally:
        part.unlink(missing_ok=True)
