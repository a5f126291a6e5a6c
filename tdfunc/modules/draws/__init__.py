"""The random functions of torch by a key: each as a function of the mode that serves it."""
