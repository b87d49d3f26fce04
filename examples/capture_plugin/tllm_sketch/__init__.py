"""Random projections of activations."""
