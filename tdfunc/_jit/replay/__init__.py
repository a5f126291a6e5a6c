"""Running a recorded graph: its Python code, and the memory that its large results are written to."""
