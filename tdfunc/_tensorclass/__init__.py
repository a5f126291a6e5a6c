"""`TensorClass`: a tree with named, typed fields."""

from tdfunc._tensorclass.instance import TensorClass as TensorClass
from tdfunc._tensorclass.instance import tensorclass as tensorclass
