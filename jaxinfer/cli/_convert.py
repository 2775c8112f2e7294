"""`jaxinfer convert`: any checkpoint as an Orbax or safetensors directory."""

from __future__ import annotations

import argparse

from jaxinfer.cli._errors import user_mistakes
from jaxinfer.cli._options import MODEL_HELP

FORMATS = ("orbax", "safetensors")  # as `checkpoints` has them, whose import --help need not wait for


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Declare the command."""
    about = (
        "Write a model as an Orbax directory, which loads without conversion, or as the safetensors directory that "
        "transformers loads; both hold its tokenizer."
    )
    parser = commands.add_parser(
        "convert", help="write a model as an Orbax or safetensors directory", description=about
    )
    parser.add_argument("source", metavar="SRC", help=MODEL_HELP.partition(" (default")[0])
    parser.add_argument("destination", metavar="DST", help="the directory to make; it must not exist yet")
    parser.add_argument(
        "--to", choices=FORMATS, help="the format to write (default orbax, and safetensors for what is Orbax already)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Convert and say where it lies."""
    from checkpoints import conversion_note, convert, progress_bar

    with user_mistakes(), progress_bar() as progress:
        written = convert(options.source, options.destination, format=options.to, progress=progress)
        note = conversion_note(written)
    print(f"Wrote {written}{note}")
    return 0
