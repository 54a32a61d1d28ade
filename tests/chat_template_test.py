"""Chat templates: whatever one computes ends within limits, and ordinary ones take no time."""

import signal
import time
from pathlib import Path

import hypothesis
import pytest
from absl.testing import absltest, parameterized
from hypothesis import strategies

from moejax.errors import MoejaxError
from moejax.text import chat_worker
from moejax.text.chat_template import ChatRenderer
from tests import slow
from tests.tokenizer_test import CONVERSATION, MIXTRAL_LIKE, QWEN3_LIKE

# Like DeepSeek-V3's: a namespace, system messages first, several kinds of message in one loop.
DEEPSEEK_LIKE = """\
{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}\
{% set ns = namespace(is_first=true, system_prompt='') %}\
{%- for message in messages %}{%- if message['role'] == 'system' %}\
{%- set ns.system_prompt = ns.system_prompt + message['content'] %}{%- endif %}{%- endfor -%}\
{{ bos_token }}{{ ns.system_prompt }}\
{%- for message in messages %}\
{%- if message['role'] == 'user' -%}{{ '<|User|>' + message['content'] }}{%- endif -%}\
{%- if message['role'] == 'assistant' -%}\
{{ '<|Assistant|>' + (message['content'] | replace('<think>', '')) + '<|end|>' }}{%- endif -%}\
{%- endfor -%}\
{% if add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}"""
DOUBLED = "{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}"
NESTED = "{% for a in r %}{% for b in r %}{% for c in r %}{% endfor %}{% endfor %}{% endfor %}"
TOO_LARGE = (
    "{{ 'a' * 10**10 }}",
    "{{ 10**10 * 'a' }}",
    "{{ [1] * 10**10 }}",
    "{{ 'a'.center(10**10) }}",
    "{{ 'a' | center(10**10) }}",
    "{{ 'a'.ljust(10**10) }}",
    "{{ '1'.zfill(10**10) }}",
    "{{ 'a' | indent(10**10) }}",
    "{{ [1] | tojson(indent=10**9) }}",
    "{{ range(10**5) | join('a' * 10**5) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%1000000000s' | format('a') }}",
    "{{ '{:>10000000000}'.format(1) }}",
    "{{ '{0:{1}}'.format(1, 10**10) }}",
    "{{ 'a' * 3000000 }}",  # fits the memory, and is far more than was given
)
# Each fills hundreds of MiB before the limit: on a busy machine its time can be over first.
FILLED = (
    "{{ ('a' * 1000).replace('a', 'b' * 10**7) }}",
    "{{ ('a' * 1000) | replace('a', 'b' * 10**7) }}",
    "{{ ('b' * 10**5).join(['a'] * 10**5) }}",
    "{% set ns = namespace(x='a') %}" + DOUBLED,
    "{% set ns = namespace(x=[1]) %}" + DOUBLED.replace("~", "+"),
    "{{ strftime_now('%Y' * 10**8) }}",
)
TOO_LONG = (
    "{% set r = range(99999) %}" + NESTED,
    "{{ lipsum(10**6) }}",
    "{{ (7 ** (10**8)) % 2 }}",
)


def failure(renderer: ChatRenderer, template: str) -> str:
    """The error of a template; "" if it has none."""
    try:
        renderer.render(template, CONVERSATION, {})
    except MoejaxError as error:
        return str(error)
    return ""


class LimitsTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.renderer = ChatRenderer()

    @parameterized.parameters(*TOO_LARGE)
    def test_memory(self, template):
        said = failure(self.renderer, template)
        self.assertRegex(said, "^the chat template failed: it(s text has| takes more than 512 MiB)")
        self.assertNotIn("\n", said)
        self.check_peak()

    @slow.where(lambda template: DOUBLED[:30] in template)
    @parameterized.parameters(*FILLED)
    def test_memory_filled(self, template):
        said = failure(self.renderer, template)
        self.assertRegex(said, "^the chat template failed: it (takes|computes for) more than ")
        self.assertNotIn("\n", said)
        if "computes" not in said:  # that ends the process
            self.check_peak()

    def check_peak(self):
        status = Path(f"/proc/{self.renderer._worker._process.pid}/status").read_text()
        peak_kb = int(status.partition("VmPeak:")[2].split()[0])
        self.assertLessEqual(1024 * peak_kb, chat_worker.MEMORY_BYTES)

    @slow.where(lambda template: "range" not in template)  # the same limit ends all of them
    @parameterized.parameters(*TOO_LONG)
    @pytest.mark.slow
    def test_time(self, template):
        said = failure(self.renderer, template)
        self.assertEqual(said, "the chat template failed: it computes for more than 1 s")
        self.assertEqual(failure(self.renderer, MIXTRAL_LIKE), "")  # by another process

    def test_what_only_waits(self):
        renderer = ChatRenderer()
        renderer.render("a", [], {})
        process = renderer._worker._process
        process.send_signal(signal.SIGSTOP)
        with absltest.mock.patch("moejax.text.chat_template._WALL_S", 0.2):
            self.assertRegex(failure(renderer, "b"), "no answer in 0.2 s")
        self.assertEqual(process.returncode, -signal.SIGKILL)
        self.assertEqual(renderer.render("c", [], {}), "c")

    @parameterized.parameters(
        ("{{ [].__class__.__mro__[1].__subclasses__() }}", "is unsafe|undefined"),
        ("{{ messages.append(1) }}", "is unsafe|not safely callable"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        ("{{ raise_exception('x' * 10**6) }}", "x{300}$"),
        ("{% if %}", "Expected an expression"),
        ("{{ " + "(" * 100_000, "."),
    )
    def test_other_errors(self, template, said):
        self.assertRegex(failure(self.renderer, template), f"^the chat template failed: .*({said})")

    @parameterized.parameters(object(), b"a", float)
    def test_values_that_json_has_not(self, value):
        with self.assertRaisesRegex(MoejaxError, "values as JSON has them"):
            self.renderer.render("a", [], {"a": value})

    def test_a_process_that_was_killed(self):
        self.renderer.render("a", [], {})
        self.renderer._worker._process.kill()
        self.renderer._worker._process.wait()
        self.assertRegex(failure(self.renderer, "b"), "process (.* has ended|ended with status -9)")
        self.assertEqual(self.renderer.render("c", [], {}), "c")

    def test_it_ends_with_the_renderer(self):
        renderer = ChatRenderer()
        renderer.render("a", [], {})
        process = renderer._worker._process
        del renderer
        self.assertIsNotNone(process.returncode)

    @parameterized.parameters(QWEN3_LIKE, MIXTRAL_LIKE, DEEPSEEK_LIKE)
    def test_ordinary_templates_take_no_time(self, template):
        long = [{"role": m["role"], "content": 100 * m["content"]} for m in CONVERSATION]
        renderer, seconds = ChatRenderer(), []
        for _ in range(20):
            start = time.perf_counter()
            text = renderer.render(template, long, {"bos_token": "<s>", "eos_token": "</s>"})
            seconds.append(time.perf_counter() - start)
        self.assertIn(long[-1]["content"], text)
        self.assertLess(min(seconds), seconds[0] / 5)  # the first starts a process


def expressions() -> strategies.SearchStrategy[str]:
    """Jinja expressions: texts, numbers, lists, and operations that make more of them."""
    numbers = strategies.sampled_from(["0", "1", "3", "1000", "10**5", "10**10", "-1"])
    words = strategies.sampled_from(["'a'", "'%9d'", "'{:>99}'", "messages[0].content", "[1]", "x"])

    def larger(inner: strategies.SearchStrategy[str]) -> strategies.SearchStrategy[str]:
        forms = [
            "({0} ~ {1})", "({0} + {1})", "({0} * {2})", "({0} % {1})", "({2} ** {2})",
            "({0}.replace('a', {1}))", "({0} | join({1}))", "({0}.center({2}))",
            "({0} | indent({2}))", "({0} | tojson(indent={2}))", "({0}.format({1}))",
            "(range({2}) | join({0}))", "({0} | list)", "(lipsum({2}))", "({0} | string)",
        ]  # fmt: skip
        return strategies.builds(str.format, strategies.sampled_from(forms), inner, inner, numbers)

    return strategies.recursive(words | numbers, larger, max_leaves=6)


def templates() -> strategies.SearchStrategy[str]:
    """Statements around expressions: loops, blocks and macros, in each other."""
    said = expressions().map("{{{{ {} }}}}".format)

    def larger(inner: strategies.SearchStrategy[str]) -> strategies.SearchStrategy[str]:
        forms = [
            "{% for i in range(99999) %}@{% endfor %}", "{% for i in range(3) %}@{% endfor %}",
            "{% set x %}@{% endset %}{{ x ~ x }}",
            "{% macro f() %}@{{ f() }}{% endmacro %}{{ f() }}",
            "{% filter upper %}@{% endfilter %}", "{% if x %}@{% else %}@{% endif %}",
        ]  # fmt: skip
        return strategies.builds(
            lambda form, a: form.replace("@", a), strategies.sampled_from(forms), inner
        )

    return strategies.recursive(said, larger, max_leaves=4)


class FuzzTest(absltest.TestCase):
    def _fuzz(self, num_examples: int) -> None:
        renderer = ChatRenderer()

        @hypothesis.settings(
            max_examples=num_examples, deadline=None, derandomize=True, database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )  # fmt: skip
        @hypothesis.given(templates())
        def render(template: str) -> None:
            try:
                text = renderer.render(template, CONVERSATION, {"x": "ab"})
                self.assertLess(len(text), 2_000_000)
            except MoejaxError as error:
                self.assertRegex(str(error), "^the chat template failed: [^\n]+$")

        render()
        self.assertEqual(renderer.render("{{ x }}", [], {"x": "still"}), "still")

    def test_no_template_takes_more(self):
        self._fuzz(40)

    @pytest.mark.slow
    def test_no_template_takes_more_at_length(self):
        self._fuzz(500)
