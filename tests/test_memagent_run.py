"""MemAgent end to end in a run of seconds, every memory token for token in the next prompt; and the presets."""

import dataclasses
import json
import shutil

import pytest

from configs import memagent
from data_pipelines import long_geography
from jaxagent import config as schema
from jaxagent import evaluate, evaluate_lengths
from jaxagent import main as cli
from jaxagent.config import ConfigError
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.engine.requests import EngineError
from jaxagent.envs.cast import Tokens
from jaxagent.envs.memagent import documents, prompts
from jaxagent.observe import episode_store
from jaxagent.rollout.conversation import Conversation, encode_prompt
from jaxagent.rollout.templates import Plain
from jaxagent.runs import checks
from jaxagent.runs.evaluation import run as evaluation
from tests import tiny_run

FLAGS = [
    "--config.data.source.num_curriculum=32",
    "--config.data.source.num_demonstrations=64",
    "--config.tokenizer.vocab_size=700",
    "--config.env.max_turns=5",
    "--config.env.chunk_tokens=48",
    "--config.env.length_tokens=192",
    "--config.env.context_tokens=128",
    "--config.warm_start.curriculum_steps=0",
    "--config.warm_start.batch.row_tokens=256",
    "--config.rl.batch.row_tokens=256",
    "--config.rl.steps=2",
    "--config.engine.pages=96",
    "--config.log_episodes=true",
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("memagent") / "run"
    assert cli.main(tiny_run.argv(workdir, *FLAGS, config="memagent")) == 0
    return workdir


@pytest.mark.slow
def test_a_tiny_run(finished):
    assert tiny_run.ended(finished)[0]["logprob_gap_max"] == 0.0


@pytest.mark.slow
def test_every_memory_stands_in_the_next_prompt_as_it_was_sampled(finished):
    """The prompts again, from the ids that the engine saw, and the ids that it sampled: nothing between is text."""
    tokenizer = Tokenizer.load(finished / "tokenizer")
    style, eos = prompts.STYLES["compact"], set(tokenizer.eos_ids)
    found = documents.Documents(next(finished.glob("long_geography-*")) / documents.FILE)
    episodes = episode_store.read(finished / "episodes")[0]
    assert len(episodes) == 16

    def encoded(text):
        return Tokens(tuple(tokenizer.encode(text)), text)

    for episode in episodes:
        texts = documents.texts_of_context(episode.task, found, 0, 192, lambda text: len(tokenizer.encode(text)))
        context = tokenizer.encode(" " + documents.numbered(texts))
        pieces = [context[at : at + 48] for at in range(0, min(len(context), 192), 48)]
        if len(context) > 192:
            pieces = [[*context[:96], *context[-96:]][at : at + 48] for at in range(0, 192, 48)]
        assert len(episode.trajectories) == len(pieces) + 1
        memory = encoded(style.no_memory)
        for number, trajectory in enumerate(episode.trajectories):
            put = {"prompt": encoded(" " + episode.task.prompt), "memory": memory}
            if number < len(pieces):
                put["chunk"] = Tokens(tuple(pieces[number]), "")
            template = style.update if number < len(pieces) else style.final
            shown = encode_prompt(tokenizer, Plain(), [prompts.message(template, **put)])
            assert trajectory.tokens[~trajectory.action_mask].tolist() == shown
            said = trajectory.tokens[trajectory.action_mask].tolist()
            memory = Tokens(tuple(said[:-1] if said[-1] in eos else said), "")


@pytest.mark.slow
def test_lengths_in_one_command(finished, tmp_path, capsys):
    command = ["evaluate_lengths", f"--config.workdir={finished}", "--lengths=96,384", "--greedy", "--tasks=6"]
    assert evaluate_lengths.main(command) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [length["name"] for length in said["lengths"]] == ["96_tokens", "384_tokens"]
    for length, tokens in zip(said["lengths"], (96, 384), strict=True):
        assert tokens - 40 < length["document_tokens"] <= tokens + 4 and length["dropped_tokens"] == 0
        assert length["chunks"] >= length["document_tokens"] / 48
        assert (length["tasks"], length["attempts"], length["failed"]) == (6, 6, 0)
        assert length["low"] <= length["accuracy"] <= length["high"]
    out = finished / "evaluations" / said["out"].split("/")[-1]
    page = (out / "lengths.html").read_text()
    assert "<svg" in page and "tokens of the document" in page and "384_tokens" in page
    assert json.loads((out / "lengths.json").read_text())["lengths"] == said["lengths"]
    assert evaluate_lengths.main(command) == 0  # nothing is played again
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert again == said
    assert evaluate_lengths.main([*command[:2], "--num_docs=1", "--greedy", "--tasks=2", "--k=2"]) == 2
    one_more = [*command[:2], "--lengths=192,96", "--greedy", "--tasks=6", f"--out={out}"]
    assert evaluate_lengths.main(one_more) == 0
    more, first = json.loads(capsys.readouterr().out.splitlines()[-1])["lengths"]
    written = json.loads((out / "lengths.json").read_text())
    assert written["lengths"] == [first, more] == [said["lengths"][0], more] and written["to_play"] == []
    assert "192_tokens" in (out / "lengths.html").read_text()
    assert evaluate_lengths.main([*one_more, "--seed=7"]) == 2
    assert "with seed = 0, here it is 7: set another --out." in capsys.readouterr().err
    assert json.loads((out / "lengths.json").read_text()) == written


@pytest.fixture
def unplayed(finished, monkeypatch):
    """A function: the flags of a command -> (exit code, lengths that began to be played), with `fails` at one."""

    def command(*flags, fails=""):
        begun = []

        def play(config, options):
            begun.append(options.out.split("/")[-1])
            if begun[-1] == fails:
                raise EngineError("the engine is dead")
            return real(config, options)

        real = evaluation.run
        with monkeypatch.context() as patch:
            patch.setattr(evaluation, "run", play)
            argv = ["evaluate_lengths", f"--config.workdir={finished}", "--greedy", "--tasks=2", *flags]
            return evaluate_lengths.main(argv), begun

    return command


@pytest.mark.slow
def test_all_lengths_are_looked_at_before_the_first_is_played(unplayed, tmp_path, capsys, monkeypatch):
    rows, row = tmp_path / "a.jsonl", {"id": "a", "prompt": "Who?", "answers": ["me"]}
    rows.write_text(json.dumps(row | {"metadata": {"context": "It is me."}}) + "\n")
    assert unplayed(f"--rows={rows},{tmp_path / 'nope.jsonl'}") == (2, [])
    assert f"No data at {tmp_path / 'nope.jsonl'}" in capsys.readouterr().err
    (tmp_path / "b.jsonl").write_text(json.dumps(row) + "\n")
    assert unplayed(f"--rows={rows},{tmp_path / 'b.jsonl'}") == (2, [])
    assert "must have a 'context' or 'documents'" in capsys.readouterr().err
    assert unplayed("--lengths=96,100000000") == (2, [])
    assert "ends before env.length_tokens=100000000" in capsys.readouterr().err
    monkeypatch.setattr(documents, "HEADER_BYTES", 10**9)  # as if the files had more bytes than the length has tokens
    assert unplayed("--lengths=96,100000000") == (2, [])
    assert "the documents of every task end before" in capsys.readouterr().err


@pytest.mark.slow
def test_what_was_played_is_written_before_the_next_length(unplayed, tmp_path, capsys, monkeypatch):
    out, ends = tmp_path / "curve", "the documents end before it"
    monkeypatch.setattr(evaluate_lengths, "note_on_tasks", lambda config, done, at, source: f"{at.name}: {ends}")
    flags = ("--lengths=96,192", f"--out={out}")
    assert unplayed(*flags, fails="192_tokens") == (1, ["96_tokens", "192_tokens"])
    assert f"the engine is dead; 1 of 2 lengths are in {out}" in capsys.readouterr().err
    written = json.loads((out / "lengths.json").read_text())
    assert [point["name"] for point in written["lengths"]] == ["96_tokens"] and written["to_play"] == ["192_tokens"]
    page = (out / "lengths.html").read_text()
    assert "<svg" in page and "96_tokens: the documents end before it" in page
    assert unplayed(*flags)[0] == 0
    assert json.loads((out / "lengths.json").read_text())["to_play"] == []


@pytest.mark.slow
def test_other_documents_are_another_evaluation_and_another_run(finished, tmp_path, capsys):
    run, there = tmp_path / "run", tmp_path / "there"
    shutil.copytree(finished, run)
    shutil.copytree(next(run.glob("long_geography-*")), there)
    own = ["evaluate", f"--config.workdir={run}", "--greedy", "--tasks=2"]
    elsewhere = [*own, f"--config.data.eval_source={there}", f"--out={tmp_path / 'out'}"]
    assert evaluate.main(own) == evaluate.main(elsewhere) == 0
    _add_a_document(there)
    assert evaluate.main(own) == 0 and evaluate.main(elsewhere) == 2
    assert "holds attempts with contents.held_out_documents = " in capsys.readouterr().err
    _add_a_document(next(run.glob("long_geography-*")))
    assert evaluate.main(own) == 2
    assert "holds attempts with contents.documents = " in capsys.readouterr().err
    assert cli.main(tiny_run.argv(run, *FLAGS, "--config.rl.steps=3", config="memagent")) == 2
    assert "The file of documents has changed since" in capsys.readouterr().err


def _add_a_document(folder):
    with (folder / documents.FILE).open("a") as file:
        file.write('{"text": "Nothing is known of it."}\n')


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ([], "Say one of --lengths, --num_docs and --rows; got none of them."),
        (["--lengths=1", "--num_docs=2"], "got lengths, num_docs."),
        (["--lengths=8,8"], "names a length twice"),
        (["--rows=a.jsonl,b/a.jsonl"], "names a length twice"),
        (["--rows=a.jsonl,"], "--rows='a.jsonl,' has an entry that names no file."),
        (["--rows="], "names no file"),
        (["--rows=a.jsonl,.."], "names no file"),
        (["--rows=a.jsonl", "--split=train"], "--split=train would play others"),
    ],
)
def test_lengths_are_said_once(flags, told):
    with pytest.raises(ConfigError) as refused:
        evaluate_lengths.lengths_of_command(evaluate_lengths.parser().parse_args(flags))
    assert told in str(refused.value)


def test_the_config_of_a_length():
    cfg = schema.parse(memagent.get_config())
    options = evaluate_lengths.parser().parse_args(["--lengths=1152"])
    (length,) = evaluate_lengths.lengths_of_command(options)
    assert not {"lengths", "num_docs", "rows"} & set(vars(options))  # the rest are evaluate's own
    longer = evaluate_lengths.config_at_length(cfg, length)
    assert (longer.env.length_tokens, longer.env.max_chunks) == (1152, evaluate_lengths.NO_END - 1)
    assert longer.env.episode_timeout_s == 4 * cfg.env.episode_timeout_s
    (many,) = evaluate_lengths.lengths_of_command(evaluate_lengths.parser().parse_args(["--num_docs=6400"]))
    longer = evaluate_lengths.config_at_length(cfg, many)
    assert longer.env.num_docs == 6400 and longer.env.episode_timeout_s > 1000 * cfg.env.episode_timeout_s
    (rows,) = evaluate_lengths.lengths_of_command(evaluate_lengths.parser().parse_args(["--rows=a/eval_50.jsonl"]))
    read = evaluate_lengths.config_at_length(cfg, rows)
    assert (rows.name, read.data.eval_source, read.env.length_tokens) == ("eval_50", "a/eval_50.jsonl", 0)
    with pytest.raises(ConfigError, match="reads no documents"):
        evaluate_lengths.config_at_length(dataclasses.replace(cfg, env=schema.parse(search()).env), length)


def search():
    from configs import search_r1

    return search_r1.get_config()


def test_demonstrations_have_the_tokens_of_episodes(tmp_path):
    """A demonstration's prompt is one text, an episode's is pieces: the seams of the compact style change no token."""
    long_geography.write(tmp_path / "data", 0, 0.5, 64, 0, 300)
    folder = tmp_path / "data"
    texts = [json.loads(line)["text"] for line in (folder / "texts.jsonl").read_text().splitlines()]
    tokenizer = Tokenizer.train(texts, 1500, ("\\boxed{",))

    def encoded(text):
        return Tokens(tuple(tokenizer.encode(text)), text)

    style, equal = prompts.STYLES["compact"], 0
    rows = [json.loads(line) for line in (folder / "full.jsonl").read_text().splitlines()]
    for row in rows:
        question, rest = row["prompt"].removeprefix("Question:").split("\n", 1)
        chunk, memory = rest.split("Memory:") if "Text:" in rest else ("", rest.removeprefix("Memory:"))
        put = {"prompt": question, "memory": memory.rsplit("\n", 1)[0], "chunk": chunk[len("Text:") : -1]}
        template = style.update if chunk else style.final
        assert prompts.text(template, **put) == row["prompt"]
        spliced = prompts.message(template, **{name: encoded(text) for name, text in put.items()})
        conversation = Conversation(tokenizer, Plain(), 10)
        conversation.add_prompt([spliced])
        equal += conversation.pending == encode_prompt(tokenizer, Plain(), [prompts.message(row["prompt"])])
    assert equal == len(rows)


@pytest.mark.parametrize("preset", ["laptop", "laptop-reproduction", "laptop+gspo", "qwen2.5-7b", "qwen2.5-14b",
                                    "qwen2.5-7b-reproduction"])  # fmt: skip
def test_presets(preset):
    cfg = schema.parse(memagent.get_config(preset))
    checks.check(cfg)
    assert cfg.env.max_chunks == 8
    assert cfg.env.train_answer == ("reproduction" not in preset)
    if "gspo" not in preset:
        assert type(cfg.rl.advantage).__name__ == "GroupMean"
        assert cfg.rl.advantage.multi_trajectory == ("divide" if "reproduction" in preset else "full")
    if preset.startswith("qwen"):
        assert (cfg.env.chunk_tokens, cfg.env.turn_tokens, cfg.env.question_tokens) == (5000, 1024, 1024)
        assert (cfg.rl.tasks_per_step, cfg.rl.group_size) == (256 if "14b" in preset else 128, 16)
        assert cfg.rl.tasks_per_step // cfg.rl.updates_per_step == (16 if "14b" in preset else 8)
        assert (cfg.rl.kl.coefficient, cfg.rl.kl.estimator, cfg.rl.kl.where) == (0.001, "k3", "loss")
        objective = cfg.rl.objective
        assert (objective.clip_low, objective.clip_high, cfg.rl.entropy_coefficient) == (0.2, 0.2, 0.0)
        assert (cfg.rl.optimizer.learning_rate, cfg.rl.sampling.temperature) == (1e-6, 1.0)
