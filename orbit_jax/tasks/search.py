"""Search over a local corpus as a tool: a key that is met exactly, else the best overlap of words.

A corpus is a JSONL file with a `key` and a `text` a line. Nothing leaves the machine.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MAX_REPORTED_ROWS = 20
_WORD = re.compile(r"\w+")


class Search:
    """The tool `search`: `{"query": "capital of France"}` gives the entries that fit best.

    Args:
      corpus: texts by key.
      max_results: entries that one answer has at most; a key that is met exactly is alone.
      max_characters: of one answer.

    Raises:
      ValueError: when the corpus is empty or a limit is not positive.
    """

    name = "search"
    description = "Looks a query up: the entry with that key, else those that share most words."
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"query": {"type": "string", "description": "a key, or words"}},
        "required": ["query"],
    }

    def __init__(self, corpus: Mapping[str, str], max_results: int = 3, max_characters: int = 2000):
        if not corpus or max_results < 1 or max_characters < 1:
            raise ValueError(
                f"Search needs a corpus and positive limits, got {len(corpus)} entries, "
                f"max_results={max_results} and max_characters={max_characters}."
            )
        self.max_results, self.max_characters = max_results, max_characters
        self._entries = tuple(corpus.items())
        self._by_key: dict[str, int] = {}
        self._by_word: dict[str, list[int]] = {}
        self._key_words = [_words(key) for key, _ in self._entries]
        for i, (key, text) in enumerate(self._entries):
            self._by_key.setdefault(_plain(key), i)
            for word in sorted(self._key_words[i] | _words(text)):
                self._by_word.setdefault(word, []).append(i)

    def start(self) -> "Search":
        """A session; the corpus does not change, so all share one."""
        return self

    def call(self, arguments: Mapping[str, Any]) -> str:
        """The entries for a query as `key: text` lines, or that there are none."""
        query = str(arguments.get("query", ""))
        if not query.strip():
            return "error: the query is empty"
        found = [f"{key}: {text}" for key, text in self.find(query)]
        if not found:
            return "nothing found"
        answer = "\n".join(found)
        more = len(answer) - self.max_characters
        return answer if more <= 0 else f"{answer[: self.max_characters]}... ({more} more)"

    def find(self, query: str) -> list[tuple[str, str]]:
        """The entries for a query, best first: more words in common, more in the key, earlier."""
        exact = self._by_key.get(_plain(query))
        if exact is not None:
            return [self._entries[exact]]
        words = _words(query)
        shared = Counter(i for word in words for i in self._by_word.get(word, ()))
        best = sorted(shared, key=lambda i: (-shared[i], -len(words & self._key_words[i]), i))
        return [self._entries[i] for i in best[: self.max_results]]

    def close(self) -> None:
        """Nothing is held."""


def load_corpus(path: str | Path) -> dict[str, str]:
    """The texts by key of a JSONL file, in its order.

    Raises:
      ValueError: when the file is missing, holds nothing, or holds bad rows (the first 20 are named
        with their reasons).
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"corpus {path} does not exist; give the path of a JSONL file.")
    corpus: dict[str, str] = {}
    faults = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                key, text = _read_row(line)
                if key in corpus:
                    raise ValueError("its `key` occurs before")
                corpus[key] = text
            except ValueError as error:
                faults.append(f"line {number}: {error}")
    if faults:
        more = len(faults) - MAX_REPORTED_ROWS
        raise ValueError(
            f"corpus {path} has {len(faults)} bad rows; correct or remove them: "
            + "; ".join(faults[:MAX_REPORTED_ROWS])
            + (f"; and {more} more." if more > 0 else ".")
        )
    if not corpus:
        raise ValueError(f"corpus {path} holds no entries; it needs at least one row.")
    return corpus


def _read_row(line: bytes) -> tuple[str, str]:
    try:
        row = json.loads(line.decode("utf-8-sig"))
        json.dumps(row, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise ValueError("not valid JSON in UTF-8") from None
    fields = [row.get(name) for name in ("key", "text")] if isinstance(row, dict) else []
    if not fields or not all(isinstance(field, str) and field.strip() for field in fields):
        raise ValueError("not an object with `key` and `text` that are texts")
    return fields[0], fields[1]


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


def _words(text: str) -> set[str]:
    return set(_WORD.findall(text.casefold()))
