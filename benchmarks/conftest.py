"""The seeds and hypothesis profiles of tests/conftest.py."""

from tests.conftest import generator, seed  # noqa: F401

# It runs in an environment of its own, with JAX.
collect_ignore = ["jax_steps.py"]
