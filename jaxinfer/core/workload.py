"""Requests to measure or simulate with: when they come, how long they are, what they share. Same seed, same work."""

from __future__ import annotations

import hashlib
import math
import random
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxinfer.core.json_files import parse_json
from jaxinfer.core.request import RequestRefused

LARGEST_LINE = 2**24
MOST_TOKENS = 2**29
"""Prompt tokens of a workload; they take 8 bytes each."""
_LATEST_ARRIVAL = 1e9
"""Seconds; about 30 years."""
_MOST_EVEN = 1e9
"""A burstiness beyond which the times between arrivals are equal anyway."""
_LARGEST_SHARED_VOCABULARY = 2**20
_KEYS = ("prompt", "prompt_token_ids", "input_tokens", "output_tokens", "arrival", "priority")


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request.

    Attributes:
        request_id: unique in the workload.
        arrival: when it comes, in seconds from the beginning.
        prompt_ids: its tokens, at least one.
        output_tokens: how many tokens it samples; nothing else ends it.
        priority: lower goes first under the policy "priority".
    """

    request_id: str
    arrival: float
    prompt_ids: tuple[int, ...]
    output_tokens: int
    priority: int = 0

    @property
    def positions(self) -> int:
        """Its tokens, prompt and output together."""
        return len(self.prompt_ids) + self.output_tokens

    def check_context(self, max_context: int) -> None:
        """RequestRefused if its output would be cut: then it would be less work than the workload says."""
        if self.positions > max_context:
            raise RequestRefused(
                f"The request has {len(self.prompt_ids)} prompt tokens and {self.output_tokens} new ones, but the"
                f" context holds {max_context}; make it shorter or max_context larger."
            )


@dataclass(frozen=True)
class Workload:
    """Requests in order of arrival; max_concurrency: most that are unfinished at once, None for no limit."""

    requests: tuple[WorkloadRequest, ...]
    max_concurrency: int | None = None

    @property
    def hash(self) -> str:
        """16 hexadecimal digits that are the same for the same work only."""
        digest = hashlib.sha256(f"{self.max_concurrency}".encode())
        for request in self.requests:
            digest.update(f"\n{request.arrival!r} {request.output_tokens} {len(request.prompt_ids)} ".encode())
            digest.update(array("q", request.prompt_ids).tobytes())
            if request.priority:
                digest.update(f" {request.priority}".encode())
        return digest.hexdigest()[:16]


@dataclass(frozen=True)
class WorkloadSpec:
    """A random workload.

    Attributes:
        num_prompts: requests in all.
        request_rate: requests per second on average; infinite for all at once.
        burstiness: shape of the gamma distribution of the times between them: 1 is a Poisson process, below 1 they
            come in bursts, above 1 more evenly.
        max_concurrency: most that are unfinished at once (closed loop); None for no limit.
        input_len: mean prompt length in tokens, without the prefix.
        output_len: mean number of tokens sampled.
        range_ratio: lengths are uniform within this share of the mean on either side, 0 .. 1.
        prefix_len: tokens at the beginning that requests share.
        prefix_share: share of the requests that begin with them, 0 .. 1.
        seed: same seed, same work.
    Raises ValueError, one sentence, for values out of range.
    """

    num_prompts: int = 100
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    input_len: int = 256
    output_len: int = 64
    range_ratio: float = 0.0
    prefix_len: int = 0
    prefix_share: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("num_prompts", 1), ("input_len", 1), ("output_len", 1), ("prefix_len", 0)):
            value, most = getattr(self, name), MOST_TOKENS if name == "num_prompts" else LARGEST_LINE
            if not least <= value <= most:
                raise ValueError(f"{name} must be {least} to {most}, not {value}.")
        for name in ("request_rate", "burstiness"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}.")
        if self.burstiness > _MOST_EVEN:
            raise ValueError(f"burstiness must be at most {_MOST_EVEN:g}, not {self.burstiness}.")
        if self.num_prompts / self.request_rate > _LATEST_ARRIVAL:
            raise ValueError(
                f"request_rate is {self.request_rate}, so that {self.num_prompts} requests would take more than"
                f" {_LATEST_ARRIVAL:g} s; let them come faster."
            )
        for name in ("range_ratio", "prefix_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be between 0 and 1, not {getattr(self, name)}.")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ValueError(f"max_concurrency must be at least 1, not {self.max_concurrency}.")


def random_workload(spec: WorkloadSpec, vocab_size: int) -> Workload:
    """The requests that a spec describes, of random tokens. ValueError if these are more than MOST_TOKENS."""
    _check_tokens(spec.num_prompts * (spec.input_len + spec.prefix_len))
    draw = random.Random(spec.seed)
    vocabulary = _vocabulary(vocab_size)
    prefix = tuple(draw.choices(vocabulary, k=spec.prefix_len))
    requests = []
    arrivals = _arrivals(spec, draw)
    for number in range(spec.num_prompts):
        start = prefix if draw.random() < spec.prefix_share else ()
        rest = draw.choices(vocabulary, k=_length(spec.input_len, spec.range_ratio, draw))
        output = _length(spec.output_len, spec.range_ratio, draw)
        requests.append(WorkloadRequest(str(number), next(arrivals), (*start, *rest), output))
    return Workload(tuple(requests), spec.max_concurrency)


def dataset_workload(
    lines: Iterable[str], spec: WorkloadSpec, vocab_size: int, encode: Callable[[str], list[int]] | None
) -> Workload:
    """Requests from JSON lines.

    Each line is an object with "prompt" (text), "prompt_token_ids" or "input_tokens" (so many random tokens), perhaps
    "output_tokens" (default: spec.output_len), "priority" (default: 0) and "arrival" in seconds (in all lines or in
    none; default: by the spec's rate). Of the spec, lengths and prefix are not used; at most num_prompts lines are.
    encode: text -> token ids; None when there is no tokenizer.
    Raises ValueError, naming the line, for anything else.
    """
    draw = random.Random(spec.seed)
    arrivals = _arrivals(spec, draw)
    vocabulary = _vocabulary(vocab_size)
    requests: list[WorkloadRequest] = []
    timed: list[bool] = []
    tokens = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if len(requests) == spec.num_prompts:
            break
        entry = _entry(line, number)
        prompt = _prompt(entry, number, vocabulary, encode, draw)
        tokens += len(prompt)
        _check_tokens(tokens)
        output = _whole(entry.get("output_tokens", spec.output_len), "output_tokens", number)
        timed.append("arrival" in entry)
        arrival = _time(entry["arrival"], number) if timed[-1] else next(arrivals)
        requests.append(WorkloadRequest(str(len(requests)), arrival, prompt, output, _priority(entry, number)))
    if not requests:
        raise ValueError("The dataset has no requests.")
    if any(timed) and not all(timed):
        raise ValueError(
            f"Request {timed.index(not timed[0])} of the dataset and request 0 disagree on having 'arrival'."
        )
    return Workload(tuple(sorted(requests, key=lambda request: request.arrival)), spec.max_concurrency)


class Feed:
    """Hands out a workload's requests as they come due; `begin` is when the workload starts, in the clock's seconds."""

    def __init__(self, workload: Workload, begin: float) -> None:
        self._begin = begin
        self._pending = deque(workload.requests)
        self._limit = math.inf if workload.max_concurrency is None else workload.max_concurrency
        self._was_full = False

    def take(self, now: float, unfinished: int) -> Iterator[tuple[WorkloadRequest, float]]:
        """Requests due at `now`, each with its arrival, while `unfinished` others are still served.

        A request that the concurrency limit held back arrives when there is room.
        """
        held = self._was_full
        while (due := self.next_arrival) is not None and due <= now and unfinished < self._limit:
            unfinished += 1
            yield self._pending.popleft(), now if held else due
        self._was_full = unfinished >= self._limit

    @property
    def next_arrival(self) -> float | None:
        """When the next request is due; None when there are no more."""
        return self._begin + self._pending[0].arrival if self._pending else None


def _check_tokens(count: int) -> None:
    if count > MOST_TOKENS:
        raise ValueError(
            f"The prompts have {count} tokens together, but a workload keeps at most {MOST_TOKENS}; take fewer or"
            " shorter ones."
        )


def _vocabulary(size: int) -> Sequence[int]:
    """Token ids to draw from: those of a list are shared by all prompts, a range makes new numbers each time."""
    return list(range(size)) if size <= _LARGEST_SHARED_VOCABULARY else range(size)


def _arrivals(spec: WorkloadSpec, draw: random.Random) -> Iterator[float]:
    """The first at 0, the times between them from a gamma distribution of the spec's mean and shape."""
    # Arrivals have a random stream of their own, so that another rate leaves lengths and tokens as they are.
    own = random.Random(draw.getrandbits(64))
    time = 0.0
    while True:
        yield time
        if math.isfinite(spec.request_rate):
            time += own.gammavariate(spec.burstiness, 1 / (spec.request_rate * spec.burstiness))


def _length(mean: int, ratio: float, draw: random.Random) -> int:
    return draw.randint(max(1, math.floor(mean * (1 - ratio))), math.ceil(mean * (1 + ratio)))


def _entry(line: str, number: int) -> Mapping[str, Any]:
    if len(line) > LARGEST_LINE:
        raise ValueError(f"Line {number} of the dataset is longer than {LARGEST_LINE} characters.")
    entry = parse_json(line, f"Line {number} of the dataset")
    if not isinstance(entry, dict):
        raise ValueError(f"Line {number} of the dataset is not a JSON object.")
    for key in entry:
        if key not in _KEYS:
            raise ValueError(f"Line {number} of the dataset has the key {key!r}; the keys are {', '.join(_KEYS)}.")
    return entry


def _prompt(
    entry: Mapping[str, Any],
    number: int,
    vocabulary: Sequence[int],
    encode: Callable[[str], list[int]] | None,
    draw: random.Random,
) -> tuple[int, ...]:
    given = [key for key in ("prompt", "prompt_token_ids", "input_tokens") if key in entry]
    if len(given) != 1:
        raise ValueError(f"Line {number} of the dataset needs one of prompt, prompt_token_ids and input_tokens.")
    value = entry[given[0]]
    if given[0] == "input_tokens":
        return tuple(draw.choices(vocabulary, k=_whole(value, "input_tokens", number)))
    if given[0] == "prompt":
        if encode is None:
            raise ValueError(
                f"Line {number} of the dataset has a text, but a simulation has no tokenizer; give input_tokens."
            )
        value = encode(value) if isinstance(value, str) and _is_unicode(value) else None
    if not isinstance(value, list) or not value:
        raise ValueError(f"Line {number} of the dataset has a {given[0]} without tokens.")
    for token in value:
        if not _is_whole(token) or not 0 <= token < len(vocabulary):
            last = len(vocabulary) - 1
            raise ValueError(f"Line {number} of the dataset has token id {token!r}, not one of 0 to {last}.")
    return tuple(value)


def _whole(value: Any, key: str, number: int) -> int:
    if not _is_whole(value) or not 1 <= value <= LARGEST_LINE:
        raise ValueError(f"Line {number} of the dataset has {key} {value!r}, which must be 1 to {LARGEST_LINE}.")
    return value


def _priority(entry: Mapping[str, Any], number: int) -> int:
    value = entry.get("priority", 0)
    if not _is_whole(value) or abs(value) > LARGEST_LINE:
        raise ValueError(f"Line {number} of the dataset has priority {value!r}, which must be an integer.")
    return value


def _time(value: Any, number: int) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= _LATEST_ARRIVAL:
        raise ValueError(
            f"Line {number} of the dataset has arrival {value!r}, which must be seconds, 0 to {_LATEST_ARRIVAL:g}."
        )
    return float(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_unicode(text: str) -> bool:
    """Whether it has no half of a character, which JSON can write."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
