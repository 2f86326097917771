"""What torch computes in many passes over a GPU's memory, in Triton, in one: the functions of kernels/cpu for a GPU.

Importing a module of this folder imports Triton, which only Linux has.
"""
