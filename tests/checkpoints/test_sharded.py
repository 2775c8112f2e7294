"""Tensors straight onto a mesh of eight simulated devices, and the memory that loading takes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from checkpoint_files import TinyGGUF, write_hf

from checkpoints import convert

ROOT = Path(__file__).parents[2]


def run(code: str, *arguments: object, devices: int = 8) -> dict:
    """Run a program on simulated devices; returns the JSON that it prints."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


SHARDED = """
    import json, sys
    import jax, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from checkpoints import open_checkpoint

    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
    facts = {}
    for source in sys.argv[1:]:
        with open_checkpoint(source) as checkpoint:
            for name, info in checkpoint.tensors.items():
                specs = [P()]
                if len(info.shape) == 2:
                    specs += [P("model"), P(None, "model"), P("data", "model"), P(("data", "model"))]
                    specs = [s for s in specs if all(
                        size % np.prod([mesh.shape[a] for a in ([axis] if isinstance(axis, str) else axis or [])]) == 0
                        for size, axis in zip(info.shape, s))]
                for spec in specs:
                    sharding = NamedSharding(mesh, spec)
                    array, whole = checkpoint.read_sharded(name, sharding), checkpoint.read(name)
                    assert array.sharding == sharding and array.shape == info.shape and array.dtype == info.dtype
                    assert len(array.addressable_shards) == 8
                    for shard in array.addressable_shards:
                        assert shard.data.shape == sharding.shard_shape(info.shape), (name, spec)
                        assert np.asarray(shard.data).tobytes() == np.ascontiguousarray(whole[shard.index]).tobytes()
                    facts[checkpoint.format] = facts.get(checkpoint.format, 0) + 1
            try:
                uneven = NamedSharding(mesh, P("model"))
                checkpoint.read_sharded("model.norm.weight", uneven)
                raise SystemExit("an uneven sharding was taken")
            except ValueError:
                pass
    print(json.dumps(facts))
"""


def test_every_device_holds_its_part_only(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {
        "model.embed_tokens.weight": rng.standard_normal((24, 16), np.float32).astype(ml_dtypes.bfloat16),
        "model.layers.0.self_attn.q_proj.weight": rng.standard_normal((64, 48), np.float32),
        "model.norm.weight": rng.standard_normal(13, np.float32),
    }
    source = write_hf(tmp_path / "m")
    safetensors.numpy.save_file(tensors, source / "model.safetensors")
    convert(source, tmp_path / "o", format="orbax")
    path = TinyGGUF(tensors={"output_norm.weight": np.ones(13, np.float32)}).write(tmp_path / "m.gguf")
    facts = run(SHARDED, source, tmp_path / "o", path)
    assert facts["safetensors"] == facts["orbax"] == 11
    assert facts["gguf"] > 30


HOST = """
    import json, sys
    import jax, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from checkpoints import open_checkpoint

    def read_bytes():
        with open("/proc/self/io") as file:
            return int(next(line for line in file if line.startswith("rchar")).split()[1])

    source, port, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
    jax.distributed.initialize(f"localhost:{port}", 2, rank)
    mesh = Mesh(np.array(jax.devices()), ("model",))
    assert (len(mesh.devices), len(mesh.local_devices)) == (8, 4)
    expected = np.random.default_rng(0).standard_normal((2048, 4096), np.float32)
    with open_checkpoint(source) as checkpoint:
        before = read_bytes()
        array = checkpoint.read_sharded("big", NamedSharding(mesh, P("model")))
        array.block_until_ready()
        read = read_bytes() - before
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), expected[shard.index])
    print(json.dumps({"read": read, "nbytes": array.nbytes}))
"""


@pytest.mark.slow
def test_each_of_two_hosts_reads_its_part_of_an_orbax_checkpoint(tmp_path):
    source = write_hf(tmp_path / "m")
    big = np.random.default_rng(0).standard_normal((2048, 4096), np.float32)
    safetensors.numpy.save_file({"big": big}, source / "model.safetensors")
    convert(source, tmp_path / "o", format="orbax")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    with ThreadPoolExecutor(2) as hosts:
        for facts in hosts.map(lambda rank: run(HOST, tmp_path / "o", port, rank, devices=4), range(2)):
            assert facts["nbytes"] == big.nbytes
            assert 0.4 * big.nbytes < facts["read"] < 0.6 * big.nbytes
