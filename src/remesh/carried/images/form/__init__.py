"""What an image consists of: records, pages, files, and how they are written and read back."""
