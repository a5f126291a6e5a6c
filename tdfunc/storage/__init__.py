"""Trees on disk: safetensors files and shards, folders of mapped files, and the checkpoints of a run."""
