"""Compile the TPU kernels for a chip that is not attached and print one JSON line for each: run as a script, alone.

Usage: tpu_kernel_figures.py CHIP OPERATION/CASE ... (or OPERATION for all its cases). The environment that libtpu needs
must be in place before jax is imported, hence a process of its own.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
import time
from typing import Any

os.environ.update(
    JAX_PLATFORMS="cpu",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    TPU_SKIP_MDS_QUERY="1",
    TPU_ACCELERATOR_TYPE="v5litepod-4",
    TPU_WORKER_HOSTNAMES="localhost",
)

import jax
import numpy as np
from jax.experimental import topologies

TOPOLOGIES = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "v5p": "v5p:2x2x1", "v7x": "tpu7x:2x2x1"}


def call_of(operation: str, case: Any) -> tuple[Any, tuple, int]:
    """(function, abstract arguments, index of the pages among them) of a case."""
    lowering = importlib.import_module(f"pallas_kernels.{operation}.pallas_mosaic_tpu")
    function = getattr(lowering, operation)
    if operation == "kv_write":
        specs = importlib.import_module("pallas_kernels.kv_write.specs")
        arguments = specs.abstract_arguments(case)
        reason = lowering.unsupported(*arguments)
    else:
        abstract = importlib.import_module("pallas_kernels.cases").abstract_arguments(case)
        reason = lowering.unsupported(*abstract.positional(case.spec), sinks=abstract.sinks)
        arguments = (*abstract.positional(case.spec)[:-1], abstract.sinks)
    if reason is not None:
        raise ValueError(reason)
    if operation == "kv_write":
        return function, arguments, 2
    return lambda *a: function(*a[:-1], case.spec, sinks=a[-1]), arguments, 3


def figures(device: Any, operation: str, case: Any) -> dict[str, Any]:
    """What the compiler says about one case; `refused` or `error` alone where there is none."""
    started = time.perf_counter()
    try:
        function, arguments, at = call_of(operation, case)
    except ValueError as refusal:
        return {"refused": str(refusal)}
    sharding = jax.sharding.SingleDeviceSharding(device)
    arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)
    try:
        compiled = jax.jit(function, donate_argnums=at).lower(*arguments).compile()
    except jax.errors.JaxRuntimeError as error:
        return {"error": str(error)[:2000]}
    memory, text = compiled.memory_analysis(), compiled.as_text()
    pool = arguments[at].data.shape
    shape = f"[{','.join(map(str, pool))}]"
    copies = [line for line in text.splitlines() if shape in line and (" copy(" in line or " copy-start(" in line)]
    return {
        "seconds": round(time.perf_counter() - started, 1),
        "pool_bytes": sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(arguments[at])),
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "bytes_accessed": compiled.cost_analysis()["bytes accessed"],
        "flops": compiled.cost_analysis()["flops"],
        "kernels": text.count('custom_call_target="tpu_custom_call"'),
        "pool_copies": len(copies),
    }


def main(chip: str, names: list[str]) -> None:
    """Compile the named cases for a chip."""
    device = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip]).devices[0]
    target = jax.sharding.AbstractDevice(device_kind=device.device_kind, num_cores=1, platform="tpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=target)
    for name in names:
        operation, _, wanted = name.partition("/")
        specs = importlib.import_module(f"pallas_kernels.{operation}.specs")
        cases = [case for case in specs.CASES if wanted in ("", case.name)]
        if operation != "kv_write" and wanted.startswith("llama_3_8b"):
            page_size = int(wanted.rpartition(":")[2]) if ":" in wanted else specs.LLAMA_3_8B.page_size
            cases = [dataclasses.replace(specs.LLAMA_3_8B, page_size=page_size)]
        for case in cases:
            with jax.sharding.use_abstract_mesh(mesh):
                found = figures(device, operation, case)
            print(json.dumps({"chip": chip, "operation": operation, "case": case.name, **found}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
