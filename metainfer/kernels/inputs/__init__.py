"""Random inputs of every op: for one case and load, at any size, on any device."""
