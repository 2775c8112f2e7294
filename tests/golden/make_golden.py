"""Write the tiny reference checkpoints next to this file: ``python make_golden.py [family ...]``.

Needs torch and transformers (the versions used are in README.md), nothing of jaxinfer. Every directory is a real
Hugging Face checkpoint with random weights; ``expected.npz`` in it holds what transformers computes from the *written
files* (loaded back, so the stored rounding is part of the model): eager attention, float32, CPU.

For prompt number i the archive has ``prompt_i`` int32[P], ``logits_i`` float32[P, V] (every position), ``greedy_i``
int32[64] (end-of-sequence ids are ordinary ids here) and ``margin_i`` float32[] (smallest top1-top2 logit distance over
those 64 steps). A seed is kept only if every margin is at least MIN_MARGIN, the outputs do not collapse into a short
cycle, and switching off each special feature of the family moves the logits visibly.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

HERE = Path(__file__).resolve().parent
NEW_TOKENS = 64
PROMPT_LENGTHS = (1, 7, 20, 47)
MIN_MARGIN = 3e-3
MIN_DISTINCT_IDS = 12
MIN_FEATURE_EFFECT = 0.1
# Cached and uncached float32 sums run in another order; anything above this is a real difference.
CACHE_TOLERANCE = 2e-3

Model = torch.nn.Module


@dataclass(frozen=True)
class Family:
    """One reference checkpoint. ``features`` maps a feature's name to an edit of a loaded model that removes it."""

    name: str
    config: PreTrainedConfig
    dtype: torch.dtype
    features: dict[str, Callable[[Model], None]]
    shard_size: str = "10GB"
    # config.json keys as older transformers releases wrote them, instead of `rope_parameters`: both are in use.
    legacy_rope: dict[str, object] = field(default_factory=dict)
    prompt_lengths: tuple[int, ...] = PROMPT_LENGTHS
    # The last ids of the vocabulary, which no prompt has.
    ids_unused: int = 0


def tensors_ending(model: Model, suffix: str) -> list[torch.Tensor]:
    """The parameters and buffers whose names end so."""
    found = [t for name, t in (*model.named_parameters(), *model.named_buffers()) if name.endswith(suffix)]
    if not found:
        raise SystemExit(f"nothing in the model ends with {suffix}")
    return found


def modules_with(model: Model, attribute: str) -> list[Model]:
    """The modules that have an attribute."""
    found = [module for module in model.modules() if hasattr(module, attribute)]
    if not found:
        raise SystemExit(f"no module of the model has {attribute}")
    return found


def fill(model: Model, suffix: str, value: float = 0.0) -> None:
    """Fill every tensor whose name ends so."""
    for tensor in tensors_ending(model, suffix):
        tensor.data.fill_(value)


def _reset_rope(model: Model) -> None:
    """Replace scaled rotary frequencies by the plain ones."""
    config = model.config
    half = config.head_dim // 2
    theta = config.rope_parameters["rope_theta"]
    model.model.rotary_emb.inv_freq = theta ** (-torch.arange(half, dtype=torch.float32) / half)


def _reset_theta(model: Model) -> None:
    half = model.model.rotary_emb.inv_freq.shape[0]
    model.model.rotary_emb.inv_freq = 500.0 ** (-torch.arange(half, dtype=torch.float32) / half)


def _widen_window(model: Model, window: int) -> None:
    model.config.sliding_window = window


def _norms_to_one(model: Model) -> None:
    fill(model, "norm.weight", 1.0)


COMMON = {"max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 48,
}


def families() -> list[Family]:
    llama = LlamaConfig(
        vocab_size=160,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        **COMMON,
    )
    llama_tied = LlamaConfig(
        vocab_size=160,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "llama3", "rope_theta": 1000.0, **LLAMA3_SCALING},
        **COMMON,
    )
    qwen2 = Qwen2Config(
        vocab_size=157,
        hidden_size=48,
        intermediate_size=88,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        **COMMON,
    )
    qwen3 = Qwen3Config(
        vocab_size=160,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        **COMMON,
    )
    mistral = MistralConfig(
        vocab_size=160,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        sliding_window=8,
        tie_word_embeddings=False,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        **COMMON,
    )
    return [
        Family(
            "llama",
            llama,
            torch.float32,
            {"rope theta": _reset_theta, "norm weights": _norms_to_one},
            shard_size="110KB",
        ),
        Family(
            "llama-tied",
            llama_tied,
            torch.bfloat16,
            {"llama3 rope scaling": _reset_rope},
            legacy_rope={"rope_theta": 1000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3_SCALING}},
        ),
        Family(
            "qwen2",
            qwen2,
            torch.float32,
            {
                "q bias": lambda model: fill(model, "q_proj.bias", 0.0),
                "k bias": lambda model: fill(model, "k_proj.bias", 0.0),
                "v bias": lambda model: fill(model, "v_proj.bias", 0.0),
            },
            legacy_rope={"rope_theta": 1000000.0, "rope_scaling": None},
        ),
        Family(
            "qwen3",
            qwen3,
            torch.bfloat16,
            {
                "q norm": lambda model: fill(model, "q_norm.weight", 1.0),
                "k norm": lambda model: fill(model, "k_norm.weight", 1.0),
            },
        ),
        Family(
            "mistral",
            mistral,
            torch.bfloat16,
            {
                "sliding window": lambda model: _widen_window(model, 256),
                "window of 9": lambda model: _widen_window(model, 9),
            },
        ),
    ]


def randomise(model: Model, seed: int) -> None:
    """Weights with real spread: matrices N(0, 0.25), norm weights in 0.5..1.5, biases N(0, 0.5)."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        if name.endswith("norm.weight"):
            parameter.data.uniform_(0.5, 1.5, generator=generator)
        else:
            parameter.data.normal_(0.0, 0.5 if name.endswith("bias") else 0.25, generator=generator)


def write_checkpoint(family: Family, seed: int, folder: Path) -> None:
    model = AutoModelForCausalLM.from_config(family.config, dtype=torch.float32)
    randomise(model, seed)
    shutil.rmtree(folder, ignore_errors=True)
    model.to(family.dtype).save_pretrained(folder, max_shard_size=family.shard_size)
    if family.legacy_rope:
        path = folder / "config.json"
        config = json.loads(path.read_text())
        del config["rope_parameters"]
        config["torch_dtype"] = config.pop("dtype")
        config.update(family.legacy_rope)
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def load(folder: Path) -> Model:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def all_logits(model: Model, ids: list[int]) -> torch.Tensor:
    """Float32 [len(ids), vocab], computed without a cache."""
    return model(torch.tensor([ids]), use_cache=False).logits[0].float()


def greedy_cached(model: Model, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """The new ids and the logits they were chosen from [NEW_TOKENS, vocab], one token at a time with the KV cache."""
    cache, feed, ids, rows = None, prompt, [], []
    for _ in range(NEW_TOKENS):
        out = model(torch.tensor([feed]), cache=cache, use_cache=True)
        cache = out.cache
        rows.append(out.logits[0, -1].float())
        feed = [int(rows[-1].argmax())]
        ids += feed
    return ids, torch.stack(rows)


def check_against_recomputation(model: Model, prompt: list[int], ids: list[int], cached: torch.Tensor) -> None:
    """Recompute every step from the whole sequence without a cache; ids must agree and logits be close."""
    for step in range(NEW_TOKENS):
        row = all_logits(model, prompt + ids[:step])[-1]
        distance = float((row - cached[step]).abs().max())
        if int(row.argmax()) != ids[step] or distance > CACHE_TOLERANCE:
            raise SystemExit(f"step {step}: cached and uncached passes differ by {distance:.2e}")


def smallest_margin(rows: torch.Tensor) -> float:
    top = rows.topk(2, dim=-1).values
    return float((top[:, 0] - top[:, 1]).min())


def weak_feature(family: Family, folder: Path, prompt: list[int], logits: torch.Tensor) -> str | None:
    """Name a feature whose removal these logits would hardly show, or None."""
    for name, remove in family.features.items():
        model = load(folder)
        remove(model)
        if float((all_logits(model, prompt) - logits).abs().max()) < MIN_FEATURE_EFFECT:
            return name
    return None


def expected_values(model: Model, prompts: list[list[int]]) -> dict[str, np.ndarray] | str:
    """The archive's content, or the reason why this seed does not serve."""
    content: dict[str, np.ndarray] = {}
    for index, prompt in enumerate(prompts):
        ids, rows = greedy_cached(model, prompt)
        margin = smallest_margin(rows)
        if margin < MIN_MARGIN:
            return f"margin {margin:.1e}"
        if len(set(ids)) < MIN_DISTINCT_IDS:
            return f"only {len(set(ids))} distinct ids"
        check_against_recomputation(model, prompt, ids, rows)
        content[f"prompt_{index}"] = np.asarray(prompt, np.int32)
        content[f"logits_{index}"] = all_logits(model, prompt).numpy()
        content[f"greedy_{index}"] = np.asarray(ids, np.int32)
        content[f"margin_{index}"] = np.float32(margin)
    return content


def make(family: Family, target: Path, write: Callable[[Any, int, Path], None]) -> None:
    beyond = family.config.get_text_config().vocab_size - family.ids_unused
    for seed in range(1, 400):
        write(family, seed, target)
        model = load(target)
        numbers = np.random.default_rng(seed)
        prompts = [numbers.integers(3, beyond, n).tolist() for n in family.prompt_lengths]
        content = expected_values(model, prompts)
        if not isinstance(content, str):
            weak = weak_feature(family, target, prompts[-1], torch.from_numpy(content[f"logits_{len(prompts) - 1}"]))
            if weak is None:
                break
            content = f"{weak} hardly matters"
        print(f"{family.name}: seed {seed} rejected: {content}", file=sys.stderr)
    else:
        raise SystemExit(f"{family.name}: no seed serves")
    np.savez_compressed(target / "expected.npz", seed=np.int32(seed), **content)
    size = sum(path.stat().st_size for path in target.iterdir())
    margins = [f"{float(content[f'margin_{i}']):.4f}" for i in range(len(prompts))]
    distinct = [len(set(content[f"greedy_{i}"].tolist())) for i in range(len(prompts))]
    print(f"{family.name}: seed {seed}, margins {margins}, distinct ids {distinct}, {size / 1000:.0f} kB")


def main(families: Sequence[Family], write: Callable[[Any, int, Path], None]) -> None:
    """Make the families that the command line names. write: the checkpoint of a family from a seed."""
    known = {family.name: family for family in families}
    parser = argparse.ArgumentParser(description="Write the tiny reference checkpoints next to this file.")
    parser.add_argument("name", nargs="*", help=f"which ones (default: all): {', '.join(known)}")
    names = parser.parse_args().name or list(known)
    if unknown := [name for name in names if name not in known]:
        parser.error(f"unknown name {unknown[0]}; known: {', '.join(known)}")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("highest")
    with torch.inference_mode():
        for name in names:
            make(known[name], HERE / name, write)


if __name__ == "__main__":
    main(families(), write_checkpoint)
