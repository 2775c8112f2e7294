"""`jaxinfer generate`: prompts in, text out; without a prompt, a chat."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.cli._errors import INTERRUPTED, UserMistake, user_mistakes
from jaxinfer.cli._options import add_engine_options, add_model, add_sampling_options
from jaxinfer.cli._recording import Recording, add_file_options
from jaxinfer.cli._streams import writes_unicode

if TYPE_CHECKING:
    from checkpoints import Tokenizer
    from jaxinfer.cli._serving import Finished, Job
    from jaxinfer.engine import CompletionOutput, RequestOutput
    from jaxinfer.engine.outputs import TokenLogprobs
    from jaxinfer.engine.prompts import Prompt

_ABOUT = """Complete one prompt or many. A prompt goes through the model's chat template when it has
one. The text of one prompt appears as it is generated; several run as one batch. Without a
prompt: standard input when it is piped, or a chat on a terminal."""


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "generate",
        help="complete prompts, or chat",
        usage="jaxinfer generate [PROMPT ...] [--model M] [options]",
        description=_ABOUT,
    )
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="the text; one with a leading dash goes after --")
    add_model(parser)
    parser.add_argument(
        "--prompt-file",
        action="append",
        default=[],
        metavar="F",
        help="a file that is one prompt, without its last line break; - is standard input; may be given several times",
    )
    parser.add_argument("--raw", action="store_true", help="continue the text as it is, without the chat template")
    parser.add_argument("--system", metavar="S", help="system message before the prompt")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line for each prompt")
    add_file_options(parser.add_argument_group("what happened"))
    add_sampling_options(parser)
    add_engine_options(parser, without=("policy",))  # prompts have no priorities here
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Generate, or chat."""
    _check(options)
    recording = Recording(options)
    prompts = _prompts(options)
    if prompts is None:
        from jaxinfer.cli import _chat

        return _chat.run(options, recording)
    return _generate(options, prompts, recording)


def _check(options: argparse.Namespace) -> None:
    if options.raw and options.system is not None:
        raise UserMistake("--system is part of the chat template, which --raw leaves out; give one of the two.")
    for name in ("logprobs", "prompt_logprobs"):
        if name in options and not options.json:
            raise UserMistake(f"--{name.replace('_', '-')} is shown with --json only; add --json.")


# --- prompts ----------------------------------------------------------------------------------------------------------


def _prompts(options: argparse.Namespace) -> list[str] | None:
    """The prompts, or None for a chat."""
    prompts = [*options.prompts, *(_read(name) for name in options.prompt_file)]
    if not prompts:
        if sys.stdin.isatty():
            return None
        prompts = [_read("-")]
        if not prompts[0]:
            raise UserMistake("There is no prompt; give one as an argument, with --prompt-file or through a pipe.")
    for prompt in prompts:
        _check_prompt(prompt)
    return prompts


def _check_prompt(prompt: str) -> None:
    if not prompt:
        raise UserMistake("The prompt is empty; give some text.")
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise UserMistake(f"The prompt {prompt[:40]!a} is not UTF-8 text.") from None


def _read(name: str) -> str:
    """A file's text without its last line break, which editors and echo add."""
    with user_mistakes():
        content = sys.stdin.buffer.read() if name == "-" else Path(name).expanduser().read_bytes()
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise UserMistake(f"{'Standard input' if name == '-' else name} is not UTF-8 text.") from None
    return text.removesuffix("\n").removesuffix("\r")


def _encode(tokenizer: Tokenizer, options: argparse.Namespace, prompts: Sequence[str]) -> list[Prompt]:
    from jaxinfer.cli._serving import chat_messages

    if options.raw or tokenizer.chat_template is None:
        if options.system is not None:
            raise UserMistake(f"{options.model} has no chat template for --system; put the text into the prompt.")
        return list(prompts)
    return [tokenizer.encode_chat(chat_messages(options.system, prompt)) for prompt in prompts]


# --- results ----------------------------------------------------------------------------------------------------------


def _generate(options: argparse.Namespace, prompts: Sequence[str], recording: Recording) -> int:
    from jaxinfer.cli._interrupt import interruptible
    from jaxinfer.cli._serving import prepare, print_statistics

    job = prepare(options, lambda tokenizer: _encode(tokenizer, options, prompts), recording.observer)
    with interruptible() as interrupted:
        if options.json or len(prompts) > 1 or job.params.n > 1:
            finished = _print_whole(job, prompts, options.json, interrupted)
        else:
            finished = _print_stream(job, interrupted)
        print_statistics(finished)
        title = f"Generation from {len(prompts)} prompt{'' if len(prompts) == 1 else 's'}"
        recording.write(title, job.facts(options.model), job.engine.scheduler.config)
        return INTERRUPTED if interrupted() else 0


def _print_stream(job: Job, interrupted: Any) -> Finished:
    """Print one prompt's text as it comes."""
    from jaxinfer.cli._serving import Finished, serve
    from jaxinfer.engine import OutputKind

    last, finished = "\n", Finished()
    for _, output in serve(job.engine, job.prompts, job.params, OutputKind.DELTA, interrupted):
        for completion in output.outputs:
            print(completion.text, end="", flush=True)
            last = completion.text[-1:] or last
        finished.add(output)
    if last != "\n":
        print(flush=True)
    return finished


def _print_whole(job: Job, prompts: Sequence[str], as_json: bool, interrupted: Any) -> Finished:
    """Print each request when it and all before it have finished."""
    from jaxinfer.cli._serving import Finished, serve
    from jaxinfer.engine import OutputKind

    shown, finished = _InOrder(), Finished()
    for number, output in serve(job.engine, job.prompts, job.params, OutputKind.FINAL_ONLY, interrupted):
        for index, ready in shown.add(number, output):
            if as_json:
                print(json.dumps(_as_json(prompts[index], ready), ensure_ascii=not writes_unicode()), flush=True)
            else:
                _print_text(prompts[index] if len(prompts) > 1 else None, ready, first=index == 0)
            finished.add(ready)
    return finished


@dataclass
class _InOrder:
    """Hands outputs out in the order of their numbers."""

    next_number: int = 0
    waiting: dict[int, RequestOutput] = field(default_factory=dict)

    def add(self, number: int, output: RequestOutput) -> Iterator[tuple[int, RequestOutput]]:
        """Take one; give those whose turn it is."""
        self.waiting[number] = output
        while self.next_number in self.waiting:
            yield self.next_number, self.waiting.pop(self.next_number)
            self.next_number += 1


def _print_text(prompt: str | None, output: RequestOutput, first: bool) -> None:
    if not first:
        print()
    if prompt is not None:
        print("\n".join(f"> {line}" for line in prompt.splitlines()))
    for completion in output.outputs:
        if len(output.outputs) > 1:
            print(f"[{completion.index + 1} of {len(output.outputs)}]")
        print(completion.text.removesuffix("\n"), flush=True)


def _as_json(prompt: str, output: RequestOutput) -> dict[str, Any]:
    completions = [_completion_json(completion) for completion in output.outputs]
    result: dict[str, Any] = {"prompt": prompt, "prompt_token_ids": output.prompt_token_ids}
    if output.prompt_logprobs is not None:
        result["prompt_logprobs"] = [entry and _logprobs_json(entry) for entry in output.prompt_logprobs]
    result |= completions[0]
    if len(completions) > 1:
        result["outputs"] = completions
    metrics = output.metrics
    if metrics is not None:
        result["metrics"] = {name: getattr(metrics, name) for name in ("queue_s", "ttft_s", "itl_s", "e2e_s")}
    return result


def _completion_json(completion: CompletionOutput) -> dict[str, Any]:
    result: dict[str, Any] = {
        "token_ids": completion.token_ids,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if completion.logprobs is not None:
        result["cumulative_logprob"] = completion.cumulative_logprob
        result["logprobs"] = [_logprobs_json(entry) for entry in completion.logprobs]
    return result


def _logprobs_json(entry: TokenLogprobs) -> list[dict[str, Any]]:
    """The token that stands there first, then the likeliest ones."""
    return [
        {"id": token_id, "logprob": value.logprob, "rank": value.rank, "token": value.decoded_token}
        for token_id, value in entry.items()
    ]
