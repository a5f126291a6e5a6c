"""The seeds and hypothesis profiles of tests/conftest.py."""

from tests.conftest import generator, seed  # noqa: F401
