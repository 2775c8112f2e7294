"""A timeline as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

One track for each slot, one for the device and one for the host, the wait of every request, and counters of pages,
requests and tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxinfer.core.timeline import RoundTimeline, SequenceTimeline, Timeline

_PROCESS = 1
_DEVICE, _HOST, _FIRST_SLOT = 2, 3, 10
"""Track numbers; Perfetto shows tracks in their order, and takes one with the process's number for its main thread."""


def write_trace(timeline: Timeline, path: str | Path) -> None:
    """Write the trace. OSError when the file cannot be written."""
    Path(path).write_text(json.dumps(chrome_trace(timeline)), encoding="utf-8")


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The trace as a JSON object; times are microseconds from the beginning of the timeline."""
    events = [*_names(timeline)]
    for round_ in timeline.rounds:
        events += _round_events(round_, timeline.begin)
    for number, sequence in enumerate(timeline.sequences):
        events += _sequence_events(sequence, number, timeline.begin)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _names(timeline: Timeline) -> Iterator[dict[str, Any]]:
    slots = sorted({span.slot for sequence in timeline.sequences for span in sequence.spans})
    tracks = {_DEVICE: "device", _HOST: "host"} | {_FIRST_SLOT + slot: f"slot {slot}" for slot in slots}
    yield {"ph": "M", "pid": _PROCESS, "name": "process_name", "args": {"name": "jaxinfer"}}
    for track, name in tracks.items():
        yield {"ph": "M", "pid": _PROCESS, "tid": track, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": _PROCESS, "tid": track, "name": "thread_sort_index", "args": {"sort_index": track}}


def _round_events(round_: RoundTimeline, begin: float) -> Iterator[dict[str, Any]]:
    work = {
        "decodes": round_.decodes,
        "prefill rows": round_.prefill_rows,
        "prefill tokens": round_.prefill_tokens,
    }
    name = "decode" if not round_.prefill_rows else "prefill" if not round_.decodes else "decode + prefill"
    yield _span(_DEVICE, name, round_.start, round_.end, begin, work)
    yield _span(_HOST, "schedule", round_.host_start, round_.dispatched, begin, {})
    yield _span(_HOST, "outputs", round_.end, round_.host_end, begin, {})
    counters = {
        "pages": round_.pages._asdict(),
        "pages in host memory": {"pages": round_.host_pages},
        "page moves": {"out": round_.pages_out, "in": round_.pages_in, "copied": round_.page_copies},
        "requests": {"waiting": round_.waiting, "running": round_.running},
        "tokens": {"decode": round_.decodes, "prefill": round_.prefill_tokens},
    }
    for counter, values in counters.items():
        yield {"ph": "C", "pid": _PROCESS, "name": counter, "ts": _micros(round_.start, begin), "args": values}


def _sequence_events(sequence: SequenceTimeline, number: int, begin: float) -> Iterator[dict[str, Any]]:
    name = sequence_name(sequence)
    work_began = sequence.spans[0].start if sequence.spans else sequence.finished_at
    if work_began is not None:
        wait = {"pid": _PROCESS, "cat": "queue", "id": number, "name": f"{name} queued"}
        yield wait | {"ph": "b", "ts": _micros(sequence.arrival, begin)}
        yield wait | {"ph": "e", "ts": _micros(work_began, begin)}
    first_token = True
    for span in sequence.spans:
        track = _FIRST_SLOT + span.slot
        counts = {"request": name, "computed": span.computed_tokens, "cached": span.cached_tokens}
        yield _span(track, f"{span.kind} {name}", span.start, span.end, begin, counts)
        if span.sampled and first_token:
            yield _instant(track, f"first token {name}", span.end, begin)
            first_token = False
    for preemption in sequence.preemptions:
        yield _instant(_FIRST_SLOT + preemption.slot, f"preempted {name}", preemption.time, begin)
    if sequence.finished_at is not None and sequence.spans:
        track = _FIRST_SLOT + sequence.spans[-1].slot
        yield _instant(track, f"finished {name} ({sequence.reason})", sequence.finished_at, begin)


def sequence_name(sequence: SequenceTimeline) -> str:
    """How a sequence is called where people read it: its request, and its number if that is not 0."""
    request_id, index = sequence.sequence
    return f"{request_id}/{index}" if index else request_id


def _span(track: int, name: str, start: float, end: float, begin: float, arguments: dict[str, Any]) -> dict[str, Any]:
    micros = _micros(start, begin)
    return {
        "ph": "X",
        "pid": _PROCESS,
        "tid": track,
        "name": name,
        "ts": micros,
        "dur": round(_micros(end, begin) - micros, 3),
        "args": arguments,
    }


def _instant(track: int, name: str, time: float, begin: float) -> dict[str, Any]:
    return {"ph": "i", "s": "t", "pid": _PROCESS, "tid": track, "name": name, "ts": _micros(time, begin)}


def _micros(time: float, begin: float) -> float:
    return round((time - begin) * 1e6, 3)
