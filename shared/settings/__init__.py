"""Sections of a recipe that are long enough for a module of their own."""
