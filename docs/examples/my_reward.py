"""The fraction of the right answer's words that the completion has."""


def score(response: str, answer: str) -> float:
    """0 to 1."""
    wanted, given = set(answer.lower().split()), set(response.lower().split())
    return len(wanted & given) / max(len(wanted), 1)
