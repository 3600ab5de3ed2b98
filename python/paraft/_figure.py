"""The state of jobs, as a line of text and as HTML with SVG charts. The HTML loads nothing, runs nothing, and
inherits the page's text and background colours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Optional

from ._live import Job, Point, Seen, Server

#: Okabe and Ito's blue and vermilion, in shades that are readable on white and on black.
_FIRST, _SECOND = "#2a86c8", "#dd6a12"
_WIDTH, _HEIGHT = 300, 170
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 8, 8, 22
#: The maximum number of points of a chart: further points are averaged.
_DRAWN = 200


def number(value: Optional[float], digits: int = 4) -> str:
    """Formats a number for people."""
    if value is None:
        return "-"
    for least, unit, name in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= least:
            return f"{value / unit:.{digits}g}{name}"
    return f"{value:.{digits}g}"


def percent(value: Optional[float]) -> str:
    """Formats a share from 0 to 1."""
    return "-" if value is None else f"{100 * value:.2f} %"


def held_out(job: Job) -> str:
    """The latest evaluation."""
    if job.held_out_loss is None and job.accuracy is None:
        return "-"
    return number(job.held_out_loss) + (f", {percent(job.accuracy)}" if job.accuracy is not None else "")


def _led(server: Server, leader: Optional[int]) -> str:
    """The shards that a server leads."""
    group = ["the control group"] if server.server == leader else []
    return " and ".join(group + ([f"{server.leads} shard{'s' * (server.leads != 1)}"] if server.leads else []))


def leads(seen: Seen) -> str:
    """All leaders and their shards."""
    return "; ".join(f"s{s.server} leads {_led(s, seen.leader)}" for s in seen.servers if _led(s, seen.leader))


def text(seen: Seen, name: str = "") -> str:
    """The state as one line."""
    job = seen.job(name)
    if job is None:
        return seen.where if not name else f"no job {name}; {seen.where}"
    parts = [
        f"{job.name} {job.state}",
        f"step {job.step}",
        f"loss {number(job.loss)}",
        f"held-out {held_out(job)}",
        f"{number(job.samples_per_s)} samples/s",
        f"{job.present} of {job.expected} workers",
        leads(seen),
        seen.where,
    ]
    return "  ".join(p for p in parts if p)


def html(seen: Seen, name: str = "") -> str:
    """The state, with charts."""
    job = seen.job(name)
    where = f'<p style="margin: 4px 0; {"color: #c0392b; font-weight: 600" if seen.lost else "opacity: .7"}">{escape(seen.where)}</p>'
    if job is None:
        none = f"<p>This fleet has no job {escape(name)}.</p>" if name else ""
        return f'<div class="paraft-live" style="font-size: 13px">{none}{where}</div>'
    facts = [
        ("state", job.state),
        ("mode", job.mode),
        ("workers", f"{job.present} of {job.expected}"),
        ("steps", number(job.step, 6)),
        ("samples/s", number(job.samples_per_s)),
        ("training loss", number(job.loss)),
        ("held-out", held_out(job)),
    ]
    shown = "".join(f'<span><span style="opacity: .7">{k}</span> <b>{escape(v)}</b></span>' for k, v in facts)
    charts = [
        chart("Loss", [("training", _FIRST, job.curve("loss")), ("held-out", _SECOND, job.curve("held_out_loss"))]),
        chart("Held-out accuracy", [("", _FIRST, job.curve("accuracy"))], share=True),
        chart("Samples a second", [("", _FIRST, job.curve("samples_per_s"))], zero=True),
    ]
    workers = [[f"w{w.worker}", number(w.step, 6), number(job.step - w.step) if w.step < job.step else "", w.state] for w in job.workers[:64]]
    servers = [[f"s{s.server}", s.address, s.state, _led(s, seen.leader)] for s in seen.servers]
    tables = _table("Workers", ["worker", "step", "behind", "state"], workers)
    tables += _table("Servers", ["server", "address", "state", "leads"], servers)
    happened = "".join(f"<li>{escape(what)}</li>" for what in seen.events)
    return (
        f'<div class="paraft-live" style="font-size: 13px"><h4 style="margin: 4px 0">{escape(job.name)}</h4>{where}'
        f'<div style="display: flex; flex-wrap: wrap; gap: 2px 20px; margin: 4px 0 8px">{shown}</div>'
        f'<div style="display: flex; flex-wrap: wrap; gap: 8px 16px">{"".join(charts)}</div>'
        f'<div style="display: flex; flex-wrap: wrap; gap: 8px 32px; align-items: flex-start">{tables}</div>'
        + (f'<ul style="margin: 8px 0; padding-left: 18px; opacity: .8">{happened}</ul>' if happened else "")
        + "</div>"
    )


def _table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    cells = "".join(f'<th scope="col" style="text-align: left; font-weight: 400; opacity: .7">{h}</th>' for h in head)
    body = "".join("<tr>" + "".join(f'<td style="text-align: left; padding-right: 14px">{escape(c)}</td>' for c in row) + "</tr>" for row in rows)
    return f'<table aria-label="{caption}" style="margin: 8px 0; font-size: 13px"><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>'


def chart(title: str, lines: Sequence[tuple[str, str, Sequence[Point]]], *, share: bool = False, zero: bool = False) -> str:
    """A line chart over seconds. ``lines``: name, colour, points. ``share``: the values are shares of 1. ``zero``:
    the axis starts at 0."""
    drawn = [(name, colour, _thinned([p for p in points if math.isfinite(p[1])])) for name, colour, points in lines]
    drawn = [line for line in drawn if line[2]]
    shows = percent if share else number
    latest = ", ".join(f"{name} {shows(points[-1][1])}".strip() for name, _, points in drawn) or "nothing yet"
    label = escape(f"{title}: {latest}", quote=True)
    whole = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{label}" style="color: inherit">'
    if not drawn:
        inside = _label(_WIDTH / 2, _HEIGHT / 2, "nothing yet", "middle")
    else:
        inside = _inside([(colour, points) for _, colour, points in drawn], share, zero)
    names = "".join(f'<span style="color: {colour}">{escape(name)}</span> ' for name, colour, _ in drawn if name)
    caption = f'<figcaption><b>{escape(title)}</b> {names}</figcaption>'
    return f'<figure style="margin: 0">{caption}{whole}{inside}</svg></figure>'


def _inside(lines: Sequence[tuple[str, Sequence[Point]]], share: bool, zero: bool) -> str:
    xs = [x for _, points in lines for x, _ in points]
    ys = [y for _, points in lines for _, y in points] + ([0.0] if zero else [])
    x_ticks, y_ticks = ticks(min(xs), max(xs)), ticks(min(ys), max(ys))
    (x0, x1), (y0, y1) = (min(xs), max(max(xs), min(xs) + 1e-9)), (min(y_ticks[0], min(ys)), max(y_ticks[-1], max(ys)))

    def x(value: float) -> float:
        return _LEFT + (value - x0) / (x1 - x0) * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (value - y0) / (y1 - y0) * (_HEIGHT - _TOP - _BOTTOM)

    parts = []
    for tick in y_ticks:
        parts.append(f'<path d="M{_LEFT} {y(tick):.1f}H{_WIDTH - _RIGHT}" stroke="currentColor" opacity=".15"/>')
        parts.append(_label(_LEFT - 4, y(tick) + 4, f"{100 * tick:.4g} %" if share else number(tick), "end"))
    for tick in x_ticks:
        if x0 <= tick <= x1:
            parts.append(_label(x(tick), _HEIGHT - 6, f"{tick:g} s", "middle" if tick > x0 else "start"))
    for colour, points in lines:
        if len(points) == 1:
            parts.append(f'<circle cx="{x(points[0][0]):.1f}" cy="{y(points[0][1]):.1f}" r="3" fill="{colour}"/>')
        else:
            path = "L".join(f"{x(a):.1f} {y(b):.1f}" for a, b in points)
            parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    return "".join(parts)


def _label(x: float, y: float, what: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="11" fill="currentColor" opacity=".7">{escape(what)}</text>'


def ticks(low: float, high: float) -> list[float]:
    """Two to six round numbers from at most ``low`` to at least ``high``."""
    if high <= low:
        pad = abs(low) * 0.1 or 1.0
        low, high = low - pad, high + pad
    raw = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def _thinned(points: Sequence[Point]) -> list[Point]:
    """At most the number of drawn points, each the mean of several; the last one stays."""
    size = math.ceil(len(points) / _DRAWN)
    if size <= 1:
        return list(points)
    parts = [points[i : i + size] for i in range(0, len(points) - 1, size)]
    return [(sum(x for x, _ in p) / len(p), sum(y for _, y in p) / len(p)) for p in parts] + [points[-1]]
