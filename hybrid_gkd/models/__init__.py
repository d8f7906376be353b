"""Model specs, tokenizers, LoRA adapters, packed attention and fused layers."""
