"""Chat templates in the forms of the newer families, as transformers renders them, and served.

The templates are our own words. What they use of Jinja is what the published ones of Qwen3.5 and
3.6, GLM-4.5 to 4.7, gpt-oss and OLMoE use: macros that call themselves, namespaces, slices
backwards, splits at tags, filters, tests, raise_exception and strftime_now.
"""

import datetime
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from absl.testing import parameterized
from transformers.utils.chat_template_utils import render_jinja_template

from moejax import Engine
from moejax.errors import MoejaxError
from moejax.inference import batch, continuous
from moejax.text.chat_template import ChatRenderer
from moejax.text.tokenizer import Tokenizer, _ChannelStream
from tests import slow
from tests.hf_checkpoints import write_checkpoint
from tests.random_checkpoints import write_tokenizer
from tests.serving_case import NAME, Served, served

QWEN = r"""{%- set pictures = namespace(count=0) %}
{%- macro words(content, may_count, of_system=false) %}
    {%- if content is string %}
        {{- content }}
    {%- elif content is iterable and content is not mapping %}
        {%- for part in content %}
            {%- if 'image' in part or part.type == 'image' %}
                {%- if of_system %}
                    {{- raise_exception('no pictures for the system') }}
                {%- endif %}
                {%- if may_count %}
                    {%- set pictures.count = pictures.count + 1 %}
                {%- endif %}
                {{- 'picture ' ~ pictures.count ~ '|' }}
            {%- elif 'text' in part %}
                {{- part.text }}
            {%- endif %}
        {%- endfor %}
    {%- elif content is none or content is undefined %}
        {{- '' }}
    {%- else %}
        {{- raise_exception('content of another kind') }}
    {%- endif %}
{%- endmacro %}
{%- if not messages %}
    {{- raise_exception('no messages') }}
{%- endif %}
{%- if tools and tools is iterable and tools is not mapping %}
    {{- '<s>system\n<tools>' }}
    {%- for tool in tools %}
        {{- '\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\n</tools><e>\n' }}
{%- endif %}
{%- set at = namespace(last_query=none) %}
{%- for message in messages[::-1] if message.role == "user" %}
    {%- set said = words(message.content, false)|trim %}
    {%- if at.last_query is none and not (said.startswith('<r>') and said.endswith('</r>')) %}
        {%- set at.last_query = messages.index(message) %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = words(message.content, true)|trim %}
    {%- if message.role == "system" and not loop.first %}
        {{- raise_exception('the system comes first') }}
    {%- elif message.role in ("user", "system") %}
        {{- '<s>' + message.role + '\n' + content + '<e>\n' }}
    {%- elif message.role == "assistant" %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set halves = content.rsplit('</think>', 1) %}
            {%- set thought, content = halves[0].split('<think>')[-1].rstrip(), halves[1] %}
            {%- set content = content.lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > (at.last_query or 0) %}
            {{- '<s>assistant\n<think>\n' + thought|trim + '\n</think>\n\n' + content }}
        {%- else %}
            {{- '<s>assistant\n' + content }}
        {%- endif %}
        {%- if message.tool_calls and message.tool_calls is iterable %}
            {%- for call in message.tool_calls %}
                {%- if call.function is defined %}
                    {%- set call = call.function %}
                {%- endif %}
                {{- '\n<call=' + call.name + '>\n' }}
                {%- for name, value in call.arguments|items %}
                    {%- set value = value | tojson | safe if value is mapping or (value is
                        sequence and value is not string) else value | string %}
                    {{- '<parameter=' + name + '>' + value + '</parameter>\n' }}
                {%- endfor %}
            {%- endfor %}
        {%- endif %}
        {{- '<e>\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.previtem and loop.previtem.role != "tool" %}
            {{- '<s>user' }}
        {%- endif %}
        {{- '\n<result>\n' + content + '\n</result>' }}
        {%- if loop.last or loop.nextitem.role != "tool" %}
            {{- '<e>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<s>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- else %}
        {{- '<think>\n' }}
    {%- endif %}
{%- endif %}
"""

GLM = r"""[start]
{%- if tools -%}
<|system|>
tools:
{% for tool in tools %}
{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}
end{%- endif -%}
{%- macro seen(content) -%}
    {%- if content is string -%}
        {{- content }}
    {%- elif content is iterable and content is not mapping -%}
        {%- for item in content -%}
            {%- if item is mapping and item.type == 'text' -%}{{- item.text }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{- content }}
    {%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {% set ns.last = loop.index0 -%}
    {%- endif %}
{%- endfor %}
{% for m in messages %}
{%- if m.role == 'user' -%}<|user|>
{%- set said = seen(m.content) %}
{{ said }}
{{- '/off' if not enable_thinking | default(true) and not said.endswith("/off") else '' -}}
{%- elif m.role == 'assistant' -%}
<|assistant|>
{%- set thought = '' %}
{%- set content = seen(m.content) %}
{%- if '</think>' in content %}
    {%- set cut = content.split('</think>') -%}
    {%- set thought, content = (cut | first).split('<think>') | last, (cut | last).lstrip() -%}
{%- endif %}
{%- if ((clear_thinking is defined and not clear_thinking) or loop.index0 > ns.last) and thought -%}
{{ '<think>' + thought.strip() + '</think>'}}
{%- else -%}
{{ '</think>' }}
{%- endif -%}
{%- if content.strip() -%}{{ content.strip() }}{%- endif -%}
{% for call in m.tool_calls or [] %}
{{- '<call>' + call.function.name -}}
{% set given = call.function.arguments %}
{%- for k, v in given.items() %}<k>{{ k }}</k><v>{{ v | tojson(ensure_ascii=False)
    if v is not string else v }}</v>{% endfor -%}
{% endfor %}
{%- elif m.role == 'tool' -%}
{%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|seen|>' }}{%- endif %}
{{- m.content }}
{%- elif m.role == 'system' -%}
<|system|>
{{ seen(m.content) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    <|assistant|>{{- '</think>' if (enable_thinking is defined and not enable_thinking)
        else '<think>' -}}
{%- endif -%}
"""

# GLM-4.5's and 4.6's: the model begins its thoughts itself, and empty ones switch them off.
GLM_45 = GLM.replace("{{- '</think>' if (e", "{{- '\\n<think></think>' if (e").replace(
    "else '<think>' -}}", "else '' -}}"
)

HARMONY = r"""{#- Types of tools, by a macro that calls itself. #}
{%- macro type_of(spec, required, or_null=false) -%}
    {%- if spec.type == "array" -%}
        {%- set inner = type_of(spec['items'], required) -%}
        {{- "any[]" if inner|length > 50 else inner + "[]" }}
    {%- elif spec.type is defined and spec.type is iterable and spec.type is not string -%}
        {{- spec.type | join(" | ") }}
    {%- elif spec.oneOf -%}
        {%- for one in spec.oneOf -%}
            {{- type_of(one, required) -}}{%- if not loop.last %}{{- " | " }}{% endif -%}
        {%- endfor -%}
    {%- elif spec.type == "string" and spec.enum -%}
        {{- '"' + spec.enum|join('" | "') + '"' -}}
    {%- elif spec.type == "object" and spec.properties -%}
        {{- "{\n" }}
        {%- for name, of in spec.properties.items() -%}
            {{- name -}}{%- if name not in (spec.required or []) -%}{{- "?" }}{%- endif -%}
            {{- ": " }}
            {{ type_of(of, spec.required or []) }}
            {%- if not loop.last -%}{{- ", " }}{%- endif -%}
        {%- endfor -%}
        {{- "}" }}
    {%- else -%}
        {{- spec.type or "any" }}
    {%- endif -%}
{%- endmacro -%}
{%- macro head() -%}
    {%- if reasoning_effort is not defined %}
        {%- set reasoning_effort = "medium" %}
    {%- endif %}
    {{- "day " + strftime_now("%Y-%m-%d") + ", effort " + reasoning_effort }}
    {%- if builtin_tools %}
        {%- set own = namespace(python=false) %}
        {%- for tool in builtin_tools %}
            {%- if tool == "python" %}{%- set own.python = true %}{%- endif %}
        {%- endfor %}
        {{- ", python " ~ own.python }}
    {%- endif -%}
{%- endmacro -%}
{{- "<|start|>system<|message|>" }}
{{- head() }}
{{- "<|end|>" }}
{%- if messages[0].role == "developer" or messages[0].role == "system" %}
    {%- set asked = messages[0].content %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set asked = "" %}
    {%- set rest = messages %}
{%- endif %}
{%- if asked or tools %}
    {{- "<|start|>developer<|message|>" + asked }}
    {%- for tool in tools or [] %}
        {%- set tool = tool.function %}
        {{- "\ntype " + tool.name + " = " }}
        {%- for name, spec in tool.parameters.properties.items() %}
            {{- name + ": " + type_of(spec, tool.parameters.required or []) }}
            {%- if spec.default is defined -%}{{- " = " + spec.default|tojson }}{%- endif -%}
        {%- endfor %}
    {%- endfor %}
    {{- "<|end|>" }}
{%- endif %}
{%- set last_call = namespace(name=none) %}
{%- for message in rest -%}
    {%- if message.role == 'assistant' -%}
        {%- if "content" in message and "<|channel|>" in message.content %}
            {{- raise_exception("channels stand in fields of their own") }}
        {%- endif %}
        {%- if "tool_calls" in message %}
            {%- set later = namespace(found=false) %}
            {%- for one in rest[loop.index:] %}
                {%- if one.role == 'assistant' and "tool_calls" not in one %}
                    {%- set later.found = true %}
                {%- endif %}
            {%- endfor %}
            {%- set call = message.tool_calls[0].function %}
            {%- if message.thinking and not later.found %}
                {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking }}
            {%- endif %}
            {{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary " }}
            {{- (call.content_type if call.content_type is defined else "json") + "<|message|>" }}
            {{- call.arguments|tojson }}
            {{- "<|call|>" }}
            {%- set last_call.name = call.name %}
        {%- else %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
            {%- set last_call.name = none %}
        {%- endif %}
    {%- elif message.role == 'tool' -%}
        {%- if last_call.name is none %}
            {{- raise_exception("a result without its call") }}
        {%- endif %}
        {{- "<|start|>functions." + last_call.name + " to=assistant<|message|>" }}
        {{- message.content|tojson + "<|end|>" }}
    {%- else -%}
        {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|start|>assistant
{%- endif -%}
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

    @parameterized.product(family=tuple(TEMPLATES), kind=tuple(KINDS))
    def test_as_transformers_renders(self, family, kind):
        how = {"bos_token": "<b>", "eos_token": "<e>", "add_generation_prompt": True, **KINDS[kind]}
        messages = CALLED if kind == "tools" else TALK
        tools = how.pop("tools", None)
        # Harmony's messages have thoughts in a field of their own.
        if family == "harmony":
            messages = [{**m, "content": m["content"].split("</think>")[-1]} for m in messages]
        [expected], _ = render_jinja_template([messages], tools, None, TEMPLATES[family], **how)
        found = self.renderer.render(TEMPLATES[family], messages, {**how, "tools": tools})
        self.assertEqual(found, expected)
        if family == "harmony":
            self.assertIn(f"day {datetime.date.today()}, effort", found)

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
        ("harmony", [TALK[1], CALLED[-1]], "a result without its call"),
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

    @slow.where(lambda name: name != "olmoe")
    @parameterized.parameters(*SERVED)
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
