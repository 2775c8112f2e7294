"""Small checkpoints the tests write themselves."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import safetensors.numpy
import tokenizers
from gguf.constants import GGMLQuantizationType
from tokenizers import decoders, models, pre_tokenizers, processors

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD = 64, 4, 2, 16, 96
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def byte_level_vocabulary() -> tuple[list[str], list[str]]:
    """Tokens and merges of a minimal byte-level BPE with two special tokens at the front."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġ Ġ", "1 2"]
    return ["<|im_start|>", "<|im_end|>", *alphabet, *(merge.replace(" ", "") for merge in merges)], merges


@dataclass
class TinyGGUF:
    """Recipe of a one-layer GGUF model; change a field and call `write`."""

    arch: str = "llama"
    pre: str = "smollm"
    tied: bool = True
    kind: GGMLQuantizationType = GGMLQuantizationType.Q4_1
    heads: int | list[int] = HEADS
    extra: dict[str, tuple[str, object]] = field(default_factory=dict)
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    # Tensors given as uint8[rows, bytes of a row] and the type of their blocks.
    blocks: dict[str, tuple[np.ndarray, GGMLQuantizationType]] = field(default_factory=dict)
    template: str | None = TEMPLATE
    add_bos: bool | None = False

    def weights(self) -> dict[str, np.ndarray]:
        """Float32 matrices by GGUF name, in the row order of the file."""
        rng = np.random.default_rng(7)
        vocabulary = len(byte_level_vocabulary()[0])
        shapes = {
            "token_embd.weight": (vocabulary, HIDDEN),
            "blk.0.attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
            "blk.0.attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            "blk.0.attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            "blk.0.attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
            "blk.0.ffn_gate.weight": (FEED_FORWARD, HIDDEN),
            "blk.0.ffn_up.weight": (FEED_FORWARD, HIDDEN),
            "blk.0.ffn_down.weight": (HIDDEN, FEED_FORWARD),
        }
        if not self.tied:
            shapes["output.weight"] = (vocabulary, HIDDEN)
        result = {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
        for name in ("blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight"):
            result[name] = rng.standard_normal(HIDDEN, dtype=np.float32)
        return result | self.tensors

    def write(self, path: Path) -> Path:
        """Write the file and return its path."""
        writer = gguf.GGUFWriter(path, self.arch)
        writer.add_block_count(1)
        writer.add_context_length(128)
        writer.add_embedding_length(HIDDEN)
        writer.add_feed_forward_length(FEED_FORWARD)
        writer.add_head_count(self.heads)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(500000.0)
        self._write_tokenizer(writer)
        for key, (method, value) in self.extra.items():
            getattr(writer, method)(key, value)
        for name, (value, kind) in self.blocks.items():
            writer.add_tensor(name, value, raw_dtype=kind)
        for name, value in self.weights().items():
            if name in self.blocks:
                continue
            if value.ndim == 1 or self.kind == GGMLQuantizationType.F32:
                writer.add_tensor(name, value)
            else:
                writer.add_tensor(name, gguf.quants.quantize(value, self.kind), raw_dtype=self.kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def _write_tokenizer(self, writer: gguf.GGUFWriter) -> None:
        tokens, merges = byte_level_vocabulary()
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(tokens)
        writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
        writer.add_token_merges(merges)
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
        if self.add_bos is not None:
            writer.add_add_bos_token(self.add_bos)
        if self.template is not None:
            writer.add_chat_template(self.template)


def gguf_bytes(
    *, version: int = 3, tensors: bytes = b"", tensor_count: int = 0, keys: list[bytes] | None = None
) -> bytes:
    """A GGUF header from raw parts, for files no writer would produce."""
    keys = keys or []
    return b"GGUF" + struct.pack("<IQQ", version, tensor_count, len(keys)) + b"".join(keys) + tensors


def gguf_string(text: str) -> bytes:
    """A length-prefixed string."""
    return struct.pack("<Q", len(text.encode())) + text.encode()


def gguf_tensor(name: str, dims: list[int], *, n_dims: int | None = None, kind: int = 0, offset: int = 0) -> bytes:
    """One entry of the tensor directory."""
    count = len(dims) if n_dims is None else n_dims
    return gguf_string(name) + struct.pack(f"<I{len(dims)}QIQ", count, *dims, kind, offset)


def hf_tensors() -> dict[str, np.ndarray]:
    """A few tensors in the types checkpoints use."""
    rng = np.random.default_rng(3)
    values = rng.standard_normal((8, 4), dtype=np.float32)
    return {
        "model.embed_tokens.weight": values.astype(ml_dtypes.bfloat16),
        "model.layers.0.input_layernorm.weight": values[0],
        "model.layers.0.mlp.up_proj.weight": values.astype(np.float16),
        "model.layers.10.self_attn.q_proj.weight": values.T.copy().astype(ml_dtypes.bfloat16),
        # A NaN with a payload and a negative zero: equal bytes, not just equal numbers.
        "model.norm.weight": np.array([0xFFC1, 0x8000, 0x0001], np.uint16).view(ml_dtypes.bfloat16),
    }


def write_tokenizer(directory: Path, *, adds_bos: bool = False, **settings: object) -> None:
    """Write a byte-level tokenizer.json and its tokenizer_config.json."""
    tokens, merges = byte_level_vocabulary()
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    built = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, pairs))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    if adds_bos:
        built.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", 0)]
        )
    built.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}, "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config | settings))


def write_hf(directory: Path, *, shards: int = 1, **config: object) -> Path:
    """Write a safetensors checkpoint directory, in several shards with an index when `shards` > 1."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 6} | config))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5]}))
    write_tokenizer(directory)
    tensors = hf_tensors()
    if shards == 1:
        safetensors.numpy.save_file(tensors, directory / "model.safetensors")
        return directory
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        part = {name: tensors[name] for name in sorted(tensors)[shard::shards]}
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        safetensors.numpy.save_file(part, directory / file)
        weight_map |= dict.fromkeys(part, file)
    write_index(directory, weight_map)
    return directory


def write_index(directory: Path, weight_map: object) -> None:
    """Write model.safetensors.index.json."""
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
