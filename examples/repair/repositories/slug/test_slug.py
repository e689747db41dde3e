"""Tests of slug."""

import unittest

from slug import slug


class TestSlug(unittest.TestCase):
    """Titles of all kinds."""

    def test_words(self) -> None:
        """Words alone."""
        self.assertEqual(slug("Hello World"), "hello-world")

    def test_signs(self) -> None:
        """Signs are dropped."""
        self.assertEqual(slug("What? No way!"), "what-no-way")

    def test_gaps(self) -> None:
        """Any space counts once."""
        self.assertEqual(slug("  a \t b "), "a-b")
