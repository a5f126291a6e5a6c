"""Random keys: a draw is a pure function of a key and a shape, as in JAX.

A key is an int64 tensor of shape (2,), so it is a leaf of a tree like any other: mapped by `torch.vmap`, an argument
under `tdfunc.jit`, saved in a checkpoint. Draw i of a key is a hash of (key, i) by plain tensor operations: it is the
same in a loop, under vmap, grad, jit and `torch.compile`, in a recomputation, and on each device. A key that is used
twice gives the same numbers twice: `split` it, or `fold_in` a step's number.

SplitMix64 with a gamma for each key: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014).
"""

from tdfunc.core.surface import surface as _surface
from tdfunc.random.draws import bernoulli as bernoulli
from tdfunc.random.draws import bits as bits
from tdfunc.random.draws import categorical as categorical
from tdfunc.random.draws import choice as choice
from tdfunc.random.draws import exponential as exponential
from tdfunc.random.draws import fold_in as fold_in
from tdfunc.random.draws import gumbel as gumbel
from tdfunc.random.draws import key as key
from tdfunc.random.draws import key_of as key_of
from tdfunc.random.draws import normal as normal
from tdfunc.random.draws import permutation as permutation
from tdfunc.random.draws import randint as randint
from tdfunc.random.draws import split as split
from tdfunc.random.draws import truncated_normal as truncated_normal
from tdfunc.random.draws import uniform as uniform

_surface(globals())
