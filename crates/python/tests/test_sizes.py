"""`parse_bytes` reads sizes as the command line does."""

import poorwill
import pytest


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("22g", 22 << 30),
        (" 1.5 GiB ", 3 << 29),
        ("80GB", 80_000_000_000),
        (str(2**64 - 1), 2**64 - 1),
    ],
)
def test_reads_what_people_write(text: str, size_bytes: int) -> None:
    assert poorwill.parse_bytes(text) == size_bytes


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "it does not begin with a number"),
        ("1..5g", "the number is malformed"),
        ("12q", "the unit is not known"),
        ("16EiB", "it does not fit into 64 bits"),
        ("1.0000001", "it is not a whole number of bytes"),
    ],
)
def test_says_what_is_wrong_in_the_words_of_the_library(text: str, reason: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011 -- the whole text is compared
        poorwill.parse_bytes(text)
    expected = f"`{text}` is not a size: {reason}; write it like 24GiB, 1.5GiB, 512m or 1048576"
    assert str(raised.value) == expected


@pytest.mark.parametrize("value", [None, 22, 1.5, b"22g"])
def test_takes_text_only(value: object) -> None:
    with pytest.raises(TypeError):
        poorwill.parse_bytes(value)  # type: ignore[arg-type]
