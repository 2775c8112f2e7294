"""The conversation on a terminal that `jaxinfer generate` without a prompt holds."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Mapping

from checkpoints import Tokenizer
from jaxinfer.cli._errors import UserMistake, user_mistakes
from jaxinfer.cli._interrupt import interruptible
from jaxinfer.cli._recording import Recording
from jaxinfer.cli._serving import Finished, Job, prepare, print_statistics, serve
from jaxinfer.engine import OutputKind

_HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer."


def run(options: argparse.Namespace, recording: Recording) -> int:
    """Ask, answer, remember, until the user leaves."""
    if options.json:
        raise UserMistake("--json needs a prompt; give one as an argument, with --prompt-file or through a pipe.")
    if options.raw:
        raise UserMistake("A chat goes through the chat template; leave out --raw or give a prompt.")
    if getattr(options, "n", 1) != 1:
        raise UserMistake("A chat has one answer at a time; leave out --n or give a prompt.")
    job = prepare(options, _no_prompts, recording.observer)
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - line editing and history for input()
    print(f"{options.model}: {_HELP}")
    conversation = Conversation(job, options.system)
    while (question := _ask()) not in (None, "/exit"):
        _respond(conversation, question)
    recording.write("Chat", job.facts(options.model), job.engine.scheduler.config)
    return 0


class Conversation:
    """Messages so far, and the model that answers them."""

    def __init__(self, job: Job, system: str | None) -> None:
        self._job = job
        self._start: list[Mapping[str, str]] = [] if system is None else [{"role": "system", "content": system}]
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = list(self._start)

    def answer(self, question: str) -> None:
        """Print the answer as it comes, then remember both. UserMistake, and nothing remembered, if it does not fit."""
        messages = [*self.messages, {"role": "user", "content": question}]
        with user_mistakes():
            prompt = self._job.tokenizer.encode_chat(messages)
        context = self._job.engine.runner.limits.max_context
        if len(prompt) >= context:
            raise UserMistake(
                f"The conversation has {len(prompt)} tokens, but the context holds {context} with at least one new one;"
                " /reset forgets the conversation."
            )
        pieces: list[str] = []
        finished = Finished()
        with interruptible() as interrupted:
            for _, output in serve(self._job.engine, [prompt], self._job.params, OutputKind.DELTA, interrupted):
                pieces += [completion.text for completion in output.outputs]
                print("".join(completion.text for completion in output.outputs), end="", flush=True)
                finished.add(output)
        print(flush=True)
        print_statistics(finished)
        self.messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]


def _no_prompts(tokenizer: Tokenizer) -> list[list[int]]:
    if tokenizer.chat_template is None:
        raise UserMistake("This model has no chat template and cannot hold a conversation; give a prompt to continue.")
    return []


def _ask() -> str | None:
    """The next line; None when the user leaves."""
    while True:
        try:
            return input("> ").strip()
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            print(f"\n{_HELP}")
        except UnicodeDecodeError:
            print("jaxinfer: That was no UTF-8 text; type it again.", file=sys.stderr)


def _respond(conversation: Conversation, question: str) -> None:
    if not question:
        return
    if question == "/reset":
        conversation.reset()
        return
    try:
        conversation.answer(question)
    except UserMistake as mistake:
        print(f"jaxinfer: {mistake}", file=sys.stderr)
