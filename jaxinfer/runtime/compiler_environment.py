"""What must be set before jax is imported to compile for a chip that is not attached."""

from __future__ import annotations


def compiler_environment(platform: str) -> dict[str, str]:
    """Environment variables for compiling for "tpu" or "cuda" on a machine that has none."""
    if platform == "cuda":
        return {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    return {
        "JAX_PLATFORMS": "cpu",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
    }
