"""Files of `torch.save` and shards of transformers in its format, read without running code."""
