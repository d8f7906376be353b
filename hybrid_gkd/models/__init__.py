"""Facts about a model, its tokenizer and attention, and what differs between vLLM versions."""
