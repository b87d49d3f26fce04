"""The demo: a small language model, the grammar of the text it was trained on, and its training."""
