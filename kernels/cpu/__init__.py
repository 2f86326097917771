"""Operations that torch computes slowly on a CPU, in C or by another library."""
