"""Event logs and metrics of a job."""
