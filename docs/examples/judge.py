"""Half for the right number, half for a box around it."""


def compute_score(data_source, solution_str, ground_truth, extra_info):
    """0, 0.5 or 1, and its two parts."""
    right = ground_truth in solution_str
    boxed = f"\\boxed{{{ground_truth}}}" in solution_str
    return {"score": 0.5 * right + 0.5 * boxed, "right": right, "boxed": boxed}
