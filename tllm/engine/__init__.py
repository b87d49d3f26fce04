"""The only room that knows vLLM's internals. Run on vLLM 0.32; its seams
were read in 0.30 and 0.33 too."""
