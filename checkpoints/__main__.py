"""`python -m checkpoints inspect SOURCE` and `python -m checkpoints convert SOURCE DESTINATION`."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console

from checkpoints._convert import TARGET_FORMATS, conversion_note, convert
from checkpoints._errors import CheckpointError
from checkpoints._inspect import print_summary
from checkpoints._open import open_checkpoint
from checkpoints._progress import progress_bar


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, or 2 after one sentence on standard error."""
    options = _parser().parse_args(arguments)
    try:
        if options.command == "inspect":
            with progress_bar() as progress:
                checkpoint = open_checkpoint(options.source, progress=progress)
            with checkpoint:
                print_summary(checkpoint, Console())
        else:
            with progress_bar() as progress:
                written = convert(options.source, options.destination, format=options.to, progress=progress)
            print(f"Wrote {written}{conversion_note(written)}")
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m checkpoints", description="Look at and convert checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True)
    inspect = commands.add_parser("inspect", help="show architecture, parameters by module and tokenizer")
    inspect.add_argument("source", help="a .gguf file, a checkpoint directory, a named model or organisation/name")
    convert_command = commands.add_parser("convert", help="write a checkpoint as an Orbax or safetensors directory")
    convert_command.add_argument("source", help="as for inspect")
    convert_command.add_argument("destination", help="the directory to make; it must not exist")
    convert_command.add_argument(
        "--to", choices=TARGET_FORMATS, help="the format to write (default orbax, and safetensors from orbax)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
