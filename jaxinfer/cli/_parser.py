"""An argument parser that tells a mistake in one sentence."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from jaxinfer.cli._errors import UserMistake


class Parser(argparse.ArgumentParser):
    """Raises UserMistake instead of printing its usage and leaving; options cannot be abbreviated."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(
            **settings, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, add_help=True
        )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse an unknown argument here, so that the advice names the command that was given it."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        """Refuse the arguments."""
        raise UserMistake(f"{message.rstrip('.')}; see `{self.prog} --help`.")


def refuse_without_effect(options: argparse.Namespace, names: Sequence[str], reason: str) -> None:
    """UserMistake if one of these options was given, which `reason` says would change nothing."""
    for name in names:
        if getattr(options, name) != options.parser.get_default(name):
            raise UserMistake(f"--{name.replace('_', '-')} changes nothing {reason}; leave it out.")


def whole_number(text: str) -> int:
    """An integer of at most 64 bits, for argparse."""
    value = _converted(int, text, "a whole number")
    if not -(2**63) <= value < 2**63:
        raise argparse.ArgumentTypeError(f"'{text[:20]}...' is a number of more than 64 bits")
    return value


def number(text: str) -> float:
    """A number, for argparse."""
    return _converted(float, text, "a number")


def positive(text: str) -> int:
    """An integer above 0, for argparse."""
    value = whole_number(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be at least 1")
    return value


def port(text: str) -> int:
    """A TCP port, for argparse."""
    value = whole_number(text)
    if not 0 < value < 2**16:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 1 to 65535")
    return value


def positives(text: str) -> tuple[int, ...]:
    """Integers above 0 with commas between them, for argparse."""
    return tuple(positive(part) for part in text.split(","))


def whole_numbers(text: str) -> tuple[int, ...]:
    """Integers with commas between them, for argparse."""
    return tuple(whole_number(part) for part in text.split(","))


def id_and_bias(text: str) -> tuple[int, float]:
    """ID=BIAS, for argparse."""
    token_id, equals, bias = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} must be ID=BIAS, for instance 504=-2.5")
    return whole_number(token_id), number(bias)


def _converted(convert: Callable[[str], Any], text: str, wanted: str) -> Any:
    try:
        return convert(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}") from None
