"""Trees on disk: one safetensors file that holds a whole tree, written atomically and verified on load."""
