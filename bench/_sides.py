"""The other ends of comparisons: processes that answer requests (see ``_answers.py``) one at a time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any


class Side:
    """One process; `ask` blocks until it has answered.

    name: for messages. command: what to start. environment: variables besides this process's own.
    about: what it said when it was ready. started: when it was started, by time.perf_counter.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self.name = name
        self.started = time.perf_counter()
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - lives as long as the process
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                env={**os.environ, **(environment or {})},
                start_new_session=True,  # so that it can be paused and ended with the processes that it starts
            )
        except OSError as error:
            raise SystemExit(f"{command[0]} cannot be started: {error.strerror}") from None
        self.about = self._read()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        if "error" in answer:
            self.close()
            raise SystemExit(f"{self.name} refused a request: {answer['error']}")
        return answer

    def pause(self) -> None:
        """Stop it, so that it takes no time from the others while it has nothing to do."""
        self._signal("SIGSTOP")

    def resume(self) -> None:
        self._signal("SIGCONT")

    def close(self) -> None:
        assert self._process.stdin is not None
        self.resume()
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._signal("SIGKILL")
            self._process.wait()
        self._signal("SIGKILL")  # what it started and left behind
        self._log.close()

    def _signal(self, name: str) -> None:
        if sys.platform == "win32":
            return
        try:
            os.killpg(self._process.pid, getattr(signal, name))
        except ProcessLookupError:
            return  # it has ended

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            lines = self._log.read().strip().splitlines() or ["it said nothing"]
            self._signal("SIGKILL")
            raise SystemExit(f"{self.name} ended: {lines[-1][:300]}")
        return json.loads(line)
