"""Counts what kills, full disks and damage do to saved trees, for docs/reliability.md: `make reliability`."""
