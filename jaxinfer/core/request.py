"""The state of a request and of its sequences while they are served."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from jaxinfer.core.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort"]
SEED_RANGE = 2**32
_LARGEST_TIME = 2.0**63
"""In seconds, far beyond any use."""
DEADLINE = "deadline"
"""stop_reason of a sequence that was aborted because its deadline passed."""
NON_FINITE = "non-finite logits"
"""stop_reason of a sequence that was aborted because the model gave it logits that are not numbers."""


class RequestRefused(ValueError):
    """A request that can never be served as asked; the text says why in one sentence."""


@dataclass(eq=False, slots=True)
class Request:
    """One prompt and its n sequences. RequestRefused for values that no schedule can be made with.

    Attributes:
        request_id: unique among unfinished requests.
        prompt_ids: the prompt's tokens, at least one.
        params: generation parameters.
        seed: random stream of sequence 0; sequence i uses seed + i.
        eos_ids: the model's end-of-sequence ids.
        arrival: when the request came, in seconds of the scheduler's clock.
        priority: lower goes first under the policy "priority".
        timeout_s: seconds after its arrival when it ends, finished or not; None for never.
        cache_salt: its pages are shared only with requests of the same salt.
        max_new_tokens: params.max_tokens capped at what context and cache hold; set when the scheduler accepts it.
        sequences: the n sequences.
        num_unfinished: how many of them have not finished; kept by the scheduler.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    eos_ids: tuple[int, ...]
    arrival: float
    priority: int = 0
    timeout_s: float | None = None
    cache_salt: str = ""
    max_new_tokens: int = 0
    sequences: tuple[Sequence, ...] = field(init=False)
    num_unfinished: int = field(init=False)

    def __post_init__(self) -> None:
        # Queues are ordered by these: one that does not compare would be found in the middle of a change.
        for name, kind in (("request_id", str), ("priority", int), ("cache_salt", str)):
            value = getattr(self, name)
            if not isinstance(value, kind) or isinstance(value, bool):
                wanted = "an integer" if kind is int else "a text"
                raise RequestRefused(f"A request's {name} must be {wanted}, not {value!r}.")
        for name, value in (("arrival", self.arrival), ("timeout_s", 0 if self.timeout_s is None else self.timeout_s)):
            if not _is_time(value):
                raise RequestRefused(f"A request's {name} must be a finite number of seconds, not {value!r}.")
        self.num_unfinished = self.params.n
        self.sequences = tuple(Sequence(self, i, (self.seed + i) % SEED_RANGE) for i in range(self.params.n))

    @property
    def deadline(self) -> float | None:
        """When it ends, finished or not, in seconds of the scheduler's clock; None for never."""
        return None if self.timeout_s is None else self.arrival + self.timeout_s

    @property
    def finished(self) -> bool:
        """Whether every sequence has finished."""
        return self.num_unfinished == 0

    @property
    def max_positions(self) -> int:
        """Most positions a sequence of this request caches: the token sampled last is never cached."""
        return len(self.prompt_ids) + self.max_new_tokens - 1


@dataclass(eq=False, slots=True)
class Sequence:
    """One completion in the making.

    Attributes:
        request: the request it belongs to.
        index: its number among the request's n sequences.
        seed: start of its random stream.
        rank: its place in the order of service, lowest first; set when the scheduler accepts it.
        output_ids: tokens sampled so far.
        num_cached: leading positions whose K/V are in the cache, those of rounds in flight included.
        num_computed: leading positions computed by rounds that are committed, or found in the cache as full pages.
        num_pending: tokens that rounds in flight sample for it.
        num_shown: leading pages that the device's page table has.
        num_named: leading pages that are full, computed and offered to others.
        num_dropped: leading pages given back because they lie behind every window.
        page_hashes: the root of its chain, then the names of its leading full pages as far as they are known.
        prefix_tokens: positions it found in the cache when it first got a slot; None before.
        prompt_tokens_reported: prompt tokens after the first whose log probabilities were handed out.
        num_preemptions: how often it lost its slot.
        slot: its row on the device; None while waiting and after the end.
        pages: its physical pages in the order of positions; 0 for those given back.
        decoding: whether its next step feeds back the token sampled last (otherwise known tokens are still to prefill).
        finish_reason, stop_reason: None until it ends; stop_reason is the stop string or stop id if one ended it,
            DEADLINE or NON_FINITE if that aborted it.
        scheduled_at, first_token_at, last_token_at, finished_at: seconds of the scheduler's clock, None before.
    """

    request: Request
    index: int
    seed: int
    rank: tuple[int, int, int] = (0, 0, 0)
    output_ids: list[int] = field(default_factory=list)
    num_cached: int = 0
    num_computed: int = 0
    num_pending: int = 0
    num_shown: int = 0
    num_named: int = 0
    num_dropped: int = 0
    page_hashes: list[bytes] = field(default_factory=list)
    prefix_tokens: int | None = None
    prompt_tokens_reported: int = 0
    num_preemptions: int = 0
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    decoding: bool = False
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    scheduled_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    finished_at: float | None = None

    @property
    def num_known(self) -> int:
        """Tokens known so far, prompt and output."""
        return len(self.request.prompt_ids) + len(self.output_ids)

    def known_ids(self, start: int, end: int) -> tuple[int, ...]:
        """The known tokens at positions start .. end - 1."""
        prompt = self.request.prompt_ids
        if end <= len(prompt):
            return prompt[start:end]
        return (*prompt[start:], *self.output_ids[max(0, start - len(prompt)) : end - len(prompt)])


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _LARGEST_TIME
