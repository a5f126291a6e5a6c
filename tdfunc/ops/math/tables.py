"""The functions of torch that trees have as methods or take in their place: names, kernels, and results in words."""

# name -> its result in words; the foreach kernel is named where torch has one.
UNARY = {
    "abs": "absolute value", "acos": "inverse cosine (radians)", "asin": "inverse sine (radians)",
    "atan": "inverse tangent (radians)", "ceil": "smallest integer not below", "cos": "cosine",
    "cosh": "hyperbolic cosine", "erf": "error function", "erfc": "complementary error function",
    "exp": "exponential", "expm1": "exponential minus 1", "floor": "largest integer not above",
    "frac": "fractional part", "lgamma": "logarithm of the absolute gamma function", "log": "natural logarithm",
    "log10": "logarithm to base 10", "log1p": "natural logarithm of 1 + x", "log2": "logarithm to base 2",
    "neg": "negative", "reciprocal": "reciprocal", "round": "nearest integer", "rsqrt": "reciprocal of the square root",
    "sigmoid": "logistic function", "sign": "sign", "sin": "sine", "sinh": "hyperbolic sine", "sqrt": "square root",
    "tan": "tangent", "tanh": "hyperbolic tangent", "trunc": "integer part",
}  # fmt: skip
UNARY_LEAFWISE = {
    "square": "square", "logical_not": "logical negation", "bitwise_not": "bitwise negation",
    "isnan": "True for NaN", "isfinite": "True for finite numbers", "isinf": "True for infinities",
    "isneginf": "True for minus infinity", "isposinf": "True for plus infinity",
    "isreal": "True where the imaginary part is zero", "erfinv": "inverse error function",
}  # fmt: skip
BINARY = {
    "add": "sum", "sub": "difference", "mul": "product", "div": "quotient", "pow": "power",
    "maximum": "larger value", "minimum": "smaller value", "clamp_min": "larger value", "clamp_max": "smaller value",
}  # fmt: skip
BINARY_LEAFWISE = {
    "remainder": "remainder of the division, signed as the divisor", "floor_divide": "quotient, rounded down",
    "eq": "True where equal", "ne": "True where different", "lt": "True where less", "le": "True where less or equal",
    "gt": "True where greater", "ge": "True where greater or equal", "logical_and": "logical and",
    "logical_or": "logical or", "logical_xor": "logical exclusive or", "bitwise_and": "bitwise and",
    "bitwise_or": "bitwise or", "bitwise_xor": "bitwise exclusive or",
    "fmod": "remainder of the division, signed as the dividend", "atan2": "angle of (leaf, other) in radians",
}  # fmt: skip
# torch's operators: method -> function, and those with the tree on the right.
OPERATORS = {
    "__add__": "add", "__sub__": "sub", "__mul__": "mul", "__truediv__": "div", "__pow__": "pow",
    "__floordiv__": "floor_divide", "__mod__": "remainder", "__and__": "bitwise_and", "__or__": "bitwise_or",
    "__xor__": "bitwise_xor", "__lt__": "lt", "__le__": "le", "__gt__": "gt", "__ge__": "ge",
}  # fmt: skip
REVERSED = {
    "__rsub__": "sub", "__rtruediv__": "div", "__rpow__": "pow", "__rfloordiv__": "floor_divide",
    "__rmod__": "remainder",
}  # fmt: skip
COMMUTATIVE = {
    "__radd__": "add", "__rmul__": "mul", "__rand__": "bitwise_and", "__ror__": "bitwise_or", "__rxor__": "bitwise_xor",
}  # fmt: skip

# method -> dtype.
CASTS = {
    "float": "float32", "double": "float64", "half": "float16", "bfloat16": "bfloat16", "int": "int32",
    "long": "int64", "bool": "bool",
}  # fmt: skip
