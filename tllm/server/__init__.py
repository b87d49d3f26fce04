"""Interventions in vLLM's API server: fields of requests, results in responses, admin routes."""
