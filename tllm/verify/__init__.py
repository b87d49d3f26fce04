"""Whether an engine computes, reads and steers what plain `transformers` says it should."""
