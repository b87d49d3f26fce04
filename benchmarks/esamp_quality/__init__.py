"""Does ESamp find more? Pass@k on problems that take a chain of reasoning."""
