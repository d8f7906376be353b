"""The loss of every step in a table, loss.csv of the run folder."""


class MyTracker:
    def __init__(self, info):
        path = info.run_dir / "loss.csv"
        kept = []
        if info.resume and path.exists():  # rows after the checkpoint will come again
            kept = [row for row in path.read_text().splitlines() if int(row.partition(",")[0]) <= info.start_step]
        path.write_text("".join(f"{row}\n" for row in kept))
        self.file = path.open("a")

    def log(self, metrics, step):
        if "actor/kl_loss" in metrics:
            print(step, metrics["actor/kl_loss"], sep=",", file=self.file, flush=True)

    def log_generations(self, samples, step):
        """Sample completions, each with prompt, response, answer and reward; not in this table."""

    def close(self, *, failed):
        self.file.close()
