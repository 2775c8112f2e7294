"""A model as a Python object: prompts in, completions out."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Protocol, TypeAlias, cast

from jaxinfer.core.observer import Observer, unobserved
from jaxinfer.core.sampling_params import SamplingParams
from jaxinfer.engine import Engine, OutputKind, RequestOutput, RequestRefused
from jaxinfer.engine.prompts import Prompt, Tokenizer

Messages: TypeAlias = Sequence[Mapping[str, Any]]
"""One conversation: [{"role": "user", "content": "..."}, ...]."""


class ChatTokenizer(Tokenizer, Protocol):
    """A tokenizer that knows the model's chat template."""

    def encode_chat(
        self, messages: Messages, add_generation_prompt: bool = True, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Token ids of a conversation."""
        ...


class LLM:
    """Offline inference with vLLM's shapes.

    Requests of all methods share one engine, so streams and batches may overlap. Not thread-safe.

    Args:
        model: a checkpoint's path or name.
        observer: told of everything that happens: a `jaxinfer.core.timeline.TimelineRecorder` for traces and reports, a
            `jaxinfer.engine.metrics.PrometheusMetrics`, or both in a `jaxinfer.core.observer.Observers`.
        show_progress: draw bars of downloading, loading and compiling on standard error, if that is a terminal.
        options: fields of `jaxinfer.engine.build.EngineOptions`, for instance max_slots=4, max_context=2048.
    """

    def __init__(
        self, model: str, *, observer: Observer = unobserved, show_progress: bool = True, **options: Any
    ) -> None:
        # An existing engine needs neither jax nor a checkpoint.
        from checkpoints import progress_bar
        from jaxinfer.engine.build import EngineOptions, build_engine

        engine_options = EngineOptions.from_names(**options)
        with progress_bar() if show_progress else nullcontext() as progress:
            self._attach(build_engine(model, engine_options, progress, observer))

    @classmethod
    def from_engine(cls, engine: Engine) -> LLM:
        """An LLM on an engine that exists already; it must not be stepped by anybody else."""
        llm = cls.__new__(cls)
        llm._attach(engine)
        return llm

    def _attach(self, engine: Engine) -> None:
        self.engine = engine
        self._numbers = itertools.count()
        self._inbox: dict[str, deque[RequestOutput]] = {}

    @property
    def tokenizer(self) -> ChatTokenizer:
        """The model's tokenizer."""
        return cast(ChatTokenizer, self.engine.tokenizer)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        timeout_s: float | None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or many.

        Args:
            prompts: a string, a list of token ids, {"prompt": ...} or {"prompt_token_ids": ...}, or a list of these. A
                dict may have a "cache_salt": cached prefixes are shared only between prompts of the same salt.
            params: for all prompts, or one for each.
            priority: of all prompts, or one for each: with policy="priority" the lowest number goes first.
            timeout_s: seconds after which each prompt ends with what it has, finish_reason "abort" and stop_reason
                "deadline"; None for no limit.

        Returns:
            One finished output per prompt, in the order of the prompts.

        Raises:
            RequestRefused: (a ValueError) a prompt cannot be served; then none of the batch is.
            ValueError: not as many params or priorities as prompts.
        """
        batch = [cast(Prompt, prompts)] if _is_one_prompt(prompts) else list(cast(Sequence[Prompt], prompts))
        each = _params_for_each(params, len(batch))
        ranks = _priority_for_each(priority, len(batch))
        ids: list[str] = []
        try:
            for prompt, chosen, rank in zip(batch, each, ranks, strict=True):
                ids.append(self._add(prompt, chosen, OutputKind.FINAL_ONLY, rank, timeout_s))
            return [self._next_output(request_id) for request_id in ids]
        finally:
            for request_id in ids:
                self._drop(request_id)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        priority: int | Sequence[int] = 0,
        timeout_s: float | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, written out by the model's chat template.

        Args:
            messages: one conversation, or a list of them.
            params, priority, timeout_s: as for `generate`.
            add_generation_prompt: end the prompt where the assistant's answer begins.
            tools: descriptions of functions that the model may call, as its template takes them.

        Raises as `generate`, and as the tokenizer does for messages its template does not accept.
        """
        if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
            raise RequestRefused(f"A conversation must be a list of messages, not {type(messages).__name__}.")
        if not messages:
            raise RequestRefused("The conversation is empty; give at least one message.")
        _check_tools(tools)
        one = isinstance(messages[0], Mapping)
        conversations = cast(Sequence[Messages], [messages] if one else messages)
        encode = self.tokenizer.encode_chat
        prompts = [encode(talk, add_generation_prompt, tools) for talk in conversations]
        return self.generate(prompts, params, priority=priority, timeout_s=timeout_s)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        output_kind: OutputKind = OutputKind.CUMULATIVE,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> OutputStream:
        """Complete one prompt and yield an output whenever there is a new token.

        Outputs are cumulative: text and token_ids hold everything so far. With OutputKind.DELTA they hold only what is
        new. The last output has finished=True. The request is checked and queued at the call, before the first output
        is asked for; closing the iterator early cancels it. timeout_s: as for `generate`.
        """
        (rank,) = _priority_for_each(priority, 1)
        return OutputStream(self, self._add(prompt, params, output_kind, rank, timeout_s))

    def _add(
        self, prompt: Prompt, params: SamplingParams | None, kind: OutputKind, priority: int, timeout_s: float | None
    ) -> str:
        request_id = str(next(self._numbers))
        self.engine.add_request(request_id, prompt, params, output_kind=kind, priority=priority, timeout_s=timeout_s)
        self._inbox[request_id] = deque()
        return request_id

    def _next_output(self, request_id: str) -> RequestOutput:
        """Run rounds until this request has an output; outputs of others wait in their own queue."""
        queue = self._inbox[request_id]
        while not queue:
            for output in self.engine.step():
                if output.request_id in self._inbox:
                    self._inbox[output.request_id].append(output)
        return queue.popleft()

    def _drop(self, request_id: str) -> None:
        """Cancel the request if it is unfinished and forget its outputs."""
        self.engine.abort(request_id)
        self._inbox.pop(request_id, None)


class OutputStream(Iterator[RequestOutput]):
    """A running request's outputs. Unlike a generator, it also cancels when it was never started."""

    def __init__(self, llm: LLM, request_id: str) -> None:
        self._llm = llm
        self._request_id = request_id
        self._open = True

    def __next__(self) -> RequestOutput:
        if not self._open:
            raise StopIteration
        try:
            output = self._llm._next_output(self._request_id)
        except BaseException:
            self.close()
            raise
        if output.finished:
            self.close()
        return output

    def close(self) -> None:
        """Cancel the request unless it has finished."""
        if self._open:
            self._open = False
            self._llm._drop(self._request_id)

    def __del__(self) -> None:
        self.close()


def _is_one_prompt(prompts: Any) -> bool:
    if isinstance(prompts, (str, Mapping)):
        return True
    if not isinstance(prompts, Sequence):
        raise RequestRefused(f"Prompts must be text, token ids or a list of these, not {type(prompts).__name__}.")
    return bool(prompts) and all(isinstance(item, int) for item in prompts)


def _params_for_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if isinstance(params, (str, bytes)) or not isinstance(params, Sequence):
        raise ValueError(f"Sampling parameters must be a SamplingParams or a list, not {type(params).__name__}.")
    if len(params) != count:
        raise ValueError(f"There are {count} prompts but {len(params)} sampling parameters; give one for each or one.")
    return params


def _priority_for_each(priority: int | Sequence[int], count: int) -> Sequence[int]:
    each = [priority] * count if isinstance(priority, int) else priority
    if isinstance(each, (str, bytes)) or not isinstance(each, Sequence):
        raise ValueError(f"A priority must be an integer or a list of them, not {type(each).__name__}.")
    if len(each) != count:
        raise ValueError(f"There are {count} prompts but {len(each)} priorities; give one for each or one.")
    for number in each:
        if not isinstance(number, int) or isinstance(number, bool):
            raise ValueError(f"A priority must be an integer, not {number!r}.")
    return each


def _check_tools(tools: object) -> None:
    if tools is None:
        return
    if isinstance(tools, (str, bytes)) or not isinstance(tools, Sequence):
        raise RequestRefused(f"Tools must be a list of function descriptions, not {type(tools).__name__}.")
    for tool in tools:
        if not isinstance(tool, Mapping):
            raise RequestRefused(f"A tool must be described by a dict, not {type(tool).__name__}.")
