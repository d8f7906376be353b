"""Facts about a model, its tokenizer and attention."""
