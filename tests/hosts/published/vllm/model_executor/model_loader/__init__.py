"""The published interface of vLLM."""
