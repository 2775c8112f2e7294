"""Options and results that `bench serve` and `simulate` share: workload, objective and figures."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from jaxinfer.cli._errors import UserMistake, user_mistakes
from jaxinfer.cli._parser import number, positive, refuse_without_effect, whole_number
from jaxinfer.cli._recording import add_file_options, write_files
from jaxinfer.cli._tables import print_table
from jaxinfer.core.latency import Capacity, Distribution, Slo, Summary, summarize
from jaxinfer.core.scheduler import SchedulerConfig
from jaxinfer.core.timeline import Timeline
from jaxinfer.core.workload import LARGEST_LINE, Workload, WorkloadSpec, dataset_workload, random_workload

if TYPE_CHECKING:
    from jaxinfer.engine.report import TimeUnit


_OF_RANDOM_PROMPTS = ("random_input_len", "random_range_ratio", "random_prefix_len", "prefix_share")


def add_workload_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the workload."""
    group = parser.add_argument_group("workload")
    group.add_argument("--num-prompts", type=positive, default=100, metavar="N", help="requests (100)")
    group.add_argument(
        "--request-rate",
        type=number,
        default=float("inf"),
        metavar="R",
        help="requests per second on average, a Poisson process (default: inf, all at once)",
    )
    group.add_argument(
        "--burstiness",
        type=number,
        default=1.0,
        metavar="B",
        help="below 1 they come in bursts, above 1 more evenly: the shape of a gamma distribution (1)",
    )
    group.add_argument(
        "--max-concurrency", type=positive, metavar="N", help="send a request only when fewer than N are unfinished"
    )
    group.add_argument("--random-input-len", type=positive, default=256, metavar="N", help="mean prompt length (256)")
    group.add_argument("--random-output-len", type=positive, default=64, metavar="N", help="mean output length (64)")
    group.add_argument(
        "--random-range-ratio",
        type=number,
        default=0.0,
        metavar="R",
        help="lengths are uniform within R of the mean (0)",
    )
    group.add_argument(
        "--random-prefix-len",
        type=whole_number,
        default=0,
        metavar="N",
        help="tokens that prompts begin with alike (0)",
    )
    group.add_argument(
        "--prefix-share", type=number, default=1.0, metavar="S", help="share of the prompts that begin so (1)"
    )
    group.add_argument(
        "--dataset-path",
        metavar="FILE",
        help="requests as JSON lines: prompt, prompt_token_ids or input_tokens, and perhaps output_tokens, "
        "arrival, priority",
    )
    group.add_argument("--seed", type=whole_number, default=0, metavar="N", help="same seed, same work (0)")


def add_result_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of what is told about a run."""
    group = parser.add_argument_group("results")
    group.add_argument(
        "--slo", metavar="LIMITS", help="count requests within limits on ttft, itl, tpot or e2e: ttft:200ms,itl:50ms"
    )
    add_file_options(group)
    group.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def read_workload(
    options: argparse.Namespace, vocab_size: int, encode: Callable[[str], list[int]] | None = None
) -> Workload:
    """The workload that the options describe."""
    if options.dataset_path is not None:
        refuse_without_effect(options, _OF_RANDOM_PROMPTS, "with --dataset-path")
    with user_mistakes():
        spec = WorkloadSpec(
            num_prompts=options.num_prompts,
            request_rate=options.request_rate,
            burstiness=options.burstiness,
            max_concurrency=options.max_concurrency,
            input_len=options.random_input_len,
            output_len=options.random_output_len,
            range_ratio=options.random_range_ratio,
            prefix_len=options.random_prefix_len,
            prefix_share=options.prefix_share,
            seed=options.seed,
        )
        if options.dataset_path is None:
            return random_workload(spec, vocab_size)
        try:
            with open(options.dataset_path, encoding="utf-8-sig") as file:
                lines = iter(partial(file.readline, LARGEST_LINE + 1), "")  # a line without an end is not read whole
                return dataset_workload(lines, spec, vocab_size, encode)
        except UnicodeDecodeError:
            raise UserMistake(f"{options.dataset_path} is not text in UTF-8.") from None


def read_slo(options: argparse.Namespace) -> Slo | None:
    """The objective that --slo gives."""
    with user_mistakes():
        return None if options.slo is None else Slo.parse(options.slo)


def show_run(
    options: argparse.Namespace,
    title: str,
    facts: Sequence[tuple[str, str]],
    timeline: Timeline,
    config: SchedulerConfig,
    unit: TimeUnit,
) -> None:
    """Print a run's figures and write its trace and report."""
    from jaxinfer.engine.report import ReportSection

    summary = summarize(timeline, Capacity.of_scheduler(config), read_slo(options))
    if options.json:
        print(json.dumps({"title": title} | dict(facts) | _without_none(asdict(summary))))
    else:
        print(f"{title}. " + "; ".join(f"{label}: {value}" for label, value in facts) + ".")
        _print_summary(summary, unit)
    write_files(options, [ReportSection(title, facts, timeline, summary, unit)])  # last: the disk may be full


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _print_summary(summary: Summary, unit: TimeUnit) -> None:
    rows = [(name, *_figures(found, unit)) for name, found in summary.latencies.items()]
    print_table(("", "mean", "p50", "p90", "p99", "of"), rows, left=("",))
    per = unit.per
    print(
        f"{summary.complete} of {summary.sequences} requests complete in {unit.text(summary.duration_s)}: "
        f"{summary.requests_per_s:.4g} requests/{per}, {summary.output_tokens_per_s:.4g} output tokens/{per}, "
        f"{summary.total_tokens_per_s:.4g} tokens/{per} with the prompts."
    )
    if summary.good is not None:
        print(f"Within the objective: {summary.good}, a goodput of {summary.goodput_per_s:.4g} requests/{per}.")
    print(
        f"KV pages held: {100 * summary.kv_mean:.0f}% on average, {100 * summary.kv_peak:.0f}% at most; "
        f"{summary.preemptions} preemptions; {100 * summary.hit_rate:.1f}% of known tokens found in the cache."
    )
    if summary.page_copies or summary.pages_out:
        print(
            f"Pages: {summary.page_copies} copied, {summary.pages_out} moved to host memory, {summary.pages_in} back; "
            f"it kept {summary.host_pages_peak} at most."
        )
    print(f"{summary.rounds} rounds{_host_sentence(summary)}.")
    print(f"Bottleneck: {summary.bottleneck.name}: {summary.bottleneck.evidence}")


def _host_sentence(summary: Summary) -> str:
    if summary.host is None:
        return ""
    share = "" if summary.host_of_decode is None else f"took {100 * summary.host_of_decode:.1f}% of a decode step and "
    return f"; the host {share}kept the device waiting {100 * summary.host_exposed:.1f}% of their time"


def _figures(found: Distribution | None, unit: TimeUnit) -> tuple[str, ...]:
    if found is None:
        return "-", "-", "-", "-", "0"
    return *(unit.text(value) for value in (found.mean, found.p50, found.p90, found.p99)), str(found.count)
