"""The operating system under everything else."""
