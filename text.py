"""Text in and out (chapter 3): prompts to token ids, token ids to text as they come.

Mirrors   vLLM: v1/engine/detokenizer.py:69 BaseIncrementalDetokenizer, v1/engine/detokenizer.py:310 check_stop_strings
Promises  the pieces of text that a request shows, laid end to end, are the decode of all its tokens, cut at the stop
          string.
Why a file of its own: it needs no weights, no tensors, and all that goes wrong in it goes wrong in single characters.
"""
import json
import time

from tokenizers import Tokenizer

from checkpoint import CheckpointError, read_json
from request import RequestRefused


class TextCodec:
    """tokenizer.json and the chat template of a checkpoint. Without tokenizer.json, prompts must be token ids and all
    text is empty. Raises CheckpointError naming the file that can't be read."""

    def __init__(self, folder):
        file, config = folder / "tokenizer.json", folder / "tokenizer_config.json"
        # tokenizer.json is the authority on how text is cut; tokenizer_config.json tells names, some as {"content": …}.
        try:
            self.tokenizer = Tokenizer.from_file(str(file)) if file.is_file() else None
        except Exception as error:                                        # the library has no class of its own for this
            raise CheckpointError(f"{file} is not a tokenizer: {error}") from None
        if self.tokenizer is not None:      # a file may bring settings made for training; a prompt isn't cut or padded
            self.tokenizer.no_truncation()
            self.tokenizer.no_padding()
        self.config = read_json(config) if config.is_file() else {}
        named = {k: v for k, v in self.config.items() if k.endswith("_token")}
        named = {k: v.get("content") if isinstance(v, dict) else v for k, v in named.items()}
        self.special = {k: v for k, v in named.items() if isinstance(v, str)}
        file = folder / "chat_template.jinja"
        self.chat_template = file.read_text(encoding="utf-8") if file.is_file() else self.config.get("chat_template")
        if isinstance(self.chat_template, list):                          # several named ones
            named = {t.get("name"): t.get("template") for t in self.chat_template if isinstance(t, dict)}
            self.chat_template = named.get("default")

    def encode(self, text, add_special_tokens=True):
        """Text to ids. The tokenizer puts BOS in front; a text that brings its own still gets just one."""
        if self.tokenizer is None:
            raise RequestRefused("this checkpoint has no tokenizer.json, so a prompt must be token ids: "
                                 "{'prompt_token_ids': [...]}")
        try:
            ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeError) as error:
            raise RequestRefused(f"the prompt can't be tokenized: {error}") from None
        bos = self.special.get("bos_token")
        return ids[1:] if bos and ids[:2] == [self.tokenizer.token_to_id(bos)] * 2 else ids

    def decode(self, ids, skip_special_tokens=True):
        return "" if self.tokenizer is None else self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(self, messages, add_generation_prompt=True):
        """[{"role": …, "content": …}, …] to the text that the model was trained on, by its own jinja template. The
        template comes with the weights from anywhere, so it runs in a sandbox, and whatever it raises is this request's
        failure alone. Raises RequestRefused.
        vLLM renders it through transformers (entrypoints/llm.py, LLM.chat); left out: tools, content in parts."""
        if not self.chat_template:
            raise RequestRefused("this checkpoint has no chat template; use generate() with a plain prompt")
        good = lambda m: isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
        if not messages or not isinstance(messages, (list, tuple)) or not all(map(good, messages)):
            raise RequestRefused('messages are a list of {"role": text, "content": text}, at least one, '
                                 f"not {messages!r:.80}")
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def raise_exception(message):
            raise RequestRefused(f"the chat template refuses these messages: {message}")
        env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                            extensions=["jinja2.ext.loopcontrols"])
        env.filters["tojson"] = lambda value, **kw: json.dumps(value, ensure_ascii=False, **kw)
        env.globals.update(raise_exception=raise_exception, strftime_now=lambda f: time.strftime(f))
        try:
            return env.from_string(self.chat_template).render(
                messages=messages, add_generation_prompt=add_generation_prompt, tools=None, documents=None,
                **self.special)
        except RequestRefused:
            raise
        except Exception as error:
            raise RequestRefused(f"the chat template can't render these messages: {error}") from None


class Detokenizer:
    """Turns one request's ids into text as they come: never half a character, nothing twice, no beginning of a stop
    string.

    A character may span tokens, and a token's text may depend on the one before it, so the text of a token is the
    difference of two decodes. Example: 世 is the bytes E4 B8 96 in three tokens; after the first and second the decode
    ends in U+FFFD, which means "not finished": nothing is emitted. After the third the whole character is. Only a
    request that ends in half a character shows the U+FFFD. With the stop string "END":
        token      " the"   E4        B8        96        " E"        "N"        "x"
        text       " the"   " the"    " the"    " the世"   " the世 E"   " the世 EN"  " the世 ENx"
        may show   " the"   " the"    " the"    " the世"   " the世 "    " the世 "    " the世 ENx"
    vLLM: v1/engine/detokenizer.py:69 BaseIncrementalDetokenizer
    """

    def __init__(self, codec, params):
        self.codec, self.params = codec, params
        self.token_ids, self.text = [], ""
        self.read_offset = 0         # token_ids[read_offset:] have given no text yet
        self.prefix_offset = 0       # the window that is decoded begins here, with the tokens of the last piece of text
        self.shown = 0               # text[:shown] may be shown, the rest could be the beginning of a stop string

    def append(self, token_id, finished, show_token=True):
        """Take a token in (show_token False: the stop token itself, which has no text). Returns the stop string that
        ended the text, or None. After finished=True nothing is held back."""
        if show_token:
            self.token_ids.append(token_id)
        before, skip = len(self.text), self.params.skip_special_tokens
        old = self.codec.decode(self.token_ids[self.prefix_offset:self.read_offset], skip)
        new = self.codec.decode(self.token_ids[self.prefix_offset:], skip)
        # A run of byte tokens (byte fallback) is all U+FFFD once one of them is wrong. What was shown stays, and the
        # new ones are decoded alone.
        piece = new[len(old):] if new.startswith(old) else self.codec.decode(self.token_ids[self.read_offset:], skip)
        if piece and (finished or not piece.endswith("\ufffd")):
            self.text += piece
            self.prefix_offset, self.read_offset = self.read_offset, len(self.token_ids)
        stop = self._find_stop(before)
        self.shown = len(self.text) if finished or stop else len(self.text) - self._held_back()
        return stop

    def _find_stop(self, before):
        """The earliest stop string that ends in the new text; the text is cut at it."""
        if len(self.token_ids) <= self.params.min_tokens:    # token number min_tokens itself may not end the text,
            return None                                      # as model.adjust_logits bans stop ids until so many exist
        places = [(self.text.find(s, max(before - len(s) + 1, 0)), -len(s), s) for s in self.params.stop]
        found = [place for place in places if place[0] >= 0]
        if not found:
            return None
        at, _, stop = min(found)                 # of those that begin together, the longest
        self.text = self.text[:at + len(stop) if self.params.include_stop_str_in_output else at]
        return stop

    def _held_back(self):
        """How many characters at the end of the text could still become a stop string."""
        longest = max((len(s) - 1 for s in self.params.stop), default=0)
        for n in range(min(longest, len(self.text)), 0, -1):
            if any(s.startswith(self.text[-n:]) for s in self.params.stop if len(s) > n):
                return n
        return 0
