# SPDX-License-Identifier: BSD-3-Clause
"""The page of ``bench all``: one file of HTML with plots in it, that needs nothing but itself.

Rules of this file: figures in, text out; no script, nothing to be loaded; every text is escaped; a figure stands with
its unit; both colour schemes have the same classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from ._common import counted, in_bytes, in_percent, in_time
from ._plot import Axis, Row, legend, plot

__all__ = ["page"]

Figures = dict[str, Any]

_STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1b1f24; --soft: #57606a; --rule: #d8dee4;
  --one: #1f66d0; --two: #b45309; --socket: #b42318; --copy: #5b6470; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171b; --ink: #e6e9ec; --soft: #a3acb6; --rule: #343b43;
  --one: #6ea8ff; --two: #f0a458; --socket: #ff8f84; --copy: #b4bcc6; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1080px; padding: 20px 16px 48px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 36px 0 4px; }
p { margin: 4px 0 10px; max-width: 75ch; } .soft { color: var(--soft); }
.warn { border: 1px solid var(--two); border-radius: 6px; padding: 6px 10px; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); gap: 0 40px; }
.pair > * { min-width: 0; }
.scroll { overflow-x: auto; margin-bottom: 16px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 14px; }
th, td { padding: 4px 14px 4px 0; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--rule); }
th:first-child, td:first-child { text-align: left; white-space: normal; min-width: 11em; }
th { font-weight: 600; color: var(--soft); }
summary { cursor: pointer; margin: 28px 0 8px; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 18px; font-size: 13px; margin: 8px 0 12px; }
.key { vertical-align: -1px; }
.plot { display: block; overflow: visible; }
.plot text { font-size: 13px; fill: var(--ink); paint-order: stroke; stroke: var(--paper); stroke-width: 4px;
  stroke-linejoin: round; font-variant-numeric: tabular-nums; }
.plot .head { font-weight: 600; } .plot .tick, .plot .axis { fill: var(--soft); font-size: 12px; }
.grid, .track { stroke: var(--rule); stroke-width: 1; } .track { stroke-dasharray: 2 3; }
rect.one, circle.one { fill: var(--one); } rect.two { fill: var(--two); }
circle.two { fill: none; stroke: var(--two); stroke-width: 2.5; }
.plot tspan.one { fill: var(--one); } .plot tspan.two { fill: var(--two); } .plot tspan.soft { fill: var(--soft); }
.limit { stroke-width: 2.5; } .limit.socket { stroke: var(--socket); }
.limit.trip { stroke: var(--ink); } .limit.copy { stroke: var(--copy); stroke-dasharray: 3 2; }
@media (max-width: 600px) { thead { display: none; } table, tbody, tr { display: block; }
  tr { padding: 6px 0; border-bottom: 1px solid var(--rule); }
  td { display: flex; justify-content: space-between; gap: 16px; padding: 1px 0; border: 0; }
  td::before { content: attr(data-name); color: var(--soft); font-weight: 400; }
  td:first-child { font-weight: 600; } td:first-child::before { content: none; } }
"""

_HEALING = (
    "Each transport heals states of several shapes in place. The fit is seconds = fixed + per tensor \N{DOT OPERATOR} "
    "tensors + bytes / bandwidth, by least squares of the relative errors, no cost negative. Times are medians."
)
_TIMES = "\N{MULTIPLICATION SIGN}"
_KINDS = {"child": "in a child", "in_process": "in process"}


def page(figures: Figures) -> str:
    """The whole page of what ``bench all`` measured."""
    title = f"{figures['package']} bench all, {_date(figures)}"
    quick = "Quick run: sizes so tiny that the figures say nothing about speed." if figures["quick"] else ""
    body = [
        f"<h1>{escape(figures['package'])} bench all</h1>",
        f'<p class="soft">{escape(_circumstances(figures))}</p>',
        f'<p class="warn">{quick}</p>' if quick else "",
        "<h2>What a tensor and a byte cost</h2>",
        f"<p>{_HEALING}</p>",
        _costs(figures),
        '<div class="pair">',
        _healing(figures),
        _throughput(figures),
        f"<div>{_latency(figures)}{_limits(figures['limits'])}</div>",
        _ops(figures),
        "</div>",
        "<details><summary>All figures of the plots</summary>",
        _shapes(figures),
        _op_table(figures),
        "</details>",
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in body if part)
        + "\n</body>\n</html>\n"
    )


def _date(figures: Figures) -> str:
    return str(figures["date"]).replace("T", " ").replace("+00:00", " UTC")


def _circumstances(figures: Figures) -> str:
    machine = figures["machine"]
    cores, memory = counted(machine["cores"], "core"), in_bytes(machine["memory_bytes"])
    return (
        f"{_date(figures)}. {machine['cpu']}, {cores}, {memory} of memory, {machine['system']}. "
        f"torch {figures['torch']}, Python {figures['python']}. Measured in {in_time(figures['took_s'])}, "
        f"{counted(figures['runs'], 'run')} each; every byte was verified."
    )


def _speed(known: float | None) -> str:
    return "-" if known is None else f"{in_bytes(known * 1e9)}/s"


def _ratio(known: float | None) -> str:
    return "-" if known is None else f"{known:.2f}{_TIMES}"


def _off(known: float) -> str:
    return in_percent(known).replace("-", "\N{MINUS SIGN}")


def _shape(row: Figures) -> str:
    return f"{row['tensors']:,} {_TIMES} {in_bytes(row['tensor_bytes'])}"


# --- plots ---------------------------------------------------------------------------------------------


def _section(title: str, text: str, keys: Sequence[tuple[str, str, str]], drawn: str) -> str:
    return f"<section><h2>{escape(title)}</h2><p>{escape(text)}</p>{legend(keys)}{drawn}</section>"


def _healing(figures: Figures) -> str:
    rows = [row for it in figures["transports"] for row in it["shapes"]]
    axis = Axis.decades(
        [row[key] for row in rows for key in ("median_s", "fitted_s")], "time of a heal, log scale", in_time
    )
    groups = [
        (it["name"], [_measured(_shape(row), row["median_s"], row["fitted_s"], row["off"]) for row in it["shapes"]])
        for it in figures["transports"]
    ]
    title = "Healing: measured and fitted"
    keys = [("dot", "one", "measured"), ("dot", "two", "fitted (how far off)")]
    return _section(title, f"Tensors {_TIMES} size of each.", keys, plot(axis, groups, (), title))


def _measured(name: str, seconds: float, fitted_s: float, off: float) -> Row:
    values = [(in_time(seconds), "one"), (f"({_off(off)})", "two")]
    return Row(name, values, dots=[(seconds, "one"), (fitted_s, "two")])


def _throughput(figures: Figures) -> str:
    limits = {name: figures["limits"][name]["GBps"] for name in ("socket", "copy")}
    speeds = [row["GBps"] for it in figures["transports"] for row in it["shapes"]]
    axis = Axis.linear([*speeds, *limits.values()], "throughput", lambda known: "0" if known == 0 else _speed(known))
    groups = [
        (
            it["name"],
            [
                Row(
                    _shape(row),
                    [(_speed(row["GBps"]), "one"), (f"({_ratio(row['of_socket'])} socket)", "soft")],
                    bars=[(row["GBps"], "one")],
                )
                for row in it["shapes"]
            ],
        )
        for it in figures["transports"]
    ]
    keys = [("bar", "one", "healing")]
    keys += [("limit", "socket", f"raw socket, one connection: {_speed(limits['socket'])}")]
    keys += [("limit", "copy", f"copy of memory: {_speed(limits['copy'])}")]
    title = "Throughput and the machine's limits"
    return _section(title, "Longer is better.", keys, plot(axis, groups, [(limits[it], it) for it in limits], title))


def _latency(figures: Figures) -> str:
    limit_s, rows = figures["limits"]["round_trip"]["seconds"], []
    values = [limit_s]
    for it in figures["pg"]["latency"]:
        known = [(it[f"{kind}_s"], colour) for kind, colour in zip(_KINDS, ("one", "two")) if f"{kind}_s" in it]
        values += [seconds for seconds, _ in known]
        texts = [(in_time(seconds), colour) for seconds, colour in known]
        rows.append(Row(it["part"], [*texts[:1], *((f"/ {text}", colour) for text, colour in texts[1:])], bars=known))
    axis = Axis.decades(values, "time of one, log scale", in_time)
    keys = [("bar", "one", "in a child"), ("bar", "two", "in process")]
    keys += [("limit", "trip", f"round trip to another process: {in_time(limit_s)}")]
    title = "Process groups: latency"
    text = "Two ranks. Shorter is better; each factor of ten in time has the same length."
    return _section(title, text, keys, plot(axis, [("", rows)], [(limit_s, "trip")], title))


def _ops(figures: Figures) -> str:
    groups, values = [], []
    for it in figures["pg"]["ops"]:
        fit, rows = it["fit"], []
        for size, seconds, fitted_s, off in zip(it["sizes"], it["seconds"], fit["fitted_s"], fit["off"]):
            rows.append(_measured(in_bytes(size), seconds, fitted_s, off))
            values += [seconds, fitted_s]
        groups.append((f"{it['op']} tensor, {_KINDS[it['kind']]}", rows))
    axis = Axis.decades(values, "time of an allreduce, log scale", in_time)
    title = "Process groups: allreduce by size"
    text = (
        "seconds = fixed + bytes / bandwidth. The tensor is the same each time, a fresh one, or in the child's memory."
    )
    keys = [("dot", "one", "measured"), ("dot", "two", "fitted (how far off)")]
    return _section(title, text, keys, plot(axis, groups, (), title))


# --- tables --------------------------------------------------------------------------------------------


def _grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f'<th scope="col">{escape(text)}</th>' for text in head)
    body = ""
    for row in rows:
        # on a telephone the names stand beside the figures
        named = (f'<td data-name="{escape(name)}">{escape(text)}</td>' for name, text in zip(head, row))
        body += f"<tr>{''.join(named)}</tr>"
    return f'<div class="scroll"><table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div>'


def _costs(figures: Figures) -> str:
    head = ("transport", "fixed", "per tensor", "bandwidth", "of raw socket", "of a copy", "fit off by at most")
    rows = [
        (
            it["name"],
            in_time(it["fit"]["fixed_s"]),
            in_time(it["fit"]["per_tensor_s"]),
            _speed(it["fit"]["GBps"]),
            _ratio(it["fit"]["of_socket"]),
            _ratio(it["fit"]["of_copy"]),
            _trust(it["fit"]),
        )
        for it in figures["transports"]
    ]
    return _grid(head, rows)


def _trust(fit: Figures) -> str:
    if not fit["determined"]:
        return "costs not told apart"
    return f"{fit['largest_off']:.0%}" + (", as many shapes as costs" if fit["exact"] else "")


def _limits(limits: Figures) -> str:
    names = {
        "copy": "copy of memory",
        "socket": "raw socket on loopback, one connection, into memory that exists",
        "round_trip": "message to another process and back",
        "gloo_float": "allreduce of one float, Gloo in process, two ranks",
        "gloo_large": "allreduce, Gloo in process, two ranks",
    }
    rows = [
        (text, in_bytes(limits[key]["bytes"]), in_time(limits[key]["seconds"]), _speed(limits[key].get("GBps")))
        for key, text in names.items()
    ]
    text = "Measured in the same run: by plain programs in processes of their own, warm; the last two by two ranks."
    table = _grid(("limit", "size", "time", "speed"), rows)
    return f"<section><h2>Limits of this machine</h2><p>{text}</p>{table}</section>"


def _shapes(figures: Figures) -> str:
    head = ("heal in place", "state", "first", "median", "fitted", "off", "speed", "of raw socket", "of a copy")
    rows = [
        (
            f"{it['name']}, {_shape(row)}",
            in_bytes(row["state_bytes"]),
            *(in_time(row[key]) for key in ("first_s", "median_s", "fitted_s")),
            _off(row["off"]),
            _speed(row["GBps"]),
            _ratio(row["of_socket"]),
            _ratio(row["of_copy"]),
        )
        for it in figures["transports"]
        for row in it["shapes"]
    ]
    return _grid(head, rows)


def _op_table(figures: Figures) -> str:
    head = ("allreduce", "fixed", "bandwidth", "fit off by at most")
    rows = [
        (
            f"{it['op']} tensor, {_KINDS[it['kind']]}",
            in_time(it["fit"]["fixed_s"]),
            _speed(it["fit"]["GBps"]),
            _trust(it["fit"]),
        )
        for it in figures["pg"]["ops"]
    ]
    return _grid(head, rows)
