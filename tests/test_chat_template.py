"""chat_template.py: conversations as the checkpoint's own template writes them; transformers is the measure."""
import copy
import functools
import json

import pytest
import toys

from chat_template import compile_template
from request import RequestRefused
from test_text import TALK, TEMPLATE, make_codec

TOOLS = [{"type": "function", "function": {"name": "weather", "description": "gibt \"das\" Wetter <für>", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}}}]
CALLS = [{"role": "user", "content": "Wetter in Zürich?"},
         {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}]},
         {"role": "tool", "content": "kalt & naß", "name": "weather"}]
THOUGHT = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "reasoning": "easy", "content": " 4 "}, {"role": "user", "content": "sure?"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
LOOP = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m['content'] %}[{{ p.text }}]{% endfor %}{% endif %}{% endfor %}"


@functools.lru_cache(None)
def transformers_tokenizer():
    from transformers import PreTrainedTokenizerFast
    return PreTrainedTokenizerFast(tokenizer_object=toys.byte_tokenizer(), bos_token="<|bos|>", eos_token="<|eos|>")


def theirs(template, messages, **options):
    return transformers_tokenizer().apply_chat_template(copy.deepcopy(messages), chat_template=template, tokenize=False, **options)


def ours(template, messages, add_generation_prompt=False, **options):
    codec = make_codec(toys.byte_tokenizer(), template, bos_token="<|bos|>", eos_token="<|eos|>")
    return codec.apply_chat_template(messages, add_generation_prompt, **options)


# Pieces of templates that checkpoints of the family bring: undefined against none, loop controls, JSON, dates, whitespace, marks for training.
TEMPLATES = [
    "{%- if not tools is defined %}{%- set tools = none %}{%- endif %}{{ bos_token }}{% if tools is not none %}TOOLS{% endif %}{{ messages[0].content }}",
    "{% if tools is not none %}TOOLS{% endif %}{% if documents is none %}no documents{% endif %}",
    "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m | tojson }}\n{% endfor %}",
    "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ loop.index0 }}{{ m.role }}{% endfor %}",
    "{{ messages | tojson(indent=2) }}", "{{ messages | tojson(4) }}", "{{ messages | tojson(ensure_ascii=true, separators=(',', ':'), sort_keys=True) }}",
    "{{ {'b': '<ä>', 'a': none} | tojson(sort_keys=true) }}", "{{ {'b': [1, 2.5, true]} | tojson(separators=[',', ' : ']) }}",
    "  {% if true %}\n  x\n  {% endif %}\n\ty",
    "{{ strftime_now('%Y') }}{{ messages[1]['content'].strip().upper() }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}{{ unknown_name }}",
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "{%- for m in messages -%}\n  {%- generation -%}\n {{ m.role }} {% set x = m.role %}{{ x }}\n {%- endgeneration -%}\n{{ x }}{{ loop.index }}{% endfor %}",
    "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
    "{% macro line(m, end='') %}<{{ m.role }}>{{ m.content }}{{ end }}{% endmacro %}{% for m in messages %}{{ line(m, end=eos_token) }}{% endfor %}",
    "{% generation %}{% for m in messages %}{{ m.role[0] }}{% endfor %}{% endgeneration %}",
    "{% for k, v in messages[0] | dictsort %}{{ k }}={{ v }};{% endfor %}{{ messages | map(attribute='role') | join('|') }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
    "{{ dict(a=1, **{'b': 2}) }}{{ range(3) | list }}{{ 'x' ~ 1 }}{{ messages[-1].content.split('o')[0] }}{{ [1, 2] + [3] }}{{ messages[1:] | length }}",
    "{{ messages[0].content | trim | title | replace('B', 'p') | indent(2) }}{{ '%s-%d' | format('a', 3) }}{{ ('a' if false) is undefined }}",
    "{% with a = 1 %}{{ a }}{% endwith %}{% filter upper %}abc{% endfilter %}{% raw %}{{ x }}{% endraw %}{# nothing #}{{ 'a\\n' }}",
    "{% for m in messages if m.role != 'system' %}{{ loop.first }}{{ loop.last }}{{ loop.previtem.role if loop.previtem is defined }}{{ m.content is string }}{{ m is mapping }}{{ m.x is defined }}{% else %}none{% endfor %}",
]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("generation_prompt", [False, True])
def test_templates_of_the_wild_render_as_in_transformers(template, generation_prompt):
    want = theirs(template, TALK, add_generation_prompt=generation_prompt)
    assert ours(template, TALK, generation_prompt) == want


@pytest.mark.parametrize("template", [
    "{% for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}{{ tools | length }}", "{{ tools[0].function.parameters.properties | tojson }}",
    "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}"
    "{% else %}{{ m.role }}: {{ m.content }} {{ m.name }}{% endif %}{% endfor %}", "{{ tools }}{{ documents }}",
    "{% for d in documents %}{{ d.title }}: {{ d.text }}{% endfor %}{{ thinking_budget }}{{ bos_token }}"])
def test_tools_documents_and_other_variables_reach_the_template(template):
    documents = [{"title": "T", "text": "täxt"}]
    for messages in (TALK, CALLS):
        want = theirs(template, messages, tools=TOOLS, documents=documents, thinking_budget=5, bos_token="B")
        assert ours(template, messages, tools=TOOLS, chat_template_kwargs={"documents": documents, "thinking_budget": 5, "bos_token": "B"}) == want


def test_a_tool_calls_arguments_are_an_object_for_the_template_even_if_they_came_as_text():
    template = "{{ messages[1].tool_calls[0].function.arguments.city }}{{ messages[1].content }}"
    for arguments, want in [('{"city": "Zürich"}', "Zürich"), ({"city": "Bern"}, "Bern"), ("", ""), (None, "")]:
        call = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "w", "arguments": arguments}}]}
        assert ours(template, [CALLS[0], call]) == want


def test_reasoning_has_the_names_that_templates_know():
    for name in ("reasoning", "thinking", "reasoning_content"):
        messages = [{("x" if key != "reasoning" else name): value for key, value in m.items()} | m for m in THOUGHT]
        messages[1] = {"role": "assistant", name: "easy", "content": "4"}
        for template in ("{{ messages[1].reasoning_content }}", "{{ messages[1].thinking }}", "{{ messages[1].content }}"):
            assert ours(template, messages) == theirs(template, messages)


@pytest.mark.parametrize("kwarg, message", [({"messages": []}, "messages"), ({"chat_template": "x"}, "chat_template"), ({"tokenize": True}, "tokenize"),
                                            ({"x": object()}, "JSON")])
def test_what_chat_template_kwargs_can_not_set(kwarg, message):
    with pytest.raises(RequestRefused, match=message):
        ours(TEMPLATE, TALK, chat_template_kwargs=kwarg)


def test_a_template_of_ones_own_and_one_of_several():
    codec = make_codec(toys.byte_tokenizer(), chat_template=[{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"},
                                                             {"name": "rag", "template": "R"}])
    assert codec.apply_chat_template(TALK) == "D" and codec.apply_chat_template(TALK, tools=TOOLS) == "T"
    assert codec.apply_chat_template(TALK, chat_template="rag") == "R" and codec.apply_chat_template(TALK, chat_template="rag {{ 1 }}") == "rag 1"
    assert make_codec(toys.byte_tokenizer()).apply_chat_template(TALK, chat_template="{{ messages | length }}") == "4"


@pytest.mark.parametrize("with_config", [True, False])
@pytest.mark.parametrize("files", [{}, {"chat_template.jinja": "F"}, {"chat_template.jinja": "F", "additional_chat_templates/tool_use.jinja": "A"},
                                   {"additional_chat_templates/rag.jinja": "R", "additional_chat_templates/default.jinja": "D"}])
def test_files_of_templates_go_before_the_config(files, with_config):
    from transformers import AutoTokenizer
    folder = toys.new_folder()
    toys.byte_tokenizer().save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **({"chat_template": "C"} if with_config else {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    from text import TextCodec
    reference, codec = AutoTokenizer.from_pretrained(folder), TextCodec(folder)
    for options in ({}, {"tools": TOOLS}, {"chat_template": "rag"}):
        try:
            want = reference.apply_chat_template(TALK, tokenize=False, **options)
        except ValueError:
            with pytest.raises(RequestRefused, match="no chat template"):
                codec.apply_chat_template(TALK, **options)
        else:
            assert codec.apply_chat_template(TALK, **options) == want


# -- Contents in parts -----------------------------------------------------------------------------------------------------

def test_content_in_parts():
    """As vLLM: a template that loops over the content gets parts, for all others they are joined by newlines."""
    mixed = [{"role": "user", "content": ["one", {"type": "input_text", "text": "two"}, {"text": "three"}, {"type": "refusal", "refusal": "no"}]}]
    assert ours("{{ messages[0].content }}", PARTS) == ours("{{ messages[0]['content'] }}", PARTS) == "one\ntwo"
    assert ours("{{ messages[0].content }}", mixed) == "one\ntwo\nthree\nno" and ours(LOOP, mixed) == "[one][two][three][no]"
    assert ours(LOOP, PARTS) == theirs(LOOP, PARTS) == "[one][two]" and ours(LOOP, TALK) == theirs(LOOP, TALK)
    assert PARTS[0]["content"][0] == {"type": "text", "text": "one"}, "the caller's messages stay as they are"
    for loop in ("{% for p in m.content %}", "{% set content = m.content %}{% for p in content | list %}", "{% for p in m['content'][0:] %}"):
        unasking = "{% for m in messages %}" + loop + "[{{ p.text }}]{% endfor %}{% endfor %}"
        assert ours(unasking, PARTS) == "[one][two]" and ours(unasking, TALK[3:]) == "[more]", "a string comes as parts, too"
        assert ours(unasking.replace("p.text", "p"), [{"role": "tool", "content": ["a", "b"]}]) == "[a][\n][b]", "but a tool's answer as text"


@pytest.mark.parametrize("part, kind", [({"type": "image_url", "image_url": {"url": "http://x"}}, "image_url"), ({"type": "input_audio"}, "input_audio"), (5, "int"),
                                        ({"type": "text"}, "text"), ({"type": "text", "text": 5}, "text"), (None, "NoneType"), ({"type": ["a"]}, "a")])
def test_a_part_that_is_no_text_is_refused_by_its_type(part, kind):
    with pytest.raises(RequestRefused, match=kind):
        ours(TEMPLATE, [{"role": "user", "content": [{"type": "text", "text": "see"}, part]}])


# -- Going on with the last message ----------------------------------------------------------------------------------------

CONTINUED = ["{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}",
             "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}", "{% for m in messages %}{{ m['content'] + eos_token }}{% endfor %}",
             "{% for m in messages %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}{% endfor %}{{ 'the end' }}", LOOP]


@pytest.mark.parametrize("template", CONTINUED)
@pytest.mark.parametrize("last", ["Sure, ", " Sure,\n", "ok", "hi", [{"type": "text", "text": "a"}, {"type": "text", "text": "b "}]])
def test_continue_final_message_as_in_transformers(template, last):
    messages = [*TALK[:2], {"role": "assistant", "content": last}]
    parts = isinstance(last, list) and template is not LOOP                # transformers wouldn't join the parts
    flat = [*TALK[:2], {"role": "assistant", "content": "a\nb "}] if parts else messages
    want = theirs(template, flat, continue_final_message=True)
    assert ours(template, messages, continue_final_message=True) == want and not want.endswith(("</>", "the end", "]"))
    assert messages[-1]["content"] is last


def test_continue_final_message_of_another_field():
    template = "{% for m in messages %}<{{ m.reasoning_content }}>{{ m.content }}{% endfor %}"
    messages = [TALK[1], {"role": "assistant", "content": "4", "thinking": "easy: "}]
    for field in ("reasoning_content", "thinking", "content"):
        assert ours(template, messages, continue_final_message=field) == theirs(template, messages, continue_final_message=field)


@pytest.mark.parametrize("template, options, message", [
    (TEMPLATE, {"add_generation_prompt": True, "continue_final_message": True}, "at most one"),
    (TEMPLATE, {"continue_final_message": "thinking"}, "thinking"), ("{{ messages[0].role }}", {"continue_final_message": True}, "content"),
    ("{{ messages[0].content }}", {"continue_final_message": True}, "as it is"), ("{{ messages[-1].content | upper }}", {"continue_final_message": True}, "as it is")])
def test_a_last_message_that_can_not_be_continued(template, options, message):
    with pytest.raises(RequestRefused, match=message):
        ours(template, TALK, **options)


# -- What goes wrong -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("template, message", [
    ("{{ raise_exception('roles must alternate') }}", "roles must alternate"), ("{% if %}", "template"), ("{{ 1 / 0 }}", "division"),
    ("{{ messages[0].content.nothing.more }}", "nothing"), ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "template"),
    ("{{ messages.append(1) }}", "template"), ("{{ messages[0].content + 1 }}", "template"), ("{% include 'etc' %}", "template"),
    ("{% for i in range(10**9) %}x{% endfor %}", "template"), ("{% generation %}", "template"), ("{{ messages[7].content.x }}", "template"),
    ("{{ messages | tojson(default=1) }}", "template")])
def test_a_template_that_fails_refuses_the_request(template, message):
    """The template comes with the weights: whatever it does, it costs one request, and it reaches nothing of Python's."""
    codec = make_codec(toys.byte_tokenizer(), template)
    with pytest.raises(RequestRefused, match=message):
        codec.apply_chat_template(TALK)
    assert codec.encode("x")


@pytest.mark.parametrize("messages", [[], None, "hi", 5, {}, [1], ["hi"], [{}], [{"role": "user"}], [{"content": "x"}],
                                      [{"role": "user", "content": None}], [{"role": 1, "content": "x"}], [TALK[0], "x"], [{"role": "user", "content": 5}]])
def test_what_is_no_conversation_is_refused(messages):
    with pytest.raises(RequestRefused, match="messages are a list"):
        make_codec(toys.byte_tokenizer(), TEMPLATE).apply_chat_template(messages)


@pytest.mark.parametrize("extra", [{"x": object()}, {"tool_calls": 5}, {"tool_calls": [5]}, {"tool_calls": [{"function": {"arguments": "{"}}]}])
def test_a_message_of_odd_data_is_refused(extra):
    with pytest.raises(RequestRefused, match="template can't render"):
        ours(TEMPLATE, [{"role": "assistant", "content": "x", **extra}])


def test_a_template_is_compiled_once():
    assert compile_template(TEMPLATE) is compile_template(TEMPLATE)
