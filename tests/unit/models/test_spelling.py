"""The bytes of tokens and the tokens of bytes, for three kinds of tokenizers."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_tokenizers import TEXT, byte_level, sentence_piece, word_piece
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from hybrid_gkd.errors import ModelError
from hybrid_gkd.models.spelling import Spelling

BYTES = [Spelling(byte_level(added=("<think>",)), "bytes"), Spelling(sentence_piece(), "pieces")]
WORDS = Spelling(word_piece(), "words")


@settings(max_examples=60, deadline=None)
@given(data=st.one_of(
    st.text().map(str.encode), st.binary(max_size=20), st.text(alphabet=TEXT, max_size=40).map(str.encode),
))  # fmt: skip
@example(data=b"  two  spaces\n\n\tcode(x)  ")
@example(data="東京🙂".encode()[:-2])
@example(data=b"\xff\xfe and <think> then")
@example(data=b"")
def test_tokens_spell_every_text(data):
    for spelling in BYTES:
        ids, starts, ends = spelling.encode(data)
        for number, before, start, end in zip(ids, [0, *ends[:-1]], starts, ends, strict=False):
            beside = spelling.lead if start < before else b""
            assert spelling.bytes[number] == beside + data[before:end]
        assert not ids or ends[-1] == len(data)


@settings(max_examples=30, deadline=None)
@given(text=st.text(alphabet=TEXT, max_size=40))
def test_word_piece_covers_a_text_whose_spaces_are_no_tokens(text):
    ids, _, ends = WORDS.encode(text.encode())
    assert (ends[1:] >= ends[:-1]).all()
    assert not ids or ends[-1] == len(text.encode())


def test_word_piece_ends_where_it_has_no_token_for_a_byte():
    ids, _, ends = WORDS.encode(b"the sum\xff of")
    assert WORDS.spell(ids) == b" the sum"
    assert ends[-1] == len(b"the sum")


@pytest.mark.parametrize("spelling", [*BYTES, WORDS], ids=lambda each: each.name)
def test_pieces_are_split_into_tokens_that_spell_them(spelling):
    for piece, number in list(spelling.by_bytes.items())[:50]:
        assert spelling.split([piece]) == [(number,)]
    pieces = [b" theory of", b"ing", b" interesting", b" x"]
    for piece, ids in zip(pieces, spelling.split(pieces), strict=True):
        assert spelling.spell(ids) == piece


def test_pieces_are_split_as_the_tokenizer_does_and_not_into_the_longest_tokens():
    tokenizer = byte_level()
    piece = next(
        text for text in (f" {word}" for word in ("thereabouts", "reader", "others", "there", "weathers", "gathered"))
        if len(tokenizer(text).input_ids) > 1
    )
    assert BYTES[0].split([piece.encode()]) == [tuple(tokenizer(piece).input_ids)]


@pytest.mark.parametrize(("tokenizer", "rule"), [
    (word_piece(lowercase=True), "encodes 'Two Words' as b' two words'"),
    (PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))),
     "its decoder must be one of ByteLevel, WordPiece, Metaspace, ByteFallback, got no decoder"),
    (object(), "it has no tokenizer.json"),
])  # fmt: skip
def test_other_tokenizers_are_refused(tokenizer, rule):
    with pytest.raises(ModelError, match="teacher x: its tokens cannot be aligned by bytes") as found:
        Spelling(tokenizer, "teacher x")
    assert rule in str(found.value)
