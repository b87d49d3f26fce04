"""tLLM beside others who read and steer a served model: the same requests, answers compared."""
