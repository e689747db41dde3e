"""Tests of stats."""

import unittest

from stats import median


class TestMedian(unittest.TestCase):
    """The middle of samples."""

    def test_odd(self) -> None:
        """There is a middle."""
        self.assertEqual(median([3, 1, 2]), 2)

    def test_even(self) -> None:
        """There are two."""
        self.assertEqual(median([4, 1, 3, 2]), 2.5)

    def test_nothing(self) -> None:
        """There is none."""
        with self.assertRaises(ValueError):
            median([])
