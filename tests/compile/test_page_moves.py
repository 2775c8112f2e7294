"""The programs that move pages at the Llama-3-8B shape, compiled for chips that are not attached: all in place."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from jaxinfer.runtime.compiler_environment import compiler_environment

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
needs_cuda = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None or sys.version_info < (3, 12),
    reason="the CUDA plugin of jax is not installed",
)
PROGRAM = """
import json, sys
import jax, jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jaxinfer.runtime.aot import _devices
from jaxinfer.runtime.chips import parse_target
from jaxinfer.runtime.page_moves import PAGES_PER_CALL, copy_pages, gather_pages, scatter_pages
from jaxinfer.runtime.parallel import MODEL_AXIS, state_specs
from jaxinfer.runtime.state import EngineState
from pallas_kernels import empty_pages

target, dtype = sys.argv[1:]
devices = _devices(parse_target(target))
mesh = Mesh(devices, (MODEL_AXIS,))
def place(array, spec):
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, spec))
kv = jax.eval_shape(lambda: tuple(empty_pages(2049, 8, 64, 256, dtype) for _ in range(32)))
kv = jax.tree.map(place, kv, state_specs(EngineState(kv, None, None)).kv)
whole = jax.sharding.PartitionSpec()
pages, count = (place(jax.ShapeDtypeStruct(shape, jnp.int32), whole) for shape in ((PAGES_PER_CALL,), ()))
blocks = tuple(place(block, whole) for block in jax.eval_shape(gather_pages, kv, pages))
pool = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kv)) // len(devices)
programs = {
    "copy": jax.jit(copy_pages, donate_argnums=0).lower(kv, pages, pages, count),
    "gather": jax.jit(gather_pages).lower(kv, pages),
    "scatter": jax.jit(scatter_pages, donate_argnums=0).lower(kv, blocks, pages),
}
found = {}
for name, lowered in programs.items():
    memory = lowered.compile().memory_analysis()
    found[name] = {"alias": memory.alias_size_in_bytes / pool, "temp": memory.temp_size_in_bytes / pool}
print(json.dumps(found))
"""


@pytest.mark.parametrize(
    ("target", "dtype"),
    [
        pytest.param("v6e-1", "bfloat16", marks=needs_libtpu),
        pytest.param("v6e-4", "int8", marks=needs_libtpu),
        pytest.param("h200", "int8", marks=needs_cuda),
    ],
)
def test_pages_move_in_place(target: str, dtype: str):
    command = [sys.executable, "-c", PROGRAM, target, dtype]
    environment = os.environ | compiler_environment("cuda" if target == "h200" else "tpu")
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["copy"]["alias"] >= 1
    assert found["scatter"]["alias"] >= 1
    assert found["gather"]["alias"] == 0
    assert all(program["temp"] < 0.01 for program in found.values()), found
