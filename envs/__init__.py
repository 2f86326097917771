"""Environments and rewards."""
