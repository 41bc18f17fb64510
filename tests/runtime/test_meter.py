"""What a step's samples amount to."""

from minitron.runtime.meter import Samples


def test_padding_is_no_document():
    """The last document of a sample is what fills it, where it has padding."""
    documents = [(0, 5, 12, 16), (0, 16), (0, 3, 16)]
    assert Samples(documents, (4, 0, 0)).squared_lengths() == 5**2 + 7**2 + 16**2 + 3**2 + 13**2
    assert Samples(documents).squared_lengths() == 5**2 + 7**2 + 4**2 + 16**2 + 3**2 + 13**2
