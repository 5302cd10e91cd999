"""Text in and out (chapter 3): prompts to token ids, token ids to text as they come.

Mirrors   vLLM: v1/engine/detokenizer.py:69 BaseIncrementalDetokenizer, v1/engine/detokenizer.py:310 check_stop_strings
Promises  prompt and text read on: the text is what the output adds to the decode of the prompt's ids, in whole
          characters, cut at the stop string that is complete first. A token costs the same however long the text is,
          but for a copy of it. One exception: where a tokenizer falls back to bytes, decode() spoils a whole run for
          one wrong byte in it; here the characters that came before the wrong byte, and have been shown, stay.
Order     1 TextCodec: the files of a checkpoint's tokenizer.  2 DecodeStream: ids to characters.  3 StopStrings.
          4 Detokenizer: one request's text; `python text.py` shows it at work.  Chat templates: chat_template.py.
"""
import re
import warnings
from itertools import islice
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from chat_template import read_templates, render
from checkpoint import CheckpointError, read_json
from request import RequestRefused

UNFINISHED = "\ufffd"        # what decode() gives for bytes that are no character, or not yet
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


# -- 1. The files of a tokenizer --------------------------------------------------------------------------------------

class TextCodec:
    """A checkpoint's tokenizer and chat templates. Without tokenizer.json, prompts must be token ids and all text is
    empty. `special`: names of special tokens to their texts; `eos_token_id`: the tokenizer's own end of a sequence, or
    None; `chat_template`: the default one, or None. Raises CheckpointError naming the file that can't be read."""

    def __init__(self, folder):
        read = lambda name: read_json(folder / name) if (folder / name).is_file() else {}
        self.config, self.special_tokens = read("tokenizer_config.json"), {}         # of the latter: id → text
        file = folder / "tokenizer.json"
        try:
            self.tokenizer = Tokenizer.from_file(str(file)) if file.is_file() else None
        except Exception as error:                                        # the library has no class of its own for this
            raise CheckpointError(f"{file} is not a tokenizer: {error}") from None
        try:
            self._read_tokens(read)
        except CheckpointError:
            raise
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise CheckpointError(f"{folder}: what tokenizer_config.json, special_tokens_map.json or added_tokens.json "
                                  f"says of tokens can't be used: {error!r}") from None
        id_of = lambda name: self.tokenizer.token_to_id(self.special.get(name, "")) if self.tokenizer else None
        self._bos_token_id, self.eos_token_id = map(id_of, ("bos_token", "eos_token"))
        self._special_text = re.compile("|".join(map(re.escape, self.special_tokens.values())) or "(?!)")
        self.chat_templates = read_templates(folder, self.config)
        self.chat_template = self.chat_templates.get("default")

    def _read_tokens(self, read):
        """What counts as one token, and which are special. tokenizer.json says how text is cut, and most of this; but
        tokens added later stand in the files beside it alone. As in transformers, added_tokens_decoder of
        tokenizer_config.json, where it is, replaces special_tokens_map.json and added_tokens.json; else the map goes
        before the config, and tokenizer.json before added_tokens.json."""
        config, beside = self.config, self.config.get("added_tokens_decoder")
        mapped = {} if beside is not None else read("special_tokens_map.json")
        own = lambda file: {k: v for k, v in file.items()
                            if k.endswith("_token") and k not in NAMES and isinstance(v, (str, dict))}
        content = lambda token: token["content"] if isinstance(token, dict) else token
        named, extra = {k: {**config, **mapped}.get(k) for k in NAMES} | own(mapped) | own(config), []
        for more in (config.get("extra_special_tokens") or config.get("additional_special_tokens"),
                     mapped.get("extra_special_tokens")):
            named |= more if isinstance(more, dict) else {}
            extra += [token for token in more if token not in extra] if isinstance(more, list) else []
        named = {name: token for name, token in named.items() if token is not None}
        self.special = {name: content(token) for name, token in named.items()}
        if self.tokenizer is None:
            return
        self.tokenizer.no_truncation()       # a file may bring settings made for training; a prompt isn't cut or padded
        self.tokenizer.no_padding()
        self.tokenizer.encode_special_tokens = bool(config.get("split_special_tokens", False))
        known = self.tokenizer.get_added_tokens_decoder()                # id → AddedToken
        if beside is not None:
            added = {int(i): _added_token(token) for i, token in beside.items()}
        else:
            special = {self.special.get(k) for k in NAMES} | {content(token) for token in extra}
            added = {i: AddedToken(text, normalized=text not in special, special=text in special)
                     for text, i in read("added_tokens.json").items()} | known
        tokens = [token for _, token in sorted(added.items())]
        there = {token.content for token in [*known.values(), *tokens]}
        more = [*named.values(), *(extra or mapped.get("additional_special_tokens") or [])]
        tokens += [_added_token(token) for token in more if content(token) not in there]
        for token in tokens:
            token.special = token.special or token.content in self.special.values()
        self.tokenizer.add_tokens(tokens)            # a text that is a token already keeps its id, others get the next
        for i, token in added.items():
            if (given := self.tokenizer.token_to_id(token.content)) != i:
                warnings.warn(f"token {token.content!r} has id {given}, as in transformers, not {i} as its file says")
        self.special_tokens = {i: t.content for i, t in self.tokenizer.get_added_tokens_decoder().items() if t.special}

    def encode(self, text, add_special_tokens=True):
        """Text to ids. The tokenizer puts BOS in front; a text that brings its own still gets just one."""
        if self.tokenizer is None:
            raise RequestRefused("this checkpoint has no tokenizer.json, so a prompt must be token ids: "
                                 "{'prompt_token_ids': [...]}")
        try:
            ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeError) as error:
            raise RequestRefused(f"the prompt can't be tokenized: {error}") from None
        bos = self._bos_token_id
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids

    def decode(self, ids, skip_special_tokens=True):
        return "" if self.tokenizer is None else self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def is_silent(self, token_id, skip_special_tokens):
        """Whether this token never gives text: a special one that is skipped, or an id without a token."""
        skipped = skip_special_tokens and token_id in self.special_tokens
        return skipped or self.tokenizer is None or self.tokenizer.id_to_token(token_id) is None

    def check_stop(self, params):
        """Refuses a stop string that could never match, for a special token in it is skipped."""
        for stop in params.stop if params.skip_special_tokens else ():
            if found := self._special_text.search(stop):
                raise RequestRefused(
                    f"stop {stop!r:.80}: {found[0]!r} is a special token, which skip_special_tokens leaves out; use "
                    f"stop_token_ids=[{self.tokenizer.token_to_id(found[0])}] or skip_special_tokens=False")

    def apply_chat_template(self, messages, add_generation_prompt=True, *, chat_template=None,
                            continue_final_message=False, tools=None, chat_template_kwargs=None):
        """[{"role": …, "content": text or parts}, …] to the text that the model was trained on. chat_template: another
        one, or one of several by its name; tools: JSON schemas; chat_template_kwargs: further variables, `documents`
        among them; continue_final_message: leave the last message (or the field named) open, for the model
        to go on with. Raises RequestRefused. vLLM: entrypoints/llm.py:608 LLM.chat"""
        return render(self.chat_templates, messages, chat_template, add_generation_prompt, continue_final_message,
                      tools, {**self.special, "documents": None}, chat_template_kwargs or {})


def _added_token(token):
    """A token as the files spell it, a text or an object, as the library's."""
    if isinstance(token, str):
        return AddedToken(token, special=True)
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return AddedToken(token["content"], **{flag: token[flag] for flag in flags if flag in token})


# -- 2. Ids to characters ---------------------------------------------------------------------------------------------

class DecodeStream:
    """Token ids to text, one after the other: never half a character, nothing twice.

    A character may span tokens, and a token's text may depend on the one before it ("▁a" begins with a space, but not
    where a text begins). So the text of a token is the difference of two decodes, over a window that begins with the
    tokens of the last piece of text, or of the prompt. Example: 世 is the bytes E4 B8 96 in three tokens; after the
    first and second the decode ends in one U+FFFD or two: they are held, as up to three may still become a character.
    window: tokens that are decoded together; prefix: what of their text has been given; fresh: the first of them that
    has not given all of its own; held: the U+FFFDs at the end, not given yet, each the byte of one token.
    vLLM: v1/engine/detokenizer.py:168 FastIncrementalDetokenizer (there in Rust)
    """

    def __init__(self, codec, skip_special_tokens=True, prompt_token_ids=()):
        self.codec, self.skip = codec, skip_special_tokens
        self._decode = lambda ids: codec.decode(ids, skip_special_tokens)
        tail = list(islice((i for i in reversed(prompt_token_ids) if not codec.is_silent(i, self.skip)), 8))[::-1]
        self.window, self.fresh, self.prefix, self.held = tail, len(tail), self._decode(tail), ""
        # A prompt may end within a character, which is then the output's first; and the window may begin within one.
        cuts = ((start, end) for start in range(min(4, len(tail))) for end in range(len(tail), len(tail) - 4, -1))
        for start, end in cuts if self.prefix.endswith(UNFINISHED) else ():
            if start <= end and not (text := self._decode(tail[start:end])).endswith(UNFINISHED):
                self.window, self.fresh, self.prefix = tail[start:], end - start, text
                break

    def step(self, token_id):
        """The text that this token completes."""
        if self.codec.is_silent(token_id, self.skip):
            return ""
        self.window, self.prefix, self.fresh, piece, self.held = self._next(token_id)
        if piece and not self.held:                       # whole characters: the window begins anew with this piece
            self.window = self.window[self.fresh:]
        elif len(self.window) > 16:                       # babble; what is unfinished lies in the last few tokens
            self.window = self.window[-8:]
        else:
            return piece
        text = self._decode(self.window)
        if not text.endswith(self.held):                  # of a run of bytes, the wrong one has left the window
            piece, self.held = piece + self.held, ""
        self.prefix, self.fresh = text[:len(text) - len(self.held)], len(self.window) - len(self.held)
        return piece

    def _next(self, token_id):
        """(window, its text that has been given, index of its first token that has not given all, piece, held)"""
        window, prefix, fresh = [*self.window, token_id], self.prefix, self.fresh
        text = self._decode(window)
        if not text.startswith(prefix):     # a run of bytes is all U+FFFD once one of them is wrong. What was shown
            window, prefix, fresh = window[fresh:], "", 0            # stays, and the new ones are decoded alone
            text = self._decode(window)
        held = min(len(text) - max(len(text.rstrip(UNFINISHED)), len(prefix)), 3)
        given = len(text) - held
        return window, text[:given], fresh, text[len(prefix):given], text[given:]

    def peek(self, token_id, last=False):
        """What this token would add to the text if it came next, so the texts of all that come add up to the text: ""
        while a character is unfinished, then the whole of it. One that is skipped gives its name. last: what is held
        comes, too. vLLM: v1/engine/logprobs.py:249 LogprobsProcessor._correct_decoded_token"""
        if self.codec.is_silent(token_id, self.skip):
            return self.codec.decode([token_id], False)
        *_, piece, held = self._next(token_id)
        return piece + held if last else piece


# -- 3. Stop strings --------------------------------------------------------------------------------------------------

class StopStrings:
    """All stop strings of a request in one automaton (Aho and Corasick), so that a character costs the same for one
    string as for a thousand, and nothing of the text is read twice.

    A state is the longest end of the text that begins a stop string. Example, stops "END" and "NOW":
        text     "E"  "EN"   "ENO"  "ENOx"
        state    "E"  "EN"   "NO"   ""           at "ENO" the state falls back from "EN" to "N", and goes on to "NO"
    The state's length is what must be held back. vLLM: v1/engine/detokenizer.py:310 check_stop_strings"""

    def __init__(self, stops):
        self.stops, self.state, none = list(stops), 0, len(stops)
        self.next, self.fall_back, self.depth, self.ends = [{}], [0], [0], [none]       # by state; 0 is the empty one
        for index, stop in enumerate(self.stops):
            state = 0
            for char in stop:
                child = self.next[state].setdefault(char, len(self.next))
                if child == len(self.next):
                    self.next.append({})
                    self.fall_back.append(0)
                    self.depth.append(self.depth[state] + 1)
                    self.ends.append(none)
                state = child
            self.ends[state] = min(self.ends[state], index)
        queue = list(self.next[0].values())
        for state in queue:                               # shorter states first: a state falls back to a shorter one
            for char, child in self.next[state].items():
                self.fall_back[child] = self._step(self.fall_back[state], char)
                self.ends[child] = min(self.ends[child], self.ends[self.fall_back[child]])
                queue.append(child)

    def _step(self, state, char):
        while state and char not in self.next[state]:
            state = self.fall_back[state]
        return self.next[state].get(char, 0)

    def find(self, piece, may_stop=True):
        """Read on, to the end of the stop string that is complete first, of several the first in the list. Returns (the
        stop string or None, how many characters of the piece were read)."""
        for length, char in enumerate(piece if self.stops else "", 1):
            self.state = self._step(self.state, char)
            if may_stop and self.ends[self.state] < len(self.stops):
                return self.stops[self.ends[self.state]], length
            while self.state and not self.next[self.state]:          # complete, but not allowed to end the text
                self.state = self.fall_back[self.state]
        return None, len(piece)


# -- 4. One request's text --------------------------------------------------------------------------------------------

class Detokenizer:
    """One request's text as it comes: whole characters, no beginning of a stop string. text[:shown] may be shown, the
    rest could still become one. Only a request that ends in half a character shows U+FFFD. Example, stop "END":
        token      " the"   E4        B8        96          " E"          "N"           "x"
        text       " the"   " the"    " the"    " the世"    " the世 E"    " the世 EN"   " the世 ENx"
        may show   " the"   " the"    " the"    " the世"    " the世 "     " the世 "     " the世 ENx"
    Raises RequestRefused, see check_stop. vLLM: v1/engine/detokenizer.py:69 BaseIncrementalDetokenizer"""

    def __init__(self, codec, params, prompt_token_ids=()):
        codec.check_stop(params)
        self.params, self.num_tokens, self.text, self.shown = params, 0, "", 0
        self.stream = DecodeStream(codec, params.skip_special_tokens, prompt_token_ids)
        self.stop_strings, self.decodes = StopStrings(params.stop), params.detokenize

    def append(self, token_id, finished, show_token=True):
        """Take a token in (show_token False: the stop token itself, which has no text). Returns the stop string that
        ended the text, or None. After finished=True nothing is held back."""
        piece = self.stream.step(token_id) if show_token and self.decodes else ""
        piece += self.stream.held if finished else ""
        self.num_tokens += show_token
        # Token number min_tokens itself may not end the text, as sampling bans stop ids until so many exist.
        stop, length = self.stop_strings.find(piece, self.num_tokens > self.params.min_tokens)
        self.text += piece[:length]
        if stop and not self.params.include_stop_str_in_output:
            self.text = self.text[:-len(stop)]
        self.shown = len(self.text) - (0 if finished or stop else self.stop_strings.depth[self.stop_strings.state])
        return stop

    def token_texts(self, token_ids, last=False):
        """The texts of tokens that may come next (None each if nothing is decoded), see DecodeStream.peek: so ask
        before append(), with last=finished."""
        return [self.stream.peek(i, last) if self.decodes else None for i in token_ids]


if __name__ == "__main__":         # the example above, with the tokens of the embedded model
    from request import SamplingParams
    codec = TextCodec(Path(__file__).resolve().parent / "models" / "tiny-llama3")
    prompt, output = codec.encode("Once upon a time,"), codec.encode(" the cat 世 ENx END of it", False)
    detokenizer = Detokenizer(codec, SamplingParams(stop="END"), prompt)
    print(f"prompt {codec.decode(prompt)!r}, stop string 'END'\n{'token':10} {'text':26} may show")
    for token_id in output:
        stop = detokenizer.append(token_id, finished=False)
        token, text = codec.tokenizer.id_to_token(token_id), detokenizer.text
        print(f"{token:10} {text!r:26} {text[:detokenizer.shown]!r}")
        if stop:
            break
