"""A module of constants, as a program has one; the tests of attributes change them."""

LR = 1.0


def scale(x):
    """Scale by a constant of this module."""
    return x * LR
