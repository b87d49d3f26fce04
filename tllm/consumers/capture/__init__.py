"""Activation capture: to memory, and to a store on disk."""
