"""Qwen3-VL, dense and with a mixture of experts."""
