"""Write the tiny reference checkpoints of the dense families beside Llama's next to this file.

``python make_golden_families.py [name ...]``: like make_golden.py, whose checks every seed must pass, too.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from make_golden import Family, Model, fill, main, modules_with, tensors_ending
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    GPT2Config,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    SmolLM3Config,
)


@dataclass(frozen=True)
class Recipe(Family):
    """A family, with more about how its weights are drawn and written."""

    # Keys of config.json to write as older transformers releases did; None removes a key.
    config_edits: dict[str, object] = field(default_factory=dict)
    prompt_lengths: tuple[int, ...] = (1, 6, 14, 34)
    ids_unused: int = 3
    # Norm weights are drawn from 0.5..1.5, and this is added: Gemma stores w of a scale 1 + w.
    norm_offset: float = 0.0
    # Biases are drawn from N(0, bias), token embeddings from N(0, embedding).
    bias: float = 0.5
    embedding: float = 0.25
    # Norms after a block's parts are so much stronger: else a tied head only repeats the last token.
    norm_after: float = 1.0
    # What tensor names begin with in other files of the family: (written by transformers, as there).
    renamed: tuple[str, str] | None = None


def set_attribute(name: str, value: object) -> Callable[[Model], None]:
    """An edit that sets an attribute of every module that has it."""

    def edit(model: Model) -> None:
        for module in modules_with(model, name):
            setattr(module, name, value)

    return edit


def set_config(name: str, value: object) -> Callable[[Model], None]:
    """An edit of the loaded model's config, for what is read at every call."""
    return lambda model: setattr(model.config, name, value)


def filled(suffix: str, value: float) -> Callable[[Model], None]:
    """An edit that fills every tensor whose name ends so."""
    return lambda model: fill(model, suffix, value)


def scale_buffer(name: str, factor: float) -> Callable[[Model], None]:
    """An edit that multiplies a buffer of every module that has it."""

    def edit(model: Model) -> None:
        for buffer in tensors_ending(model, name):
            buffer.mul_(factor)

    return edit


SIZES = {
    "vocab_size": 80,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24}


def _longrope(original: int) -> dict[str, object]:
    # The short and long factors differ in every frequency.
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0, 1.1, 1.3],
        "long_factor": [1.5, 2.5, 4.0],
        "original_max_position_embeddings": original,
    }


def _phi3(name: str, original: int, prompt_lengths: tuple[int, ...]) -> Recipe:
    config = Phi3Config(
        **SIZES, num_hidden_layers=2, rope_parameters=_longrope(original), original_max_position_embeddings=original
    )
    features = {"attention factor": set_attribute("attention_scaling", 1.0)}
    return Recipe(name, config, torch.bfloat16, features, prompt_lengths=prompt_lengths)


def recipes() -> list[Recipe]:
    """Every recipe, cheapest first."""
    gemma = {
        "num_hidden_layers": 3,
        "head_dim": 12,
        "query_pre_attn_scalar": 20,
        "sliding_window": 8,
    }
    gemma2 = Recipe(
        "gemma2",
        Gemma2Config(
            **SIZES,
            **gemma,
            attn_logit_softcapping=3.0,
            final_logit_softcapping=6.0,
            rope_parameters=PLAIN_ROPE,
        ),
        torch.bfloat16,
        {
            "cap of scores": set_attribute("attn_logit_softcapping", None),
            "scale of scores": set_attribute("scaling", 12**-0.5),
            "sliding window": set_config("sliding_window", 256),
            "embedding scale": scale_buffer("embed_scale", 1.3),
            "norms after": filled("post_attention_layernorm.weight", 0.0),
        },
        norm_offset=-1.0,
        norm_after=3.0,
        config_edits={"layer_types": None, "rope_parameters": None, "rope_theta": 10000.0},
    )
    gemma3_text = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
    }
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    gemma3 = Recipe(
        "gemma3",
        Gemma3TextConfig(**SIZES, **gemma, layer_types=kinds, rope_parameters=gemma3_text),
        torch.bfloat16,
        {
            "q norm": filled("q_norm.weight", 0.0),
            "k norm": filled("k_norm.weight", 0.0),
            "local rope": scale_buffer("sliding_attention_inv_freq", 0.5),
            "linear scaling": scale_buffer("full_attention_inv_freq", 8.0),
        },
        norm_offset=-1.0,
        norm_after=6.0,
        embedding=0.1,
        config_edits={
            "layer_types": None,
            "rope_parameters": None,
            "sliding_window_pattern": 3,
            "rope_theta": 1000.0,
            "rope_local_base_freq": 100.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    )
    nested = Recipe(
        "gemma3-nested",
        Gemma3Config(
            text_config=Gemma3TextConfig(**SIZES, **gemma, layer_types=kinds, rope_parameters=gemma3_text),
            vision_config={
                "hidden_size": 8,
                "intermediate_size": 8,
                "num_hidden_layers": 1,
                "num_attention_heads": 1,
                "image_size": 8,
                "patch_size": 4,
            },
            mm_tokens_per_image=1,
            boi_token_index=77,
            eoi_token_index=78,
            image_token_index=79,
            tie_word_embeddings=True,
        ),
        torch.bfloat16,
        {"q norm": filled("q_norm.weight", 0.0)},
        norm_offset=-1.0,
        norm_after=6.0,
        embedding=0.1,
    )
    olmo2 = Recipe(
        "olmo2",
        Olmo2Config(**SIZES, num_hidden_layers=2, rope_parameters={**PLAIN_ROPE, "rope_theta": 500000.0}),
        torch.bfloat16,
        {"q norm": filled("q_norm.weight", 1.0), "norm after MLP": filled("post_feedforward_layernorm.weight", 1.0)},
    )
    smollm3 = Recipe(
        "smollm3",
        SmolLM3Config(
            **SIZES,
            num_hidden_layers=4,
            no_rope_layers=[1, 0, 1, 1],
            rope_parameters={**YARN, "rope_theta": 1000.0},
        ),
        torch.bfloat16,
        {
            "layer without positions": lambda model: setattr(model.model.layers[1].self_attn, "use_rope", 1),
            "attention factor": set_attribute("attention_scaling", 1.0),
        },
        config_edits={"rope_parameters": None, "rope_theta": 1000.0, "rope_scaling": YARN},
    )
    gpt2 = Recipe(
        "gpt2",
        GPT2Config(vocab_size=80, n_positions=128, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2),
        torch.bfloat16,
        {"positions": filled("wpe.weight", 0.0), "bias of a norm": filled("ln_2.bias", 0.0)},
        bias=0.15,
        embedding=0.1,
        renamed=("transformer.", ""),
    )
    opt = {
        "vocab_size": 80,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "ffn_dim": 48,
        "max_position_embeddings": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    positions = {"positions": filled("embed_positions.weight", 0.0)}
    return [
        gemma2,
        gemma3,
        nested,
        _phi3("phi3-short", 128, (1, 6, 14, 34)),
        _phi3("phi3-long", 24, (25, 26, 30, 37)),
        olmo2,
        smollm3,
        gpt2,
        Recipe("opt", OPTConfig(**opt), torch.bfloat16, positions, bias=0.15, embedding=0.1),
        Recipe(
            "opt-after",
            OPTConfig(
                **opt,
                do_layer_norm_before=False,
                word_embed_proj_dim=24,
                activation_function="gelu",
                tie_word_embeddings=False,
            ),
            torch.bfloat16,
            positions,
            bias=0.15,
            embedding=0.5,
        ),
    ]


def randomise(model: Model, seed: int, recipe: Recipe) -> None:
    """Weights with real spread: matrices N(0, 0.25), the others as the recipe says."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        if re.search(r"(norm|ln_\w+)\.weight$", name):
            factor = recipe.norm_after if "post_" in name else 1.0
            parameter.data.uniform_(0.5 * factor, 1.5 * factor, generator=generator).add_(recipe.norm_offset)
        else:
            embedding = re.search(r"(wte|embed_tokens)\.weight$", name)
            spread = recipe.bias if name.endswith("bias") else recipe.embedding if embedding else 0.25
            parameter.data.normal_(0.0, spread, generator=generator)


def write_checkpoint(recipe: Recipe, seed: int, folder: Path) -> None:
    model = AutoModelForCausalLM.from_config(recipe.config, dtype=torch.float32)
    randomise(model, seed, recipe)
    shutil.rmtree(folder, ignore_errors=True)
    model.to(recipe.dtype).save_pretrained(folder)
    if recipe.config_edits:
        path = folder / "config.json"
        config = json.loads(path.read_text()) | recipe.config_edits
        config["torch_dtype"] = config.pop("dtype")
        config = {key: value for key, value in config.items() if value is not None}
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    if recipe.renamed:
        begin, instead = recipe.renamed
        tensors = load_file(folder / "model.safetensors")
        renamed = {re.sub(f"^{re.escape(begin)}", instead, name): tensor for name, tensor in tensors.items()}
        save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main(recipes(), write_checkpoint)
