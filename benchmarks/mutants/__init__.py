"""Small changes to the code of tdfunc, and whether the tests notice each."""
