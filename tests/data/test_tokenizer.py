"""The tokenizer against the reference library's recorded outputs, against transformers, and by properties."""

import copy
import gzip
import json
import pickle
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxagent.config import ConfigError
from jaxagent.data.tokenizer import EOS, Tokenizer

SHARED = Path(__file__).resolve().parents[2].parent / "shared/data"
TAGS = ["<search>", "</search>", "<answer>", "</answer>"]
TEXTS = ["The calling code of Ghana is 233. <search> calling code of Ghana</search>"] * 20 + ["naïve café Ærø"] * 5


@pytest.fixture(scope="session", params=["gpt2", "deepseek"])
def shared_folder(request, tmp_path_factory) -> Path:
    name = {"gpt2": "gpt2-tokenizer", "deepseek": "deepseek-r1-tokenizer"}[request.param]
    source = SHARED / name
    if not source.is_dir():
        pytest.skip(f"{name} is not beside this checkout")
    if request.param == "gpt2":
        return source
    folder = tmp_path_factory.mktemp(name)
    (folder / "tokenizer.json").write_bytes(gzip.decompress((source / "tokenizer.json.gz").read_bytes()))
    (folder / "tokenizer_config.json").write_text((source / "tokenizer_config.json").read_text())
    return folder


@pytest.fixture(scope="session")
def library(shared_folder) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(shared_folder / "tokenizer.json"))


@pytest.fixture(scope="session")
def shared(shared_folder) -> Tokenizer:
    return Tokenizer.load(shared_folder)


@pytest.fixture(scope="session")
def trained() -> Tokenizer:
    return Tokenizer.train(TEXTS, 400, TAGS)


def test_recorded_outputs_of_the_library(shared, shared_folder):
    name = "tokenizer_gpt2.jsonl" if shared_folder.name.startswith("gpt2") else "tokenizer_deepseek_r1.jsonl"
    path = SHARED / "reference-vectors" / name
    for row in map(json.loads, path.read_text().splitlines()):
        assert shared.encode(row["text"]) == row["ids"]
        assert shared.decode(row["ids"]) == row["decoded"]


@settings(max_examples=50, deadline=None)
@given(text=st.text())
def test_bytes_of_the_tokens_are_the_bytes_of_the_text(shared, text):
    assert shared.decode_bytes(shared.encode(text)) == text.encode()


@pytest.mark.parametrize(
    "text", ["", "a", "ab " * 500, " " * 3000, "e\u0301" * 400, "ᄒ\u1161\u11ab" * 100, "日本" * 300]
)
def test_a_lower_bound_on_tokens_without_encoding(shared, trained, text):
    for tokenizer in (shared, trained):
        assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text))
    assert shared.least_tokens("ab " * 10**6) > 2048


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_decoding_any_ids_equals_the_library(shared, library, data):
    ids = data.draw(st.lists(st.integers(0, shared.vocab_size - 1), max_size=8))
    assert shared.decode(ids) == library.decode(ids, skip_special_tokens=False)


def test_eos_prefix_and_template(shared, shared_folder):
    if shared_folder.name.startswith("gpt2"):  # its tokenizer_config.json names no EOS
        assert (shared.vocab_size, shared.eos_ids, shared.prefix_ids, shared.chat_template) == (50257, (), (), "")
    else:
        assert shared.vocab_size == 128815
        assert shared.eos_ids == (1,) and shared.prefix_ids == (0,)
        assert "<｜Assistant｜>" in shared.chat_template


def test_trained_vocabulary(trained):
    assert trained.vocab_size <= 400
    assert len(trained.encode(" 233")) == 1  # short numbers can be one token
    assert all(len(trained.token_bytes()[i].strip()) <= 3 for i in trained.encode(" 123456789"))
    for tag in TAGS:
        assert trained.encode(tag) == [trained.id_of(tag)]
        assert trained.decode([trained.id_of(tag)]) == tag
    assert trained.decode(trained.encode(TEXTS[0])) == TEXTS[0]
    assert trained.eos_ids == (trained.id_of(EOS),)
    assert not any(b"search" in b and b != b"<search>" and b != b"</search>" for b in trained.token_bytes())


def test_training_is_deterministic(trained):
    again = Tokenizer.train(TEXTS, 400, TAGS)
    assert again.token_bytes() == trained.token_bytes()


def test_save_and_load(trained, tmp_path):
    trained.save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    text = "<answer> 233 naïve 🤖</answer>"
    assert loaded.encode(text) == trained.encode(text)
    assert loaded.eos_ids == trained.eos_ids and loaded.token_bytes() == trained.token_bytes()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_a_copy_encodes_alike_and_remembers_for_itself(trained, copied):
    found = copied(trained)
    assert found.encode(TEXTS[0]) == trained.encode(TEXTS[0]) and found.digest() == trained.digest()
    assert found._remembered is not trained._remembered


def test_what_a_caller_does_to_remembered_tokens_stays_with_the_caller(trained):
    first = trained.encode(TEXTS[0])
    expected = list(first)
    first.append(7)
    assert trained.encode(TEXTS[0]) == expected


@pytest.mark.parametrize("layout", ["config", "files", "one", "one file", "files over config"])
def test_named_templates_are_chosen_as_transformers_does(trained, tmp_path, layout):
    transformers = pytest.importorskip("transformers")
    files = {"tokenizer_config.json": json.loads(trained._files["tokenizer_config.json"])}
    if layout in ("config", "files over config"):
        named = [{"name": name, "template": f"{name} in the config"} for name in ("default", "tool_use", "rag")]
        files["tokenizer_config.json"]["chat_template"] = named
    if layout == "one":
        files["tokenizer_config.json"]["chat_template"] = "the only one"
    files = {"tokenizer_config.json": json.dumps(files["tokenizer_config.json"])}
    if layout in ("files", "one file", "files over config"):
        files["chat_template.jinja"] = "default in a file"
    if layout == "files":
        files |= {f"additional_chat_templates/{name}.jinja": f"{name} in a file" for name in ("tool_use", "rag")}
    Tokenizer(trained._backend, files).save(tmp_path)
    ours, theirs = Tokenizer.load(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert ours.chat_template == theirs.get_chat_template()
    assert (ours.tool_template or ours.chat_template) == theirs.get_chat_template(tools=[{"type": "function"}])


def test_transformers_reads_the_saved_folder(trained, tmp_path):
    transformers = pytest.importorskip("transformers")
    trained.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "In Ghana <search> code</search> 233\n\nÆrø"
    assert theirs.encode(text, add_special_tokens=False) == trained.encode(text)
    assert theirs.eos_token_id == trained.eos_ids[0]


def test_generation_config_adds_eos_ids(trained, tmp_path):
    trained.save(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert Tokenizer.load(tmp_path).eos_ids == (7, 9, trained.id_of(EOS))


def test_a_config_beside_the_tokenizer_that_is_no_object_is_named(trained, tmp_path):
    trained.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"Cannot read '.*tokenizer_config\.json': it is no object"):
        Tokenizer.load(tmp_path)


def test_users_mistakes_are_one_line(trained, tmp_path):
    with pytest.raises(ConfigError, match=r"No tokenizer\.json"):
        Tokenizer.load(tmp_path)
    with pytest.raises(ConfigError, match="do not belong together"):
        trained.check_fits(trained.vocab_size - 1)
    trained.check_fits(trained.vocab_size)
    with pytest.raises(ConfigError, match="at least 261"):
        Tokenizer.train(TEXTS, 100, TAGS)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="Cannot read"):
        Tokenizer.load(tmp_path)
    word_level = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a"))
    word_level.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match="byte-level"):
        Tokenizer.load(tmp_path)
