"""Throughput of tLLM as a ratio to untouched vLLM, in the same run, with functional counters."""
