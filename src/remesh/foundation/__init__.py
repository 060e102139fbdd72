"""Foundation of every room: errors, exit codes, options, checksums, durable files, Linux interfaces."""
