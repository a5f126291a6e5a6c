"""Runs of tdfunc beside tensordict, `torch.func` and `torch.optim`: `make conformance`."""
