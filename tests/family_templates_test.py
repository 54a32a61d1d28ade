"""Chat templates in the forms of the newer families, as transformers renders them, and served.

The templates are our own words; they use of Jinja what the published ones of Qwen3.5 and 3.6,
GLM-4.5 to 4.7, gpt-oss and OLMoE use.
"""

import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from absl.testing import parameterized
from transformers.utils.chat_template_utils import render_jinja_template

from moejax import Engine
from moejax.errors import MoejaxError
from moejax.inference import batch, continuous
from moejax.text.chat_template import ChatRenderer
from moejax.text.tokenizer import Tokenizer, _ChannelStream
from tests.hf_checkpoints import write_checkpoint
from tests.random_checkpoints import write_tokenizer
from tests.serving_case import NAME, Served, served

# What the published templates use of Jinja, a line or two each.
SNIPPETS = (
    "{%- macro of(c, n=1, deep=false) %}{%- if c is string %}{{- c ~ '|' ~ n }}"
    "{%- elif c is iterable and c is not mapping %}{%- for x in c %}{{- of(x, n + 1) }}"
    "{%- endfor %}{%- else %}{{- c is none or c is undefined }}{%- endif %}{%- endmacro %}"
    "{{ of(messages[0].content) }}{{ of(['a', ['b'], none], deep=true) }}",
    "{% set ns = namespace(last=none, count=0) %}{% for m in messages[::-1] if m.role == 'user' %}"
    "{% if ns.last is none and not (m.content.startswith('<r>') and m.content.endswith('</r>')) %}"
    "{% set ns.last = messages.index(m) %}{% endif %}{% set ns.count = ns.count + 1 %}{% endfor %}"
    "{{ ns.last }} {{ ns.count }}",
    "{%- for m in messages %}{{- loop.index0 ~ loop.first ~ loop.last }}"
    "{%- if loop.previtem and loop.previtem.role != 'tool' %}{{- 'p' }}{%- endif %}"
    "{%- if loop.last or loop.nextitem.role != 'tool' %}{{- 'n' }}{%- endif %}{%- endfor %}",
    "{% set c = messages[2].content %}{% set halves = c.rsplit('</think>', 1) %}"
    "{% set thought, said = halves[0].split('<think>')[-1].rstrip(), halves[1] %}"
    "{{ thought|trim + '!' + said.lstrip('\n') }}{{ (c.split('</think>') | first) | last }}",
    "{% for tool in tools or [] %}\n{{ tool | tojson }}{{ tool | tojson(ensure_ascii=False) }}\n"
    "{% endfor %}{{ 'many' if tools and tools is iterable and tools is not mapping else 'none' }}",
    "{% for m in messages %}{% for call in m.tool_calls or [] %}{% set given = call.function %}"
    "{% for k, v in given.arguments|items %}{{ k }}={{ v | tojson | safe if v is mapping or (v is"
    " sequence and v is not string) else v | string }}{% endfor %}"
    "{% for k, v in given.arguments.items() %}{{ k }}{% endfor %}{% endfor %}{% endfor %}",
    "{% macro type_of(s) %}{% if s.type == 'array' %}{{ type_of(s['items'])|length }}[]"
    "{% elif s.oneOf %}{% for o in s.oneOf %}{{ type_of(o) }}{% if not loop.last %}|{% endif %}"
    "{% endfor %}{% elif s.enum %}{{ s.enum|join('|') }}{% elif s.properties %}"
    "{% for n, o in s.properties.items() %}{{ n }}{{ '?' if n not in (s.required or []) }}"
    "{{ type_of(o) }}{% endfor %}{% else %}{{ s.type or 'any' }}{% endif %}{% endmacro %}"
    "{% for tool in tools or [] %}{{ type_of(tool.function.parameters) }}{% endfor %}",
    "{% if enable_thinking is defined and enable_thinking is false %}off{% endif %}"
    "{{ '/off' if not enable_thinking | default(true) else '' }}"
    "{{ (clear_thinking is defined and not clear_thinking) or 'x' }}",
    "{% if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}"
    "{{ 'day ' + strftime_now('%Y-%m-%d') + ', effort ' + reasoning_effort }}"
    "{% for t in builtin_tools or [] %}{% if t == 'python' %}{{ 1 }}{% endif %}{% endfor %}",
    "{#- A comment. #}{% set ends = {'assistant': eos_token} %}{{ bos_token }}"
    "{% for m in messages[1:] %}{{ m['content'] ~ ends.get(m['role'], '') }}{% endfor %}",
)
# Prompts begin and end as those of the families do.
QWEN = """
{%- for m in messages %}
    {%- if m.content is not string %}{{- raise_exception('content of another kind') }}{%- endif %}
    {%- if m.role == 'system' and not loop.first %}
        {{- raise_exception('the system comes first') }}
    {%- endif %}
    {{- '<s>' + m.role + '\\n' + m.content|trim + '<e>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<s>assistant\\n<think>\\n' }}
    {{- '' if enable_thinking | default(true) else '\\n</think>\\n\\n' }}
{%- endif %}
"""
GLM = """[start]
{%- for m in messages -%}<|{{ m.role }}|>
{{ m.content }}
{{- '/off' if m.role == 'user' and not enable_thinking | default(true) else '' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    <|assistant|>{{- '</think>' if not enable_thinking | default(true) else '<think>' -}}
{%- endif -%}
"""
# GLM-4.5's and 4.6's: the model begins its thoughts itself, and empty ones switch them off.
GLM_45 = GLM.replace("'</think>' if", "'\\n<think></think>' if").replace(
    "else '<think>'", "else ''"
)
HARMONY = """<|start|>system<|message|>effort {{ reasoning_effort | default('medium') }}<|end|>
{%- for m in messages -%}
    {%- if m.role == 'assistant' and '<|channel|>' in m.content %}
        {{- raise_exception('channels stand in fields of their own') }}
    {%- endif %}
    {{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}
"""
OLMOE = (
    "{% set ends = {'assistant': eos_token} %}{{ bos_token }}{% for m in messages %}"
    "{{ '[' ~ m['role'] ~ ']\n' }}{{ m['content'] ~ ends.get(m['role'], '') + '\n' }}"
    "{% if add_generation_prompt and loop.last %}{{ '[assistant]\n' }}{% endif %}{% endfor %}"
)
TEMPLATES = {"qwen": QWEN, "glm": GLM, "glm_45": GLM_45, "harmony": HARMONY, "olmoe": OLMOE}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather, “näher”",
        "parameters": {
            "type": "object",
            "required": ["place"],
            "properties": {
                "place": {"type": "string"},
                "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
                "days": {"type": "array", "items": {"type": "integer"}},
                "how": {"oneOf": [{"type": "string"}, {"type": "number"}]},
                "box": {"type": "object", "properties": {"x": {"type": ["number", "null"]}}},
            },
        },
    },
}
CALL = {"name": "weather", "arguments": {"place": "Köln", "days": [1, 2], "box": {"x": 1.5}}}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "  who was Newton? "},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\na man"},
    {"role": "user", "content": "and the weather?"},
]
CALLED: list[dict[str, Any]] = [
    *TALK,
    {"role": "assistant", "content": "", "thinking": "look", "reasoning_content": "look",
     "tool_calls": [{"type": "function", "function": CALL}]},
    {"role": "tool", "content": "7 degrees"},
]  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no_thinking": {"enable_thinking": False},
    "thinking": {"enable_thinking": True, "clear_thinking": False},
    "effort": {"reasoning_effort": "high", "builtin_tools": ["python"]},
    "tools": {"tools": [WEATHER]},
}


class FamilyTemplatesTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.renderer = ChatRenderer()

    @parameterized.product(of=(*TEMPLATES.values(), *SNIPPETS), kind=tuple(KINDS))
    def test_as_transformers_renders(self, of, kind):
        how = {"bos_token": "<b>", "eos_token": "<e>", "add_generation_prompt": True, **KINDS[kind]}
        messages = CALLED if kind == "tools" else TALK
        tools = how.pop("tools", None)
        [expected], _ = render_jinja_template([messages], tools, None, of, **how)
        self.assertEqual(self.renderer.render(of, messages, {**how, "tools": tools}), expected)

    def test_switches_change_the_prompt(self):
        def end(family: str, **how: Any) -> str:
            how["add_generation_prompt"] = True
            return self.renderer.render(TEMPLATES[family], TALK[:2], how)

        self.assertEndsWith(end("qwen"), "<think>\n")
        self.assertEndsWith(end("qwen", enable_thinking=False), "</think>\n\n")
        self.assertEndsWith(end("glm"), "<|assistant|><think>")
        self.assertEndsWith(end("glm", enable_thinking=False), "/off<|assistant|></think>")
        self.assertEndsWith(end("glm_45"), "<|assistant|>")
        self.assertEndsWith(end("glm_45", enable_thinking=False), "<|assistant|>\n<think></think>")
        self.assertIn("effort low", end("harmony", reasoning_effort="low"))

    @parameterized.parameters(
        ("qwen", [TALK[1], TALK[0]], "the system comes first"),
        ("qwen", [{"role": "user", "content": 1}], "content of another kind"),
        ("harmony", [{"role": "assistant", "content": "<|channel|>"}], "channels stand"),
    )
    def test_what_they_refuse_is_said(self, family, messages, said):
        with self.assertRaisesRegex(MoejaxError, f"the chat template failed: {said}"):
            self.renderer.render(TEMPLATES[family], messages, {})


MARKS = ("<think>", "</think>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>")
CHANNELS = (
    "<|channel|>analysis<|message|>let me<|end|>"
    "<|start|>assistant<|channel|>commentary to=x<|message|>no<|end|>"
    "<|start|>assistant<|channel|>final<|message|>4!"
)
# Checkpoints of each family, templates, and an answer with thoughts.
SERVED = {
    "qwen35": ("qwen", "let me</think>4!"),
    "air": ("glm_45", "<think>let me</think>4!"),
    "flash": ("glm", "let me</think>4!"),
    "oss_mxfp4": ("harmony", CHANNELS),
    "olmoe": ("olmoe", "<think>let me</think>4!"),
}


class ThoughtsTest(parameterized.TestCase):
    @parameterized.parameters(
        ("<think>", True), ("<think>\n", True), ("</think><think>", True), ("", False),
        ("</think>", False), ("<think></think>", False), ("<think>\n\n</think>\n\n", False),
    )  # fmt: skip
    def test_a_prompt_may_begin_them(self, end, begins):
        folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        write_tokenizer(folder, 160, MARKS)
        tokenizer = Tokenizer.from_directory(folder)
        prompt, said = (tokenizer.encode(x, add_special_tokens=False) for x in ("a" + end, "so"))
        stream = tokenizer.stream(prompt)
        text = "".join(map(stream.push, said)) + stream.flush()
        self.assertIsInstance(stream, _ChannelStream)
        self.assertEqual((text, stream.thoughts), ("", "so") if begins else ("so", ""))


class ServerTest(parameterized.TestCase):
    def chat(self, server: Served, **how: Any) -> tuple[str, str, int]:
        """Thoughts and text, alike in a stream and as a whole, and tokens of the prompt."""
        how |= {"model": NAME, "messages": [{"role": "user", "content": "who?"}], "temperature": 0}
        ask = server.client.chat.completions.create
        whole = ask(**how)
        *chunks, last = ask(**how, stream=True, stream_options={"include_usage": True})
        self.assertEqual(last.usage, whole.usage)
        deltas = [chunk.choices[0].delta for chunk in chunks]
        message, found = whole.choices[0].message, []
        for name in ("reasoning_content", "content"):
            found.append("".join(getattr(delta, name, None) or "" for delta in deltas))
            self.assertEqual(found[-1], getattr(message, name, ""))
        return *found, whole.usage.prompt_tokens

    @parameterized.parameters(*SERVED)
    @pytest.mark.slow
    def test_each_family(self, name):
        template, answer = SERVED[name]
        path = write_checkpoint(name, Path(self.enterContext(tempfile.TemporaryDirectory())))
        write_tokenizer(path, 160, MARKS)
        (path / "chat_template.jinja").write_text(TEMPLATES[template])
        engine = Engine.from_pretrained(path, dtype="float32", platform="cpu", progress=False)
        tokenizer = engine.tokenizer
        script = tokenizer.encode(answer, add_special_tokens=False)

        def scripted(*given: Any) -> Any:
            output = read_output(*given)
            tokens = [[next(left, 0) if i >= 0 else i for i in row] for row in output.tokens]
            return output._replace(tokens=tokens)

        with served(engine) as server:
            how: Any = {"model": NAME, "prompt": "who?", "max_tokens": 6, "temperature": 0}
            found = server.client.completions.create(**how).choices[0].text
            self.assertEqual(found, engine.generate(["who?"], max_new_tokens=6)[0].text)
            for switch in ({}, {"enable_thinking": False}):
                prompt = tokenizer.apply_chat_template(
                    [{"role": "user", "content": "who?"}], **switch
                )
                ids = tokenizer.encode(prompt, add_special_tokens=False)
                [alone] = engine.generate([ids], max_new_tokens=6)
                self.assertNoCommonElements(alone.tokens, map(tokenizer.token_id, MARKS))
                expected = [alone.text, ""]
                if not prompt.rstrip().endswith("<think>"):
                    expected.reverse()
                self.assertEqual(
                    [*self.chat(server, max_tokens=6, extra_body=switch)], [*expected, len(ids)]
                )
            read_output, left = continuous.read_output, iter(script * 2)
            with mock.patch.object(continuous, "read_output", scripted):
                thoughts, text, _ = self.chat(server, max_tokens=len(script))
            self.assertEqual((thoughts, text), ("let me", "4!"))
        if template == "harmony":
            left = iter(script)
            with mock.patch.object(batch, "read_output", scripted):
                [alone] = engine.generate([ids], max_new_tokens=len(script))
            self.assertEqual((alone.thoughts, alone.text), ("let me", "4!"))
