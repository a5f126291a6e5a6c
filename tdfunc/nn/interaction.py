"""`InteractionType`: how a value is chosen from a distribution."""

from enum import Enum
from typing import Any


class InteractionType(str, Enum):
    """How a probabilistic module chooses a value from its distribution.

    MODE, MEDIAN and MEAN are the distribution's properties of that name. RANDOM is a sample, with gradients where the
    distribution has `rsample`. DETERMINISTIC is its `deterministic_sample`, else the mode where it can enumerate its
    support, else the mean.
    """

    MODE = "mode"
    MEDIAN = "median"
    MEAN = "mean"
    RANDOM = "random"
    DETERMINISTIC = "deterministic"


# In place of a type: keep a value that is in the tree.
GIVEN: Any = object()
