"""The only room that knows vLLM's internals. Checked against vLLM 0.30, 0.32 and 0.33."""
