"""What there is to image: frozen processes, their kernel state, descriptors and written pages."""
