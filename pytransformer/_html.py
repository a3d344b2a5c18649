# SPDX-License-Identifier: Apache-2.0
"""HTML without dependencies: tables for notebooks, and reports in one file with inline SVG.

A report loads nothing: its policy forbids scripts and every request, and all text is escaped.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence

from .console import clean

# Okabe and Ito's colors, distinct for every kind of color vision.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#8C7E00", "#000000")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_STYLE = """\
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 72em; padding: 0 1em }
table { border-collapse: collapse; font-size: 13px; margin: 0.6em 0 }
th, td { padding: 0.25em 0.7em; text-align: left; border-bottom: 1px solid #ddd }
.right { text-align: right; font-variant-numeric: tabular-nums }
.note { color: #555; font-size: 13px }
svg { max-width: 100%; height: auto; font: 12px system-ui, sans-serif }
summary { cursor: pointer; margin: 0.6em 0 }
"""
_DASHES = ("", "6 3", "2 3")
_STEPS = (1, 2, 5, 10)


def text(value: object) -> str:
    """Return `value` as literal text."""
    return html.escape(clean(value))


def paragraph(words: object, note: bool = False) -> str:
    kind = ' class="note"' if note else ""
    return f"<p{kind}>{text(words)}</p>"


def heading(words: object) -> str:
    return f"<h2>{text(words)}</h2>"


def details(title: object, content: str) -> str:
    """Return content that a click unfolds."""
    return f"<details><summary>{text(title)}</summary>{content}</details>"


def table(
    columns: Sequence[object],
    rows: Iterable[Iterable[object]],
    right: Iterable[object] = (),
    caption: object = "",
) -> str:
    """Return a table; the columns in `right` are aligned to the right."""
    kinds = [' class="right"' if column in set(right) else "" for column in columns]

    def row(tag: str, cells: Iterable[object]) -> str:
        shown = (f"<{tag}{kind}>{text(cell)}</{tag}>" for kind, cell in zip(kinds, cells))
        return f"<tr>{''.join(shown)}</tr>"

    title = f"<caption>{text(caption)}</caption>" if caption else ""
    body = "\n".join(row("td", cells) for cells in rows)
    head = f"<thead>{row('th', columns)}</thead>"
    return f"<table>{title}{head}<tbody>\n{body}\n</tbody></table>"


def page(title: object, parts: Iterable[str]) -> str:
    """Return a complete document."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<title>{text(title)}</title>\n<style>{_STYLE}</style></head>\n"
        f"<body><h1>{text(title)}</h1>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def bars(values: Sequence[tuple[str, float]]) -> str:
    """Return horizontal bars of ratios on a log axis, from 1: blue above, vermilion below."""
    left, width, line = 330, 420, 20
    logs = [math.log(value) for _, value in values]
    low, high = min([0.0, *logs]), max([0.0, *logs])
    scale = width / ((high - low) or 1.0)
    one = left - low * scale
    height = line * len(values) + 8
    drawn = [f'<svg viewBox="0 0 {left + width + 70} {height}" width="{left + width + 70}">']
    for i, ((label, value), log) in enumerate(zip(values, logs, strict=True)):
        y, x = line * i + 4, one + min(log, 0.0) * scale
        color = COLORS[0] if value >= 1 else COLORS[3]
        drawn += [
            f'<text x="{left - 8}" y="{y + 12}" text-anchor="end">{text(label)}</text>',
            f'<rect x="{x:.1f}" y="{y}" width="{abs(log) * scale + 1:.1f}" height="{line - 6}"'
            f' fill="{color}"/>',
            f'<text x="{one + max(log, 0.0) * scale + 6:.1f}" y="{y + 12}">{value:.2f}x</text>',
        ]
    drawn.append(f'<path d="M{one:.1f} 0V{height}" stroke="#333"/></svg>')
    return "".join(drawn)


def ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers between the limits."""
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw)) if raw > 0 else 1.0
    step = next(power * s for s in _STEPS if power * s >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def lines(curves: Mapping[str, Sequence[tuple[float, float]]], x_label: str, y_label: str) -> str:
    """Return a line plot with one color and dash per curve and the legend beside it."""
    left, top, width, height = 60, 12, 480, 260
    points = [point for curve in curves.values() for point in curve]
    xs, ys = zip(*points, strict=True)
    (x0, x1), (y0, y1) = ((min(v), max(v) if max(v) > min(v) else min(v) + 1.0) for v in (xs, ys))

    def at(x: float, y: float) -> tuple[float, float]:
        return left + (x - x0) / (x1 - x0) * width, top + (y1 - y) / (y1 - y0) * height

    drawn = [f'<svg viewBox="0 0 {left + width + 250} {top + height + 44}" width="790">']
    for y in ticks(y0, y1):
        _, v = at(x0, y)
        drawn.append(
            f'<path d="M{left} {v:.1f}h{width}" stroke="#ddd"/>'
            f'<text x="{left - 6}" y="{v + 4:.1f}" text-anchor="end">{y:g}</text>'
        )
    for x in ticks(x0, x1):
        u, _ = at(x, y0)
        drawn.append(f'<text x="{u:.1f}" y="{top + height + 16}" text-anchor="middle">{x:g}</text>')
    for i, (name, curve) in enumerate(curves.items()):
        dash = _DASHES[i // len(COLORS) % len(_DASHES)]
        style = f'stroke="{COLORS[i % len(COLORS)]}" stroke-width="2" stroke-dasharray="{dash}"'
        path = "L".join(f"{u:.1f} {v:.1f}" for u, v in (at(*point) for point in curve))
        y = top + 14 + 18 * i
        drawn.append(
            f'<path d="M{path}" fill="none" {style}/>'
            f'<path d="M{left + width + 14} {y - 4}h22" {style}/>'
            f'<text x="{left + width + 42}" y="{y}">{text(name)}</text>'
        )
    middle = left + width / 2
    drawn.append(
        f'<text x="{middle}" y="{top + height + 36}" text-anchor="middle">{text(x_label)}</text>'
        f'<text transform="translate(14 {top + height / 2}) rotate(-90)" text-anchor="middle">'
        f"{text(y_label)}</text></svg>"
    )
    return "".join(drawn)
