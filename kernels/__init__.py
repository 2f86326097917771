"""Numeric kernels: the fused linear log-probability and the backward-in-time scan. Triton is imported only on a GPU."""

from kernels.linear_logprob import linear_logprob
from kernels.scan import reverse_scan

__all__ = ["linear_logprob", "reverse_scan"]
