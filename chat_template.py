"""Conversations to text (chapter 3): a checkpoint's own jinja template, in the environment that transformers gives it.

Mirrors   vLLM: entrypoints/llm.py:608 LLM.chat, which renders through transformers
Promises  a template that transformers renders is rendered, to the same text. It comes with the weights from anywhere:
          it runs in a sandbox, it sees copies of plain data, and whatever it raises refuses this request alone.
Leaves out images and sound in messages, Python functions as tools.
"""
import functools
import json
from datetime import datetime

from checkpoint import CheckpointError
from request import RequestRefused, show

MARK = "END_OF_THE_LAST_MESSAGE "      # ends in a space, to see whether the template trims what it is given
REASONING = ("reasoning_content", "thinking", "reasoning")     # what templates and senders call the same field


def read_templates(folder, config):
    """{name: template} of a checkpoint: files of their own go before what tokenizer_config.json says."""
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    try:
        if found := {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()}:
            return found
    except (OSError, UnicodeError) as error:
        raise CheckpointError(f"a chat template of {folder} can't be read: {error}") from None
    said = config.get("chat_template") or {}
    if isinstance(said, list):                                            # several named ones
        said = {t["name"]: t["template"] for t in said if isinstance(t, dict) and t.keys() >= {"name", "template"}}
    return said if isinstance(said, dict) else {"default": said}


def render(templates, messages, chat_template, add_generation_prompt, continue_final_message, tools, known, given):
    """One of a checkpoint's templates (or another one, chat_template) over `messages`; `known` and `given` are what
    else it sees, the latter from the request. See TextCodec.apply_chat_template. Raises RequestRefused."""
    if chat_template is not None and not isinstance(chat_template, str):
        raise RequestRefused(f"chat_template is a template's text, or the name of one, not {show(chat_template)}")
    name = "tool_use" if tools is not None and "tool_use" in templates else "default"
    source = templates.get(chat_template or name, chat_template)
    if not isinstance(source, str) or not source:
        raise RequestRefused("this checkpoint has no chat template; use generate() with a plain prompt")
    if continue_final_message and add_generation_prompt:
        raise RequestRefused("continue_final_message goes on with the last message and add_generation_prompt begins "
                             "another: at most one of them may be true")
    if not isinstance(given, dict) or given.keys() & {"chat_template", "tokenize", "messages"}:
        raise RequestRefused("chat_template_kwargs is a dict of further variables, none of them messages, tokenize "
                             f"or chat_template, not {show(given)}")
    try:
        template, loops, asks = compile_template(source)
        messages = [_plain_message(m, loops, asks) for m in json.loads(json.dumps(_checked(messages)))]
        last = _mark_end(messages[-1], continue_final_message, source) if continue_final_message else None
        variables = json.loads(json.dumps({**known, **given, "tools": tools}))
        text = template.render({**variables, "messages": messages, "add_generation_prompt": add_generation_prompt})
        return text if last is None else _cut_at_mark(text, last)
    except RequestRefused:
        raise
    except Exception as error:
        raise RequestRefused(f"the chat template can't render these messages: {error}") from None


@functools.lru_cache(8)
def compile_template(source):
    """Jinja source  →  (template, whether it loops over a message's content, whether it asks what is a string), with
    the tags, filters and globals that transformers gives to chat templates."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):     # {% generation %} … {% endgeneration %} marks, for training, what the model says
        tags = {"generation"}

        def parse(self, parser):
            lineno = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=lineno)

    def raise_exception(message):
        raise RequestRefused(f"the chat template refuses these messages: {message}")

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def is_content(node):            # content, message.content, message["content"], any of them filtered or sliced
        if isinstance(node, nodes.Filter) or isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            return is_content(node.node)
        if isinstance(node, nodes.Name):
            return node.name == "content"
        key = node.attr if isinstance(node, nodes.Getattr) else getattr(getattr(node, "arg", None), "value", None)
        return key == "content" and isinstance(node.node, nodes.Name)

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                        extensions=[Generation, "jinja2.ext.loopcontrols"])
    env.filters["tojson"] = tojson
    env.globals.update(raise_exception=raise_exception, strftime_now=lambda form: datetime.now().strftime(form))
    tree = env.parse(source)
    return (env.from_string(source), any(is_content(loop.iter) for loop in tree.find_all(nodes.For)),
            any(test.name == "string" for test in tree.find_all(nodes.Test)))


def _checked(messages):
    good = lambda m: isinstance(m, dict) and isinstance(m.get("role"), str) and (
        isinstance(m.get("content"), (str, list, tuple)) or m.get("content") is None and m.get("tool_calls"))
    if not messages or not isinstance(messages, (list, tuple)) or not all(map(good, messages)):
        raise RequestRefused('messages are a list of {"role": text, "content": text or parts}, at least one, '
                             f"not {show(messages)}")
    return messages


def _plain_message(message, loops, asks):
    """A message with its content as the template takes it: as parts where it loops over them (a plain string, too,
    unless it asks what it has got), else as one string, parts joined by newlines. What is None is absent (content:
    empty), a tool call's arguments are an object, and reasoning is found as thinking and as reasoning_content."""
    message = {key: value for key, value in message.items() if value is not None}
    content = message.get("content", "")
    if isinstance(content, list) or loops and not asks:
        content = [_text_part(part) for part in ([content] if isinstance(content, str) else content)]
        if not loops or message["role"] == "tool":
            content = "\n".join(part["text"] for part in content)
    message["content"] = content
    for call in message.get("tool_calls", ()):
        if isinstance(arguments := call["function"].get("arguments"), str):
            call["function"]["arguments"] = json.loads(arguments or "{}")
    said = next((message[name] for name in REASONING if name in message), None)
    return message if said is None else {"thinking": said, **message, "reasoning_content": said}


def _text_part(part):
    part = {"type": "text", "text": part} if isinstance(part, str) else part
    kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
    text = part.get("text", part.get(kind)) if isinstance(part, dict) else None
    if kind not in ("text", "input_text", "output_text", "refusal", "thinking") or not isinstance(text, str):
        raise RequestRefused(f"a part of a message's content is of type {kind!r:.40}; only text is served")
    return {**part, "type": "text", "text": text}


def _mark_end(message, field, source):
    """Append MARK to what is to be continued; returns the text before it."""
    field = field if isinstance(field, str) else "content"
    text = message.get(field)
    names = [name for name in REASONING if message.get(name) == text] if field in REASONING else [field]
    if not text or not any(name in source for name in names):
        raise RequestRefused(f"continue_final_message: the last message has no {field!r}, or the template ignores it")
    if isinstance(text, list):
        text[-1]["text"], text = text[-1]["text"] + MARK, text[-1]["text"]
    else:
        message.update(dict.fromkeys(names, text + MARK))
    return text


def _cut_at_mark(rendered, last):
    at = rendered.rfind(MARK.strip())
    if at < 0 or last.strip() not in rendered:
        raise RequestRefused("continue_final_message: the template doesn't write the last message as it is")
    # The template has trimmed the mark's space if it trims; then it would have trimmed the message's own end, too.
    return rendered[:at] if rendered.startswith(MARK, at) else rendered[:at].rstrip()
