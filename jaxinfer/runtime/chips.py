"""Chips to compile for without having them: their memory and speed by datasheet, and how their compilers know them."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1024**3
USABLE_MEMORY = 0.96
"""Part of a device's memory that programs get; the rest is the runtime's."""


@dataclass(frozen=True)
class Gpu:
    """What XLA's GPU compiler must know of a chip: a line each of its target configuration."""

    kind: str
    capability: tuple[int, int]
    accelerated_features: bool
    cores: int
    fpus_per_core: int
    shared_memory_per_core: int
    shared_memory_per_block: int
    l2_bytes: int
    clock_ghz: float


@dataclass(frozen=True)
class Chip:
    """One kind of chip, in jax devices.

    devices: jax devices of one chip. memory_bytes, bandwidth (bytes/s), flops (dense bf16 FLOP/s): of one device.
    topologies: for a TPU, topology names by number of chips. gpu: for a GPU, its description.
    source: where the figures come from.
    """

    name: str
    memory_bytes: int
    bandwidth: float
    flops: float
    source: str
    devices: int = 1
    topologies: tuple[tuple[int, str], ...] = ()
    gpu: Gpu | None = None

    @property
    def platform(self) -> str:
        """ "tpu" or "cuda"."""
        return "tpu" if self.gpu is None else "cuda"


_CLOUD = "Google Cloud TPU documentation"
_NVIDIA = "NVIDIA datasheet, SXM part"

CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            "v5e",
            16 * GIB,
            819e9,
            197e12,
            _CLOUD,
            topologies=((1, "v5e:1x1"), (4, "v5e:2x2"), (8, "v5e:2x4"), (16, "v5e:4x4")),
        ),
        Chip(
            "v6e",
            32 * GIB,
            1640e9,
            918e12,
            _CLOUD,
            topologies=((1, "v6e:1x1"), (4, "v6e:2x2"), (8, "v6e:2x4"), (16, "v6e:4x4")),
        ),
        Chip("v5p", 95 * GIB, 2765e9, 459e12, _CLOUD, topologies=((4, "v5p:2x2x1"), (8, "v5p:2x2x2"))),
        Chip(
            "v7x",
            96 * GIB,
            3690e9,
            1153e12,
            f"{_CLOUD}; a chip is two devices, and these are half its figures",
            devices=2,
            topologies=((1, "tpu7x:1x1x1"), (4, "tpu7x:2x2x1"), (8, "tpu7x:2x2x2")),
        ),
        Chip(
            "h100",
            84942979072,
            3350e9,
            989e12,
            _NVIDIA,
            gpu=Gpu("NVIDIA H100 80GB HBM3", (9, 0), True, 132, 128, 233472, 232448, 52428800, 1.98),
        ),
        Chip(
            "h200",
            150754820096,
            4800e9,
            989e12,
            _NVIDIA,
            gpu=Gpu("NVIDIA H200", (9, 0), True, 132, 128, 233472, 232448, 62914560, 1.98),
        ),
        Chip(
            "b200",
            192 * 10**9,
            8000e9,
            2250e12,
            _NVIDIA,
            gpu=Gpu("NVIDIA B200", (10, 0), True, 148, 128, 233472, 232448, 132120576, 1.965),
        ),
        Chip(
            "a100",
            85899345920,
            2039e9,
            312e12,
            _NVIDIA,
            gpu=Gpu("NVIDIA A100-SXM4-80GB", (8, 0), False, 108, 64, 167936, 166912, 41943040, 1.41),
        ),
    )
}


@dataclass(frozen=True)
class Target:
    """A number of chips of one kind."""

    chip: Chip
    chips: int

    @property
    def name(self) -> str:
        """As given on the command line, v6e-4 for instance."""
        return f"{self.chip.name}-{self.chips}"

    @property
    def devices(self) -> int:
        """jax devices."""
        return self.chips * self.chip.devices


def parse_target(text: str) -> Target:
    """ "v6e-4", "h100" or "h100-2" as a Target; ValueError, naming what there is, for anything else."""
    name, _, count = text.partition("-")
    chip = CHIPS.get(name)
    if chip is None:
        raise ValueError(f"There is no target {text!r}; chips are {', '.join(CHIPS)}, with a number as in v6e-4.")
    chips = int(count) if count.isdecimal() else 0 if count else 1
    possible = [number for number, _ in chip.topologies] or [1, 2, 4, 8]
    if not any(1 <= chips <= number for number in possible):
        raise ValueError(f"The target {text!r} is not known; {name} comes in 1 to {max(possible)} chips.")
    return Target(chip, chips)


def gpu_target_config(chip: Chip) -> str:
    """A GPU's description in the text form of xla.gpu.GpuTargetConfigProto."""
    gpu = chip.gpu
    assert gpu is not None, "only GPUs are described to the compiler this way"
    features = " feature_extension: ACCELERATED_FEATURES" if gpu.accelerated_features else ""
    major, minor = gpu.capability
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {gpu.shared_memory_per_core}
  threads_per_core_limit: 2048
  core_count: {gpu.cores}
  fpus_per_core: {gpu.fpus_per_core}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {int(chip.bandwidth)}
  l2_cache_size: {gpu.l2_bytes}
  clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {chip.memory_bytes}
  shared_memory_per_block_optin: {gpu.shared_memory_per_block}
  cuda_compute_capability {{ major: {major} minor: {minor}{features} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
runtime_version {{ major: 13 }}
device_description_str: "{gpu.kind}"
"""
