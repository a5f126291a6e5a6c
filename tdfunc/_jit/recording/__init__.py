"""One run of a function, recorded: the tracer, the values that the function reads, the answers to what it asks."""
