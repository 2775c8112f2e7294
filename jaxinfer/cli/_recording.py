"""The files that show what happened in a run: `--trace` and `--report`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxinfer.cli._errors import UserMistake, user_mistakes
from jaxinfer.core.latency import Capacity, summarize
from jaxinfer.core.observer import Observer, unobserved
from jaxinfer.core.scheduler import SchedulerConfig
from jaxinfer.core.timeline import TimelineRecorder

if TYPE_CHECKING:
    from jaxinfer.engine.report import ReportSection


_FILES_READ = ("dataset_path", "steps", "config")
"""Options whose files must not be overwritten."""


def add_file_options(group: argparse._ArgumentGroup) -> None:
    """Declare the options of the files that show a run."""
    group.add_argument("--trace", metavar="FILE", help="write a Chrome trace, for ui.perfetto.dev")
    group.add_argument("--report", metavar="FILE", help="write a page of HTML with the timeline as a picture")


def check_outputs(options: argparse.Namespace) -> None:
    """UserMistake when --trace or --report cannot be written, before the long part."""
    outputs = [Path(name) for name in (options.trace, options.report) if name is not None]
    if len({path.resolve() for path in outputs}) < len(outputs):
        raise UserMistake(f"--trace and --report would both write {options.trace}; give two files.")
    read = {Path(name).resolve() for name in (getattr(options, given, None) for given in _FILES_READ) if name}
    with user_mistakes():
        for path in outputs:
            if path.resolve() in read:
                raise UserMistake(f"{path} is read and would be overwritten; give another file.")
            _check_writable(path)


def _check_writable(path: Path) -> None:
    """OSError if it is not; leaves no empty file behind."""
    there = path.exists()
    if not there or path.is_file() or path.is_dir():  # opening a pipe would wait for its reader
        path.open("a").close()
    if not there:
        path.unlink()


class Recording:
    """What happens from now on, if the options ask for a file that shows it.

    UserMistake at the beginning when the file cannot be written.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        check_outputs(options)
        self._options = options
        self._recorder = None if options.trace is None and options.report is None else TimelineRecorder()

    @property
    def observer(self) -> Observer:
        """To be given to the engine."""
        return self._recorder or unobserved

    def write(self, title: str, facts: Sequence[tuple[str, str]], config: SchedulerConfig) -> None:
        """Write the files that were asked for."""
        if self._recorder is None:
            return
        from jaxinfer.engine.report import ReportSection

        timeline = self._recorder.timeline()
        section = ReportSection(title, facts, timeline, summarize(timeline, Capacity.of_scheduler(config)))
        write_files(self._options, [section])


def write_files(options: argparse.Namespace, sections: Sequence[ReportSection]) -> None:
    """What --trace and --report ask for; the trace is that of the last section."""
    from jaxinfer.engine.report import write_report
    from jaxinfer.engine.trace import write_trace

    with user_mistakes():
        if options.trace is not None:
            write_trace(sections[-1].timeline, options.trace)
        if options.report is not None:
            write_report(sections, options.report)
