"""The engine's loop: schedule a round, run it on the device, turn its tokens into outputs."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Literal, Protocol

from jaxinfer.core.observer import Observer, RoundFinished, unobserved
from jaxinfer.core.request import SEED_RANGE, Request, Sequence
from jaxinfer.core.sampling_params import SamplingParams
from jaxinfer.core.scheduler import Scheduler, SchedulerConfig, SequenceProgress
from jaxinfer.core.step import StepResult, StepWork
from jaxinfer.engine.interrupts import interrupts_held
from jaxinfer.engine.output_state import RequestState
from jaxinfer.engine.outputs import OutputKind, RequestOutput
from jaxinfer.engine.prompts import Prompt, Tokenizer, check_params, encode_prompt

_TOKEN_TEXTS_KEPT = 65536


class Limits(Protocol):
    """What a runner was built for; see SchedulerConfig for the meaning."""

    @property
    def max_slots(self) -> int: ...  # noqa: D102
    @property
    def page_size(self) -> int: ...  # noqa: D102
    @property
    def num_pages(self) -> int: ...  # noqa: D102
    @property
    def max_context(self) -> int: ...  # noqa: D102
    @property
    def max_batched_tokens(self) -> int: ...  # noqa: D102
    @property
    def max_prefill_rows(self) -> int: ...  # noqa: D102
    @property
    def vocab_size(self) -> int: ...  # noqa: D102


class Runner(Protocol):
    """Executes rounds on the device."""

    @property
    def limits(self) -> Limits:
        """What it was built for."""
        ...

    def execute(self, work: StepWork, /) -> StepResult:
        """Run one round and wait for its result."""
        ...

    def recover(self) -> bool:
        """Become usable again after an exception out of `execute`; True if what was cached is lost."""
        ...


class Engine:
    """Serves many requests at once on one runner.

    `add_request` queues, `step` runs one round and returns what is new, `abort` ends a request at any moment. A mistake
    in a request is a ValueError from `add_request` and disturbs no other request. If a round fails or is interrupted,
    `step` raises, the requests in that round end with reason "abort" (their outputs come with the next `step`) and the
    others go on; if the cache was lost with it, every request that had begun ends so. In the main thread Ctrl-C waits
    for the end of the round and ends no request; a second one interrupts the round. A sequence whose logits are not
    finite numbers ends alone, with reason "abort" and stop_reason NON_FINITE. Not thread-safe: call it from one thread,
    or from one at a time.

    Args:
        runner: executes rounds.
        tokenizer: the model's tokenizer.
        mode: "continuous" batching or "static" waves.
        policy, enable_prefix_caching, enable_chunked_prefill, reserve_full: see SchedulerConfig.
        model_version: names model, weights and adapter for the prefix cache.
        seed: makes the random streams of requests without a seed of their own repeatable.
        clock: seconds; arrivals are given and metrics measured in it.
        observer: told of every event.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer,
        *,
        mode: Literal["continuous", "static"] = "continuous",
        policy: Literal["fcfs", "priority"] = "fcfs",
        enable_prefix_caching: bool = True,
        enable_chunked_prefill: bool = True,
        reserve_full: bool = False,
        model_version: str = "",
        seed: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        observer: Observer = unobserved,
    ) -> None:
        limits = runner.limits
        config = SchedulerConfig(
            max_slots=limits.max_slots,
            page_size=limits.page_size,
            num_pages=limits.num_pages,
            max_context=limits.max_context,
            max_batched_tokens=limits.max_batched_tokens,
            mode=mode,
            max_prefill_rows=limits.max_prefill_rows,
            policy=policy,
            enable_prefix_caching=enable_prefix_caching,
            enable_chunked_prefill=enable_chunked_prefill,
            reserve_full=reserve_full,
        )
        self.runner = runner
        self.tokenizer = tokenizer
        self.scheduler = Scheduler(config, clock, observer, model_version)
        self._vocab_size = limits.vocab_size
        self._eos_ids = tuple(token_id for token_id in tokenizer.eos_ids if 0 <= token_id < limits.vocab_size)
        self._clock = clock
        self._observer = observer
        self._random = random.Random(seed)
        self._token_text = lru_cache(_TOKEN_TEXTS_KEPT)(lambda token_id: tokenizer.decode([token_id], False))
        self._states: dict[str, RequestState] = {}
        self._undelivered: list[RequestOutput] = []
        self._torn = False  # whether a failed round still has to be cleared away

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has anything to do or to hand out."""
        return bool(self._states or self._undelivered)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        arrival: float | None = None,
        output_kind: OutputKind = OutputKind.CUMULATIVE,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
        cache_salt: str = "",
    ) -> None:
        """Queue a request.

        Args:
            request_id: unique among unfinished requests.
            prompt: text (encoded with the tokenizer's special tokens) or token ids (taken as they are).
            params: generation parameters; None for the defaults.
            arrival: when the request came, in seconds of the engine's clock; None for now.
            output_kind: how much each of its outputs carries.
            priority: lower goes first; only with the policy "priority".
            timeout_s: seconds after its arrival when the request ends, finished or not, with reason "abort" and
                stop_reason DEADLINE; None for no limit.
            cache_salt: cached prefixes are shared only between requests of the same salt.

        Raises:
            RequestRefused: (a ValueError) the prompt is empty or has ids outside the vocabulary, a parameter names such
                an id, the request can never fit the context or the cache, or its id is in use.
        """
        params = params or SamplingParams()
        text, prompt_ids = encode_prompt(prompt, self.tokenizer, self._vocab_size)
        check_params(params, self._vocab_size)
        seed = self._random.randrange(SEED_RANGE) if params.seed is None else params.seed
        now = self._clock() if arrival is None else arrival
        deadline = None if timeout_s is None else now + timeout_s
        request = Request(
            request_id,
            prompt_ids,
            params,
            seed,
            self._eos_ids,
            now,
            priority=priority,
            deadline=deadline,
            cache_salt=cache_salt,
        )
        state = RequestState(request, text, output_kind, self.tokenizer, self._token_text)
        with interrupts_held():
            self.scheduler.add(request)
            self._states[request_id] = state

    def step(self) -> list[RequestOutput]:
        """Run one round; outputs of the requests it brought forward."""
        # Outputs are kept until nothing can fail any more, so that an exception loses none.
        with interrupts_held():
            self._finish_recovery()
            finished = self._run_round()
            if finished is not None:
                self._observer(finished)
        outputs, self._undelivered = self._undelivered, []
        return outputs

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now; its last output (reason "abort"), or None if no such request is unfinished."""
        with interrupts_held():
            self._finish_recovery()
            if self.scheduler.cancel(request_id) is None:
                return None
            return self._states.pop(request_id).abort()

    def _run_round(self) -> RoundFinished | None:
        scheduler = self.scheduler
        work: StepWork | None = None  # a round that was scheduled and is not recorded, not even by half
        recording: list[Sequence] = []
        try:
            for request in scheduler.expire():
                self._deliver_abort(request.request_id)
            if not scheduler.has_unfinished:
                return None
            host_start = self._clock()
            work = scheduled = scheduler.schedule()
            waiting, running, pages = len(scheduler.waiting), len(scheduler.running), scheduler.pool.usage
            start = self._clock()
            result = self.runner.execute(scheduled)
            end = self._clock()
            owners = scheduler.owners(scheduled)
            recording, work = scheduler.running.copy(), None
            self._postprocess(scheduler.commit(scheduled, result, end))
        except BaseException:
            self._recover(work, recording)
            raise
        return RoundFinished(host_start, start, end, self._clock(), scheduled, owners, waiting, running, pages)

    def _finish_recovery(self) -> None:
        if self._torn:  # an exception came while an earlier one was dealt with
            self._recover(None, ())

    def _recover(self, work: StepWork | None, recording: Iterable[Sequence]) -> None:
        """Clear away a failed round; work: None if it failed in the middle of the scheduler's own changes."""
        self._torn = True
        cache_lost = self.runner.recover()
        if work is None or cache_lost:
            self.scheduler.reset(recording)
        else:
            self.scheduler.abandon(work)
        for request_id in [name for name in self._states if name not in self.scheduler.requests]:
            self._deliver_abort(request_id)
        self._torn = False

    def _deliver_abort(self, request_id: str) -> None:
        self._undelivered.append(self._states[request_id].abort())
        del self._states[request_id]

    def _postprocess(self, progress: list[SequenceProgress]) -> None:
        changed: dict[str, RequestState] = {}
        for item in progress:
            request_id = item.sequence.request.request_id
            state = self._states[request_id]
            state.add_prompt_logprobs(item.prompt_logprobs)
            if item.token is not None:
                stop = state.completions[item.sequence.index].push(item.token)
                if stop is not None:
                    self.scheduler.finish(item.sequence, "stop", stop)
                changed[request_id] = state
            elif item.sequence.finish_reason == "abort":
                state.completions[item.sequence.index].abort()
                changed[request_id] = state
        for request_id, state in changed.items():
            output = state.take_output()
            if output is not None:
                self._undelivered.append(output)
            if state.request.finished:
                del self._states[request_id]
