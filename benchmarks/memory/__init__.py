"""Memory of each verb: what it plans, beside what was measured, on the host and on devices."""
