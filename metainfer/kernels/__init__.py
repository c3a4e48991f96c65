"""Implementations of the operations, and the registry that chooses among them."""
