"""All commands of `jaxinfer`, one module for each, and what becomes of their failures."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jaxinfer import __version__
from jaxinfer.cli import _bench, _compile, _convert, _generate, _info, _plan, _simulate
from jaxinfer.cli._errors import BAD_USE, UserMistake
from jaxinfer.cli._parser import Parser
from jaxinfer.cli._quiet import quiet_libraries
from jaxinfer.cli._streams import NO_ROOM, discard_output, open_standard_streams

_PIPE_CLOSED = 141  # what a shell reports for a program that a closed pipe ended
_DESCRIPTION = "Run language models with JAX on TPU, GPU and CPU."
_EPILOG = """examples:
  jaxinfer generate "What is the capital of France?"
  jaxinfer generate                                    # on a terminal: a chat
  jaxinfer generate --model ./my-model --temperature 0.7 --json "First prompt" "Second prompt"
  jaxinfer bench steps --batch 1,8
  jaxinfer plan --config config.json --target v6e-4
  jaxinfer simulate --example
  jaxinfer compile --config config.json --target v6e-4
  jaxinfer info
"""


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name and return its exit code; KeyboardInterrupt is the caller's."""
    quiet_libraries()
    open_standard_streams()
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()
    except UserMistake as mistake:
        print(f"jaxinfer: {mistake}", file=sys.stderr)
        return BAD_USE
    except BrokenPipeError:
        discard_output()
        return _PIPE_CLOSED
    except OSError as error:
        if error.errno not in NO_ROOM or error.filename is not None:
            raise
        discard_output()
        print(f"jaxinfer: The output cannot be written: {error.strerror}.", file=sys.stderr)
        return BAD_USE
    except MemoryError:
        print("jaxinfer: There is not enough memory for what was asked.", file=sys.stderr)
        return BAD_USE


def _run(arguments: Sequence[str] | None) -> int:
    options = _parser().parse_args(arguments)
    if options.run is None:
        _parser().print_help()
        return 0
    return options.run(options)


def _parser() -> Parser:
    parser = Parser(prog="jaxinfer", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("--version", action="version", version=f"jaxinfer {__version__}")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)
    for command in (_generate, _bench, _plan, _simulate, _compile, _info, _convert):
        command.add_parser(commands)
    return parser
