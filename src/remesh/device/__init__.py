"""Devices: streams, queued copies, the driver, what NCCL needs. Experimental until a device has run it."""
