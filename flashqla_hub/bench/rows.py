"""Rows of the benchmark: head counts and sequence lengths, with the names used in records."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

OPS = {  # and how to say them
    "forward": "forward",
    "backward": "backward",
    "forward_backward": "forward and backward",
    "training_forward": "forward for training",
}
GATES = ("bench", "zero", "decay", "trained")

# Uneven lengths behind the names of FlashQLA's own benchmark.
NAMED_LENGTHS = {
    "8192_8seq": (161, 1928, 3157, 563, 1244, 229, 177, 733),
    "8192_4seq": (5809, 1244, 406, 733),
}


@dataclass(frozen=True)
class Row:
    """One shape: key heads, value heads, and packed sequences by name.

    Names: `1x32768` is one sequence of 32768 tokens; `8192x4` is four sequences of 8192; `28672+4096` is two; `8192_8seq`
    names a fixed list.
    """

    hk: int
    hv: int
    seqs: str

    @property
    def lengths(self) -> tuple[int, ...]:
        if self.seqs in NAMED_LENGTHS:
            return NAMED_LENGTHS[self.seqs]
        if match := re.fullmatch(r"1x(\d+)", self.seqs):
            return (int(match[1]),)
        if match := re.fullmatch(r"(\d+)x(\d+)", self.seqs):
            return (int(match[1]),) * int(match[2])
        if re.fullmatch(r"\d+(\+\d+)*", self.seqs):
            return tuple(int(length) for length in self.seqs.split("+"))
        raise ValueError(
            f"seqs is {self.seqs!r}; it must look like 1x32768, 8192x4 or 28672+4096, or be one of {', '.join(NAMED_LENGTHS)}."
        )

    @property
    def name(self) -> str:
        return f"{self.hk},{self.hv}:{self.seqs}"

    @classmethod
    def parse(cls, text: str) -> "Row":
        """`16,64:8192x4` -> Row(16, 64, "8192x4")."""
        match = re.fullmatch(r"(\d+),(\d+):(\S+)", text)
        if match is None:
            raise ValueError(
                f"row is {text!r}; it must be HK,HV:SEQS, for example 16,64:8192x4, or one of {', '.join(ROW_SETS)}."
            )
        row = cls(int(match[1]), int(match[2]), match[3])
        if row.hk == 0 or row.hv == 0 or row.hv % row.hk:
            raise ValueError(f"row is {text!r}; value heads must be a positive multiple of key heads.")
        if not sum(row.lengths):
            raise ValueError(f"row is {text!r}; it must have a token to time.")
        return row


# Named sets of rows; `forward` are those that a forward must win, long and short, few heads and many.
ROW_SETS = {
    "forward": (
        *(f"2,8:{seqs}" for seqs in ("1x32768", "1x8192", "1x2048", "8192x4", "1024x8")),
        *("4,16:1x32768", "8,24:1x32768", "8,32:1x32768", "16,16:1x32768"),
        *(f"16,32:{seqs}" for seqs in ("1x4096", "8192x4", "1x32768")),
        "16,48:1x32768",
        *(f"16,64:{seqs}" for seqs in ("1x32768", "8192x4", "1x2048", "1024x8", "28672+4096")),
    ),
    "backward": (
        *("16,32:1x32768", "16,32:8192_8seq", "16,32:8192_4seq", "2,4:1x32768", "8,16:1x32768"),
        *("16,16:1x32768", "16,48:1x32768", "16,64:1x8192"),
    ),
    "few": ("16,64:8192x4", "16,32:8192x4", "2,8:1x32768"),
}


def parse_rows(texts: Sequence[str]) -> list[Row]:
    """Rows of names of sets and of single rows, in their order and each once."""
    names = [name for text in texts for name in ROW_SETS.get(text, (text,))]
    return [Row.parse(name) for name in dict.fromkeys(names)]


def shortened(row: Row, max_tokens: int) -> tuple[int, ...]:
    """Lengths of the row cut to at most `max_tokens` in all, in proportion and unround, for the correctness gate."""
    total = sum(row.lengths)
    if total <= max_tokens:
        return row.lengths
    lengths = [max(1, length * max_tokens // total) for length in row.lengths[:max_tokens]]
    return tuple(length - (length > 100 and i % 2 == 0) for i, length in enumerate(lengths))
