"""text.py: what a request shows, character by character, and how prompts become ids."""
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
from text import Detokenizer, TextCodec

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
          "single bytes": make_codec(toys.byte_tokenizer())}
every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)


def feed(codec, ids, finish=True, **params):
    """Everything that a front end sees of `ids`: (pieces, whole text, stop string or None). Stops where the detokenizer says so."""
    detokenizer = Detokenizer(codec, SamplingParams(max_tokens=None, **params))
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
    codec, seen = CODECS["byte-level"], []
    spy = SimpleNamespace(decode=lambda ids, skip: (seen.append(len(ids)), codec.decode(ids, skip))[1])
    ids = codec.encode(VARIED * 20)
    feed(spy, ids)
    assert len(ids) > 400 and max(seen) <= 8


def test_without_a_tokenizer_ids_give_no_text():
    codec = make_codec(None)
    assert feed(codec, [1, 2, 3]) == (["", "", ""], "", None)
    with pytest.raises(RequestRefused, match="no tokenizer.json"):
        codec.encode("hi")


# -- Stop strings ----------------------------------------------------------------------------------------------------------

BYTES = CODECS["single bytes"]


def feed_text(chunks, **params):
    """One token for each chunk of bytes or text."""
    chunks = [c.encode() if isinstance(c, str) else c for c in chunks]
    longer = list(dict.fromkeys(c for c in chunks if len(c) > 1))
    codec = make_codec(toys.byte_tokenizer(longer))
    return feed(codec, [c[0] if len(c) == 1 else 259 + longer.index(c) for c in chunks], **params)


@pytest.mark.parametrize("stop, include, text, found", [
    (["cde"], False, "ab", "cde"), (["cde"], True, "abcde", "cde"), (["ghX"], False, "abcdefgh", None), (["ef", "cde"], False, "ab", "cde"),
    (["h"], False, "abcdefg", "h"), (["gh"], True, "abcdefgh", "gh"), (["a"], False, "", "a"), (["abcdefghi"], False, "abcdefgh", None),
    ("de", False, "abc", "de"), (["de", "cde"], False, "ab", "cde"), (["e", "cdef"], False, "abcd", "e"), ([], False, "abcdefgh", None)])
def test_a_stop_string_across_tokens(stop, include, text, found):
    pieces, whole, reason = feed_text("abcdefgh", stop=stop, include_stop_str_in_output=include)
    assert ("".join(pieces), whole, reason) == (text, text, found)


@pytest.mark.parametrize("chunks", [["abcdefgh"], ["ab", "cdefgh"], ["abc", "defgh"], ["abcd", "e", "fgh"], ["a", "bcdef", "gh"]])
def test_a_stop_string_inside_a_token_and_over_its_edge(chunks):
    assert feed_text(chunks, stop=["cde"])[1:] == ("ab", "cde")
    assert feed_text(chunks, stop=["cde"], include_stop_str_in_output=True)[1:] == ("abcde", "cde")
    assert feed_text(chunks, stop=["de", "cdef", "g"])[1:] == (("ab", "cdef") if chunks[-1] != "fgh" else ("abc", "de"))


def test_of_two_stops_in_one_token_the_earliest_wins_then_the_longest():
    assert feed_text(["a", "bcdef"], stop=["e", "cd"])[1:] == ("ab", "cd")
    assert feed_text(["a", "bcdef"], stop=["cd", "cde", "c"], include_stop_str_in_output=True)[1:] == ("abcde", "cde")


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


def test_a_stop_string_may_be_the_text_of_a_special_token():
    assert feed(BYTES, [97, toys.EOT, 98], stop=["<|eot|>"])[1:] == ("ab", None)
    assert feed(BYTES, [97, toys.EOT, 98], stop=["<|eot|>"], skip_special_tokens=False)[1:] == ("a", "<|eot|>")


chunked_text = st.lists(st.text("abc世", min_size=1, max_size=4), min_size=1, max_size=12)


@settings(max_examples=250, deadline=None, derandomize=True)
@given(chunked_text, st.lists(st.text("abc世", min_size=1, max_size=4), max_size=3), st.booleans(), st.integers(0, 4))
def test_stop_strings_against_the_obvious_way(chunks, stops, include, min_tokens):
    """Text so far, a token at a time: the first in which a stop ends is cut at the earliest such stop. And what is held back is never
    more than the beginning of a stop, and never less."""
    want, found, past = "", None, 0
    for i, chunk in enumerate(chunks):
        past, want = len(want), want + chunk
        ends = [(want.find(s, max(past - len(s) + 1, 0)), -len(s), s) for s in stops] if i >= min_tokens else []
        if ends := [e for e in ends if e[0] >= 0]:
            at, _, found = min(ends)
            want = want[:at + (len(found) if include else 0)]
            break
    pieces, text, stop = feed_text(chunks, stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens)
    assert ("".join(pieces), text, stop) == (want, want, found)
    shown = "".join(feed_text(chunks, finish=False, stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens)[0])
    if found is None:
        held = want[len(shown):]
        starts = [want[-n:] for n in range(1, len(want) + 1) if any(s != want[-n:] and s.startswith(want[-n:]) for s in stops)]
        assert held == max(starts, key=len, default="")


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


# Pieces of templates that checkpoints of the family bring: undefined against none, loop controls, JSON, dates, whitespace.
TEMPLATES = [
    "{%- if not tools is defined %}{%- set tools = none %}{%- endif %}{{ bos_token }}{% if tools is not none %}TOOLS{% endif %}{{ messages[0].content }}",
    "{% if tools is not none %}TOOLS{% endif %}{% if documents is none %}no documents{% endif %}",
    "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m | tojson }}\n{% endfor %}",
    "{{ messages | tojson(indent=2) }}",
    "  {% if true %}\n  x\n  {% endif %}\n\ty",
    "{{ strftime_now('%Y') }}{{ messages[1]['content'].strip().upper() }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}{{ unknown_name }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_of_the_wild_render_as_in_transformers(template):
    from transformers import PreTrainedTokenizerFast
    reference = PreTrainedTokenizerFast(tokenizer_object=toys.byte_tokenizer(), bos_token="<|bos|>", eos_token="<|eos|>")
    reference.chat_template = template
    codec = make_codec(toys.byte_tokenizer(), template, bos_token="<|bos|>", eos_token="<|eos|>")
    assert codec.apply_chat_template(TALK, False) == reference.apply_chat_template(TALK, tokenize=False)


@pytest.mark.parametrize("template, message", [
    ("{{ raise_exception('roles must alternate') }}", "roles must alternate"), ("{% if %}", "template"), ("{{ 1 / 0 }}", "division"),
    ("{{ messages[0].content.nothing.more }}", "nothing"), ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "template"),
    ("{{ messages.append(1) }}", "template"), ("{{ messages[0].content + 1 }}", "template"), ("{% include 'etc' %}", "template"),
    ("{% for i in range(10**9) %}x{% endfor %}", "template"), ("{% generation %}{% endgeneration %}", "template"), ("{{ messages[7].content.x }}", "template")])
def test_a_template_that_fails_refuses_the_request(template, message):
    """The template comes with the weights: whatever it does, it costs one request, and it reaches nothing of Python's."""
    codec = make_codec(toys.byte_tokenizer(), template)
    with pytest.raises(RequestRefused, match=message):
        codec.apply_chat_template(TALK)
    assert codec.encode("x")


@pytest.mark.parametrize("messages", [[], None, "hi", 5, {}, [1], ["hi"], [{}], [{"role": "user"}], [{"content": "x"}],
                                      [{"role": "user", "content": None}], [{"role": 1, "content": "x"}], [TALK[0], "x"]])
def test_what_is_no_conversation_is_refused(messages):
    with pytest.raises(RequestRefused, match="messages are a list"):
        make_codec(toys.byte_tokenizer(), TEMPLATE).apply_chat_template(messages)


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
