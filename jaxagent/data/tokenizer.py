"""Text <-> token ids: one byte-level BPE tokenizer, loaded from a Hugging Face folder or trained on a dataset.

A folder (tokenizer.json, tokenizer_config.json, ...) or texts in -> `Tokenizer`. Only byte-level BPE is accepted,
because the whole system relies on its one property: every token *is* a byte string, and a text's bytes are its
tokens' bytes in order (after the tokenizer's own Unicode normalisation, where it has one). So stop strings can be
found in tokens (`token_bytes`), and a token that ends inside a character is still exact. Nothing here adds tokens of
its own accord: `encode` returns the tokens of the text and no others.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

from jaxagent.config import ConfigError, check_folder
from jaxagent.data import files
from jaxagent.types import Task

EOS = "<eos>"  # the end-of-sequence token of a tokenizer trained here

# GPT-2's words, with numbers in runs of at most three digits: "233" can be one token, "20231116" never is.
WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

NORMALISED = 4  # bytes of a text may become one when it is Unicode-normalised (composed characters: 3 at most)

REMEMBERED, REMEMBERED_CHARS = 1024, 16_384  # texts whose tokens are not computed a second time; longer ones always are

SPECIAL_STRINGS = ("bos_token", "eos_token", "pad_token", "unk_token")
GENERATION, VARIABLES = "generation_config.json", "template_variables.json"
CONFIG_FILES = ("tokenizer_config.json", GENERATION, "chat_template.jinja", VARIABLES)
MORE_TEMPLATES = "additional_chat_templates"  # a folder of named ones, NAME.jinja


class Tokenizer:
    """A byte-level BPE tokenizer with the facts that stand beside it: EOS ids, prompt prefix, chat template."""

    def __init__(self, backend: tokenizers.Tokenizer, files: Mapping[str, str]):
        """`files` maps names of CONFIG_FILES to their text; see `load` and `train`, which build it."""
        _require_byte_level(backend)
        self._backend = backend
        self._files = dict(files)
        config = json.loads(files.get("tokenizer_config.json", "{}"))
        generation = json.loads(files.get("generation_config.json", "{}"))
        # Added tokens included; a model needs at least this many rows.
        self.vocab_size: int = 1 + max(backend.get_vocab(with_added_tokens=True).values())
        # {"bos_token": "...", ...} as chat templates expect them; the file may have {"content": "..."} for a text.
        special = {name: config[name] for name in SPECIAL_STRINGS if config.get(name)}
        self.special_strings = {name: t if isinstance(t, str) else t["content"] for name, t in special.items()}
        self.eos_ids: tuple[int, ...] = self._find_eos(generation)  # that end a generation; may be empty
        self.prefix_ids: tuple[int, ...] = self._find_prefix(config)  # of a *plain* prompt; usually nothing or one BOS
        templates = _chat_templates(config, files)
        self.chat_template: str = templates.get("default", "")  # jinja2
        self.tool_template: str = templates.get("tool_use", "")  # of conversations in which tools are offered; or ""
        self.template_variables: dict[str, Any] = json.loads(files.get(VARIABLES, "{}"))
        self._remembered = functools.lru_cache(maxsize=REMEMBERED)(self._encode)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, here or in another process, has a memory of its own."""
        return type(self), (self._backend, self._files)

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Reads tokenizer.json and what of CONFIG_FILES stands beside it.

        Raises:
          ConfigError: no tokenizer.json, an unreadable file, or not a byte-level BPE.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        check_folder(folder)
        if not path.is_file():
            raise ConfigError(f"No tokenizer.json in '{folder}'.")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every malformed file
            raise ConfigError(f"Cannot read '{path}': {error}") from error
        backend.no_truncation()
        backend.no_padding()
        files = {}
        more = [f"{MORE_TEMPLATES}/{path.name}" for path in sorted((folder / MORE_TEMPLATES).glob("*.jinja"))]
        for name in (name for name in (*CONFIG_FILES, *more) if (folder / name).is_file()):
            try:
                files[name] = (folder / name).read_text("utf-8")
                if name.endswith(".json") and not isinstance(json.loads(files[name]), dict):
                    raise ValueError("it is no object")
            except ValueError as error:  # not UTF-8, or not JSON
                raise ConfigError(f"Cannot read '{folder / name}': {error}") from error
        return cls(backend, files)

    def with_template_variables(self, text: str) -> Tokenizer:
        """The same tokenizer, whose template is given the variables of a JSON object, '{"enable_thinking": false}'.

        Raises ConfigError: not a JSON object, or a name that the template does not mention.
        """
        try:
            variables = json.loads(text)
        except ValueError:
            variables = None
        if not isinstance(variables, dict):
            raise ConfigError(
                "tokenizer.template_variables must be a JSON object such as "
                f"""'{{"enable_thinking": false}}', not {text[:80]!r}."""
            )
        for name in variables:
            if not re.search(rf"\b{re.escape(name)}\b", self.chat_template):
                raise ConfigError(f"tokenizer.template_variables: the chat template never mentions '{name}'.")
        return type(self)(self._backend, self._files | {VARIABLES: json.dumps(variables, indent=2) + "\n"})

    def with_end_token(self, token: str) -> Tokenizer:
        """The same tokenizer, in which this token, too, ends what a policy writes.

        Raises ConfigError: no token has this text.
        """
        added = self.id_of(token)
        if added is None:
            raise ConfigError(f"tokenizer.end_token: the tokenizer has no token {token!r}.")
        generation = json.loads(self._files.get(GENERATION, "{}"))
        generation["eos_token_id"] = sorted({*self.eos_ids, added})
        return type(self)(self._backend, self._files | {GENERATION: json.dumps(generation, indent=2) + "\n"})

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str]) -> Tokenizer:
        """Trains a byte-level BPE of at most `vocab_size` entries, added tokens included. Deterministic.

        `special_tokens` (such as "<search>") become single ids that encode from, and decode to, their literal text.
        They and `EOS` take the last ids. The texts' own special tokens are not learned from.
        """
        added = [*dict.fromkeys(special_tokens), EOS]
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        if vocab_size < len(alphabet) + len(added):
            raise ConfigError(
                f"tokenizer.vocab_size must be at least {len(alphabet) + len(added)} (256 bytes and "
                f"{len(added)} added tokens), got {vocab_size}."
            )
        backend = tokenizers.Tokenizer(models.BPE())
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(WORDS), "isolated"), to_bytes])
        backend.decoder = decoders.ByteLevel()
        split = re.compile("|".join(re.escape(token) for token in sorted(added, key=len, reverse=True)))
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size - len(added),
            initial_alphabet=sorted(alphabet),
            special_tokens=[],
            show_progress=False,
        )
        backend.train_from_iterator((piece for text in texts for piece in split.split(text) if piece), trainer)
        backend.add_tokens([AddedToken(token, normalized=False, special=token == EOS) for token in added])
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "clean_up_tokenization_spaces": False}
        return cls(backend, {"tokenizer_config.json": json.dumps(config, indent=2) + "\n"})

    def save(self, folder: str | Path) -> None:
        """Writes a folder that `load`, `tokenizers` and `transformers` read back; config files as they were loaded."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._backend.save(str(folder / "tokenizer.json"))
        self.save_files(folder)

    def save_files(self, folder: Path) -> None:
        """Writes what stands beside tokenizer.json, with the settings that this tokenizer was given."""
        for name, text in self._files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text, "utf-8")

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, with nothing added. The literal text of an added token becomes its id."""
        # A group's attempts have one prompt, and find the same passages.
        return (self._remembered if len(text) <= REMEMBERED_CHARS else self._encode)(text).tolist()

    def _encode(self, text: str) -> np.ndarray:
        return np.asarray(self._backend.encode(text, add_special_tokens=False).ids, np.int32)

    def least_tokens(self, text: str) -> int:
        """A lower bound of a text's number of tokens, without encoding it: far too long a text is never encoded.

        Raises:
          UnicodeEncodeError: half of a surrogate pair in it.
        """
        shrinks = 1 if self._backend.normalizer is None else NORMALISED
        return len(text.encode()) // (self._longest_token * shrinks)

    @functools.cached_property
    def _longest_token(self) -> int:
        return max(map(len, self.token_bytes()))

    def normalize(self, text: str) -> str:
        """The text as it is really encoded: Unicode-normalised by tokenizers that do so (Qwen: NFC), else unchanged."""
        normalizer = self._backend.normalizer
        return text if normalizer is None else normalizer.normalize_str(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, every token in it. Bytes that are no UTF-8 become U+FFFD, for parsing and people only."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """The exact bytes of the ids. Ids without an entry (padded vocabulary rows) are empty."""
        table = self.token_bytes()
        return b"".join(table[i] if i < len(table) else b"" for i in map(int, ids))

    def token_bytes(self) -> list[bytes]:
        """Bytes of every id, [vocab_size]; added tokens have the bytes of their literal text, unused ids b""."""
        return self._token_bytes

    @functools.cached_property
    def _token_bytes(self) -> list[bytes]:
        byte_of = _byte_of_unicode()
        table = [b""] * self.vocab_size
        for token, index in self._backend.get_vocab(with_added_tokens=False).items():
            table[index] = bytes(byte_of[c] for c in token if c in byte_of)
        for index, token in self._backend.get_added_tokens_decoder().items():
            table[index] = token.content.encode("utf-8")
        return table

    @functools.cached_property
    def byte_lengths(self) -> np.ndarray:
        """Bytes of every id, int32 [vocab_size]: the lengths of `token_bytes`."""
        return np.asarray([len(token) for token in self._token_bytes], np.int32)

    def digest(self) -> str:
        """Equal for tokenizers whose ids all stand for the same bytes: 32 hex digits."""
        digest = hashlib.blake2b(digest_size=16)
        for token in self.token_bytes():
            digest.update(len(token).to_bytes(4, "little") + token)
        return digest.hexdigest()

    def id_of(self, token: str) -> int | None:
        """The id whose literal text is `token`, or None."""
        return self._backend.token_to_id(token)

    def check_fits(self, model_vocab_size: int) -> None:
        """Raises ConfigError when the model has fewer vocabulary rows than this tokenizer has ids."""
        if self.vocab_size > model_vocab_size:
            raise ConfigError(
                f"The tokenizer has {self.vocab_size} tokens but the model's vocabulary only {model_vocab_size}: "
                "tokenizer.path and model.path do not belong together."
            )

    def _find_eos(self, generation: Mapping[str, Any]) -> tuple[int, ...]:
        ids = generation.get("eos_token_id")
        ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
        if not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
            raise ConfigError(f"{GENERATION}: eos_token_id must be a token id or a list of some, not {ids!r}.")
        literal = self.id_of(self.special_strings["eos_token"]) if "eos_token" in self.special_strings else None
        return tuple(sorted({*ids, *([] if literal is None else [literal])}))

    def _find_prefix(self, config: Mapping[str, Any]) -> tuple[int, ...]:
        prefix = tuple(self._backend.encode("", add_special_tokens=True).ids)
        if not prefix and config.get("add_bos_token") and "bos_token" in self.special_strings:
            bos = self.id_of(self.special_strings["bos_token"])
            prefix = () if bos is None else (bos,)
        return prefix


def _chat_templates(config: Mapping[str, Any], files: Mapping[str, str]) -> dict[str, str]:
    """Templates by name, as transformers finds them: those in files, or else the config's one or its named ones."""
    names = {name: Path(name).stem for name in files if name.startswith(MORE_TEMPLATES)}
    names |= {name: "default" for name in files if name == "chat_template.jinja"}
    if templates := {name: files[path] for path, name in names.items() if files[path]}:
        return templates
    template = config.get("chat_template") or ""
    named = isinstance(template, list) and all(
        isinstance(one, dict) and {"name", "template"} <= set(one) for one in template
    )
    if not isinstance(template, str) and not named:
        raise ConfigError("tokenizer_config.json: chat_template must be a text, or a list of named ones.")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}
    return {"default": template}


def _require_byte_level(backend: tokenizers.Tokenizer) -> None:
    decoder = json.loads(backend.to_str())["decoder"] or {}
    steps = [step["type"] for step in decoder.get("decoders", [decoder]) if "type" in step]
    if steps != ["ByteLevel"]:
        raise ConfigError(
            f"Only byte-level BPE tokenizers (Qwen, Llama 3, GPT-2, ...) are supported; this one decodes with {steps}."
        )


def _byte_of_unicode() -> dict[str, int]:
    """GPT-2's printable stand-in -> its byte: printable Latin-1 stands for itself, other bytes from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(rest)}


TEXTS = "texts.jsonl"  # rows {"text": ...} in a dataset's folder
MOST_ROWS = 50_000  # of tasks and of passages, the first ones: more change a vocabulary little and take long


def texts_of_dataset(
    dataset: Path, tasks: Iterable[Task], prompt: Callable[[str], Iterable[str]], corpus: Path | None
) -> Iterator[str]:
    """Yields what to train a tokenizer on, in an order of the data alone.

    Of a dataset with a `texts.jsonl` only that is read. `prompt`: a task's prompt -> the texts that the policy is shown
    for it; `corpus`: jsonl of passages. Raises ConfigError for a malformed row, and names it.
    """
    if (own := dataset / TEXTS).is_file():
        yield from _column(own, "text")
        return
    for task in itertools.islice(tasks, MOST_ROWS):
        yield from prompt(task.prompt)
        yield from (f" {answer}" for answer in task.answers)  # a word in a sentence, as it is generated
    if corpus is not None and corpus.is_file():
        yield from itertools.islice(_column(corpus, "contents"), MOST_ROWS)


def _column(path: Path, name: str) -> Iterator[str]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            row = files.from_json(line, f"{path}, row {number}")
            text = row.get(name) if isinstance(row, dict) else None
            if not isinstance(text, str):
                raise ConfigError(f'{path}, row {number}: must be an object with a text "{name}".')
            yield text
