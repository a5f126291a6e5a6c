"""Language models as modules of trees: one base over two calls of a backend, and the backends."""
