"""The teacher reads a right completion of the same prompt, or else the reference answer."""


def with_a_solution(task, sample, group):
    """Return the teacher's prompt; completions that are right already have no teacher."""
    if sample.reward == 1:
        return None
    right = [other.text for other in group if other.reward == 1]
    return f"{task.text}\n\nA right solution:\n{right[0] if right else task.answer}\n\nSolve it in your own words."
