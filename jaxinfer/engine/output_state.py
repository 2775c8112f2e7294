"""Collects what a request has produced so far and shows it as RequestOutput."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from jaxinfer.core.detokenizer import IncrementalDetokenizer, TextDecoder
from jaxinfer.core.request import Request, Sequence
from jaxinfer.core.step import SampledToken
from jaxinfer.core.stop import StopChecker
from jaxinfer.engine.outputs import (
    CompletionOutput,
    Logprob,
    OutputKind,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
)

TokenText = Callable[[int], str]


class CompletionState:
    """Text and log probabilities of one sequence, and how much of them the caller has seen."""

    def __init__(self, sequence: Sequence, tokenizer: TextDecoder, token_text: TokenText) -> None:
        params = sequence.request.params
        self.sequence = sequence
        self._token_text = token_text
        self._keep_stop_token = params.include_stop_str_in_output
        self._detokenizer = IncrementalDetokenizer(tokenizer, sequence.request.prompt_ids, params.skip_special_tokens)
        self._stop = StopChecker(params)
        self._pieces: list[str] = []
        self._logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self._cumulative_logprob = 0.0
        self._shown_tokens = 0
        self._shown_end = False

    def push(self, token: SampledToken) -> str | None:
        """Take the token sampled last; returns the stop string its text completed, if any."""
        if self._logprobs is not None:
            self._logprobs.append(token_logprobs(token, self._token_text))
            self._cumulative_logprob += token.logprob or 0.0
        ended = self.sequence.finish_reason
        hide = ended == "stop" and not self._keep_stop_token
        delta = "" if hide else self._detokenizer.push(token.id)
        if ended is not None:
            delta += self._detokenizer.finish()
        text, stop = self._stop.push(delta, len(self.sequence.output_ids))
        if ended is not None and stop is None:
            text += self._stop.finish()
        self._pieces.append(text)
        return stop

    def abort(self) -> None:
        """Give out the text held back for a stop string that will not come."""
        self._pieces.append(self._stop.finish())

    def take_output(self, kind: OutputKind) -> CompletionOutput | None:
        """What to show the caller now; None if this is a delta without news."""
        sequence = self.sequence
        start = self._shown_tokens if kind is OutputKind.DELTA else 0
        if kind is OutputKind.DELTA and start == len(sequence.output_ids) and self._shown_end == self._ended:
            return None
        text = "".join(self._pieces)
        self._pieces = [] if kind is OutputKind.DELTA else [text]
        self._shown_tokens = len(sequence.output_ids)
        self._shown_end = self._ended
        return CompletionOutput(
            index=sequence.index,
            text=text,
            token_ids=tuple(sequence.output_ids[start:]),
            cumulative_logprob=None if self._logprobs is None else self._cumulative_logprob,
            logprobs=None if self._logprobs is None else tuple(self._logprobs[start:]),
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
        )

    @property
    def _ended(self) -> bool:
        return self.sequence.finish_reason is not None


class RequestState:
    """Everything the engine keeps about an unfinished request beside its schedule."""

    def __init__(
        self, request: Request, prompt: str | None, kind: OutputKind, tokenizer: TextDecoder, token_text: TokenText
    ) -> None:
        self.request = request
        self.kind = kind
        self.completions = [CompletionState(sequence, tokenizer, token_text) for sequence in request.sequences]
        self._prompt = prompt
        self._token_text = token_text
        self._prompt_logprobs: list[TokenLogprobs | None] | None = (
            None if request.params.prompt_logprobs is None else [None]
        )

    def add_prompt_logprobs(self, entries: SequenceOf[SampledToken]) -> None:
        """Take the next prompt tokens' log probabilities."""
        if self._prompt_logprobs is not None:
            self._prompt_logprobs.extend(token_logprobs(entry, self._token_text) for entry in entries)

    def abort(self) -> RequestOutput:
        """The last output of a request that was cancelled."""
        for completion in self.completions:
            if completion.sequence.finish_reason == "abort":
                completion.abort()
        return self._output()

    def take_output(self) -> RequestOutput | None:
        """What to show the caller now, if anything."""
        if self.kind is OutputKind.FINAL_ONLY and not self.request.finished:
            return None
        return self._output()

    def _output(self) -> RequestOutput:
        request = self.request
        shown = (completion.take_output(self.kind) for completion in self.completions)
        return RequestOutput(
            request_id=request.request_id,
            prompt=self._prompt,
            prompt_token_ids=request.prompt_ids,
            prompt_logprobs=self._complete_prompt_logprobs(),
            outputs=tuple(output for output in shown if output is not None),
            finished=request.finished,
            metrics=request_metrics(request) if request.finished else None,
            num_cached_tokens=request.sequences[0].prefix_tokens,
        )

    def _complete_prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        entries = self._prompt_logprobs
        if entries is None or len(entries) < len(self.request.prompt_ids):
            return None
        return tuple(entries)


def token_logprobs(token: SampledToken, token_text: TokenText) -> TokenLogprobs:
    """The token itself first, then the most likely ones, best first."""
    if token.logprob is None:
        raise RuntimeError(f"The runner gave no log probability for token {token.id}, which was asked for.")
    entries = {token.id: Logprob(token.logprob, token.rank, token_text(token.id))}
    for position, (token_id, logprob) in enumerate(token.top):
        entries.setdefault(token_id, Logprob(logprob, position + 1, token_text(token_id)))
    return entries


def request_metrics(request: Request) -> RequestMetrics:
    """Timing of a finished request; with several completions, from the first start to the last end."""
    sequences = request.sequences
    starts = [s.scheduled_at for s in sequences if s.scheduled_at is not None]
    firsts = [s.first_token_at for s in sequences if s.first_token_at is not None]
    ends = [s.finished_at for s in sequences if s.finished_at is not None]
    gaps = sum(max(0, len(s.output_ids) - 1) for s in sequences)
    decode_s = sum(
        s.last_token_at - s.first_token_at
        for s in sequences
        if s.last_token_at is not None and s.first_token_at is not None
    )
    return RequestMetrics(
        queue_s=min(starts) - request.arrival if starts else None,
        ttft_s=min(firsts) - request.arrival if firsts else None,
        itl_s=decode_s / gaps if gaps else None,
        e2e_s=max(ends) - request.arrival,
        num_prompt_tokens=len(request.prompt_ids),
        num_output_tokens=sum(len(s.output_ids) for s in sequences),
        num_cached_tokens=sequences[0].prefix_tokens or 0,
        num_preemptions=sum(s.num_preemptions for s in sequences),
    )
