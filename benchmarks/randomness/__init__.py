"""Statistical tests of `tdfunc.random`."""
