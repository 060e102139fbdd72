"""Messages between processes: one framing, one proof of belonging, one server, TLS. No torch."""
