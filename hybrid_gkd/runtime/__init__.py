"""Time spans, waits with deadlines, files, processes and imports; every other folder may import it."""
