"""`jaxinfer info`: what runs where, and why."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer import __version__

if TYPE_CHECKING:
    from pallas_kernels import Choice

_PACKAGES = ("jax", "jaxlib", "flax")
_PLUGINS = ("libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Declare the command."""
    about = "Show devices, the attention kernels chosen for them and why, versions, cache directories and named models."
    parser = commands.add_parser("info", help="devices, kernels, versions, caches", description=about)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Gather and print."""
    facts = gather()
    if options.json:
        print(json.dumps(facts))
    else:
        _print(facts)
    return 0


def gather() -> dict[str, Any]:
    """Everything the command shows, as JSON values."""
    import jax

    from jaxinfer.cli._serving import require_device

    require_device()
    return {
        "versions": _versions(),
        "backend": jax.default_backend(),
        "devices": [_device(device) for device in jax.devices()],
        "kernels_for": "the shapes of Llama 3 8B in bfloat16",
        "kernels": {name: {"choice": choice.name, "reason": choice.reason} for name, choice in _kernels().items()},
        "kv_cache": _kv_cache(),
        "caches": _caches(),
        "named_models": _named_models(),
    }


def _versions() -> dict[str, str]:
    versions = {"jaxinfer": __version__, "python": f"{platform.python_version()} ({sys.executable})"}
    for package in (*_PACKAGES, *_PLUGINS):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue  # a plugin of another kind of machine
    return versions


def _device(device: Any) -> dict[str, Any]:
    memory = (device.memory_stats() or {}).get("bytes_limit")
    return {"id": device.id, "platform": device.platform, "kind": device.device_kind, "memory_bytes": memory}


def _kernels() -> dict[str, Choice]:
    import jax
    import jax.numpy as jnp

    from pallas_kernels import cases
    from pallas_kernels.dispatch import AUTO, choose_for
    from pallas_kernels.paged_decode.specs import LLAMA_3_8B as DECODE
    from pallas_kernels.paged_prefill.specs import LLAMA_3_8B as PREFILL
    from pallas_kernels.quantized_matmul import specs as products

    choices = {}
    for name, case in (("paged_decode", DECODE), ("paged_prefill", PREFILL)):
        arguments = cases.abstract_arguments(case)
        choices[name] = choose_for(f"pallas_kernels.{name}", AUTO, *arguments.positional(case.spec), sinks=None)
    written = cases.abstract_arguments(PREFILL)
    places = jax.ShapeDtypeStruct((PREFILL.tokens,), jnp.int32)
    choices["kv_write"] = choose_for(
        "pallas_kernels.kv_write", AUTO, written.k, written.v, written.pages, places, places
    )
    arguments = products.abstract_arguments(products.LLAMA_3_8B[0])
    choices["quantized_matmul"] = choose_for("pallas_kernels.quantized_matmul", AUTO, *arguments)
    return choices


def _kv_cache() -> dict[str, Any]:
    from jaxinfer.core.pool import ROOM_FOR_CACHE
    from jaxinfer.engine.build import default_kv_bytes

    return {"default_bytes": int(default_kv_bytes()), "most_times_the_slots": ROOM_FOR_CACHE}


def _caches() -> dict[str, dict[str, Any]]:
    from huggingface_hub.constants import HF_HUB_CACHE

    from checkpoints import cache_directory
    from jaxinfer.runtime.compilation_cache import compilation_cache_directory

    places = {
        "named models": cache_directory() / "models",
        "compiled programs": compilation_cache_directory(),
        "hub models": Path(HF_HUB_CACHE),
    }
    return {name: {"path": str(path), "bytes": _bytes_in(path)} for name, path in places.items()}


def _bytes_in(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        try:
            total += 0 if path.is_symlink() or not path.is_file() else path.stat().st_size
        except OSError:
            continue  # removed while we looked, or not ours to look at
    return total


def _named_models() -> dict[str, dict[str, Any]]:
    from checkpoints import NAMED_MODELS, named_model_path

    paths = {name: named_model_path(name) for name in NAMED_MODELS}
    return {name: {"cached": path.is_file(), "path": str(path)} for name, path in paths.items()}


def _print(facts: dict[str, Any]) -> None:
    from rich.filesize import decimal

    _section("Versions", facts["versions"])
    devices = {}
    for device in facts["devices"]:
        memory = "" if device["memory_bytes"] is None else f", {decimal(device['memory_bytes'])} of memory"
        devices[f"{device['platform']}:{device['id']}"] = device["kind"] + memory
    _section(f"Devices (backend {facts['backend']})", devices)
    kernels = {name: f"{kernel['choice']:<18} {kernel['reason']}" for name, kernel in facts["kernels"].items()}
    _section(f"Kernels (for {facts['kernels_for']})", kernels)
    pool = facts["kv_cache"]
    size = f"up to {decimal(pool['default_bytes'])}, and {pool['most_times_the_slots']} times what the slots can use"
    _section("KV cache (unless --kv-cache-gib or --num-pages says otherwise)", {"size": size})
    caches = {name: f"{cache['path']} ({decimal(cache['bytes'])})" for name, cache in facts["caches"].items()}
    _section("Cache directories", caches)
    models = {
        name: f"cached at {model['path']}" if model["cached"] else "not cached, fetched on first use"
        for name, model in facts["named_models"].items()
    }
    _section("Named models", models)


def _section(title: str, rows: dict[str, str]) -> None:
    width = max(map(len, rows))
    print(title)
    for name, value in rows.items():
        print(f"  {name:<{width}}  {value}")
