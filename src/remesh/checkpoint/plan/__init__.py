"""Plans of saves and loads: writer of each chunk, chunks that fill the wanted boxes. From metadata alone; pure."""
