"""Process groups of torch: made, aborted, judged, made again, made beside the default one."""
