"""Text to rows of tokens: documents from files or a dataset, one after the other, cut into rows of equal length."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from .settings import FinetuneError, Settings, one_clause

TEXT_FILES = (".txt", ".md", ".rst", ".tex", ".html", ".py", ".c", ".cpp", ".h", ".js", ".rs", ".go", ".java")
Encode = Callable[[str], list[int] | Tensor]


def read_documents(data: str | None, column: str) -> list[str]:
    """The documents that `data` names, empty ones left out.

    A file is one document, a .jsonl file one a line, a folder one a text file in it, in the order of their paths. What is
    no path here is the name of a dataset on the Hub, of which the split "train" is read.

    Raises:
        FinetuneError: there is no such thing, or no text in it; one sentence.
    """
    if data is None:
        from pydoc_data.topics import topics

        return list(topics.values())
    if not data:  # the path of which would be the present folder
        raise FinetuneError("data is an empty name; name a file or folder, or leave it out for Python's help topics.")
    path = Path(data).expanduser()
    if path.is_dir():
        documents = _folder(path)
    elif path.suffix == ".jsonl" and path.is_file():
        documents = _json_lines(path, column)
    elif path.is_file():
        documents = [_text(path)]
    else:
        documents = _dataset(data, column)
    documents = [document for document in documents if document.strip()]
    if not documents:
        raise FinetuneError(f"data is {data}, which holds no text; name a file or folder with some.")
    return documents


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise FinetuneError(f"{path} is not text in UTF-8; convert it, or leave it out.") from error


def _folder(folder: Path) -> list[str]:
    files = sorted(path for path in folder.rglob("*") if path.suffix in TEXT_FILES and path.is_file())
    if not files:
        raise FinetuneError(f"data is {folder}, which holds no text file; text files end in {', '.join(TEXT_FILES)}.")
    return [_text(path) for path in files]


def _json_lines(path: Path, column: str) -> list[str]:
    documents = []
    for number, line in enumerate(_text(path).split("\n"), 1):  # not splitlines: JSON may hold its other ends
        if not line.strip():
            continue
        try:
            value = json.loads(line)[column]
        except (ValueError, KeyError, TypeError) as error:
            raise FinetuneError(
                f"line {number} of {path} is no JSON object with a field {column}; name the field that holds the text "
                "with --column."
            ) from error
        documents.append(str(value))
    return documents


def _dataset(name: str, column: str) -> list[str]:
    if find_spec("datasets") is None:
        raise FinetuneError(
            f"data is {name}, which is no file or folder here; reading it as a dataset of the Hub needs the package "
            "datasets: pip install datasets."
        )
    from datasets import load_dataset

    try:
        rows = load_dataset(name, split="train")
    except Exception as error:  # whatever the library or the network says, the user needs to hear which data it was
        raise FinetuneError(
            f"data is {name}, which is no path here and no dataset that loads: {one_clause(error)}."
        ) from error
    if column not in rows.column_names:
        raise FinetuneError(f"dataset {name} has no column {column}; --column takes {', '.join(rows.column_names)}.")
    return [str(text) for text in rows[column]]


@dataclass(frozen=True)
class Corpus:
    """All documents as one sequence of tokens.

    Attributes:
        tokens: [N] int32.
        starts: [D] int64, ascending; where each document begins.
    """

    tokens: Tensor
    starts: Tensor


def join(documents: Iterable[str], encode: Encode) -> Corpus:
    """The tokens of all documents, in their order."""
    parts = [torch.as_tensor(encode(document), dtype=torch.int32) for document in documents]
    lengths = torch.tensor([len(part) for part in parts])
    return Corpus(torch.cat(parts), lengths.cumsum(0) - lengths)


class Rows(Dataset):
    """Rows of `seq_len` tokens, from `first` to before `last`; a last row that would be short is left out.

    An item is {"input_ids", "labels"}: unbroken text. With `packed` it is {"segments": a list of those, one a document}.
    """

    def __init__(self, corpus: Corpus, seq_len: int, first: int, last: int, packed: bool) -> None:
        self.corpus, self.seq_len, self.first, self.last, self.packed = corpus, seq_len, first, last, packed

    def __len__(self) -> int:
        return self.last - self.first

    def __getitem__(self, index: int) -> dict:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = (self.first + index) * self.seq_len
        row = self.corpus.tokens[start : start + self.seq_len].long()
        if not self.packed:
            return {"input_ids": row, "labels": row}
        begins = self.corpus.starts
        inner = begins[(begins > start) & (begins < start + self.seq_len)] - start
        parts = row.tensor_split(inner)
        return {"segments": [{"input_ids": part.tolist(), "labels": part.tolist()} for part in parts if len(part)]}


def make_rows(corpus: Corpus, settings: Settings) -> tuple[Rows, Rows]:
    """(what is trained on, what is held out): the last `held_out` rows.

    Raises:
        FinetuneError: the text is too short for one row of each.
    """
    count = len(corpus.tokens) // settings.seq_len
    if count < settings.held_out + 1:
        raise FinetuneError(
            f"data has {len(corpus.tokens):,} tokens, and {settings.held_out} held-out rows and one to train on take "
            f"{(settings.held_out + 1) * settings.seq_len:,}; bring more text, or lower --seq-len or --held-out."
        )
    cut = count - settings.held_out
    return tuple(
        Rows(corpus, settings.seq_len, first, last, settings.packed) for first, last in ((0, cut), (cut, count))
    )
