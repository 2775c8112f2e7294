"""The engine's loop: schedule a round, run it on the device, turn its tokens into outputs."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Protocol

from jaxinfer.core.observer import Load, Observer, RoundFinished, unobserved
from jaxinfer.core.request import SEED_RANGE, Request, RequestRefused, Sequence
from jaxinfer.core.sampling_params import SamplingParams
from jaxinfer.core.scheduler import Scheduler, SchedulerConfig, SequenceProgress
from jaxinfer.core.step import StepResult, StepWork
from jaxinfer.engine.interrupts import interrupts_held
from jaxinfer.engine.output_state import RequestState
from jaxinfer.engine.outputs import OutputKind, RequestOutput
from jaxinfer.engine.prompts import Prompt, Tokenizer, check_output_kind, check_params, encode_prompt, salt_of

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
    @property
    def window(self) -> int | None: ...  # noqa: D102
    @property
    def host_pages(self) -> int: ...  # noqa: D102


class PendingResult(Protocol):
    """What a round on the device will give."""

    def result(self) -> StepResult:
        """Wait for it."""
        ...


class Runner(Protocol):
    """Executes rounds on the device, in the order in which they are dispatched."""

    @property
    def limits(self) -> Limits:
        """What it was built for."""
        ...

    def dispatch(self, work: StepWork, /) -> PendingResult:
        """Hand one round to the device and go on."""
        ...

    def recover(self) -> bool:
        """Become usable again after an exception out of a round; True if what was cached is lost."""
        ...


@dataclass(frozen=True, slots=True)
class _Dispatched:
    """A round on the device, and what its RoundFinished will need."""

    work: StepWork
    pending: PendingResult
    host_start: float
    start: float
    dispatched: float
    load: Load


class Engine:
    """Serves many requests at once on one runner.

    `add_request` queues, `step` runs one round and returns what is new, `abort` ends a request at any moment. A mistake
    in a request is a ValueError from `add_request` and disturbs no other request. If a round fails or is interrupted,
    `step` raises, the requests in the rounds on the device end with reason "abort" (their outputs come with the next
    `step`) and the others go on; if the cache was lost with it, every request that had begun ends so. In the main
    thread Ctrl-C waits for the end of the round and ends no request; a second one interrupts the round. A sequence
    whose logits are not finite numbers ends alone, with reason "abort" and stop_reason NON_FINITE. Not thread-safe:
    call it from one thread, or from one at a time.

    With `async_scheduling` the next round is on the device before the host reads the tokens of the last (sampled tokens
    stay there to be fed back), so that the device does not wait for the host. Outputs are the same; a sequence that
    turns out to have ended has one position computed for nothing, and a new request waits for one round more.

    Args:
        runner: executes rounds.
        tokenizer: the model's tokenizer.
        mode: "continuous" batching or "static" waves.
        policy, enable_prefix_caching, enable_chunked_prefill, reserve_full: see SchedulerConfig.
        async_scheduling: run one round ahead.
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
        async_scheduling: bool = True,
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
            window=limits.window,
            host_pages=limits.host_pages,
            max_rounds_in_flight=2 if async_scheduling else 1,
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
        self._on_device: deque[_Dispatched] = deque()
        self._device_free_at = clock()
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
            cache_salt: cached prefixes are shared only between requests of the same salt; empty for that of the prompt.

        Raises:
            RequestRefused: (a ValueError) the prompt is empty or has ids outside the vocabulary, a parameter names such
                an id, an argument is of the wrong type, the request can never fit the context or the cache, or its id
                is in use.
        """
        params = params or SamplingParams()
        text, prompt_ids = encode_prompt(prompt, self.tokenizer, self._vocab_size)
        check_params(params, self._vocab_size)
        check_output_kind(output_kind)
        seed = self._random.randrange(SEED_RANGE) if params.seed is None else params.seed
        now = self._clock() if arrival is None else arrival
        request = Request(
            request_id,
            prompt_ids,
            params,
            seed,
            self._eos_ids,
            now,
            priority=priority,
            timeout_s=timeout_s,
            cache_salt=salt_of(prompt) if cache_salt == "" else cache_salt,
        )
        state = RequestState(request, text, output_kind, self.tokenizer, self._token_text)
        with self._changes():
            self.scheduler.add(request)
            self._states[request_id] = state

    def step(self) -> list[RequestOutput]:
        """Run one round to its end; outputs of the requests it brought forward."""
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
        with self._changes():
            if self.scheduler.cancel(request_id) is None:
                return None
            output = self._states[request_id].abort()
            del self._states[request_id]
            return output

    @contextmanager
    def _changes(self) -> Iterator[None]:
        """Changes of scheduler and states between rounds; what an interrupt leaves of them is cleared away later."""
        with interrupts_held():
            self._finish_recovery()
            try:
                yield
            except RequestRefused:
                raise
            except BaseException:
                self._torn = True
                raise

    def _run_round(self) -> RoundFinished | None:
        scheduler = self.scheduler
        recording: list[Sequence] = []
        changing = True  # whether an exception would come in the middle of the scheduler's own changes
        try:
            for request in scheduler.expire():
                self._deliver_abort(request.request_id)
            while scheduler.has_unfinished and len(self._on_device) < scheduler.config.max_rounds_in_flight:
                host_start = self._clock()
                work = scheduler.schedule()
                if work.is_empty:
                    break
                changing = False
                self._on_device.append(self._dispatch(work, host_start))
                changing = True
            if not self._on_device:
                return None
            changing = False
            done = self._on_device[0]
            result, owners = done.pending.result(), scheduler.owners(done.work)
            end = self._clock()
            recording, changing = scheduler.running.copy(), True
            self._on_device.popleft()
            self._postprocess(scheduler.commit(done.work, result, end))
            self._drop_idle_rounds()
        except BaseException:
            self._recover(changing, recording)
            raise
        start, self._device_free_at = max(done.start, self._device_free_at), end
        host = done.host_start, done.dispatched
        return RoundFinished(*host, start, end, self._clock(), done.work, owners, *done.load, result.failed)

    def _dispatch(self, work: StepWork, host_start: float) -> _Dispatched:
        start, pending = self._clock(), self.runner.dispatch(work)
        return _Dispatched(work, pending, host_start, start, self._clock(), self.scheduler.load)

    def _drop_idle_rounds(self) -> None:
        """Once every request has ended, what is still on the device was computed for nothing: do not wait for it."""
        while self._on_device and not self.scheduler.has_unfinished:
            self.scheduler.commit(self._on_device.popleft().work, StepResult({}))

    def _finish_recovery(self) -> None:
        if self._torn:  # an exception came while an earlier one was dealt with
            self._recover(True, ())

    def _recover(self, changing: bool, recording: Iterable[Sequence]) -> None:
        """Clear away the rounds on the device after a failure.

        changing: whether it came in the middle of the scheduler's own changes. recording: the sequences whose part in a
        round may have been recorded by half.
        """
        self._torn = True
        self._on_device.clear()
        cache_lost = self.runner.recover()
        if changing or cache_lost:
            self.scheduler.reset(recording)
        else:
            self.scheduler.abandon()
        for request_id in [name for name in self.scheduler.requests if name not in self._states]:
            self.scheduler.cancel(request_id)  # its add_request was interrupted
        told = {output.request_id for output in self._undelivered if output.finished}
        for request_id in [name for name in self._states if name not in self.scheduler.requests]:
            if request_id in told:
                del self._states[request_id]
            else:
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
