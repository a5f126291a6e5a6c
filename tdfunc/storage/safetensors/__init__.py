"""Trees in safetensors files and in the shards of an index."""
