"""Qwen3.5, dense and with a mixture of experts: three of four layers are gated delta nets."""
