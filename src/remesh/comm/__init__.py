"""The lower half of a program: networks that are shed and grown again. Knows no tensors."""
