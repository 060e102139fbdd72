"""Who writes what, and which stored chunks fill which boxes: decided from metadata alone. Pure."""
