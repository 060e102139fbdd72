"""What every room stands on: errors, exit codes, options, checksums, durable files, what Linux offers."""
