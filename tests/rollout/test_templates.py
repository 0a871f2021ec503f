"""Chat templates applied turn by turn equal the template applied to the whole conversation, where it keeps texts."""

import datetime
import pickle

import jinja2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxagent.config import ConfigError
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.envs.base import Message, Observation
from jaxagent.gateway.chat import ChatMessage
from jaxagent.gateway.renderer import Renderer
from jaxagent.rollout.conversation import Conversation
from jaxagent.rollout.templates import Chat, Plain, open_template, unended_messages
from jaxagent.types import Generation, TokenKind
from tests.gateway.chat_templates import QWEN3_QUIET

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMMING = CHATML.replace("m.content", "m.content | trim")
USER_ONLY = (  # knows no tool role, like Llama 2 and Gemma
    "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}{{ raise_exception('roles!') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
DATE = datetime.datetime(2025, 1, 2)


def chat(source):
    return Chat(source, {"bos_token": "<s>", "eos_token": "</s>"}, DATE)


def text_of(spans):
    return "".join(text for text, _ in spans)


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@settings(max_examples=50, deadline=None)
@given(prompt=texts, turns=st.lists(st.tuples(texts, texts, st.sampled_from(["user", "tool"])), max_size=3))
def test_incremental_equals_whole(prompt, turns):
    template = chat(CHATML)
    messages = [{"role": "user", "content": prompt}]
    incremental = template.prompt([Message("user", prompt)])
    for action, observation, role in turns:
        spans = template.observation(Observation(((observation, TokenKind.OBSERVATION),), role), "")
        incremental += action + text_of(spans)
        messages += [{"role": "assistant", "content": action}, {"role": role, "content": observation}]
    assert incremental == jinja2.Template(CHATML).render(messages=messages, add_generation_prompt=True)


def test_spans_of_an_observation():
    parts = (("WARNING", TokenKind.WARNING), ("result", TokenKind.OBSERVATION))
    assert chat(CHATML).observation(Observation(parts, "tool"), "") == [
        ("<|im_end|>\n<|im_start|>tool\n", TokenKind.PROMPT),
        *parts,
        ("<|im_end|>\n<|im_start|>assistant\n", TokenKind.PROMPT),
    ]


def test_a_sampled_end_of_turn_is_not_repeated():
    spans = chat(CHATML).observation(Observation((("x", TokenKind.OBSERVATION),), "user"), "<|im_end|>")
    assert text_of(spans) == "\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"


def test_trimming_templates_keep_the_kinds():
    parts = (("  warn", TokenKind.WARNING), ("body \n", TokenKind.OBSERVATION))
    spans = chat(TRIMMING).observation(Observation(parts, "user"), "")
    assert spans[1:3] == [("warn", TokenKind.WARNING), ("body", TokenKind.OBSERVATION)]


def test_unknown_roles_become_user():
    spans = chat(USER_ONLY).observation(Observation((("x", TokenKind.OBSERVATION),), "tool"), "")
    assert text_of(spans) == "[user]x[assistant]"


def test_continuing_observations_carry_no_template_text():
    parts = (("\n\n<information>", TokenKind.OBSERVATION),)
    assert chat(CHATML).observation(Observation(parts), "") == list(parts)
    assert Plain().observation(Observation(parts, "tool"), "") == list(parts)


def test_deepseek_template(tokenizer):
    if not tokenizer.chat_template:
        pytest.skip("this tokenizer has no chat template")
    template = Chat(tokenizer.chat_template, tokenizer.special_strings, DATE)
    assert template.prompt([Message("user", "hi")]) == "<｜begin▁of▁sentence｜><｜User｜>hi<｜Assistant｜>"
    spans = template.observation(Observation((("no", TokenKind.OBSERVATION),), "user"), "")
    assert text_of(spans) == "<｜end▁of▁sentence｜><｜User｜>no<｜Assistant｜>"


def test_cutting_an_observation_keeps_the_template_around_it(tokenizer):
    talk = Conversation(tokenizer, chat(CHATML), 20)
    talk.add_prompt([Message("user", "hi")])
    talk.add_action(Generation(np.array([5]), np.zeros(1), np.zeros(1), "stop"))
    kept = talk.add_observation(Observation((("0 1 2 3 4 5 6 7 8 9 " * 20, TokenKind.OBSERVATION),), "user"))
    text = tokenizer.decode(talk.pending)
    header, footer = "<|im_end|>\n<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
    assert text.startswith(header + "0 1 2") and text.endswith(footer)
    assert ("0 1 2 3 4 5 6 7 8 9 " * 20).startswith(kept) and len(kept) > 5
    assert len(tokenizer.encode(kept)) <= 20 and len(text) < len(header + footer) + 60


def test_helpers_that_templates_use():
    source = "{{ {'a': '<é>'} | tojson }}|{{ strftime_now('%Y') }}|{% for m in messages %}{{ m.content }}{% endfor %}"
    assert chat(source).prompt([Message("user", "x")]) == '{"a": "<é>"}|2025|x'


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for", "not valid jinja2"),
        ("{{ ''.__class__.__mro__ }}", "failed|cannot be used"),
        ("nothing", "cannot be used"),
        ("{{ raise_exception('no') }}", "failed: no"),
    ],
)
def test_unusable_templates_fail_at_once(source, message):
    with pytest.raises(ConfigError, match=message):
        chat(source)


def test_opening_the_tokenizers_template(tokenizer):
    assert isinstance(open_template(tokenizer, False, DATE), Plain)
    if tokenizer.chat_template:
        assert isinstance(open_template(tokenizer, True, DATE), Chat)
    else:
        with pytest.raises(ConfigError, match="no chat template"):
            open_template(tokenizer, True, DATE)


def test_marks_of_what_the_assistant_wrote_change_nothing():
    marked = CHATML.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}")
    assert chat(marked).prompt([Message("user", "hi")]) == chat(CHATML).prompt([Message("user", "hi")])


THINKS = CHATML.replace(
    "assistant\n{% endif %}", "assistant\n{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)


def tokenizer_of(template):
    trained = Tokenizer.train(["some text"], 320, ["<|im_start|>", "<|im_end|>"])
    files = trained._files | {"chat_template.jinja": template}
    return Tokenizer(trained._backend, files)


def test_variables_of_the_template_reach_prompts_and_the_exported_folder(tmp_path):
    tokenizer = tokenizer_of(THINKS)
    assert not open_template(tokenizer, True, DATE).prompt([Message("user", "hi")]).endswith("<think></think>")
    tokenizer.with_template_variables('{"enable_thinking": false}').save(tmp_path)
    loaded = pickle.loads(pickle.dumps(Tokenizer.load(tmp_path)))
    assert open_template(loaded, True, DATE).prompt([Message("user", "hi")]).endswith("<think></think>")
    assert (
        Renderer(loaded, THINKS, DATE).prompt([ChatMessage("user", "hi")], [], {}).ids[-3:]
        == loaded.encode("ink>")[-3:]
    )


@pytest.mark.parametrize("role", ["user", "tool"])
def test_thoughts_that_were_sampled_stay_and_empty_ones_are_the_template_s(role):
    """Qwen3's template takes thoughts out of earlier turns; a rollout appends to what was sampled and never does."""
    parts, question = (("2", TokenKind.OBSERVATION),), [Message("user", "1 + 1?")]
    thinks, quiet = (Chat(QWEN3_QUIET, {"enable_thinking": on}, DATE) for on in (True, False))
    for template in (thinks, quiet):
        spans = template.observation(Observation(parts, role), "<|im_end|>")
        seen = template.prompt(question) + "<think>\nhm\n</think>\n\nso<|im_end|>" + text_of(spans)
        whole = [
            dict(role="user", content="1 + 1?"),
            dict(role="assistant", content="so"),
            dict(role=role, content="2"),
        ]
        assert seen.replace("<think>\nhm\n</think>\n\n", "", 1) == (
            template.prompt(question) + template.render(whole).partition("<|im_start|>assistant\n")[2]
        )
        assert (parts[0] in spans) and seen.endswith("<|im_start|>assistant\n") == (template is thinks)


@pytest.mark.parametrize("text", ['{"enable_thinkin": true}', "[1]", "x", "null"])
def test_variables_that_no_template_reads_are_refused(text):
    with pytest.raises(ConfigError, match=r"never mentions 'enable_thinkin'|must be a JSON object such as"):
        tokenizer_of(THINKS).with_template_variables(text)


def test_a_message_whose_end_ends_no_generation_is_told():
    tokenizer = tokenizer_of(CHATML)
    assert "ends a message with <|im_end|>, which does not end" in unended_messages(tokenizer, DATE)
    mended = tokenizer.with_end_token("<|im_end|>")
    assert unended_messages(mended, DATE) == ""
    assert set(mended.eos_ids) == {*tokenizer.eos_ids, tokenizer.id_of("<|im_end|>")}
    with pytest.raises(ConfigError, match="no token '<end>'"):
        tokenizer.with_end_token("<end>")


@pytest.mark.parametrize(
    "files",
    [
        {"generation_config.json": '{"eos_token_id": 1.5}'},
        {"generation_config.json": '{"eos_token_id": ["a"]}'},
        {"tokenizer_config.json": '{"chat_template": [1]}'},
    ],
)
def test_files_of_another_type_are_one_line(files):
    with pytest.raises(ConfigError, match="must be a"):
        Tokenizer(tokenizer_of("")._backend, files)
