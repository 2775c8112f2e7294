"""A JAX/XLA inference engine for language models on TPU, GPU and CPU."""
