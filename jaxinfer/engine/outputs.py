"""What a caller gets back, with vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from jaxinfer.core.request import FinishReason


class OutputKind(Enum):
    """How much of a request each RequestOutput carries."""

    CUMULATIVE = "cumulative"
    """Every output carries everything so far."""
    DELTA = "delta"
    """Every output carries only what is new; completions without news are left out."""
    FINAL_ONLY = "final_only"
    """One output, when the request has finished."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's natural log probability, its rank in the vocabulary (1 is the most likely) and its text."""

    logprob: float
    rank: int | None
    decoded_token: str | None


TokenLogprobs = dict[int, Logprob]
"""The token that stands at a position, and the most likely tokens there."""


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One of a request's n completions.

    Attributes:
        index: its number, 0 .. n-1.
        text: generated text; without the stop string or stop token unless the request asked for it.
        token_ids: sampled tokens, the one that ended the output included.
        cumulative_logprob: sum of the sampled tokens' log probabilities; None when logprobs were not asked for.
        logprobs: one entry per token of token_ids; None when not asked for.
        finish_reason: "stop", "length" or "abort"; None while it goes on.
        stop_reason: the stop string or stop id that ended it, "deadline" or "non-finite logits" if that aborted it;
            None for end of sequence, length and cancelling.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        """Whether this completion has ended."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Where a finished request's time went, in seconds; None for what never happened.

    Attributes:
        queue_s: from arrival to the first prefill work.
        ttft_s: from arrival to the first token.
        itl_s: mean time between two tokens of a completion; None if no completion has two.
        e2e_s: from arrival to the end.
        num_prompt_tokens: length of the prompt.
        num_output_tokens: sampled tokens of all completions.
        num_cached_tokens: prompt tokens of the first completion that were found in the prefix cache.
        num_preemptions: how often a completion lost its pages and was computed again.
    """

    queue_s: float | None
    ttft_s: float | None
    itl_s: float | None
    e2e_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request's progress or result.

    Attributes:
        request_id: the request.
        prompt: its text; None when it came as token ids.
        prompt_token_ids: its tokens.
        prompt_logprobs: one entry per prompt token, None for the first; None when not asked for or not yet complete.
        outputs: its completions (see OutputKind).
        finished: whether all completions have ended.
        metrics: timing, once finished.
        num_cached_tokens: prompt tokens of the first completion that were found in the prefix cache; None until it
            starts.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    metrics: RequestMetrics | None = None
    num_cached_tokens: int | None = None
