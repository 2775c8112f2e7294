"""The Chrome trace and the HTML report of a timeline."""

from __future__ import annotations

import html.parser
import json
import re
import xml.etree.ElementTree as ElementTree

import pytest
from rounds import finished, prefill, queued, round_of

from jaxinfer.core.latency import Capacity, Slo, summarize
from jaxinfer.core.observer import SequenceId, SequencePreempted
from jaxinfer.core.step import PageCopy, PageIn, PageOut
from jaxinfer.core.timeline import TimelineRecorder
from jaxinfer.engine.report import MOST_ROWS, ReportSection, report_html, write_report
from jaxinfer.engine.trace import chrome_trace, write_trace

HOSTILE = '<script>alert("x")</script>'
CAPACITY = Capacity(2, 10, 8)


def timeline(name="a", others=0):
    recorder = TimelineRecorder()
    events = (
        queued(name, 100.0, 10),
        queued("waiting", 100.5, 3),
        round_of(101.0, 102.0, {0: name}, prefills=[prefill(0, 3, 4, sample=False)], entered=[0], waiting=1),
        round_of(103.0, 104.0, {0: name}, prefills=[prefill(0, 3, 7)], waiting=1, active=3, cached=2),
        SequencePreempted(104.5, SequenceId(name, 0), 0),
        round_of(105.0, 106.0, {1: name}, prefills=[prefill(1, 11)], entered=[1]),
        *(round_of(106.5 + i, 107.0 + i, {1: name}, decodes=[1]) for i in range(3)),
        finished(name, 109.0, 5, "stop"),
        *(queued(f"other {i}", 109.0, 1) for i in range(others)),
    )
    for event in events:
        recorder(event)
    return recorder.timeline()


def section(**changes) -> ReportSection:
    found = timeline(**changes)
    return ReportSection("A run", [("seed", "7")], found, summarize(found, CAPACITY, Slo.parse("ttft:1s")))


def test_trace_names_its_tracks_and_has_every_span():
    events = chrome_trace(timeline())["traceEvents"]
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert sorted(tracks.values()) == ["device", "host", "slot 0", "slot 1"]
    spans = [(tracks[e["tid"]], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert ("slot 0", "prefill a", 1e6, 1e6) in spans
    assert ("slot 1", "decode a", 6.5e6, 0.5e6) in spans
    assert ("device", "prefill", 3e6, 1e6) in spans
    assert ("host", "schedule", 2.75e6, 0.25e6) in spans
    assert ("host", "outputs", 4e6, 0.25e6) in spans
    assert [name for track, name, *_ in spans if track == "slot 1"] == ["prefill a", *["decode a"] * 3]
    first = next(event for event in events if event["ph"] == "X" and event["name"] == "prefill a")
    assert first["args"] == {"request": "a", "computed": 3, "cached": 4}


def test_trace_instants_waits_and_counters():
    events = chrome_trace(timeline())["traceEvents"]
    instants = {event["name"]: event["ts"] for event in events if event["ph"] == "i"}
    assert instants == {"first token a": 4e6, "preempted a": 4.5e6, "finished a (stop)": 9e6}
    waits = [(e["ph"], e["id"], e["ts"]) for e in events if e.get("cat") == "queue"]
    assert waits == [("b", 0, 0.0), ("e", 0, 1e6)]  # the other one still waits
    pages = [event["args"] for event in events if event["ph"] == "C" and event["name"] == "pages"]
    assert pages[1] == {"active": 3, "cached": 2, "free": 5}
    requests = [event["args"] for event in events if event["ph"] == "C" and event["name"] == "requests"]
    assert requests[0] == {"waiting": 1, "running": 1}


def test_trace_file(tmp_path):
    write_trace(timeline(), tmp_path / "out.json")
    written = json.loads((tmp_path / "out.json").read_text())
    assert written == chrome_trace(timeline())
    for event in written["traceEvents"]:
        assert {"ph", "pid", "name"} <= event.keys()
        assert event["ph"] == "M" or event["ts"] >= 0


class Page(html.parser.HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text += data


def test_report_is_self_contained_and_escapes_names():
    text = report_html([section(name=HOSTILE)])
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name in ("src", "href") or name.startswith("on")]
    assert "url(" not in text
    assert "http" not in text
    assert HOSTILE in page.text  # as text, in a tooltip
    assert "prefers-color-scheme:dark" in text


def test_report_draws_what_happened():
    text = report_html([section()])
    titles = re.findall(r"<title>(.*?)</title>", text)
    assert "a: prefill of 3 tokens, 4 more from the cache, 1 s in slot 0" in titles
    assert titles.count("a: 1 decode, 500 ms in slot 1") == 3
    assert "a: first token after 4 s" in titles
    assert "a: preempted" in titles
    text_only = Page(text).text
    assert "complete1 of 2" in text_only
    assert "within the objective0 of 2" in text_only
    assert "preemptions1" in text_only
    assert "round on the host500 ms" in text_only
    assert "device waits for the host" in text_only
    assert "Bottleneck: " in text_only


def test_report_pictures_stay_inside():
    for match in re.finditer(r'<svg viewBox="0 (-?\d+) (\d+) ([\d.]+)"', report_html([section()])):
        assert float(match[3]) > 0
    for x, width in re.findall(r"<rect class=\w+ x=([\d.]+) y=[\d.]+ width=([\d.]+)", report_html([section()])):
        assert float(x) >= 0
        assert float(x) + float(width) <= 1001


def test_report_styles_are_well_formed():
    style = re.search(r"<style>(.*?)</style>", report_html([section()]), re.S)[1]
    assert style.count("{") == style.count("}")
    assert ElementTree.fromstring(f"<style>{style.replace('<', '')}</style>").tag == "style"


def test_long_timelines_are_cut_and_say_so():
    text = Page(report_html([section(others=MOST_ROWS)])).text
    assert f"The first {MOST_ROWS} of {MOST_ROWS + 2} are drawn." in text


def test_many_narrow_decodes_are_one_bar():
    recorder = TimelineRecorder()
    recorder(queued("a", 0.0, 4))
    recorder(round_of(0.25, 1.0, {0: "a"}, prefills=[prefill(0, 4)], entered=[0]))
    for i in range(5000):
        recorder(round_of(1.0 + i, 2.0 + i, {0: "a"}, decodes=[0]))
    found = recorder.timeline()
    text = report_html([ReportSection("long", [], found, summarize(found, CAPACITY))])
    assert "a: 5000 decodes" in text
    assert len(text) < 100_000


def test_several_runs_and_none(tmp_path):
    empty = TimelineRecorder().timeline()
    write_report([section(), ReportSection("B run", [], empty, summarize(empty, CAPACITY))], tmp_path / "out.html")
    text = (tmp_path / "out.html").read_text()
    assert text.count("<section>") == 2
    assert "B run" in text
    with pytest.raises(OSError, match="Is a directory"):
        write_report([section()], tmp_path)


def test_page_moves_are_shown():
    recorder = TimelineRecorder()
    recorder(queued("a", 0.0, 10))
    moves = ((PageOut(1, 0), PageOut(2, 1)), (PageCopy(3, 4),), (PageIn(1, 6), PageIn(0, 7), PageIn(2, 8)))
    recorder(round_of(1.0, 2.0, {0: "a"}, prefills=[prefill(0, 3)], entered=[0], moves=moves, host=5))
    recorder(round_of(2.0, 3.0, {0: "a"}, decodes=[0], moves=(moves[0], (), ()), host=4))
    found = recorder.timeline()
    summary = summarize(found, CAPACITY)
    figures = (summary.host_pages_peak, summary.pages_out, summary.pages_in, summary.page_copies)
    assert figures == (5, 4, 3, 1)
    counters = {}
    for event in chrome_trace(found)["traceEvents"]:
        if event["ph"] == "C":
            counters.setdefault(event["name"], []).append(event["args"])
    assert counters["page moves"] == [{"out": 2, "in": 3, "copied": 1}, {"out": 2, "in": 0, "copied": 0}]
    assert counters["pages in host memory"] == [{"pages": 5}, {"pages": 4}]
    page = report_html([ReportSection("A run", [], found, summary)])
    assert "5 at most, 4 out, 3 back" in page
