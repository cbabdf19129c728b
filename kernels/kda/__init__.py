"""Kernels of Kimi Delta Attention."""
