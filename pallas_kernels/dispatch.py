"""Which lowering runs an operation, and why: `auto` always works, an explicit choice that cannot run raises."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax

AUTO = "auto"
XLA = "xla"
MOSAIC_TPU = "pallas_mosaic_tpu"
MOSAIC_GPU = "pallas_mosaic_gpu"
LOWERINGS = (XLA, MOSAIC_TPU, MOSAIC_GPU)
_PLATFORM_OF = {MOSAIC_TPU: "tpu", MOSAIC_GPU: "cuda"}


class KernelUnavailable(ValueError):
    """The lowering that was asked for cannot run here; the message says why."""


@dataclass(frozen=True)
class Choice:
    """The lowering chosen for one operation (`name`, one of LOWERINGS) and the reason, a sentence."""

    name: str
    reason: str


def current_platform() -> str:
    """What the code being traced will run on: "cpu", "cuda", "rocm" or "tpu".

    An abstract mesh with a named device (a compile for a chip that is not attached) wins over the default backend.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform = device.platform if device is not None else jax.default_backend()
    return "cuda" if platform == "gpu" else platform


def choose(impl: str, platform: str, why_not: Callable[[str], str | None]) -> Choice:
    """Pick a lowering.

    impl: "auto" or one of LOWERINGS.
    platform: as `current_platform()` gives it.
    why_not: lowering name -> None when it can run these arguments, else the reason as a sentence.
    Raises KernelUnavailable for an unknown or impossible explicit choice.
    """
    if impl == AUTO:
        return _choose_auto(platform, why_not)
    if impl not in LOWERINGS:
        raise KernelUnavailable(f"There is no implementation {impl!r}; choose auto, {', '.join(LOWERINGS)}.")
    needed = _PLATFORM_OF.get(impl)
    if needed not in (None, platform):
        raise KernelUnavailable(f"{impl} needs a {needed} device, but this program runs on {platform}; choose auto.")
    reason = None if impl == XLA else why_not(impl)
    if reason is not None:
        raise KernelUnavailable(f"{impl} cannot run here: {reason}")
    return Choice(impl, "It was asked for.")


def _choose_auto(platform: str, why_not: Callable[[str], str | None]) -> Choice:
    native = next((name for name, where in _PLATFORM_OF.items() if where == platform), None)
    if native is None:
        return Choice(XLA, f"There is no Pallas lowering for {platform}; XLA runs everywhere.")
    reason = why_not(native)
    if reason is not None:
        return Choice(XLA, f"{native} cannot run here: {reason}")
    return Choice(native, f"The native kernel of {platform}.")


def load(package: str, name: str) -> ModuleType:
    """The module of a lowering, imported only when it is looked at (a GPU lowering needs GPU packages)."""
    return importlib.import_module(f"{package}.{name}")


def choose_for(package: str, impl: str, *arguments: Any, **options: Any) -> Choice:
    """`choose` for an operation's package and the arguments of one call (arrays or ShapeDtypeStructs)."""

    def why_not(name: str) -> str | None:
        try:
            module = load(package, name)
        except ImportError as error:
            return f"a package it needs is not installed ({error})."
        return module.unsupported(*arguments, **options)

    return choose(impl, current_platform(), why_not)
