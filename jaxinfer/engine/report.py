"""A timeline as one page of HTML: pictures and figures, nothing fetched, no script, readable in light and dark."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from jaxinfer.core.latency import Distribution, Summary, percentile
from jaxinfer.core.timeline import RoundTimeline, SequenceTimeline, Span, Timeline
from jaxinfer.engine.trace import sequence_name

MOST_ROWS = 150
"""Sequences drawn in a timeline; of a longer one the first are."""
_WIDTH, _LEFT, _RIGHT = 1000, 90, 20
_ROW, _AXIS = 16, 26
_PLOT = _WIDTH - _LEFT - _RIGHT
_BINS = 40
_POINTS = 400
_NARROW = 3.0
"""Decodes of fewer pixels are drawn as one bar."""


@dataclass(frozen=True)
class TimeUnit:
    """How times are written: in seconds with a unit by size, or as bare numbers of ticks; per: name of one of them."""

    per: str
    ticks: bool = False

    def text(self, value: float) -> str:
        """A time in this unit."""
        if self.ticks:
            return f"{value:.4g}"
        if abs(value) >= 1 or value == 0:
            return f"{value:.4g} s"
        return f"{value * 1e3:.4g} ms" if abs(value) >= 1e-3 else f"{value * 1e6:.4g} µs"


SECONDS = TimeUnit("s")
TICKS = TimeUnit("tick", ticks=True)


@dataclass(frozen=True)
class ReportSection:
    """One run: what it is called, what it was run with (label, value), what happened, and the figures of that."""

    title: str
    facts: Sequence[tuple[str, str]]
    timeline: Timeline
    summary: Summary
    unit: TimeUnit = SECONDS


def write_report(sections: Sequence[ReportSection], path: str | Path) -> None:
    """Write the page. OSError when the file cannot be written."""
    Path(path).write_text(report_html(sections), encoding="utf-8")


def report_html(sections: Sequence[ReportSection]) -> str:
    """The page."""
    title = escape(sections[0].title) if len(sections) == 1 else "jaxinfer"
    body = "".join(_section(section) for section in sections)
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>{body}</body></html>'
    )


def _section(section: ReportSection) -> str:
    rounds = section.timeline.rounds
    facts = "".join(f"<dt>{escape(label)}</dt><dd>{escape(value)}</dd>" for label, value in section.facts)
    bottleneck = section.summary.bottleneck
    parts = [
        f"<h1>{escape(section.title)}</h1><dl>{facts}</dl>",
        f"<p><b>Bottleneck: {escape(bottleneck.name)}.</b> {escape(_sentence(bottleneck.evidence))}</p>",
        _figures(section),
        f"<h2>Requests</h2>{_LEGEND}{_requests(section)}",
        f"<h2>Latencies</h2><div class=row>{''.join(_histograms(section))}</div>",
    ]
    if rounds:
        parts.append(f"<h2>KV pages</h2>{_pages(section)}<h2>Queue</h2>{_queue(section)}")
    return f"<section>{''.join(parts)}</section>"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


# Figures


def _figures(section: ReportSection) -> str:
    summary, unit = section.summary, section.unit
    head = "".join(f"<th>{name}</th>" for name in ("", "mean", "p50", "p90", "p99"))
    rows = "".join(f"<tr><th>{name}</th>{_cells(values, unit)}</tr>" for name, values in summary.latencies.items())
    good = [] if summary.good is None else [("within the objective", f"{summary.good} of {summary.sequences}")]
    counts = [
        ("complete", f"{summary.complete} of {summary.sequences}"),
        *good,
        ("duration", unit.text(summary.duration_s)),
        ("output tokens", f"{summary.output_tokens} ({summary.output_tokens_per_s:.4g}/{unit.per})"),
        ("KV pages held", f"{100 * summary.kv_mean:.0f}% on average, {100 * summary.kv_peak:.0f}% at most"),
        ("cache hits", f"{100 * summary.hit_rate:.1f}% of known tokens"),
        (
            "pages in host memory",
            f"{summary.host_pages_peak} at most, {summary.pages_out} out, {summary.pages_in} back",
        ),
        ("pages copied", str(summary.page_copies)),
        ("preemptions", str(summary.preemptions)),
        *_host(summary),
    ]
    other = "".join(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in counts)
    return f"<div class=row><table><tr>{head}</tr>{rows}</table><table>{other}</table></div>"


def _host(summary: Summary) -> list[tuple[str, str]]:
    if summary.host is None:
        return []  # a simulation has none
    return [
        ("host", f"{_share(summary.host_of_decode)} of a decode step"),
        ("device waits for the host", f"{_share(summary.host_exposed)} of the rounds' time"),
    ]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"


def _cells(values: Distribution | None, unit: TimeUnit) -> str:
    if values is None:
        return "<td>-</td>" * 4
    return "".join(f"<td>{unit.text(value)}</td>" for value in (values.mean, values.p50, values.p90, values.p99))


# Requests over time


def _requests(section: ReportSection) -> str:
    timeline = section.timeline
    shown = timeline.sequences[:MOST_ROWS]
    scale = _Scale(timeline.begin, max((_last_moment(s) for s in shown), default=timeline.begin))
    height = len(shown) * _ROW
    rows = "".join(_request(sequence, number * _ROW, scale, section.unit) for number, sequence in enumerate(shown))
    note = ""
    if len(shown) < len(timeline.sequences):
        note = f"<p class=note>The first {len(shown)} of {len(timeline.sequences)} are drawn.</p>"
    return _svg(height, f"{_time_axis(scale, height, section.unit)}{rows}") + note


def _request(sequence: SequenceTimeline, top: float, scale: _Scale, unit: TimeUnit) -> str:
    name = escape(sequence_name(sequence))
    label = name if len(name) <= 12 else f"{name[:11]}…"
    middle = top + _ROW / 2
    parts = [f"<text class=label x={_LEFT - 8} y={middle + 4:.0f} text-anchor=end>{label}</text>"]
    parts.append(_bar("wait", scale, sequence.arrival, _last_moment(sequence), middle - 1, 2, f"{name}: waits"))
    for span, count in _bars(sequence.spans, scale):
        said = _said(span, count, name, unit)
        parts.append(_bar(span.kind, scale, span.start, span.end, top + 3, _ROW - 6, said))
        if span.cached_tokens:
            parts.append(_bar("cached", scale, span.start, span.end, top + _ROW - 5, 2, said))
    for preemption in sequence.preemptions:
        x = scale(preemption.time)
        parts.append(f'<path class=preempted d="M{x:.1f} {top + 1}v{_ROW - 2}"><title>{name}: preempted</title></path>')
    times = sequence.token_times
    if times:
        said = f"{name}: first token after {unit.text(times[0] - sequence.arrival)}"
        parts.append(f"<circle class=first cx={scale(times[0]):.1f} cy={middle} r=3><title>{said}</title></circle>")
    return "".join(parts)


def _last_moment(sequence: SequenceTimeline) -> float:
    if sequence.finished_at is not None:
        return sequence.finished_at
    return sequence.spans[-1].end if sequence.spans else sequence.arrival


def _bars(spans: Sequence[Span], scale: _Scale) -> Iterator[tuple[Span, int]]:
    """Spans to draw with the number of decodes in each: narrow decodes that follow each other closely are one."""
    held: Span | None = None
    count = 0
    for span in spans:
        narrow = span.kind == "decode" and scale.pixels(span.end - span.start) < _NARROW
        if held is not None and narrow and scale.pixels(span.start - held.end) < _NARROW:
            held, count = held._replace(end=span.end), count + 1
            continue
        if held is not None:
            yield held, count
            held = None
        if narrow:
            held, count = span, 1
        else:
            yield span, 1
    if held is not None:
        yield held, count


def _said(span: Span, count: int, name: str, unit: TimeUnit) -> str:
    time = f"{unit.text(span.end - span.start)} in slot {span.slot}"
    if span.kind == "decode":
        return f"{name}: {count} decode{'s' if count > 1 else ''}, {time}"
    return f"{name}: prefill of {span.computed_tokens} tokens, {span.cached_tokens} more from the cache, {time}"


def _bar(kind: str, scale: _Scale, start: float, end: float, top: float, height: float, said: str) -> str:
    x = scale(start)
    width = max(0.8, scale(end) - x)
    return f"<rect class={kind} x={x:.1f} y={top:.1f} width={width:.1f} height={height}><title>{said}</title></rect>"


# Distributions


def _histograms(section: ReportSection) -> Iterator[str]:
    complete = [sequence for sequence in section.timeline.sequences if sequence.complete]
    values = {
        "TTFT": [s.ttft_s for s in complete if s.ttft_s is not None],
        "ITL": [gap for s in complete for gap in s.itls_s],
        "e2e": [s.e2e_s for s in complete if s.e2e_s is not None],
    }
    for name, found in values.items():
        if found:
            yield _histogram(name, sorted(found), section.unit)


def _histogram(name: str, ordered: Sequence[float], unit: TimeUnit) -> str:
    width, height, top = 320, 110, 42
    high = max(ordered[-1], 1e-12)
    counts = [0] * _BINS
    for value in ordered:
        counts[min(_BINS - 1, int(value / high * _BINS))] += 1
    step, most = width / _BINS, max(counts)
    bars = []
    for number, count in enumerate(counts):
        if count:
            tall = max(1.0, count / most * height)
            x, y = number * step, top + height - tall
            bars.append(
                f"<rect class=decode x={x:.1f} y={y:.1f} width={step - 1:.1f} height={tall:.1f}>"
                f"<title>{count} up to {unit.text((number + 1) / _BINS * high)}</title></rect>"
            )
    marks = []
    for row, share in enumerate((0.5, 0.9, 0.99)):
        value = percentile(ordered, share)
        x = value / high * width
        anchor = "end" if x > width / 2 else "start"
        shift = -3 if anchor == "end" else 3
        marks.append(
            f'<path class=mark d="M{x:.1f} {row * 13 + 4}V{top + height}"/>'
            f"<text class=label x={x + shift:.1f} y={row * 13 + 11} text-anchor={anchor}>"
            f"p{100 * share:.0f} {unit.text(value)}</text>"
        )
    axis = (
        f'<path class=axis d="M0 {top + height}H{width}"/><text class=label x=0 y={top + height + 15}>0</text>'
        f"<text class=label x={width} y={top + height + 15} text-anchor=end>{unit.text(high)}</text>"
    )
    picture = f'<svg viewBox="0 0 {width} {top + height + 20}" role=img>{"".join(bars)}{"".join(marks)}{axis}</svg>'
    return f"<figure class=small><figcaption>{name} ({len(ordered)})</figcaption>{picture}</figure>"


# Charts over time


def _pages(section: ReportSection) -> str:
    rounds = section.timeline.rounds
    total = sum(rounds[0].pages)
    layers: dict[str, Callable[[RoundTimeline], float]] = {
        "cached": lambda round_: round_.pages.active + round_.pages.cached,
        "active": lambda round_: round_.pages.active,
    }
    legend = (
        "<p class=note><span class='key active'></span> held by requests "
        "<span class='key cached'></span> kept as cache</p>"
    )
    return legend + _chart(section, layers, total, "area")


def _queue(section: ReportSection) -> str:
    layers: dict[str, Callable[[RoundTimeline], float]] = {
        "waiting": lambda round_: round_.waiting,
        "running": lambda round_: round_.running,
    }
    most = max(max(value(round_) for value in layers.values()) for round_ in section.timeline.rounds)
    legend = "<p class=note><span class='key waiting'></span> waiting <span class='key running'></span> running</p>"
    return legend + _chart(section, layers, max(1, most), "line")


def _chart(section: ReportSection, layers: dict[str, Callable[[RoundTimeline], float]], most: float, shape: str) -> str:
    timeline, height = section.timeline, 120
    scale = _Scale(timeline.begin, timeline.end)
    paths = []
    for name, value in layers.items():
        steps = [(scale(t), height * (1 - found / most)) for t, found in _steps(timeline.rounds, value, scale)]
        line = "".join(f"H{x:.1f}V{y:.1f}" for x, y in steps)
        end = f"H{scale(timeline.rounds[-1].end):.1f}V{height}"
        paths.append(f'<path class="{shape} {name}" d="M{steps[0][0]:.1f} {height}{line}{end}"/>')
    grid = "".join(
        f'<path class=grid d="M{_LEFT} {height * (1 - share):.0f}h{_PLOT}"/>'
        f"<text class=label x={_LEFT - 8} y={height * (1 - share) + 4:.0f} text-anchor=end>{share * most:.4g}</text>"
        for share in (0.0, 0.5, 1.0)
    )
    return _svg(height, f"{grid}{_time_axis(scale, height, section.unit)}{''.join(paths)}")


def _steps(
    rounds: Sequence[RoundTimeline], value: Callable[[RoundTimeline], float], scale: _Scale
) -> Iterator[tuple[float, float]]:
    """(time, value) of every round, or of the highest in each stretch of time when there are too many to draw."""
    stretch = scale.span / _POINTS
    current: int | None = None
    start = highest = 0.0
    for round_ in rounds:
        number = int((round_.start - scale.begin) / stretch)
        if number != current:
            if current is not None:
                yield start, highest
            current, start, highest = number, round_.start, value(round_)
        highest = max(highest, value(round_))
    yield start, highest


# Drawing


class _Scale:
    """Times to pixels."""

    def __init__(self, begin: float, end: float) -> None:
        self.begin = begin
        self.span = max(end - begin, 1e-9)

    def __call__(self, time: float) -> float:
        return _LEFT + self.pixels(time - self.begin)

    def pixels(self, seconds: float) -> float:
        return seconds / self.span * _PLOT


def _time_axis(scale: _Scale, height: float, unit: TimeUnit) -> str:
    rough = scale.span / 8
    magnitude = 10 ** math.floor(math.log10(rough))
    step = next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= rough)
    parts = []
    for number in range(int(scale.span / step + 1e-9) + 1):
        x = scale(scale.begin + number * step)
        parts.append(
            f'<path class=grid d="M{x:.1f} 0V{height + 4}"/>'
            f"<text class=label x={x:.1f} y={height + 18} text-anchor=middle>{unit.text(number * step)}</text>"
        )
    return "".join(parts)


def _svg(height: float, content: str) -> str:
    return f'<svg viewBox="0 -6 {_WIDTH} {height + _AXIS + 6}" role=img>{content}</svg>'


_LEGEND = (
    "<p class=note><span class='key wait'></span> waits <span class='key prefill'></span> prefill "
    "<span class='key cached'></span> with tokens from the cache <span class='key decode'></span> decode "
    "<span class='key first'></span> first token <span class='key preempted'></span> preempted</p>"
)
_STYLE = """
:root{color-scheme:light dark;--back:#fff;--text:#1c2330;--soft:#667085;--line:#e3e6eb;--wait:#b9c0cb;--prefill:#e08a1e;
--decode:#3b78c3;--cached:#4aa564;--first:#1c2330;--bad:#c9302c}
@media(prefers-color-scheme:dark){:root{--back:#14171c;--text:#e6e9ee;--soft:#98a2b3;--line:#2b313b;--wait:#4a5261;
--prefill:#f0a548;--decode:#6aa5ea;--cached:#62c07d;--first:#fff;--bad:#f2706b}}
body{background:var(--back);color:var(--text);font:15px/1.45 system-ui,sans-serif;max-width:1040px;margin:24px auto;
padding:0 20px}
h1{font-size:22px;margin:28px 0 8px}h2{font-size:16px;margin:26px 0 4px}
section+section{border-top:1px solid var(--line);margin-top:40px}
dl{display:grid;grid-template-columns:max-content 1fr;gap:2px 16px;margin:0 0 10px}dt{color:var(--soft)}dd{margin:0}
.row{display:flex;flex-wrap:wrap;gap:12px 40px;align-items:flex-start}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
td,th{padding:3px 12px 3px 0;text-align:right;border-bottom:1px solid var(--line);font-weight:400}
th:first-child{text-align:left;color:var(--soft)}
svg{width:100%;height:auto;display:block}figure{margin:0}.small{flex:1 1 260px;max-width:320px}
.label{font-size:11px;fill:var(--soft)}.note,figcaption{color:var(--soft);font-size:13px;margin:2px 0 6px}
.wait{fill:var(--wait);background:var(--wait)}.prefill{fill:var(--prefill);background:var(--prefill)}
.decode{fill:var(--decode);background:var(--decode)}.cached{fill:var(--cached);background:var(--cached)}
rect.prefill,rect.decode{stroke:var(--back);stroke-width:.6}
.first{fill:var(--first);background:var(--first);stroke:var(--back)}
path.preempted{stroke:var(--bad);stroke-width:2}.key.preempted{background:var(--bad)}
.grid{stroke:var(--line)}.axis{stroke:var(--soft)}.mark{stroke:var(--prefill);stroke-dasharray:3 2}
.area.active{fill:var(--decode)}.key.active{background:var(--decode)}.area.cached{fill:var(--cached);opacity:.55}
.line{fill:none;stroke-width:1.8}.line.waiting{stroke:var(--prefill)}.line.running{stroke:var(--decode)}
.key.waiting{background:var(--prefill)}.key.running{background:var(--decode)}
.key{display:inline-block;width:12px;height:12px;border-radius:2px;margin:0 3px 0 12px;vertical-align:-1px}
.key.first{border-radius:6px;width:8px;height:8px;vertical-align:1px}.key.preempted{width:3px}.key.wait{height:3px;vertical-align:3px}
"""
