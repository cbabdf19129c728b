"""Pieces shared by the kernels of more than one operator."""
