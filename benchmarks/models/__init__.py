"""Models that are measured: small ones of our own, and the architectures of transformers with tiny configurations."""
