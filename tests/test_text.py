"""text.py: what a request shows, character by character, and how prompts become ids."""
import copy
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import toys
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from checkpoint import CheckpointError
from nano_serve import EMBEDDED_MODEL
from request import RequestRefused, SamplingParams
from text import DecodeStream, Detokenizer, StopStrings, TextCodec

VARIED = "ďábel 世界 👩‍👩‍👧 🇨🇭 ไทย"
CORPUS = ["the quick brown fox jumps over the lazy dog", "a b  c   d", "世界世界 你好", "ďábel žluťoučký kůň", "\n\n  x y\tz"] * 3
SPECIAL = ["<unk>", "<s>", "</s>"]
ROUND = settings(max_examples=150, deadline=None, derandomize=True)


# -- Tokenizers of the kinds that Llama checkpoints bring ---------------------------------------------------------------

def byte_level():
    """Llama-3's kind: any byte is a token, a character may be cut anywhere."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def sentencepiece(metaspace):
    """Llama-2's kind: words with ▁ for a space, one byte token after the other for a character that has no token. The decoder strips
    one space from the front of whatever it is given, so a piece decoded alone loses the space it begins with."""
    pieces = [f"<0x{b:02X}>" for b in range(256)] + ["▁"] + [chr(c) for c in range(33, 127)] + ["你", "好"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "a"), ("▁", "▁"), ("▁", "x")]
    vocab = {token: i for i, token in enumerate(SPECIAL + pieces + [a + b for a, b in merges])}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first", split=False)])
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                               decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)])
    return tokenizer


def make_codec(tokenizer, template_file=None, **tokenizer_config):
    folder = toys.new_folder()
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
    if tokenizer_config:
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config), encoding="utf-8")
    if template_file is not None:
        (folder / "chat_template.jinja").write_text(template_file, encoding="utf-8")
    return TextCodec(folder)


CODECS = {"byte-level": make_codec(byte_level()), "sentencepiece": make_codec(sentencepiece(False)), "metaspace": make_codec(sentencepiece(True)),
          "single bytes": make_codec(toys.byte_tokenizer()), "llama-3": TextCodec(Path(EMBEDDED_MODEL))}
BYTES = CODECS["single bytes"]
every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)


def feed(codec, ids, finish=True, prompt=(), **params):
    """Everything that a front end sees of `ids`: (pieces, whole text, stop string or None). Stops where the detokenizer says so."""
    detokenizer = Detokenizer(codec, SamplingParams(max_tokens=None, **params), prompt)
    pieces, shown, stop = [], 0, None
    for i, token_id in enumerate(ids):
        stop = detokenizer.append(token_id, finish and i == len(ids) - 1)
        assert detokenizer.shown >= shown, "text was taken back"
        pieces.append(detokenizer.text[shown:detokenizer.shown])
        shown = detokenizer.shown
        if stop is not None:
            break
    return pieces, detokenizer.text, stop


# -- Whole characters ----------------------------------------------------------------------------------------------------

@every_codec
@pytest.mark.parametrize("text", [VARIED, " a b", "  x", "\n\n y", "   ", "the the", "\u00a0x", "a\r\nb", "e\u0301", "\U0010ffff", "\0"])
def test_pieces_are_whole_characters_and_make_up_the_text(codec, text):
    ids = codec.encode(text)
    pieces, shown, _ = feed(codec, ids)
    assert "".join(pieces) == shown == codec.decode(ids)
    assert shown == text or codec is CODECS["metaspace"], "only this one takes a leading space for its own"
    assert not any("\ufffd" in piece for piece in pieces)


@every_codec
@ROUND
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd▁"), max_size=30))
def test_any_unicode_text_comes_out_as_it_is(codec, text):
    ids = codec.encode(text)
    pieces, shown, _ = feed(codec, ids)
    assert "".join(pieces) == shown == codec.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("codec", [CODECS["byte-level"], CODECS["single bytes"]], ids=["byte-level", "single bytes"])
@pytest.mark.parametrize("skip_special_tokens", [True, False])
@ROUND
@given(data=st.data())
def test_random_ids_of_a_byte_level_tokenizer_give_their_decode(codec, skip_special_tokens, data):
    """Whatever bytes a model babbles: the pieces are decode(all ids), U+FFFD for what is no text included."""
    ids = data.draw(st.lists(st.integers(0, codec.tokenizer.get_vocab_size() - 1), max_size=40))
    pieces, shown, _ = feed(codec, ids, skip_special_tokens=skip_special_tokens)
    assert "".join(pieces) == shown == codec.decode(ids, skip_special_tokens)


@pytest.mark.parametrize("codec", [CODECS["sentencepiece"], CODECS["metaspace"]], ids=["sentencepiece", "metaspace"])
@ROUND
@given(data=st.data())
def test_random_ids_of_a_byte_fallback_tokenizer(codec, data):
    """decode() replaces every byte of a run that is not wholly valid, so a later byte can spoil characters that were right. What was
    shown stays; without such a run the pieces are decode(all ids)."""
    ids = data.draw(st.lists(st.integers(0, codec.tokenizer.get_vocab_size() - 1), max_size=40))
    pieces, shown, _ = feed(codec, ids)
    assert "".join(pieces) == shown
    if "\ufffd" not in codec.decode(ids):
        assert shown == codec.decode(ids)


@every_codec
def test_text_that_ends_in_half_a_character(codec):
    """The one documented tail: what is there of the character becomes U+FFFD (byte fallback: one a byte) when the request ends."""
    ids = codec.encode("ab", add_special_tokens=False) + [codec.tokenizer.token_to_id(t) for t in _byte_tokens(codec, "👩".encode())]
    for cut in (1, 2, 3):
        pieces, text, _ = feed(codec, ids[:-cut])
        assert text in ("ab\ufffd", "ab" + "\ufffd" * (4 - cut)) and "".join(pieces[:-1]) == "ab"
    for cut in (0, 1, 2, 3):
        assert feed(codec, ids[:len(ids) - cut], finish=False)[1] == ("ab" if cut else "ab👩")


def _byte_tokens(codec, data):
    fallback = codec.tokenizer.token_to_id("<0x00>") is not None
    return [f"<0x{b:02X}>" if fallback else toys.BYTE_TO_CHAR[b] for b in data]


def test_a_wrong_byte_in_a_byte_run_costs_only_itself():
    """decode() gives U+FFFD for the whole run, the right bytes of it too; but those have been shown."""
    codec = CODECS["sentencepiece"]
    ids = [codec.tokenizer.token_to_id(t) for t in _byte_tokens(codec, "世界".encode() + b"\xe4")]
    assert feed(codec, ids)[1] == "世界\ufffd"
    pieces, text, _ = feed(codec, ids + codec.encode("b", add_special_tokens=False))
    assert text == "".join(pieces) == "世界\ufffd b" and codec.decode(ids) == "\ufffd" * 7


@every_codec
def test_special_tokens_are_shown_only_on_request(codec):
    bos = codec.tokenizer.encode("").ids or [codec.tokenizer.token_to_id("<s>")]
    ids = codec.encode("ab", add_special_tokens=False) + bos + codec.encode("cd", add_special_tokens=False)
    name = codec.tokenizer.id_to_token(bos[0])
    for skip in (True, False):
        pieces, text, _ = feed(codec, ids, skip_special_tokens=skip)
        assert "".join(pieces) == text == codec.decode(ids, skip) and (name in text) is not skip


def test_the_window_that_is_decoded_stays_short():
    """The cost of a token doesn't grow with the text."""
    codec = CODECS["byte-level"]
    ids = codec.encode(VARIED * 20)
    seen = decoded_tokens(codec, ids)
    assert len(ids) > 400 and max(seen) <= 8 and sum(seen) < 8 * len(ids)


def decoded_tokens(codec, ids, **params):
    """The lengths of all that is decoded to get the text of these ids."""
    seen, spy = [], copy.copy(codec)
    spy.decode = lambda ids, skip: (seen.append(len(ids)), codec.decode(ids, skip))[1]
    feed(spy, ids, **params)
    return seen


@every_codec
@pytest.mark.parametrize("kind", ["special", "broken", "lead", "continuation", "no token", "broken in a run", "spaces"])
def test_tokens_without_text_cost_no_more_than_others(codec, kind):
    """4,000 skipped special tokens or broken bytes: each token decodes a few tokens, not all since the last text."""
    byte = lambda *data: [codec.tokenizer.token_to_id(t) for t in _byte_tokens(codec, bytes(data))]
    ids = {"special": [max(codec.special_tokens)], "broken": byte(0xff), "lead": byte(0xe4), "continuation": byte(0x96),
           "no token": [10 ** 6], "broken in a run": byte(0xe4, *"世".encode()), "spaces": codec.encode(" ", False)}[kind]
    ids = codec.encode("ab", False) + ids * (4000 // len(ids))
    seen = decoded_tokens(codec, ids)
    assert max(seen) <= 17 and sum(seen) <= 40 * len(ids)
    assert kind not in ("special", "no token") or len(seen) < 10
    if codec in (CODECS["byte-level"], CODECS["single bytes"]):
        assert feed(codec, ids)[1] == codec.decode(ids)


def test_without_a_tokenizer_ids_give_no_text():
    codec = make_codec(None)
    assert feed(codec, [1, 2, 3]) == (["", "", ""], "", None)
    with pytest.raises(RequestRefused, match="no tokenizer.json"):
        codec.encode("hi")


# -- Reading on from the prompt ---------------------------------------------------------------------------------------------

def decode_stream(codec, prompt, ids, skip=True):
    """What vLLM's detokenizer makes of them: the tokenizers library's own stream, primed with the prompt's ids."""
    stream = decoders.DecodeStream(ids=list(prompt), skip_special_tokens=skip)
    return "".join(stream.step(codec.tokenizer, i) or "" for i in ids)


def without_bos(codec, text):
    return codec.encode(text, add_special_tokens=False)


@every_codec
@pytest.mark.parametrize("text", ["Once upon a time", "def f():\n    if x:\n        return 1", "a  b   c", "naïve 世界 👩‍👩‍👧 ไทย x", "the\n\n a\t b"])
def test_prompt_and_text_read_on_wherever_the_prompt_ends(codec, text):
    ids = codec.encode(text)
    for cut in range(1, len(ids)):
        prompt, want = codec.decode(ids[:cut]), codec.decode(ids)
        pieces, got, _ = feed(codec, ids[cut:], prompt=ids[:cut])
        assert "".join(pieces) == got
        if not prompt.endswith("\ufffd"):
            assert prompt + got == want and got == decode_stream(codec, ids[:cut], ids[cut:])
        else:       # the output finishes the prompt's last character: it is the output's first
            whole = next(t for n in (1, 2, 3) if not (t := codec.decode(ids[:cut - n])).endswith("\ufffd"))
            assert whole + got == want


def test_a_word_after_a_prompt_keeps_its_space_and_a_text_alone_does_not():
    for codec in (CODECS["sentencepiece"], CODECS["metaspace"]):
        a, the = map(codec.tokenizer.token_to_id, ["▁a", "▁the"])
        bos, eos = codec.tokenizer.token_to_id("<s>"), codec.eos_token_id
        for prompt, text in [([bos, the], " a the"), ([bos], "a the"), ([], "a the"), ([the, 2], " a the"), ([the, 2, 1, 2, 2], " a the")]:
            assert feed(codec, [a, the], prompt=prompt)[1] == decode_stream(codec, prompt, [a, the]) == text
        assert feed(codec, [a, the], prompt=[bos, the], stop=" a")[1:] == ("", " a")
        assert feed(codec, [a, the], prompt=[bos], stop=" a")[1:] == ("a the", None)
        assert eos is None


@every_codec
def test_a_prompt_that_ends_within_a_character(codec):
    """As vLLM, which at this place gives the prompt once more before the finished character; that is left out."""
    byte = lambda data: [codec.tokenizer.token_to_id(t) for t in _byte_tokens(codec, data)]
    for before in ("", "世", "ab", "ab世界世界"):
        start = without_bos(codec, before)
        for data, cut in [("世".encode(), 1), ("世".encode(), 2), ("😀".encode(), 3)]:
            prompt, ids = start + byte(data[:cut]), byte(data[cut:]) + byte(b"xy")
            want = data.decode() + "xy"
            assert decode_stream(codec, prompt, ids) == codec.decode(start) + want
            assert feed(codec, ids, prompt=prompt)[1] == want
            x = [codec.tokenizer.token_to_id("x")]
            assert feed(codec, x, prompt=prompt)[1].lstrip("\ufffd") == "x" == decode_stream(codec, prompt, x)[-1]
            assert feed(codec, [max(codec.special_tokens)], prompt=prompt)[1] == "", "nothing of the prompt's alone"


@pytest.mark.parametrize("codec", [CODECS["byte-level"], CODECS["single bytes"], CODECS["llama-3"]], ids=["byte-level", "single bytes", "llama-3"])
@ROUND
@given(data=st.data())
def test_any_ids_after_any_prompt_of_a_byte_level_tokenizer(codec, data):
    """What the output adds to the decode of the prompt; vLLM gives the same but for what is no character at the end."""
    some = st.lists(st.integers(0, min(codec.tokenizer.get_vocab_size(), 400) - 1), max_size=40)
    prompt, ids, skip = data.draw(some) + without_bos(codec, "a"), data.draw(some), data.draw(st.booleans())
    got = feed(codec, ids, prompt=prompt, skip_special_tokens=skip)[1]
    assert codec.decode(prompt, skip) + got == codec.decode(prompt + ids, skip)
    theirs = decode_stream(codec, prompt, ids, skip)
    assert got.startswith(theirs) and (got == theirs or got.endswith("\ufffd"))


@pytest.mark.parametrize("codec", [CODECS["sentencepiece"], CODECS["metaspace"]], ids=["sentencepiece", "metaspace"])
@ROUND
@given(data=st.data())
def test_any_ids_after_any_prompt_of_a_byte_fallback_tokenizer(codec, data):
    some = st.lists(st.integers(0, codec.tokenizer.get_vocab_size() - 1), max_size=40)
    prompt, ids, skip = data.draw(some) + without_bos(codec, "a"), data.draw(some), data.draw(st.booleans())
    got = feed(codec, ids, prompt=prompt, skip_special_tokens=skip)[1]
    if "\ufffd" not in codec.decode(prompt + ids, skip):
        assert got == decode_stream(codec, prompt, ids, skip) == codec.decode(prompt + ids, skip)[len(codec.decode(prompt, skip)):]


@every_codec
def test_a_long_prompt_costs_no_more_than_a_short_one(codec):
    ids = codec.encode(VARIED * 50)
    seen, spy = [], copy.copy(codec)
    spy.decode = lambda ids, skip: (seen.append(len(ids)), codec.decode(ids, skip))[1]
    for prompt in (ids, ids[:-1], ids[:-2], ids + [max(codec.special_tokens)] * 100, [max(codec.special_tokens)] * 5000):
        seen.clear()
        Detokenizer(spy, SamplingParams(), prompt)
        assert sum(seen) <= 17 * 8


@every_codec
@pytest.mark.parametrize("skip", [True, False])
def test_texts_of_tokens_add_up_to_the_text(codec, skip):
    """decoded_token: with its space, "" while a character is unfinished, then the whole of it."""
    ids, special = codec.encode("the the a 世界 👩‍👩‍👧x"), max(codec.special_tokens)
    for prompt in ([], codec.encode("a"), without_bos(codec, "世")):
        for end in ([], ids[-1:], [codec.tokenizer.token_to_id(t) for t in _byte_tokens(codec, b"\xe4")], [special]):
            detokenizer, total = Detokenizer(codec, SamplingParams(max_tokens=None, skip_special_tokens=skip), prompt), ""
            for i, token_id in enumerate(ids + end):
                last = i == len(ids + end) - 1
                texts = detokenizer.token_texts([token_id, special, ids[0]], last)
                silent = skip and token_id in codec.special_tokens
                assert texts == detokenizer.token_texts([token_id, special, ids[0]], last), "asking changes nothing"
                assert not skip or texts[1] == codec.special_tokens[special]
                total += texts[0] if not silent else ""
                assert not silent or texts[0] == codec.special_tokens[token_id]
                detokenizer.append(token_id, last)
            assert total == detokenizer.text


def test_the_text_of_a_token_keeps_its_space():
    for codec in (CODECS["sentencepiece"], CODECS["metaspace"]):
        a, the = map(codec.tokenizer.token_to_id, ["▁a", "▁the"])
        assert Detokenizer(codec, SamplingParams(), [1, the]).token_texts([a, the, 1, 10 ** 6]) == [" a", " the", "<s>", ""]
        assert Detokenizer(codec, SamplingParams(), [1]).token_texts([a, the]) == ["a", "the"], "where a text begins there is none"


def test_nothing_is_decoded_that_is_not_wanted():
    detokenizer = Detokenizer(BYTES, SimpleNamespace(detokenize=False, stop=[], skip_special_tokens=True, min_tokens=0))
    assert detokenizer.append(97, True) is None and (detokenizer.text, detokenizer.shown) == ("", 0)
    assert detokenizer.token_texts([97, 98]) == [None, None]


@pytest.mark.parametrize("include, text", [(False, "ab"), (True, "abz")])
def test_the_stop_token_has_text_only_on_request(include, text):
    """show_token is what the engine makes of include_stop_str_in_output; what was held back comes out either way."""
    detokenizer = Detokenizer(BYTES, SamplingParams(stop="bc", include_stop_str_in_output=include))
    assert [detokenizer.append(i, False) for i in b"ab"] == [None, None] and detokenizer.shown == 1
    assert detokenizer.append(ord("z"), True, show_token=include) is None
    assert (detokenizer.text, detokenizer.shown) == (text, len(text))


# -- Stop strings ----------------------------------------------------------------------------------------------------------

def feed_text(chunks, **params):
    """One token for each chunk of bytes or text."""
    chunks = [c.encode() if isinstance(c, str) else c for c in chunks]
    longer = list(dict.fromkeys(c for c in chunks if len(c) > 1))
    codec = make_codec(toys.byte_tokenizer(longer))
    return feed(codec, [c[0] if len(c) == 1 else 259 + longer.index(c) for c in chunks], **params)


@pytest.mark.parametrize("stop, include, text, found", [
    (["cde"], False, "ab", "cde"), (["cde"], True, "abcde", "cde"), (["ghX"], False, "abcdefgh", None), (["ef", "cde"], False, "ab", "cde"),
    (["h"], False, "abcdefg", "h"), (["gh"], True, "abcdefgh", "gh"), (["a"], False, "", "a"), (["abcdefghi"], False, "abcdefgh", None),
    ("de", False, "abc", "de"), (["de", "cde"], False, "abc", "de"), (["cde", "de"], False, "ab", "cde"), (["bcd", "c"], False, "ab", "c"), (["e", "cdef"], False, "abcd", "e"), ([], False, "abcdefgh", None)])
def test_a_stop_string_across_tokens(stop, include, text, found):
    pieces, whole, reason = feed_text("abcdefgh", stop=stop, include_stop_str_in_output=include)
    assert ("".join(pieces), whole, reason) == (text, text, found)


@pytest.mark.parametrize("chunks", [["abcdefgh"], ["ab", "cdefgh"], ["abc", "defgh"], ["abcd", "e", "fgh"], ["a", "bcdef", "gh"]])
def test_a_stop_string_inside_a_token_and_over_its_edge(chunks):
    assert feed_text(chunks, stop=["cde"])[1:] == ("ab", "cde")
    assert feed_text(chunks, stop=["cde"], include_stop_str_in_output=True)[1:] == ("abcde", "cde")
    assert feed_text(chunks, stop=["cdef", "de", "g"])[1:] == ("abc", "de")
    assert feed_text(chunks, stop=["bcd", "c"])[1:] == ("ab", "c")


def test_of_several_stops_the_one_that_is_complete_first_wins_then_the_first_of_the_list():
    assert feed_text(["a", "bcdef"], stop=["e", "cd"])[1:] == ("ab", "cd")
    assert feed_text(["a", "bcdef"], stop=["cde", "cd", "c"], include_stop_str_in_output=True)[1:] == ("abc", "c")
    assert feed_text(["a", "bcdef"], stop=["cd", "bcd", "d"])[1:] == ("ab", "cd")
    assert feed_text(["a", "bcdef"], stop=["bcd", "cd", "d"])[1:] == ("a", "bcd")


def test_the_beginning_of_a_stop_is_held_back_and_given_out_when_it_is_none():
    pieces, text, _ = feed_text("abcabcd", stop=["abcd"])
    assert pieces == ["", "", "", "abc", "", "", ""] and text == "abc"
    pieces, text, _ = feed_text("xaab", stop=["aac", "ab!"])
    assert pieces == ["x", "", "", "aab"] and text == "xaab"


def test_a_stop_string_of_split_characters():
    data = "好世界".encode()
    pieces, text, stop = feed_text([data[i:i + 1] for i in range(len(data))], stop=["世界"])
    assert ("".join(pieces), text, stop) == ("好", "好", "世界")


@pytest.mark.parametrize("min_tokens, text", [(0, "ab"), (2, "ab"), (3, "ab"), (5, "abcdefgh"), (4, "ab")])
def test_min_tokens_lets_stop_strings_pass(min_tokens, text):
    """As in vLLM: a stop may begin among the first min_tokens tokens, but must end after them; "cde" ends with the fifth."""
    assert feed_text("abcdefgh", stop=["cde"], min_tokens=min_tokens)[1] == text


@pytest.mark.parametrize("stop", ["<|eot|>", ["x", "<|eot|>"], ["\n<|eot|>"], "<|eos|><|eos|>"])
def test_a_stop_string_that_holds_a_skipped_special_token_is_refused(stop):
    """Its text never comes, so it could never match: the refusal says what would."""
    with pytest.raises(RequestRefused, match="stop_token_ids.*skip_special_tokens=False") as refusal:
        feed(BYTES, [97], stop=stop)
    assert str([toys.EOT if "eot" in str(stop) else toys.EOS]) in str(refusal.value)
    assert feed(BYTES, [97], stop=stop, skip_special_tokens=False)[1:] == ("a", None)


def test_a_stop_string_may_be_the_text_of_a_special_token():
    assert feed(BYTES, [97, toys.EOT, 98], stop=["<|eot|>"], skip_special_tokens=False)[1:] == ("a", "<|eot|>")
    assert feed(BYTES, [*b"<|eot|"], stop=["<|eot|"])[1:] == ("", "<|eot|"), "half a token's name is a text like any other"


chunked_text = st.lists(st.text("abc世", min_size=1, max_size=4), min_size=1, max_size=12)


def obvious_way(chunks, stops, include, min_tokens):
    """A character at a time: (text, what of it may be shown before the end, the stop or None)."""
    text = ""
    for i, chunk in enumerate(chunks):
        for char in chunk:
            text += char
            if found := next((s for s in stops if text.endswith(s)), None) if i >= min_tokens else None:
                text = text if include else text.removesuffix(found)
                return text, text, found
    held = [n for n in range(1, len(text) + 1) if any(s.startswith(text[-n:]) and s != text[-n:] for s in stops)]
    return text, text[:len(text) - max(held, default=0)], None


@settings(max_examples=250, deadline=None, derandomize=True)
@given(chunked_text, st.lists(st.text("abc世", min_size=1, max_size=4), max_size=4), st.booleans(), st.integers(0, 4))
def test_stop_strings_against_the_obvious_way(chunks, stops, include, min_tokens):
    """However the text is cut into tokens; and what is held back is the beginning of a stop, never more, never less."""
    params = dict(stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens)
    text, shown, found = obvious_way(chunks, stops, include, min_tokens)
    pieces, *ended = feed_text(chunks, **params)
    assert ("".join(pieces), *ended) == (text, text, found)
    assert "".join(feed_text(chunks, finish=False, **params)[0]) == shown
    if not min_tokens:
        assert feed_text("".join(chunks), **params)[1:] == (text, found) == feed_text(["".join(chunks)], **params)[1:]


def test_a_character_costs_the_same_for_ten_thousand_stop_strings():
    """Counted: every state that the automaton looks at. It falls back at most as often as it went on."""
    looked = []
    class Counting(list):
        def __getitem__(self, state):
            looked.append(state)
            return list.__getitem__(self, state)
    stops = StopStrings([f"{'ab' * (i % 9)}{i}" for i in range(10_000)])
    stops.next = Counting(stops.next)
    text = "abababababa1ab12cabab" * 40
    assert stops.find(text, may_stop=False) == (None, len(text))
    assert len(text) * 2 < len(looked) < len(text) * 8


# -- The files of a folder --------------------------------------------------------------------------------------------------

def token(content, **flags):
    return {"content": content, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True, **flags}


FOLDERS = {        # tokenizer_config.json, added_tokens.json, special_tokens_map.json
    "decoder": ({"added_tokens_decoder": {"340": token("<|im_start|>"), "341": token("<|im_end|>"), "342": token("<tool>", special=False)}, "eos_token": "<|im_end|>"}, None, None),
    "added": ({}, {"<|im_start|>": 341, "<|im_end|>": 340}, None),
    "added+eos": ({"eos_token": "<|im_end|>"}, {"<|im_start|>": 341, "<|im_end|>": 340}, None),
    "added+map": ({"eos_token": "</s>"}, {"<|im_start|>": 341, "<|im_end|>": 340}, {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]}),
    "map": ({"eos_token": "</s>", "bos_token": "<s>"}, None, {"eos_token": token("<|im_end|>"), "additional_special_tokens": ["<|im_start|>"]}),
    "decoder wins": ({"added_tokens_decoder": {"340": token("<|im_start|>")}, "eos_token": "</s>"}, {"<|im_end|>": 341}, {"eos_token": "<|im_end|>"}),
    "flags": ({"added_tokens_decoder": {"1": token("<s>", special=False), "2": token("</s>", lstrip=True), "340": token("<tool>", rstrip=True, special=False)}}, None, None),
    "extra": ({"extra_special_tokens": ["<|im_start|>"], "eos_token": "<|im_end|>"}, None, None),
    "extra dict": ({"extra_special_tokens": {"image_token": "<|im_start|>"}, "eos_token": "<|im_end|>"}, None, None),
    "additional": ({"additional_special_tokens": ["<|im_start|>", "<tool>"]}, None, {"additional_special_tokens": ["<|im_end|>"]}),
    "own": ({"image_token": "<tool>"}, None, {"video_token": "<|im_end|>"}),
    "object": ({"bos_token": {"__type": "AddedToken", **token("<|im_start|>", lstrip=True)}}, None, None),
    "split": ({"split_special_tokens": True, "eos_token": "</s>"}, None, None),
    "vocab": ({"eos_token": "q"}, None, None),
    "gap": ({"added_tokens_decoder": {"400": token("<|im_start|>"), "350": token("<|im_end|>")}}, None, None),
    "order": ({"pad_token": "<pad>", "mask_token": "<mask>", "bos_token": "<tool>", "x_token": "<|im_start|>"}, None, {"y_token": "<|im_end|>", "x_token": "q"}),
    "null": ({"eos_token": "</s>"}, None, {"eos_token": None, "unk_token": "<unk>"}),
    "none": (None, None, {"eos_token": "</s>", "pad_token": "<pad>"}),
    "pad": ({"pad_token": "<pad>", "bos_token": None, "add_bos_token": True}, None, None),
    "extra map": ({"extra_special_tokens": ["<tool>"]}, None, {"extra_special_tokens": ["<|im_start|>"]}),
    "extra map dict": ({}, None, {"extra_special_tokens": {"image_token": "<tool>"}}),
}
MARKED = "<|im_start|>user\nhi <s> q </s>a  <|im_end|>  <tool>  b<pad> <unk><mask>"


@pytest.mark.parametrize("kind", [byte_level, lambda: sentencepiece(False), lambda: sentencepiece(True), toys.byte_tokenizer],
                         ids=["byte-level", "sentencepiece", "metaspace", "single bytes"])
@pytest.mark.parametrize("config, added, special_map", FOLDERS.values(), ids=FOLDERS)
@pytest.mark.filterwarnings("ignore:token .* has id")
def test_every_file_that_says_something_about_tokens_is_read_as_transformers_reads_it(kind, config, added, special_map):
    """tokenizer_config.json (None: not there), added_tokens.json, special_tokens_map.json beside tokenizer.json."""
    from transformers import PreTrainedTokenizerFast
    folder = toys.new_folder()
    kind().save(str(folder / "tokenizer.json"))
    for name, content in [("tokenizer_config", config), ("added_tokens", added), ("special_tokens_map", special_map)]:
        if content is not None:
            (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    reference, codec = PreTrainedTokenizerFast.from_pretrained(folder), TextCodec(folder)
    ids = codec.encode(MARKED)
    assert ids == reference(MARKED)["input_ids"]
    for skip in (True, False):
        assert codec.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip)
    assert (codec.eos_token_id, codec.special) == (reference.eos_token_id, reference.special_tokens_map)
    assert codec.tokenizer.get_vocab() == reference.get_vocab()


def test_an_added_token_is_one_token():
    """The kind of folder that chat models of the SentencePiece age bring."""
    n = byte_level().get_vocab_size()
    tokens = {str(n): token("<|im_start|>"), str(n + 1): token("<|im_end|>")}
    codec = make_codec(byte_level(), added_tokens_decoder=tokens, eos_token="<|im_end|>")
    assert codec.encode("<|im_start|>hi<|im_end|>") == [n, *codec.encode("hi"), n + 1] and codec.eos_token_id == n + 1
    assert feed(codec, [n, *codec.encode("hi"), n + 1])[1] == "hi"
    assert make_codec(byte_level()).eos_token_id is None and make_codec(None, eos_token="</s>").eos_token_id is None


def test_an_id_that_the_tokenizer_can_not_give_is_named():
    """The library numbers tokens on; a file that says otherwise would be read wrong without a word."""
    with pytest.warns(UserWarning, match="'<x>' has id 333.*not 400"):
        assert make_codec(byte_level(), added_tokens_decoder={"400": token("<x>")}).encode("<x>") == [333]


@pytest.mark.parametrize("name", ["tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"])
@pytest.mark.parametrize("content", [{"added_tokens_decoder": {"x": token("a")}, "a": "b"}, {"added_tokens_decoder": {"1": 5}, "<x>": "y"},
                                     {"added_tokens_decoder": {"1": {}}, "a": {}}, {"eos_token": {"text": "</s>"}, "added_tokens_decoder": []}])
def test_a_file_with_odd_tokens_is_named(name, content):
    folder = toys.new_folder()
    byte_level().save(str(folder / "tokenizer.json"))
    (folder / name).write_text(json.dumps(content))
    if name == "special_tokens_map.json" and "eos_token" not in content:
        assert TextCodec(folder).special == {}, "nothing in it is a name of a token"
    else:
        with pytest.raises(CheckpointError, match=name):
            TextCodec(folder)


# -- Prompts to ids --------------------------------------------------------------------------------------------------------

TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] | trim }}{{ eos_token }}{% endfor %}" \
           "{% if add_generation_prompt %}[assistant]{% endif %}"
OTHER = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
TALK = [{"role": "system", "content": " be  brief "}, {"role": "user", "content": "hi <|eot|> 世界\n"}, {"role": "assistant", "content": "ok"},
        {"role": "user", "content": "more"}]


def test_ids_are_those_of_tokenizer_json():
    """A class name in tokenizer_config.json changes nothing."""
    codec = make_codec(byte_level(), tokenizer_class="LlamaTokenizer", add_bos_token=True, bos_token="<s>")
    assert codec.encode(VARIED) == byte_level().encode(VARIED).ids


def test_padding_and_truncation_in_the_file_do_not_touch_prompts():
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=50, pad_id=2, pad_token="</s>")
    assert make_codec(tokenizer).encode(VARIED) == byte_level().encode(VARIED).ids


def test_one_bos():
    codec = make_codec(toys.byte_tokenizer(), TEMPLATE, bos_token="<|bos|>", eos_token={"content": "<|eot|>", "lstrip": False})
    assert codec.encode("hi") == [toys.BOS, *b"hi"]
    assert codec.encode("<|bos|>hi") == [toys.BOS, *b"hi"], "a prompt that brings its own BOS keeps one"
    assert codec.encode("hi <|bos|>") == [toys.BOS, *b"hi ", toys.BOS]
    assert codec.encode(codec.apply_chat_template(TALK), add_special_tokens=False).count(toys.BOS) == 1


@pytest.mark.parametrize("place", ["file", "string", "list", "file before string"])
@pytest.mark.parametrize("as_object", [False, True])
def test_the_chat_template_in_each_place_gives_what_transformers_gives(place, as_object):
    """chat_template.jinja, then tokenizer_config.json, as a string or under "default" in a list; token fields as text or objects."""
    from transformers import AutoTokenizer
    token = lambda text: {"content": text, "special": True, "__type": "AddedToken"} if as_object else text
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": token("<|bos|>"), "eos_token": token("<|eot|>"), "add_bos_token": True}
    if place == "list":
        config["chat_template"] = [{"name": "tool_use", "template": OTHER}, {"name": "default", "template": TEMPLATE}]
    elif place != "file":
        config["chat_template"] = TEMPLATE if place == "string" else OTHER
    folder = toys.new_folder()
    toys.byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if place.startswith("file"):
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    codec, reference = TextCodec(folder), AutoTokenizer.from_pretrained(folder)
    assert codec.apply_chat_template(TALK) == reference.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
    ids = codec.encode(codec.apply_chat_template(TALK), add_special_tokens=False)
    assert ids == reference.apply_chat_template(TALK, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert ids[0] == toys.BOS and ids.count(toys.BOS) == 1


def test_the_embedded_model_chats_as_transformers_does():
    from transformers import AutoTokenizer
    codec, reference = TextCodec(Path(EMBEDDED_MODEL)), AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    for generation_prompt in (True, False):
        text = codec.apply_chat_template(TALK, generation_prompt)
        assert codec.encode(text, False) == reference.apply_chat_template(TALK, add_generation_prompt=generation_prompt, return_dict=False)
    assert codec.encode(VARIED) == reference(VARIED)["input_ids"]


def test_without_a_template_completions_still_work():
    codec = make_codec(toys.byte_tokenizer(), bos_token="<|bos|>")
    with pytest.raises(RequestRefused, match="no chat template"):
        codec.apply_chat_template(TALK)
    assert codec.encode("hi") == [toys.BOS, *b"hi"]
    assert make_codec(toys.byte_tokenizer(), chat_template=[{"name": "rag", "template": "x"}]).chat_template is None


@pytest.mark.parametrize("text", ["\ud83d", "a\udcffb", None, 5, b"hi"])
def test_what_is_no_text_is_refused(text):
    with pytest.raises(RequestRefused, match="tokenized"):
        BYTES.encode(text)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": {"type": "Nothing"}}', "\udcff"])
def test_a_broken_tokenizer_file_is_named(name, content):
    if name == "tokenizer_config.json" and content.startswith('{"model'):
        pytest.skip("that is a valid tokenizer_config.json")
    folder = toys.new_folder()
    shutil.copytree(EMBEDDED_MODEL, folder, dirs_exist_ok=True)
    (folder / name).write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(CheckpointError, match=name):
        TextCodec(folder)
