"""Checkpoint readers, the registry of named models and tokenizers; knows nothing of the engine."""
