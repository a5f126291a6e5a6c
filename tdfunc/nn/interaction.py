"""`InteractionType`: ways to choose a value from a distribution."""

from enum import Enum
from typing import Any


class InteractionType(str, Enum):
    """The way in which a probabilistic module chooses a value from its distribution.

    MODE, MEDIAN and MEAN are the distribution's properties of that name. RANDOM is a sample, with gradients if the
    distribution has `rsample`. DETERMINISTIC is its `deterministic_sample` if it has one. Otherwise it is the mode if
    the distribution can enumerate its support, and the mean if not. The mode of a Bernoulli is then 0 where both values
    are equally likely, and not NaN.
    """

    MODE = "mode"
    MEDIAN = "median"
    MEAN = "mean"
    RANDOM = "random"
    DETERMINISTIC = "deterministic"


# In place of a type: keep a value that is in the tree.
GIVEN: Any = object()
