"""Where a sequence ends: by a token, by length, or by a string that may lie across token borders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxinfer.core.request import Sequence
from jaxinfer.core.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a sequence ended: stop_reason is the stop string or stop id, None for end-of-sequence and length."""

    reason: Literal["stop", "length"]
    stop_reason: str | int | None = None


def banned_until_min_tokens(params: SamplingParams, eos_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Every id that could end the output, which min_tokens keeps from being sampled; empty without min_tokens."""
    if not params.min_tokens:
        return ()
    return tuple(dict.fromkeys((*eos_ids, *params.stop_token_ids)))


def finish_by_token(sequence: Sequence) -> Finish | None:
    """Whether the token sampled last ends the sequence: end of sequence first, then stop ids, then length."""
    request = sequence.request
    params = request.params
    count = len(sequence.output_ids)
    token = sequence.output_ids[-1]
    if count > params.min_tokens:
        if not params.ignore_eos and token in request.eos_ids:
            return Finish("stop")
        if token in params.stop_token_ids:
            return Finish("stop", token)
    if count >= request.max_new_tokens:
        return Finish("length")
    return None


class StopChecker:
    """Finds a request's stop strings in its text as it grows.

    Text is held back only while it could still become a stop string. The match that is complete first counts (of two
    that are complete at the same character, the one that begins first), so the result does not depend on how the text
    was cut into tokens.
    """

    def __init__(self, params: SamplingParams) -> None:
        self._stops = tuple(params.stop)
        self._include = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._longest = max(map(len, self._stops), default=0)
        self._pending = ""  # not yet delivered
        self._seen = ""  # the last characters, delivered or not, in which a stop string may have begun

    def push(self, delta: str, num_tokens: int) -> tuple[str, str | None]:
        """Take the text of one more token, the num_tokens-th, and return (text to deliver, stop string or None).

        A stop string that is complete within the first min_tokens tokens does not stop. After a stop string was
        returned there is nothing more to deliver.
        """
        if not self._stops:
            return delta, None
        self._pending += delta
        if delta and num_tokens > self._min_tokens:
            match = self._first_match(delta)
            if match is not None:
                start, stop = match
                end = start + len(stop) if self._include else start
                kept = self._pending[: max(0, len(self._pending) - len(self._seen) - len(delta) + end)]
                self._pending = ""
                return kept, stop
        self._remember(delta)
        return self._deliverable(), None

    def finish(self) -> str:
        """The text still held back, once no more will come."""
        rest, self._pending = self._pending, ""
        return rest

    def _first_match(self, delta: str) -> tuple[int, str] | None:
        """Start, within _seen + delta, of the stop string that is complete first."""
        text = self._seen + delta
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := self._find(text, stop)) >= 0]
        return min(found)[1:] if found else None

    def _find(self, text: str, stop: str) -> int:
        # Only a match that uses new text counts: an earlier one was passed over because of min_tokens.
        return text.find(stop, max(0, len(self._seen) - len(stop) + 1))

    def _remember(self, delta: str) -> None:
        text = self._seen + delta
        self._seen = text[max(0, len(text) - self._longest + 1) :]

    def _deliverable(self) -> str:
        held = 0 if self._include else self._held_length()
        cut = len(self._pending) - held
        delivered, self._pending = self._pending[:cut], self._pending[cut:]
        return delivered

    def _held_length(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        limit = min(len(self._seen), self._longest - 1)
        for length in range(limit, 0, -1):
            tail = self._seen[-length:]
            if any(len(stop) > length and stop.startswith(tail) for stop in self._stops):
                return length
        return 0
