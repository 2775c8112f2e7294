"""Requests, scheduling, pages and text: everything about serving that needs no device and imports no jax."""
