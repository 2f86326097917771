"""Qwen3, a family of text models."""
