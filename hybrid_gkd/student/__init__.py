"""The student: its shards, its optimizer, its loss."""
