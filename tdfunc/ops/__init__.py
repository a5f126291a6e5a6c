"""Pure functions on trees, a file per family, each beside the mixin of methods made of them."""
