"""`jaxinfer compile`: compile the serving programs for a chip that need not be there."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from jaxinfer.cli._errors import UserMistake, user_mistakes
from jaxinfer.cli._parser import Parser, positive, positives
from jaxinfer.cli._plan import add_config_source, read_decoder

if TYPE_CHECKING:
    from jaxinfer.models import DecoderConfig
    from jaxinfer.runtime.aot import BucketReport, CompileReport
    from jaxinfer.runtime.limits import Buckets, RunnerLimits

_ABOUT = """Compile the real prefill and decode steps of a model for a chip, with the chip's real compiler, on any
machine and without the weights. For every batch shape it tells whether the program compiles, how much memory it takes,
whether the KV pool is updated in place, and the least time that a full batch can take by the chip's datasheet; at the
end whether it all fits, and the largest pool that does. "8+63" rows are a prefill of up to 8 prompts that takes along
up to 63 decodes: with fewer, or at less than the largest context, it takes less. Needs Python 3.12 or newer and the
compilers: pip install -e '.[aot]'."""
GIB = 1024**3
DEFAULT_MAX_CONTEXT = 2048


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Declare the command."""
    parser: Parser = commands.add_parser(
        "compile", help="compile for a chip that is not here: does it fit, how fast can it be", description=_ABOUT
    )
    add_config_source(parser)
    parser.add_argument(
        "--target", required=True, metavar="CHIP-N", help="v5e-1, v6e-4, v5p-4, v7x-1, h100, h200-2, b200, a100, ..."
    )
    parser.add_argument("--tp", type=positive, metavar="N", help="devices to cut the model over (all of the target's)")
    parser.add_argument(
        "--attention",
        default="auto",
        choices=("auto", "xla", "pallas_mosaic_tpu", "pallas_mosaic_gpu"),
        help="attention kernels (default: auto, the best for the chip)",
    )
    parser.add_argument("--max-slots", type=positive, default=64, metavar="N", help="sequences at once (64)")
    parser.add_argument(
        "--max-context",
        type=positive,
        metavar="N",
        help=f"positions of each ({DEFAULT_MAX_CONTEXT}, or as many as the model was made for)",
    )
    parser.add_argument("--page-size", type=positive, default=64, metavar="N", help="positions of a page (64)")
    parser.add_argument(
        "--num-pages", type=positive, metavar="N", help="pages of the pool (default: for every slot's full context)"
    )
    parser.add_argument(
        "--max-batched-tokens", type=positive, default=512, metavar="N", help="tokens of a prefill (512)"
    )
    parser.add_argument("--max-prefill-rows", type=positive, default=8, metavar="N", help="prompts of a prefill (8)")
    parser.add_argument(
        "--decode-rows", type=positives, metavar="N,N,...", help="compile these decode batches only (all: 1, 2, 4, ...)"
    )
    parser.add_argument(
        "--prefill-tokens", type=positives, metavar="N,N,...", help="compile these prefill lengths only (all)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Compile and print; exit code 0 when all fits, 1 when it compiles but does not fit."""
    from jaxinfer.runtime.chips import parse_target  # imports no jax

    with user_mistakes():
        target = parse_target(options.target)
    from jaxinfer.runtime.compiler_environment import compiler_environment

    for name, value in compiler_environment(target.chip.platform).items():
        os.environ[name] = value  # before jax is imported; this machine's own devices are of no use here
    from jaxinfer.cli._quiet import native_messages_held
    from jaxinfer.runtime.aot import BucketReport, compile_report

    with native_messages_held(), user_mistakes():
        config = read_decoder(options).replace(attention=options.attention)
        limits, buckets = _sizes(config, options, target.chip.platform)
        printer = _JsonPrinter() if options.json else _TablePrinter(config, limits)
        for report in compile_report(config, limits, buckets, target, options.tp):
            if isinstance(report, BucketReport):
                printer.bucket(report)
            else:
                return printer.verdict(report)
    raise AssertionError("compile_report ends with the report of all")


def _sizes(config: DecoderConfig, options: argparse.Namespace, platform: str) -> tuple[RunnerLimits, Buckets]:
    from jaxinfer.runtime.limits import RunnerLimits, buckets_for

    max_context = options.max_context or min(DEFAULT_MAX_CONTEXT, config.max_positions)
    if max_context > config.max_positions:
        raise UserMistake(f"--max-context is {max_context}, but the model was made for {config.max_positions}.")
    full = options.max_slots * -(-max_context // options.page_size) + 1
    limits = RunnerLimits(
        max_slots=options.max_slots,
        page_size=options.page_size,
        num_pages=options.num_pages or full,
        max_context=max_context,
        max_batched_tokens=max(options.max_batched_tokens, options.max_slots),
        max_prefill_rows=min(options.max_prefill_rows, options.max_slots),
        vocab_size=config.vocab_size,
    )
    buckets = buckets_for(limits, platform)
    decode, prefill = buckets.decode_rows, buckets.prefill
    if options.decode_rows:
        decode = _only(decode, options.decode_rows, "--decode-rows")
    if options.prefill_tokens:
        lengths = _only(tuple(sorted({tokens for tokens, _ in prefill})), options.prefill_tokens, "--prefill-tokens")
        prefill = tuple(bucket for bucket in prefill if bucket[0] in lengths)
    return limits, replace(buckets, decode_rows=decode, prefill=prefill)


def _only(all_of_them: tuple[int, ...], wanted: tuple[int, ...], flag: str) -> tuple[int, ...]:
    for size in wanted:
        if size not in all_of_them:
            sizes = ", ".join(map(str, all_of_them))
            raise UserMistake(f"{flag} {size} is no batch shape of this engine; they are {sizes}.")
    return wanted


class _JsonPrinter:
    """Everything as one object at the end."""

    def bucket(self, report: BucketReport) -> None:
        """Nothing yet."""

    def verdict(self, report: CompileReport) -> int:
        """Print it all."""
        buckets = [asdict(bucket) | {"needed_bytes": bucket.needed_bytes} for bucket in report.buckets]
        print(json.dumps(asdict(report) | {"fits": report.fits, "buckets": buckets}))
        return 0 if report.fits else 1


class _TablePrinter:
    """A line for each program as soon as it is compiled, the verdict at the end."""

    _COLUMNS = (
        ("step", 8),
        ("rows", 7),
        ("tokens", 7),
        ("compile s", 10),
        ("args GiB", 9),
        ("temp MiB", 9),
        ("KV pool", 10),
        ("GFLOP", 9),
        ("moved GB", 9),
        ("x least", 8),
        ("floor ms", 9),
        ("estimate", 9),
    )

    def __init__(self, config: DecoderConfig, limits: RunnerLimits) -> None:
        self._config, self._limits, self._kernels = config, limits, ""

    def bucket(self, report: BucketReport) -> None:
        """One line, the first under the names of the columns."""
        if not self._kernels:
            print("".join(f"{name:>{width}}" for name, width in self._COLUMNS))
        moved = report.bytes_accessed
        values: tuple[Any, ...] = (
            report.kind,
            f"{report.rows}+{report.decodes}" if report.decodes else report.rows,
            report.tokens,
            f"{report.seconds:.1f}",
            f"{report.argument_bytes / GIB:.2f}",
            f"{report.temp_bytes / 2**20:.1f}",
            "in place" if report.in_place else "COPIED",
            f"{(report.flops or report.cost.flops) / 1e9:.1f}",
            "-" if moved is None else f"{moved / 1e9:.3f}",
            "-" if moved is None else f"{moved / report.cost.bytes:.2f}",
            f"{1e3 * report.floor_s:.3f}",
            "-" if report.estimate_s is None else f"{1e3 * report.estimate_s:.3f}",
        )
        print(
            "".join(f"{value!s:>{width}}" for value, (_, width) in zip(values, self._COLUMNS, strict=True)), flush=True
        )
        self._kernels = report.kernels

    def verdict(self, report: CompileReport) -> int:
        """A few sentences."""
        limits, spare = self._limits, report.spare_bytes / GIB
        print(f"\nAttention: {self._kernels}")
        print(
            f"Of each of {report.tensor_parallel} devices' {report.memory_bytes / GIB:.1f} GiB, weights take "
            f"{report.weight_bytes / GIB:.2f}, the KV pool of {limits.num_pages} pages {report.pool_bytes / GIB:.2f}."
        )
        if report.fits:
            print(f"It fits {report.target}, with {spare:.2f} GiB to spare.")
        else:
            print(f"It does not fit {report.target}: {-spare:.2f} GiB are missing.")
        if report.most_pages < 2:
            print("No KV pool fits at all; take more devices (--tp).")
        else:
            print(
                f"The largest KV pool that fits has {report.most_pages} pages: {report.most_slots} sequences of "
                f"{limits.max_context} positions."
            )
        return 0 if report.fits else 1
