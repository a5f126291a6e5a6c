"""Faults of tensordict, `torch.func` and `torch.optim`: each test runs theirs, which is wrong, and ours."""
