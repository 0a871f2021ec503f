"""A demonstration is the trajectory of an attempt with the same texts, token by token, in every format and template."""

import asyncio
import datetime
import functools
import json
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxagent.config import ConfigError, SamplingConfig
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.engine import automaton
from jaxagent.envs import Python, Search, Terminal
from jaxagent.envs.base import Message, Observation, Verdict
from jaxagent.envs.python.environment import PythonAttempt
from jaxagent.envs.search.environment import INVALID_ACTION, SearchAttempt
from jaxagent.envs.search.retriever.base import Passage
from jaxagent.envs.search.rewards import ExactMatch
from jaxagent.envs.terminal.environment import TerminalAttempt
from jaxagent.rollout import demonstrations
from jaxagent.rollout.conversation import Conversation
from jaxagent.rollout.multi_turn import MultiTurn
from jaxagent.rollout.templates import open_template
from jaxagent.types import Generation, Task, TokenKind
from tests.engine.toys import walk

DATE = datetime.datetime(2025, 1, 2)
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou "
    "are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + "
    "message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN = (  # tools speak inside user messages
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (  # trims, writes its own BOS, and has two tokens that end a generation
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}"
    "<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
TEMPLATES = {  # source, EOS tokens, the one that ends a message
    "plain": ("", ["<|endoftext|>"], "<|endoftext|>"),
    "chatml": (CHATML, ["<|im_end|>"], "<|im_end|>"),
    "qwen": (QWEN, ["<|endoftext|>", "<|im_end|>"], "<|im_end|>"),
    "llama3": (LLAMA3, ["<|endoftext|>", "<|eot_id|>"], "<|eot_id|>"),
    "smollm2": (SMOLLM2, ["<|endoftext|>", "<|im_end|>"], "<|im_end|>"),
}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]
TEXTS = [
    "Question: what is 12 + 30? ```python\nprint(12 + 30)\n``` Output:\n42 The answer is \\boxed{42}.",
    "<search> capital of Ghana</search><information>Doc 1(Title: Accra) Accra</information><answer> Accra</answer>",
    "<command>ls -l</command> Command executed successfully. Output: a b (exit_code=0) <action>done</action>",
    "<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call> <cmd>a</cmd><done>",
]


@functools.cache
def make_tokenizer(name: str) -> Tokenizer:
    """One vocabulary for all templates; what ends a generation is the template's. Tags are many tokens here."""
    source, eos, _ = TEMPLATES[name]
    trained = Tokenizer.train(TEXTS * 20, 420, SPECIAL)
    files = {
        "tokenizer_config.json": json.dumps({"eos_token": eos[0], "bos_token": "<|im_start|>"}),
        "generation_config.json": json.dumps({"eos_token_id": [trained.id_of(text) for text in eos]}),
    }
    return Tokenizer(trained._backend, files | ({"chat_template.jinja": source} if source else {}))


class Retriever:
    async def search(self, queries, topk):
        return [[Passage(str(i), f'"{query}"', f"{query} is {i}.") for i in range(topk)] for query in queries]


class Sandbox:
    """Says what it was asked to run."""

    async def execute(self, argv, timeout_s, output_bytes):
        return self._said(argv[-1])

    async def run(self, command, deadline_s, output_bytes):
        return self._said(command)

    def _said(self, text):
        return types.SimpleNamespace(
            output=f"{text[-30:]} ran".encode(), exit_code=len(text) % 2, timed_out=False, truncated=False
        )

    async def stop_processes(self):
        pass

    async def close(self):
        pass


class TerminalHere(TerminalAttempt):
    """Without what a task needs of a real machine."""

    def __init__(self, config):
        limits = types.SimpleNamespace(agent_timeout_s=60.0)
        self._config, self._turns_left, self._ends_at = config, config.max_turns, float("inf")
        self._task, self._sandbox = types.SimpleNamespace(limits=limits, steps=()), Sandbox()
        self._servers, self._of_steps = None, []
        self.stop_strings = config.stop_strings
        self.counters = dict.fromkeys(
            ("commands", "failed_commands", "timed_out_commands", "invalid_actions", "warnings"), 0.0
        )

    async def start(self):
        return self._config.messages("Tidy up.")

    async def verify(self, transcript):
        return Verdict(0.0)


async def sandbox():
    return Sandbox()


def make(name: str):
    """(environment, begins an attempt) of a format."""
    which, _, style = name.partition("/")
    limits = dict(max_turns=4, turn_tokens=2000, observation_tokens=14, context_tokens=8000, episode_timeout_s=300.0)
    if which == "search":
        env = Search(prompt=style, reward=ExactMatch(min_answers=1), **limits)
        return env, lambda task: SearchAttempt(task, env, Retriever())
    if which == "terminal":
        env = Terminal(tools=style, **limits)
        return env, lambda task: TerminalHere(env)
    env = Python(format=style, judge="answer", output_chars=200, traceback="message", **limits)
    return env, lambda task: PythonAttempt(task, env, sandbox)


SAMPLING = SamplingConfig(1.0, 1.0, 0, 0.0)
FORMATS = [
    "search/plain", "search/search_r1", "search/chat", "python/plain", "python/fenced", "python/qwen3_xml",
    "terminal/plain", "terminal/endless", "terminal/qwen3_xml",
]  # fmt: skip
ACTS = [
    "<search> Ghana</search>", "<py>print(1)</py>", "```python\nprint(2)\n```", "<cmd>l</cmd>", "<command>l</command>",
    "<tool_call>\n<function=python>\n<parameter=code>\nprint(3)\n</parameter>\n</function>\n</tool_call>",
    "<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>",
    "<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n<parameter=x>1</parameter>\n</function>\n"
    "</tool_call>",
]  # fmt: skip
ENDS = ["<answer> 4</answer>", "\\boxed{4}", "<done>", "<action>done</action>"]
NOISE = ["\n", " ", "é", "🤖", "so ", "</search>", "</py>", "<|im_end|>", "<|eot_id|>", "<think>a</think>", "12", "```"]
action = st.one_of(
    st.sampled_from(ACTS),
    st.lists(st.one_of(st.sampled_from(ACTS + NOISE), st.sampled_from(ENDS)), min_size=1, max_size=4).map("".join),
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8),
)


def heard(text, stop_strings, eos):
    """What an environment hears of a text: up to a stop string, or to a token that ends a message."""
    ends = [text.find(stop) + len(stop) for stop in stop_strings if stop in text]
    ends += [text.find(token) for token in eos if token in text]
    return text[: min(ends, default=None)]


async def converse(environment, actions, eos, stop_strings):
    """The row of a demonstration: actions, and what the environment answers."""
    await environment.start()
    turns = []
    for text in actions:
        step = await environment.step(heard(text, stop_strings, eos))
        turns.append({"action": text, "observation": "" if step.observation is None else step.observation.text})
        if step.observation is None:
            break
    return turns


class Forced:
    """Samples the tokens of one sequence, and insists that it is shown the others. Ends as the engine would."""

    def __init__(self, tokens, stops, eos_ids):
        self.tokens, self.stops, self.eos_ids = list(tokens), stops, eos_ids

    async def open(self, task_id, sample, group_size, domain):
        self.at = 0

    async def generate(self, session, new_tokens, max_tokens, sampling, turn, deadline_s, *, stop_strings):
        assert self.at == len(self.tokens) or list(new_tokens) == self.tokens[self.at : self.at + len(new_tokens)]
        self.at = min(self.at + len(new_tokens), len(self.tokens))
        rest = self.tokens[self.at :]
        count, stop, overshoot = walk(self.stops, rest)
        eos = next((i for i, token in enumerate(rest, 1) if token in self.eos_ids), len(rest) + 1)
        finish = "eos" if eos <= count else "stop" if stop is not None else "length"
        ids = np.asarray(rest[: min(eos, count)], np.int32)
        self.at += len(ids)
        zeros = np.zeros(len(ids))
        return Generation(
            ids, zeros.astype(np.float32), zeros.astype(np.int32), finish,
            overshoot_bytes=overshoot if finish == "stop" else 0,
        )  # fmt: skip

    def close(self, session):
        pass


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=12, deadline=None)
@given(actions=st.lists(action, min_size=1, max_size=4))
def test_a_demonstration_is_a_rollout(name, template, actions):
    environment, begin = make(name)
    tokenizer = make_tokenizer(template)
    chat = open_template(tokenizer, template != "plain", DATE)
    task = Task("t", "Tidy up.", ("4",))
    prompt = task.prompt
    turns = asyncio.run(converse(begin(task), actions, TEMPLATES[template][1], environment.stop_strings))
    new = Conversation(tokenizer, chat, environment.observation_tokens)
    shown = demonstrations.trajectory({"prompt": prompt, "turns": turns}, new, environment)

    stops = automaton.build(environment.stop_strings, tokenizer.token_bytes(), tokenizer.vocab_size)
    policy = Forced(shown.tokens, stops, tokenizer.eos_ids)
    rollout = MultiTurn(begin, policy, tokenizer, chat, environment, SAMPLING, 60.0)
    episode = asyncio.run(rollout(task, 0))
    assert episode.error == ""
    (played,) = episode.trajectories
    assert played.tokens.tolist() == shown.tokens.tolist()
    assert played.kinds.tolist() == shown.kinds.tolist()
    assert played.turns.tolist() == shown.turns.tolist()


def test_a_whole_tool_conversation_is_the_templates_own_text():
    """Against the template applied to the whole conversation, in which every message has its end."""
    environment, *_ = make("python/fenced")
    tokenizer = make_tokenizer("smollm2")
    chat = open_template(tokenizer, True, DATE)
    row = {"prompt": "What is 6 times 7?", "turns": [
        {"action": "```python\nprint(6 * 7)\n```", "observation": "Output:\n42"},
        {"action": "The answer is \\boxed{42}.", "observation": ""},
    ]}  # fmt: skip
    shown = demonstrations.trajectory(row, Conversation(tokenizer, chat, 50), environment)
    roles = [*environment.messages(row["prompt"])]
    for turn in row["turns"]:
        roles.append(Message("assistant", turn["action"]))
        if turn["observation"]:
            roles.append(Message("user", turn["observation"]))
    whole = chat.prompt(roles).removesuffix("<|im_start|>assistant\n").removesuffix("\n")
    assert tokenizer.decode(shown.tokens) == whole
    end = tokenizer.id_of("<|im_end|>")
    actions = tokenizer.decode(shown.tokens[shown.action_mask])
    assert actions == "```python\nprint(6 * 7)\n```<|im_end|>The answer is \\boxed{42}.<|im_end|>"
    assert tokenizer.decode(shown.tokens[shown.kinds == TokenKind.OBSERVATION]) == "Output:\n42"
    assert int(shown.tokens[-1]) == end and shown.action_mask[-1]


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_token_that_ends_a_message_is_the_templates(template):
    tokenizer = make_tokenizer(template)
    talk = Conversation(tokenizer, open_template(tokenizer, template != "plain", DATE), 50)
    talk.add_prompt([Message("user", "q")])
    talk.add_demonstration("no stop string", ("</py>",))
    assert tokenizer.decode(talk.trajectory().tokens[-1:]) == TEMPLATES[template][2]


def test_a_demonstration_without_an_end_is_refused():
    backend = make_tokenizer("plain")._backend
    talk = Conversation(Tokenizer(backend, {}), open_template(make_tokenizer("plain"), False, DATE), 50)
    talk.add_prompt([Message("user", "q")])
    talk.add_demonstration("<py>1</py>", ("</py>",))
    with pytest.raises(ConfigError, match="no EOS"):
        talk.add_demonstration("no stop string", ("</py>",))


def test_messages_are_taken_as_they_stand():
    environment, *_ = make("python/fenced")
    tokenizer = make_tokenizer("chatml")
    row = {"prompt": [{"role": "user", "content": "Hi"}], "turns": [{"action": "Ho", "observation": ""}]}
    shown = demonstrations.trajectory(
        row, Conversation(tokenizer, open_template(tokenizer, True, DATE), 50), environment
    )
    assert tokenizer.decode(shown.tokens) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo<|im_end|>"


def test_kinds_of_what_an_invalid_action_is_shown():
    environment, _ = make("search/chat")
    warned = environment.observation("I do not know.", INVALID_ACTION)
    assert warned == Observation(((INVALID_ACTION.strip(), TokenKind.WARNING),), "user")
    assert environment.observation("<search> x</search>", "\n\nx\n\n").parts == (("x", TokenKind.OBSERVATION),)


@pytest.mark.parametrize("template", ["chatml", "qwen", "llama3", "smollm2"])
def test_what_follows_an_ended_message_opens_a_new_one(template):
    """A format without roles under a chat template: the policy that ended its message gets an assistant frame again."""
    tokenizer = make_tokenizer(template)
    chat = open_template(tokenizer, True, DATE)
    talk = Conversation(tokenizer, chat, 50)
    talk.add_prompt([Message("user", "q")])
    sampled = [*tokenizer.encode("hm"), tokenizer.id_of(TEMPLATES[template][2])]
    zeros = np.zeros(len(sampled))
    talk.add_action(Generation(np.asarray(sampled, np.int32), zeros, zeros, "eos"))
    talk.add_observation(Observation((("<out>no program</out>", TokenKind.WARNING),)))
    whole = chat.prompt([Message("user", "q"), Message("assistant", "hm"), Message("user", "<out>no program</out>")])
    assert chat.prompt([Message("user", "q")]) + "hm" + TEMPLATES[template][2] + tokenizer.decode(talk.pending) == whole


def test_half_of_a_surrogate_pair_is_told_before_training_and_not_by_the_tokenizer(tmp_path):
    path = tmp_path / "full.jsonl"
    path.write_text(r'{"prompt": "q \ud800", "turns": [{"action": "a", "observation": ""}]}' + "\n")
    with pytest.raises(ConfigError, match=r"full\.jsonl, row 1: half of a surrogate pair"):
        demonstrations.load(path)


def test_an_observation_may_be_missing_only_at_the_end(tmp_path):
    turns = [{"action": "a", "observation": ""}, {"action": "b", "observation": ""}]
    path = tmp_path / "full.jsonl"
    path.write_text(json.dumps({"prompt": "q", "turns": turns}) + "\n")
    with pytest.raises(ConfigError, match=r"row 1: column 'turns\[0\].observation' is empty, but a turn follows"):
        demonstrations.load(path)
