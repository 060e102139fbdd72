"""How much memory does each verb need? What it plans, beside what was measured, on the host and on devices."""
