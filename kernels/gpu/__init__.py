"""Triton kernels that compute in one pass over a GPU's memory what torch computes in many: the functions of kernels/cpu
for a GPU.

Importing a module of this folder imports Triton, which exists only on Linux.
"""
