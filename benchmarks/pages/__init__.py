"""Writers of the pages of docs/ that hold tables and lists of names: `make pages`."""
