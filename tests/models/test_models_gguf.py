"""A GGUF file of each family is the same decoder as the checkpoint that it was converted from."""

from __future__ import annotations

import json
import lzma
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from checkpoints import open_checkpoint
from jaxinfer.models import abstract_params, family_of
from jaxinfer.runtime.loading import decoder_config, load_params

GOLDEN = Path(__file__).parents[1] / "checkpoints" / "golden" / "gguf"


@pytest.fixture(params=sorted(path.stem for path in GOLDEN.glob("*.json")))
def pair(request, tmp_path):
    """(checkpoint, the config.json that transformers wrote of the same model)."""
    path = tmp_path / "model.gguf"
    path.write_bytes(lzma.decompress((GOLDEN / f"{request.param}.gguf.xz").read_bytes()))
    with open_checkpoint(path) as checkpoint:
        yield checkpoint, json.loads((GOLDEN / f"{request.param}.json").read_text())["config"]


def rounded(config):
    """The file has the attention factor in float32."""
    factors = [None if rope is None else round(rope.attention_factor, 6) for rope in config.ropes]
    ropes = (rope and replace(rope, attention_factor=f) for rope, f in zip(config.ropes, factors, strict=True))
    return config.replace(ropes=tuple(ropes))


def test_the_decoder_of_a_gguf_file(pair):
    checkpoint, original = pair
    found, expected = decoder_config(checkpoint, dtype="float32"), family_of(original).decoder(original)
    assert rounded(found) == rounded(expected)
    params = load_params(checkpoint, found)
    shapes = jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), params)
    assert shapes == jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), abstract_params(expected))
