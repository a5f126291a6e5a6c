"""`td.map`: a function of the chunks of a tree, run by processes, threads or any executor."""
