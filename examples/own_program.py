"""jaxinfer's pure steps inside a JAX program of your own: no engine, no scheduler, your jit.

    python examples/own_program.py                                  # a tiny random model
    python examples/own_program.py --model smollm2-135m-instruct    # a real one

`prefill_step` and `decode_step` are functions (config, params, state, batch) -> (logits, state). Here each is traced
into a larger program: prefill with the choice of the first token, and decode as one `lax.scan` over all new tokens.
"""

from __future__ import annotations

import argparse
from functools import partial

import jax
import jax.numpy as jnp

from checkpoints import open_checkpoint
from jaxinfer.models import DecoderConfig, RopeConfig, init_params
from jaxinfer.runtime.loading import decoder_config, load_params
from jaxinfer.runtime.state import DecodeBatch, EngineState, PrefillBatch, TableUpdates, init_state
from jaxinfer.runtime.steps import Params, decode_step, prefill_step

PAGE_SIZE = 16
NO_UPDATES = TableUpdates(*(jnp.zeros((0,), jnp.int32) for _ in range(3)))

TINY = DecoderConfig(
    vocab_size=256,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=128,
    max_positions=256,
    norm_eps=1e-5,
    ropes=(RopeConfig(theta=10000.0, rotary_dim=16),) * 2,
    windows=(None, None),
)


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def prefill_greedily(
    config: DecoderConfig, params: Params, state: EngineState, batch: PrefillBatch
) -> tuple[jax.Array, EngineState]:
    """The first new token i32[1] of each prompt, and the state that holds the prompts' keys and values."""
    logits, state = prefill_step(config, params, state, batch)
    return jnp.argmax(logits, -1).astype(jnp.int32), state


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def decode_greedily(
    config: DecoderConfig, steps: int, params: Params, state: EngineState, first: jax.Array
) -> tuple[jax.Array, EngineState]:
    """The `steps` tokens i32[steps, 1] after `first` i32[1], in one program without a visit to the host."""
    slots = jnp.arange(1, dtype=jnp.int32)

    def step(carry: tuple[EngineState, jax.Array], _: None) -> tuple[tuple[EngineState, jax.Array], jax.Array]:
        state, token = carry
        logits, state = decode_step(config, params, state, DecodeBatch(token, slots, NO_UPDATES))
        token = jnp.argmax(logits, -1).astype(jnp.int32)
        return (state, token), token

    (state, _), tokens = jax.lax.scan(step, (state, first), None, length=steps)
    return tokens, state


def generate(config: DecoderConfig, params: Params, prompt: list[int], new_tokens: int) -> list[int]:
    """Greedy continuation of one prompt in slot 0, whose pages are 1, 2, 3 ... (page 0 is for padding)."""
    pages = -(-(len(prompt) + new_tokens) // PAGE_SIZE)
    state = init_state(config, num_slots=1, num_pages=1 + pages, page_size=PAGE_SIZE, max_context=pages * PAGE_SIZE)
    columns = jnp.arange(pages, dtype=jnp.int32)
    batch = PrefillBatch(
        token_ids=jnp.array(prompt, jnp.int32),
        query_starts=jnp.array([0, len(prompt)], jnp.int32),
        slots=jnp.zeros((1,), jnp.int32),
        starts=jnp.zeros((1,), jnp.int32),
        updates=TableUpdates(slots=jnp.zeros_like(columns), columns=columns, pages=columns + 1),
    )
    first, state = prefill_greedily(config, params, state, batch)
    rest, state = decode_greedily(config, new_tokens - 1, params, state, first)
    return [*first.tolist(), *rest[:, 0].tolist()]


def random_model() -> list[int]:
    """A model that nobody trained: parameters are just a pytree."""
    params = init_params(TINY, jax.random.key(0))
    return generate(TINY, params, prompt=[3, 1, 4, 1, 5], new_tokens=12)


def loaded_model(model: str, question: str) -> str:
    """A checkpoint's parameters, tokenizer and chat template."""
    with open_checkpoint(model) as checkpoint:
        config = decoder_config(checkpoint)
        tokenizer = checkpoint.tokenizer()
        params = load_params(checkpoint, config)
    prompt = tokenizer.encode_chat([{"role": "user", "content": question}])
    ids = generate(config, params, prompt, new_tokens=16)
    ends = [index for index, token in enumerate(ids) if token in tokenizer.eos_ids]
    return tokenizer.decode(ids[: min(ends, default=len(ids))])


def main() -> None:
    parser = argparse.ArgumentParser(description="Call jaxinfer's steps from a JAX program of your own.")
    parser.add_argument("--model", help="a checkpoint; without it, a tiny random model")
    parser.add_argument("--question", default="What is the capital of France?")
    options = parser.parse_args()
    if options.model is None:
        print(random_model())
        return
    try:
        print(loaded_model(options.model, options.question))
    except ValueError as error:  # a model that is not there or cannot be run, in one sentence
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
