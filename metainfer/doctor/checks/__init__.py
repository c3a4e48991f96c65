"""Checks, a file for each subject. A module here lists its own in `CHECKS`."""
