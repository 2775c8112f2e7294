"""Chat templates in a process of their own, because a template is a stranger's program.

The sandbox keeps it from reaching out; no sandbox inside a process can bound what a single operation takes, such as
printing a list that holds itself twice, forty levels deep.  The process may use little memory and is ended when it
takes too long.
"""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from checkpoints._chat_template import MAX_OUTPUT_CHARACTERS, MAX_SECONDS, render_chat
from checkpoints._errors import CheckpointError

MEMORY_BYTES = 1 << 30
# Only this package's few light modules are wanted there, not what its __init__ imports.
_START = """
import sys, types
package = types.ModuleType("checkpoints")
package.__path__ = [sys.argv[1]]
sys.modules["checkpoints"] = package
from checkpoints._template_process import serve
serve(sys.stdin.buffer, sys.stdout.buffer)
"""


class TemplateProcess:
    """Renders templates; the process starts with the first one and lives as long as this object.

    `seconds` is what one rendering may take. Threads may share it, one rendering at a time.
    """

    def __init__(self, seconds: float = MAX_SECONDS + 2) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, template: str, values: Mapping[str, Any]) -> str:
        """As `render_chat`; values are plain data. Raises `CheckpointError` also when it takes too much."""
        try:
            request = json.dumps({"template": template, "values": values}).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(f"the messages and tools must be plain JSON data ({error}).") from None
        with self._lock:
            try:
                answer = self._ask(request)
            except BaseException:
                self._stop()
                raise
        if "refusal" in answer:
            raise CheckpointError(answer["refusal"])
        return answer["text"]

    def _ask(self, request: bytes) -> dict[str, str]:
        process = self._running()
        assert process.stdin
        assert process.stdout
        deadline = time.monotonic() + self._seconds
        try:
            _send(process.stdin, request)
            length = int.from_bytes(_receive(process.stdout, 8, deadline), "little")
            return json.loads(_receive(process.stdout, min(length, 16 * MAX_OUTPUT_CHARACTERS), deadline))
        except TimeoutError:
            raise CheckpointError(
                f"the chat template refuses these messages: it takes more than {self._seconds:g} seconds."
            ) from None
        except (OSError, EOFError, ValueError):
            raise CheckpointError(
                "the chat template cannot render these messages: it ended its process, most likely for want of memory."
            ) from None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, "-c", _START, str(Path(__file__).parent)]
            pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nowhere)
            self._end = weakref.finalize(self, _end, self._process)
        return self._process

    def _stop(self) -> None:
        if self._process is not None:
            self._end()
            self._process = None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            if pipe:
                pipe.close()
    process.wait()


def _send(pipe: IO[bytes], content: bytes) -> None:
    pipe.write(len(content).to_bytes(8, "little") + content)
    pipe.flush()


def _receive(pipe: IO[bytes], count: int, deadline: float) -> bytes:
    result = bytearray()
    while len(result) < count:
        if not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise TimeoutError
        piece = pipe.read1(count - len(result))  # type: ignore[attr-defined]
        if not piece:
            raise EOFError
        result += piece
    return bytes(result)


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """What the process does: render until nobody asks any more."""
    with contextlib.suppress(ImportError):  # Windows has no such limits
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    while header := requests.read(8):
        request = json.loads(requests.read(int.from_bytes(header, "little")))
        try:
            answer = {"text": render_chat(request["template"], request["values"])}
        except CheckpointError as error:
            answer = {"refusal": str(error)}
        _send(answers, json.dumps(answer).encode())
