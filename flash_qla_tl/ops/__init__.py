"""Building blocks of the operators."""
