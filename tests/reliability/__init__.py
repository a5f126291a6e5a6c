"""What happens to saved trees when things go wrong: `python -m tests.reliability` counts it for docs/reliability.md."""
