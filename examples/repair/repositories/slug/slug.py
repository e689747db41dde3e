"""Titles as parts of addresses."""


def slug(title: str) -> str:
    """Lower case, words joined by single hyphens, no other sign."""
    return title.lower().replace(" ", "-")
