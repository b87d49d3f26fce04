"""What runs in a worker: taps, row plans, rings, dispatch, guidance. Torch, no vLLM."""
