"""What there is to image: processes that stand still, their kernel state, descriptors and written pages."""
