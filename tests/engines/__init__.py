"""Tests with engines that need an environment of their own: `make test-vllm`."""
