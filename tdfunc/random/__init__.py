"""Random keys: a draw is a pure function of a key and a shape, as in JAX.

A key is an int64 tensor of shape (2,), so it is a leaf of a tree like any other: mapped by `torch.vmap`, an argument
under `tdfunc.jit`, saved in a checkpoint. Draw i of a key is a hash of (key, i) by plain tensor operations: it is the
same in a loop, under vmap, grad, jit and `torch.compile`, in a recomputation, and on each device. A key that is used
twice gives the same numbers twice: `split` it, or `fold_in` a step's number.

SplitMix64 with a gamma for each key: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014).
"""

from tdfunc.random.batches import batches
from tdfunc.random.draws import (
    bernoulli,
    bits,
    categorical,
    choice,
    exponential,
    fold_in,
    gumbel,
    key,
    key_of,
    normal,
    permutation,
    randint,
    split,
    truncated_normal,
    uniform,
)

__all__ = [
    "batches",
    "bernoulli",
    "bits",
    "categorical",
    "choice",
    "exponential",
    "fold_in",
    "gumbel",
    "key",
    "key_of",
    "normal",
    "permutation",
    "randint",
    "split",
    "truncated_normal",
    "uniform",
]


def __dir__() -> list[str]:
    return list(__all__)
