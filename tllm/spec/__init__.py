"""What may be asked, as data. Pure Python: no torch, no vLLM."""
