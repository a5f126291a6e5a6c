"""`TensorClass`: a tree with named, typed fields."""

from tdfunc._tensorclass.decorator import tensorclass as tensorclass
from tdfunc._tensorclass.typed import TensorClass as TensorClass
