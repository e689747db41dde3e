"""Figures about samples."""


def median(values: list[float]) -> float:
    """The middle value; of an even number of values, the mean of the two in the middle.

    Raises:
        ValueError: there are no values.
    """
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
