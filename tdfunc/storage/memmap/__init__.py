"""Trees in folders of mapped files."""
