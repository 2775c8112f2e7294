"""What `generate` and the chat share: from options to an engine, from prompts to outputs."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from checkpoints import Checkpoint, Tokenizer, open_checkpoint, progress_bar
from jaxinfer.cli._errors import UserMistake, user_mistakes
from jaxinfer.cli._options import engine_options, sampling_params
from jaxinfer.cli._quiet import native_messages_held
from jaxinfer.core.observer import Observer, unobserved
from jaxinfer.core.sampling_params import SamplingParams
from jaxinfer.core.scheduler import SchedulerConfig
from jaxinfer.engine import Engine, OutputKind, RequestMetrics, RequestOutput, Runner
from jaxinfer.engine.prompts import Prompt

MOST_SLOTS = 8


@dataclass(frozen=True)
class Job:
    """A model that serves, how it is to sample, and the prompts as the engine takes them."""

    engine: Engine
    tokenizer: Tokenizer
    params: SamplingParams
    prompts: tuple[Prompt, ...]

    def facts(self, model: str) -> list[tuple[str, str]]:
        """What a report tells of the engine, as (label, value)."""
        return [("model", model), *scheduler_facts(self.engine.scheduler.config)]


def prepare(
    options: argparse.Namespace, encode: Callable[[Tokenizer], Sequence[Prompt]], observer: Observer = unobserved
) -> Job:
    """Load and compile the model that the options name, for the prompts that `encode` makes with its tokenizer.

    Whatever the model, the options or the prompts have wrong is refused before the long part.
    """
    sampling_params(options, {})  # a mistake here must not wait for a download
    with native_messages_held(), progress_bar() as progress:
        with user_mistakes(), open_checkpoint(options.model, progress=progress) as checkpoint:
            params = sampling_params(options, checkpoint.generation_config)
            tokenizer = checkpoint.tokenizer()
            prompts = tuple(encode(tokenizer))
            # A hub model is opened again by its directory, so that the hub is asked once.
            source = options.model if checkpoint.directory is None else str(checkpoint.directory)
            require_device()
            slots = min(MOST_SLOTS, max(1, len(prompts)) * params.n)
            engine = engine_options(options, max_slots=slots)
            _refuse_early(checkpoint, tokenizer, engine, prompts, params)
        from jaxinfer.engine.build import build_engine

        with user_mistakes():
            return Job(build_engine(source, engine, progress, observer), tokenizer, params, prompts)


def scheduler_facts(config: SchedulerConfig) -> list[tuple[str, str]]:
    """Slots and pages, as (label, value)."""
    pages = f"{config.num_pages - 1} of {config.page_size} positions"
    return [("slots", str(config.max_slots)), ("KV pages", pages)]


def require_device() -> Any:
    """jax's first device; UserMistake when the backend that was asked for is not there."""
    import jax

    try:
        return jax.devices()[0]
    except RuntimeError as error:
        raise UserMistake(f"jax finds no device to run on: {str(error).splitlines()[0].rstrip('.')}.") from error


def serve(
    engine: Engine, prompts: Sequence[Prompt], params: SamplingParams, kind: OutputKind, interrupted: Callable[[], bool]
) -> Iterator[tuple[int, RequestOutput]]:
    """Run the prompts as one batch; every output as it comes, with its prompt's number.

    After an interrupt, those that are unfinished end with what they have.
    """
    with user_mistakes():
        for number, prompt in enumerate(prompts):
            engine.add_request(str(number), prompt, params, output_kind=kind)
    while engine.has_unfinished:
        if interrupted():
            aborted = (engine.abort(str(number)) for number in range(len(prompts)))
            outputs = [output for output in aborted if output is not None]
        else:
            outputs = engine.step()
        for output in outputs:
            yield int(output.request_id), output


def chat_messages(system: str | None, prompt: str) -> list[Mapping[str, str]]:
    """A conversation of one question."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    return [*messages, {"role": "user", "content": prompt}]


@dataclass
class Finished:
    """What the closing line tells of a batch: the requests' metrics, and the lengths of texts cut short."""

    metrics: list[RequestMetrics] = field(default_factory=list)
    cut_at: list[int] = field(default_factory=list)

    def add(self, output: RequestOutput) -> None:
        """Count a request's last output; others change nothing."""
        if output.metrics is None:
            return
        self.metrics.append(output.metrics)
        for completion in output.outputs:
            if completion.finish_reason == "length":
                alone = len(output.outputs) == 1  # then an output that holds only what is new does, too
                self.cut_at.append(output.metrics.num_output_tokens if alone else len(completion.token_ids))


def statistics_line(batch_finished: Finished) -> str:
    """Tokens and times of the requests of one batch, and whether texts were cut by max_tokens or the context."""
    finished = batch_finished.metrics
    prompt_tokens = sum(metrics.num_prompt_tokens for metrics in finished)
    new_tokens = sum(metrics.num_output_tokens for metrics in finished)
    batch, note = ("", "") if len(finished) == 1 else (f"{len(finished)} prompts, ", " (medians)")
    ttft = _median_ms([metrics.ttft_s for metrics in finished])
    itl = _median_ms([metrics.itl_s for metrics in finished])
    rate = new_tokens / max(metrics.e2e_s for metrics in finished)
    counts = f"{batch}{_count(prompt_tokens, 'prompt token')}, {_count(new_tokens, 'new token')}"
    return f"{counts}; TTFT {ttft}, ITL {itl}{note}, {rate:.1f} tok/s{_cut_note(batch_finished)}"


def _cut_note(finished: Finished) -> str:
    if not finished.cut_at:
        return ""
    shortest, longest = min(finished.cut_at), max(finished.cut_at)
    length = _count(longest, "token") if shortest == longest else f"{shortest} .. {longest} tokens"
    texts = "" if len(finished.metrics) == len(finished.cut_at) == 1 else f"{_count(len(finished.cut_at), 'text')} "
    return f" ({texts}cut at {length})"


def print_statistics(finished: Finished) -> None:
    """The closing line, on standard error."""
    from rich.console import Console

    if finished.metrics:
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        console.print(statistics_line(finished), style="dim", markup=False)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _median_ms(seconds: Sequence[float | None]) -> str:
    known = [value for value in seconds if value is not None]
    return f"{1e3 * statistics.median(known):.1f} ms" if known else "-"


def _refuse_early(
    checkpoint: Checkpoint, tokenizer: Tokenizer, options: Any, prompts: Sequence[Prompt], params: SamplingParams
) -> None:
    """Raise ValueError for what an engine of these options would refuse, without building it."""
    from jaxinfer.engine.build import engine_on, limits_for
    from jaxinfer.runtime.loading import decoder_config

    config = decoder_config(checkpoint, dtype=options.dtype, kv_dtype=options.kv_dtype, attention=options.attention)
    idle_runner = cast(Runner, SimpleNamespace(limits=limits_for(config, options)))
    trial = engine_on(idle_runner, tokenizer, options)
    for number, prompt in enumerate(prompts):
        trial.add_request(str(number), prompt, params)
