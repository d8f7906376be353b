"""The bytes of a tokenizer's tokens, and the tokens of given bytes."""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from hybrid_gkd.errors import ModelError

PROBE = "Two Words"
"""Text whose tokens must have exactly its bytes."""
KINDS = ("ByteLevel", "WordPiece", "Metaspace", "ByteFallback")
"""Decoders of tokenizers whose tokens have known bytes."""


def byte_characters() -> dict[str, int]:
    """Return the byte of each character of a byte-level vocabulary: printable ones stand for themselves."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}


class Spelling:
    """A tokenizer whose tokens have known bytes.

    Args:
        tokenizer: a fast tokenizer: byte-level BPE, SentencePiece, or WordPiece, whose words include a space before.
        name: of the model, for messages.
        ends: ids that end a text; like special tokens, they have no bytes.

    Raises ModelError: another kind of tokenizer, or one that changes the text.
    """

    def __init__(self, tokenizer: Any, name: str, *, ends: Collection[int] = ()):
        self.name = name
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ModelError(f"{name}: its tokens cannot be aligned by bytes: it has no tokenizer.json")
        description = backend.to_str()
        self._backend: Any = type(backend).from_str(description)
        self._backend.encode_special_tokens = True  # the name of a special token in a text is text
        kinds = set(_types(json.loads(description)["decoder"]))
        if not kinds & set(KINDS):
            found = ", ".join(sorted(kinds)) or "no decoder"
            raise ModelError(f"{name}: its tokens cannot be aligned by bytes: its decoder must be one of "
                             f"{', '.join(KINDS)}, got {found}")  # fmt: skip
        self.ids: dict[str, int] = tokenizer.get_vocab()
        """Id of each token by its text in the vocabulary."""
        added = tokenizer.added_tokens_decoder
        self.specials = {each.content: number for number, each in added.items() if each.special}
        """Ids of the special tokens by content."""
        self.bytes: list[bytes | None] = [None] * (max(self.ids.values()) + 1)
        """Bytes of each id; None for special tokens and unused ids."""
        spell = functools.partial(_spelled, kinds=kinds, characters=byte_characters())
        for text, number in self.ids.items():
            self.bytes[number] = text.encode() if number in added else spell(text)
        for number in (*self.specials.values(), *ends):
            self.bytes[number] = None
        self.lengths = np.array([len(each or b"") for each in self.bytes], np.int64)
        self.by_bytes: dict[bytes, int] = {}
        """Id by bytes; of several tokens with the same bytes the one with the shortest text, not `<0x41>` for A."""
        for _, number in sorted(self.ids.items(), key=lambda entry: (-len(entry[0]), -entry[1])):
            if spelled := self.bytes[number]:
                self.by_bytes[spelled] = number
        self._longest = max(map(len, self.by_bytes))
        self.lead = b" " if self.spell(self._encode("a")) == b" a" else b""
        """Space that the first token of a text has before the text; may be empty."""
        if (probed := self.spell(self._encode(PROBE))) != self.lead + PROBE.encode():
            raise ModelError(f"{name}: its tokens cannot be aligned by bytes: it encodes {PROBE!r} as {probed!r}")

    def spell(self, ids: Sequence[int]) -> bytes:
        """Return the bytes of tokens."""
        return b"".join(self.bytes[number] or b"" for number in ids)

    def encode(self, data: bytes) -> tuple[list[int], np.ndarray, np.ndarray]:
        """Return the tokens of a text, which need not be valid UTF-8, and the start and end of each, int64.

        The tokens end early at a byte that the tokenizer has no token for. A token with a leading space that is not in
        the text starts before the text.
        """
        ids, places, start = list[int](), [np.zeros((2, 0), np.int64)], 0
        for run in _runs(data):
            try:
                text = run.decode()
            except UnicodeDecodeError:
                if (byte := self.by_bytes.get(run)) is None:
                    break
                found, own = [byte], np.array([[0], [len(run)]])
            else:
                found, own = self._encode_run(text, run)
            ids += found
            places.append(start + own)
            start += len(run)
        starts, ends = np.concatenate(places, 1)
        return ids, starts, ends

    def _encode_run(self, text: str, run: bytes) -> tuple[list[int], np.ndarray]:
        encoded = self._backend.encode(text, add_special_tokens=False)
        spelled, lengths = self.spell(encoded.ids), self.lengths[encoded.ids]
        if spelled in (run, self.lead + run):
            ends = np.cumsum(lengths) - (len(spelled) - len(run))
            return encoded.ids, np.stack([ends - lengths, ends])
        # The text is normalised, or has spaces that no token has: these are counted to the following token.
        places = np.cumsum([0, *(len(character.encode()) for character in text)])
        ends = np.maximum.accumulate(places[[end for _, end in encoded.offsets]])
        ends[-1:] = len(run)
        return encoded.ids, np.stack([np.concatenate([[0], ends[:-1]])[: len(ends)], ends])

    def split(self, pieces: Sequence[bytes]) -> list[tuple[int, ...]]:
        """Return for each piece the tokens that continue a text with it; empty if it has none.

        A piece with a token of its own is this token.
        """
        anchor = "\n" if self.lead else ""
        found: list[tuple[int, ...]] = [(self.by_bytes[each],) if each in self.by_bytes else () for each in pieces]
        texts, places = list[str](), list[int]()
        for place, piece in enumerate(pieces):
            if not found[place]:
                found[place] = self._longest_matches(piece)
                with_text = piece.decode(errors="ignore")
                if with_text.encode() == piece:
                    texts.append(anchor + with_text)
                    places.append(place)
        for place, encoded in zip(places, self._backend.encode_batch(texts, add_special_tokens=False), strict=True):
            ids, before = encoded.ids, len(self.lead + anchor.encode())
            while ids and before > 0:
                before -= int(self.lengths[ids[0]])
                ids = ids[1:]
            if before == 0 and self.spell(ids) == pieces[place]:
                found[place] = tuple(ids)
        return found

    def _longest_matches(self, piece: bytes) -> tuple[int, ...]:
        ids, start = list[int](), 0
        while start < len(piece):
            ends = range(min(len(piece), start + self._longest), start, -1)
            end = next((end for end in ends if piece[start:end] in self.by_bytes), None)
            if end is None:
                break
            ids.append(self.by_bytes[piece[start:end]])
            start = end
        return tuple(ids)

    def _encode(self, text: str) -> list[int]:
        found: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return found


def _types(decoder: dict[str, Any] | None) -> Iterator[str]:
    """Yield the types of a decoder and its parts."""
    if decoder is not None:
        yield decoder["type"]
        for part in decoder.get("decoders", ()):
            yield from _types(part)


def _spelled(text: str, *, kinds: set[str], characters: dict[str, int]) -> bytes:
    """Return the bytes of a token by its text in the vocabulary."""
    if "ByteLevel" in kinds:
        return bytes(characters[each] for each in text) if all(each in characters for each in text) else text.encode()
    if "WordPiece" in kinds:
        word = text.startswith("##") or (len(text) == 1 and not text.isalnum())
        return text.removeprefix("##").encode() if word else b" " + text.encode()
    if "ByteFallback" in kinds and len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return bytes([int(text[3:5], 16)])
    return text.replace("\u2581", " ").encode()


def _runs(data: bytes) -> Iterator[bytes]:
    """Split bytes into the longest valid UTF-8 texts and single bytes that belong to none."""
    while data:
        try:
            data.decode()
            valid = len(data)
        except UnicodeDecodeError as error:
            valid = error.start
        if valid:
            yield data[:valid]
        if valid < len(data):
            yield data[valid : valid + 1]
        data = data[valid + 1 :]
