"""`jaxinfer plan`: what a model needs and what a chip could do with it, without running anything."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.cli._errors import UserMistake, user_mistakes
from jaxinfer.cli._options import DEFAULT_MODEL, MODEL_HELP, WEIGHT_DTYPES
from jaxinfer.cli._parser import Parser, number, positive, positives
from jaxinfer.cli._tables import print_table
from jaxinfer.core.json_files import read_json

if TYPE_CHECKING:
    from jaxinfer.engine.plan import Plan
    from jaxinfer.models import DecoderConfig
    from jaxinfer.runtime.chips import Target

_ABOUT = """Tell what a model needs, by arithmetic: parameters of every module, bytes of the weights and of the KV
cache, how many requests of which length fit at once, and what a prefill and a decode step must at least compute and
move. With a target, also the least time of these steps by the chip's datasheet. `jaxinfer compile` tells what the
compiled programs need; this needs neither compiler nor weights."""
GIB = 1024**3
_LARGEST_CONFIG = 2**24
_DTYPES = ("float32", "bfloat16")


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Declare the command."""
    parser: Parser = commands.add_parser(
        "plan", help="what a model needs: parameters, KV memory, requests, step floors", description=_ABOUT
    )
    add_config_source(parser)
    parser.add_argument("--target", metavar="CHIP-N", help="v5e-1, v6e-4, v5p-4, v7x-1, h100, h200-2, b200, a100, ...")
    parser.add_argument("--tp", type=positive, metavar="N", help="devices to cut the model over (all of the target's)")
    parser.add_argument(
        "--kv-gib", type=number, metavar="G", help="size of the KV cache (default: what the weights leave)"
    )
    parser.add_argument("--page-size", type=positive, default=64, metavar="N", help="positions of a page (64)")
    parser.add_argument("--max-context", type=positive, metavar="N", help="longest request (default: the model's)")
    parser.add_argument(
        "--batch", type=positives, default=(1, 8, 64), metavar="N,N,...", help="decode batches (1,8,64)"
    )
    parser.add_argument("--prefill", type=positives, metavar="N,N,...", help="prompt lengths (512)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.set_defaults(run=run)


def add_config_source(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Declare the options that `read_decoder` reads."""
    parser.add_argument("--model", metavar="M", help=MODEL_HELP)
    parser.add_argument("--config", metavar="FILE", help="a config.json instead of a model")
    parser.add_argument("--dtype", default="bfloat16", choices=_DTYPES, help="(default: bfloat16)")
    parser.add_argument(
        "--kv-dtype",
        default="auto",
        choices=("auto", *_DTYPES, "int8", "float8_e4m3fn"),
        help="type of the KV cache (default: that of --dtype)",
    )
    parser.add_argument(
        "--weight-dtype",
        default="auto",
        choices=WEIGHT_DTYPES,
        help="type of the weights (default: auto, which is stored: quantized GGUF weights stay so)",
    )


def read_decoder(options: argparse.Namespace) -> DecoderConfig:
    """The decoder that --model or --config describes. ValueError, OSError or UserMistake if there is none."""
    from checkpoints import open_checkpoint
    from jaxinfer.models import family_of
    from jaxinfer.models.linear import quantized_weights
    from jaxinfer.runtime.loading import decoder_config

    kv_dtype = options.dtype if options.kv_dtype == "auto" else options.kv_dtype
    types = {"dtype": options.dtype, "kv_dtype": kv_dtype}
    if options.config is not None and options.model is not None:
        raise UserMistake("Give --model or --config, not both.")
    if options.config is not None:
        config = _read_config(Path(options.config))
        weights = quantized_weights(options.weight_dtype) if options.weight_dtype in ("int8", "int4") else ()
        return family_of(config).decoder(config).replace(**types, weights=weights)
    with open_checkpoint(DEFAULT_MODEL if options.model is None else options.model) as checkpoint:
        weight_dtype = "stored" if options.weight_dtype == "auto" else options.weight_dtype
        return decoder_config(checkpoint, **types, weight_dtype=weight_dtype)


def run(options: argparse.Namespace) -> int:
    """Work it out and print it."""
    from jaxinfer.runtime.chips import parse_target  # imports no jax

    if options.kv_gib is not None and not 0 < options.kv_gib < 2**40:
        raise UserMistake(f"--kv-gib must be above 0, not {options.kv_gib:g}.")
    with user_mistakes():
        target = None if options.target is None else parse_target(options.target)
        os.environ["JAX_PLATFORMS"] = "cpu"  # before jax is imported; nothing runs on a device
        from jaxinfer.engine.plan import make_plan

        config = read_decoder(options)
        plan = make_plan(
            config,
            target=target,
            devices=options.tp,
            kv_bytes=None if options.kv_gib is None else int(options.kv_gib * GIB),
            page_size=options.page_size,
            max_context=options.max_context,
            batches=options.batch,
            prefills=options.prefill or (min(512, config.max_positions),),
        )
    if options.json:
        print(json.dumps(_as_json(plan, config, target)))
    else:
        _print(plan, config, target)
    return 0


def _read_config(path: Path) -> dict[str, Any]:
    config = read_json(path, _LARGEST_CONFIG)
    if not isinstance(config, dict):
        raise UserMistake(f"{path} holds no JSON object.")
    return config


def _as_json(plan: Plan, config: DecoderConfig, target: Target | None) -> dict[str, Any]:
    steps = [asdict(step) | {"intensity": step.intensity, "tokens_per_s": step.tokens_per_s} for step in plan.steps]
    about = {"target": None if target is None else target.name, "dtype": config.dtype, "kv_dtype": config.page_dtype}
    return about | asdict(plan) | {"steps": steps}


def _print(plan: Plan, config: DecoderConfig, target: Target | None) -> None:
    print_table(
        ("module", "copies", "parameters", "MiB"),
        [
            *(
                (module.name, str(module.copies), f"{module.parameters:,}", _mib(module.bytes))
                for module in plan.modules
            ),
            ("all", "", f"{plan.parameters:,}", _mib(plan.weight_bytes)),
        ],
        left=("module",),
    )
    cut = f", {plan.weight_bytes_per_device / GIB:.2f} on each of {plan.devices} devices" if plan.devices > 1 else ""
    kind = f"Weights, quantized and in {config.dtype}," if config.weights else f"Weights in {config.dtype}"
    print(f"{kind} take {plan.weight_bytes / GIB:.2f} GiB{cut}.")
    if plan.active_parameters < plan.parameters:
        print(f"A position uses {plan.active_parameters:,} of the {plan.parameters:,} parameters.")
    per_layer = f"2 x {config.num_kv_heads} heads x {config.head_dim}" if config.mla is None else f"{config.row_dim}"
    layers = f"{config.num_layers} layers x {per_layer}"
    print(f"The KV cache in {config.page_dtype} takes {plan.kv_bytes_per_token / 1024:g} KiB a token ({layers}).")
    print(_pool_sentence(plan, target))
    print_table(
        ("context", "MiB a layer", "MiB a request", "requests at once"),
        [
            (
                str(row.context),
                _mib(row.bytes_per_layer),
                _mib(row.bytes),
                "-" if row.requests is None else str(row.requests),
            )
            for row in plan.contexts
        ],
    )
    _print_steps(plan, target)


def _pool_sentence(plan: Plan, target: Target | None) -> str:
    if plan.kv_bytes is None:
        return (
            "Unless told otherwise an engine gives KV up to 1 GiB on a CPU and 90% of the free memory elsewhere, and "
            "at most 4 times what its slots can use; --target or --kv-gib shows how many requests fit."
        )
    if plan.kv_bytes < 0 and target is not None:
        return f"The weights do not fit {target.name}: {-plan.kv_bytes / GIB:.2f} GiB are missing."
    return f"For KV there are {plan.kv_bytes / GIB:.2f} GiB, in pages of {plan.page_size} positions."


def _print_steps(plan: Plan, target: Target | None) -> None:
    if target is not None:
        chip = target.chip
        print(
            f"Floors of {plan.devices} x {chip.name} at {chip.bandwidth / 1e9:g} GB/s and {chip.flops / 1e12:g} TFLOP/s"
            f" each ({chip.source})."
        )
    floors = () if target is None else ("floor ms", "bound", "most tok/s")
    print_table(
        ("step", "batch", "tokens", "context", "KV MiB", "GFLOP", "moved GB", "FLOP/byte", *floors),
        [
            (
                step.kind,
                str(step.batch),
                str(step.tokens),
                str(step.context),
                _mib(step.kv_bytes),
                f"{step.cost.flops / 1e9:.1f}",
                f"{step.cost.bytes / 1e9:.3f}",
                f"{step.intensity:.1f}",
                *_floor(step.floor_s, step.bound, step.tokens_per_s),
            )
            for step in plan.steps
        ],
        left=("step", "bound"),
    )


def _floor(floor_s: float | None, bound: str | None, rate: float | None) -> tuple[str, ...]:
    if floor_s is None or bound is None or rate is None:
        return ()
    return f"{1e3 * floor_s:.3f}", bound, f"{rate:,.0f}"


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f}"
