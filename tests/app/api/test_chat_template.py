"""Our renderer writes what ``transformers`` writes, for what templates of models use of Jinja."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2
import pytest
from jinja2.exceptions import SecurityError, TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from app.api import bounded_template
from app.api.bounded_template import TemplateTimeoutError
from app.api.chat_template import ChatTemplate
from engine.template_errors import TEMPLATE_ERRORS

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

PLAIN: list[dict[str, Any]] = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": 'What is <b>"2 & 2"</b>?\n\n'},
    {"role": "assistant", "content": "Vier – 4 🙂", "name": None},
    {"role": "user", "content": "Why?"},
]
CALLS: list[dict[str, Any]] = [
    {"role": "user", "content": "Is it raining?"},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "I cannot look outside.",
        "tool_calls": [
            {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 2}}}
        ],
    },
    {"role": "tool", "content": '{"rain": true}'},
]
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Today's <weather> & more",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]

TEMPLATES = {
    "control tokens in strings": (
        "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'}}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "blocks on lines of their own": """
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set system = '' %}{%- set rest = messages %}
{%- endif %}
  {# a comment #}
  {% if system %}
<<SYS>>{{ system }}<</SYS>>
  {% endif %}
{% for m in rest %}
  {% if loop.last and m.role == 'user' %}last: {% endif %}
[{{ m.role | upper }}:{{ loop.index0 }}] {{ m.content | default('', true) }}
{% endfor %}
""",
    "the state of a loop in a namespace": (
        "{% set ns = namespace(last='', count=0) %}{% for m in messages %}"
        "{% set ns.count = ns.count + 1 %}{% if m.role == 'user' %}{% set ns.last = m.content %}{% endif %}"
        "{% endfor %}{{ ns.count }} {{ ns['last'] }} {{ eos_token }}"
    ),
    "tools as JSON": (
        "{% if tools %}{{ tools | tojson(indent=4) }}{% for t in tools %}{{ t | tojson }}"
        "{{ t.function | tojson(separators=(',', ':'), sort_keys=True) }}{% endfor %}"
        "{% endif %}{% for m in messages %}{{ m.role }}{% for call in m.tool_calls or [] %}"
        "{{ call.function.arguments | tojson }}{{ call.function | tojson(ensure_ascii=True) }}{% endfor %}"
        "{% endfor %}"
    ),
    "keys that may be missing": (
        "{% for m in messages %}{{ m.role }} {{ 'content' in m }} {{ 'name' in m }}"
        " {{ m.tool_calls is defined }} {{ m.get('content', 'none') }} {{ m.content is string }}"
        "{% endfor %}{{ tools is none }}{{ documents }}"
    ),
    "reasoning under either name": (
        "{% for m in messages %}{{ m.role }}:{{ m.reasoning_content }}|{{ m.thinking }}{% endfor %}"
    ),
    "continue and break": (
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.role }}"
        "{% if m.role == 'assistant' %}{% break %}{% endif %}{% endfor %}"
    ),
    "what the model writes is marked": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{% set x = m.content %}{{ x }}"
        "{% endgeneration %}{{ x }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    ),
    "macros, dictionaries and items": (
        "{% macro show(d) %}{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}{% endmacro %}"
        "{{ show(dict(a=1, b=[2, 3])) }}{{ dict.fromkeys(['x', 'y'], 0) }}{{ dict([('p', 1)], q=2) }}"
        "{{ messages | map(attribute='role') | join(',') }}{{ messages | selectattr('role', 'equalto', 'user')"
        " | list | length }}{{ range(3) | list }}{{ '%s-%d' | format('a', 3) }}{{ 'a,b'.split(',')[-1] }}"
        "{{ [[1], [2]] | map('list') | sum(start=[]) }}"
    ),
    "the year": "{{ strftime_now('%Y') }}{{ messages[0].role }}",
    "a name of self": "{% set n = namespace(self=1) %}{{ n.self }}",
}


def theirs(template: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
    given = [{key: value for key, value in message.items() if value is not None} for message in messages]
    texts, _ = render_jinja_template(
        conversations=[given], tools=tools, chat_template=template, add_generation_prompt=True, **SPECIAL
    )
    return str(texts[0])


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("messages", [PLAIN, CALLS], ids=["plain", "calls"])
def test_it_writes_what_transformers_writes(name: str, messages: list[dict[str, Any]]) -> None:
    template = TEMPLATES[name]
    if "m['content'] +" in template:
        messages = [message for message in messages if message["content"] is not None]
    for tools in (None, TOOLS):
        text = ChatTemplate(template, SPECIAL).render(messages, tools)
        assert text == theirs(template, messages, tools)
        assert text


def test_the_bundled_models_own_template(bundled_model: Path) -> None:
    template = (bundled_model / "chat_template.jinja").read_text()
    for messages in (PLAIN, PLAIN[1:]):
        assert ChatTemplate(template, SPECIAL).render(messages) == theirs(template, messages, None)


@pytest.mark.parametrize(
    ("template", "error"),
    [
        ("{{ raise_exception('only users may speak') }}", TemplateError),
        ("{{ messages[0].nothing.at.all }}", jinja2.UndefinedError),
        ("{% if %}", jinja2.TemplateSyntaxError),
        ("{{ messages.append(1) }}", SecurityError),
        ("{{ ''.__class__.__mro__ }}", SecurityError),
        ("{{ dict.__class__.__mro__ }}", SecurityError),
        ("{% set n = namespace(__class__=1) %}", SecurityError),
        ("{% set n = namespace() %}{% set n._private = 1 %}", SecurityError),
        ("{{ 1 + 'a' }}", TypeError),
    ],
)
def test_a_template_that_fails_or_breaks_out_is_refused(template: str, error: type[Exception]) -> None:
    for render in (ChatTemplate(template, SPECIAL).render, lambda turns: theirs(template, turns, None)):
        with pytest.raises(error):
            render(PLAIN)


@pytest.mark.parametrize("name", ["control tokens in strings", "blocks on lines of their own"])
@pytest.mark.parametrize("content", ["The answer", "The answer ", ""])
def test_the_last_message_is_continued(name: str, content: str) -> None:
    messages = [*PLAIN, {"role": "assistant", "content": content}]
    rendered, _ = render_jinja_template(
        [messages],
        chat_template=TEMPLATES[name],
        continue_final_message=True,
        **SPECIAL,
    )
    text = ChatTemplate(TEMPLATES[name], SPECIAL).render(
        messages, add_generation_prompt=False, continue_final_message=True
    )
    assert text == rendered[0]


BROKEN = (
    "{% if %}",
    "{{" + "(" * 3000 + "1" + ")" * 3000 + "}}",
    "{% for m in messages %}" * 25 + "{% endfor %}" * 25,
    "{% if messages %}" * 120 + "{% endif %}" * 120,
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ cycler() }}",
)
"""Broken templates; all but the first raise what is no error of Jinja's."""


@pytest.mark.parametrize("source", BROKEN)
def test_a_broken_template_fails_requests_and_not_the_start(source: str) -> None:
    template = ChatTemplate(source, {})
    template.compile()
    with pytest.raises(TEMPLATE_ERRORS):
        template.render([{"role": "user", "content": "x"}], None)


def test_a_message_that_is_not_written_cannot_be_continued() -> None:
    with pytest.raises(TemplateError, match="cannot be continued"):
        ChatTemplate("{{ messages[0].content }}", {}).render(PLAIN, continue_final_message=True)


def test_variables_of_its_own() -> None:
    template = ChatTemplate("{{ enable_thinking }}{{ other is defined }}{{ add_generation_prompt }}", {})
    assert template.render(PLAIN, variables={"enable_thinking": False}) == "FalseFalseTrue"
    assert template.render(PLAIN, add_generation_prompt=False) == "FalseFalse"


LOOP = "{% for i in range(99999) %}"
X = "{% set x = 'a' * 10**6 %}"


def repeated(change: str, first: str) -> str:
    """A change of ``n.x``, many times."""
    return (
        f"{{% set n = namespace(x={first}) %}}{{% for i in range(99) %}}{{% set n.x {change} %}}{{% endfor %}}"
    )


ENDLESS = {
    "loops in loops": LOOP * 3 + "{% endfor %}" * 3,
    "a loop that passes over all": "{% set x = range(9999) | list %}{% for j in x if -1 in x %}{% endfor %}",
    "calls that branch": "{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n }}{% endmacro %}{{ f(99) }}",
    "a recursive loop": "{% for x in range(99) recursive %}{{ loop(range(9)) if loop.depth < 99 }}{% endfor %}",
    "filters of long lists": LOOP + "{% set x = range(9999) | sort | join %}{% endfor %}",
    "called for each item": LOOP + "{{ messages | map('tojson') | join }}" * 9 + "{% endfor %}",
}

# Where the text as a whole would be refused in the end, its length is written: the text must not be made.
HUGE = {
    "a text times a number": "{{ ('ab' * 10**9) | length }}",
    "a number times a text": "{{ (10**9 * 'ab') | length }}",
    "a list times a number": "{{ ([messages] * 10**6) | length }}",
    "a power": "{{ 9 ** (9 ** 9) }}",
    "a product": repeated("= n.x * n.x", "9"),
    "long division": "{{ ('f' * 9999) | int(base=16) // 3 }}",
    "a text that doubles": repeated("= n.x + n.x", "'ab'"),
    "a list that doubles": repeated("= n.x + n.x", "[1]"),
    "a text joined to itself": repeated("= n.x ~ n.x", "'ab'"),
    "a block that doubles": repeated("%}{{ n.x }}{{ n.x }}{% endset", "'ab'"),
    "a macro that doubles": "{% macro f(n) %}{% if n %}{% set x = f(n - 1) %}{{ x }}{{ x }}{% else %}ab"
    "{% endif %}{% endmacro %}{{ f(99) }}",
    "long pieces": X + "{% for i in range(999) %}{{ x }}{% endfor %}",
    "a range": "{{ range(10**9) | list }}",
    "join": X + "{{ ([x] * 10000) | join | length }}",
    "join of an iterator": X + "{{ range(9) | map('string') | join(x) | length }}",
    "the method join": "{{ ('a' * 10**6).join(range(999) | map('string') | list) | length }}",
    "the method join of an iterator": X + "{{ x.join(range(9) | map('string')) | length }}",
    "replace": "{{ ('a' * 10**4) | replace('a', 'b' * 10**4) | length }}",
    "the method replace": "{{ ('a' * 10**4).replace('', 'b' * 10**4) | length }}",
    "a width": "{{ 'a'.ljust(10**9) | length }}",
    "zeros": "{{ 'a'.zfill(10**9) | length }}",
    "a centered text": "{{ 'a' | center(10**9) | length }}",
    "tabs": "{{ 'a\t'.expandtabs(tabsize=10**9) | length }}",
    "an indent": "{{ ('a\n' * 10**5) | indent(9999) | length }}",
    "a format with a width": "{{ ('%999999999d' % 1) | length }}",
    "a format with a given width": "{{ '%*d' | format(10**9, 1) | length }}",
    "the method format": "{{ '{:999999999}'.format(1) | length }}",
    "the method format with a given width": "{{ '{:{n}}'.format(1, n=10**9) | length }}",
    "a format of long texts": "{{ (('%s' * 999) % (('a' * 10**6,) * 999)) | length }}",
    "a list in itself": repeated("= [n.x, n.x]", "[1]") + "{{ n.x }}",
    "its JSON": repeated("= [n.x, n.x]", "[1]") + "{{ n.x | tojson }}",
    "an indent of JSON": "{{ messages | tojson(indent=10**9) | length }}",
    "bytes of a number": "{{ (1).to_bytes(10**9) | length }}",
    "batches": "{{ [1] | batch(10**9, 0) | list }}",
    "slices": "{{ [1] | slice(10**9) | list }}",
    "digits": "{{ 1 | round(10**9, 'ceil') }}",
}


@pytest.mark.parametrize("name", ENDLESS)
@pytest.mark.parametrize("gives_way", [False, True])
def test_a_rendering_without_an_end_is_ended(name: str, gives_way: bool) -> None:
    template = ChatTemplate(ENDLESS[name], {})
    with pytest.raises(TemplateTimeoutError, match=r"in 0\.01 s of CPU time"):
        template.render(PLAIN, cpu_s=0.01, gives_way=gives_way)
    assert ChatTemplate("{{ messages[0].role }}", {}).render(PLAIN) == "system"  # the thread goes on


@pytest.mark.parametrize("name", HUGE)
def test_nothing_huge_is_begun(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_template, "MAX_ITEMS", 2**14)
    monkeypatch.setattr(bounded_template, "MAX_CHARS", 2**22)
    with pytest.raises((TemplateError, OverflowError)) as refused:
        ChatTemplate(HUGE[name], {}).render(PLAIN)
    assert not isinstance(refused.value, TemplateTimeoutError)
    assert any(word in str(refused.value) for word in ("more than", "above", "width", "too big"))
