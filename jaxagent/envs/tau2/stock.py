"""Reads what a domain begins with: policy.md and the stores, from the published files.

db.json, user_db.json      tau2-bench's own: {table: {key: record}}; without the second the user's store is empty
orders.json, products.json, users.json      tau-bench's shop, the same records: a user's id is its key
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxagent.config import ConfigError, nearest
from jaxagent.data.fields import RowError, show, unique
from jaxagent.envs.forms import shaped
from jaxagent.envs.tau2.rows import AGENT, USER
from jaxagent.envs.tau2.tables import Forms, Originals
from jaxagent.envs.tau2.world import Domain, Stock

POLICY, DATABASE, USER_DATABASE = "policy.md", "db.json", "user_db.json"


def read_policy(folder: Path) -> str:
    """The text that the agent has to follow. Raises ConfigError: there is none; names the file."""
    path = folder / POLICY
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}. A folder of tau2 tasks has it.") from None
    if not text.strip():
        raise ConfigError(f"{path} is empty.")
    return text


def read_stock(domain: Domain, folder: Path) -> Stock:
    """Both sides' stores, every record checked. Raises ConfigError: a file is missing or no JSON, or a record does not
    fit; names file, record and field."""
    forms, parts = domain[AGENT].forms, [folder / f"{name}.json" for name in domain[AGENT].forms]
    if (folder / DATABASE).is_file():
        agent = _store(_tables(read_json(folder / DATABASE), forms, folder / DATABASE), forms)
    elif all(part.is_file() for part in parts):
        agent = _store({name: (part, read_json(part)) for name, part in zip(forms, parts, strict=True)}, forms)
    else:
        names = ", ".join(part.name for part in parts)
        raise ConfigError(
            f"{folder} has no {DATABASE}, and not all of {names}: set config.env.store to a folder that has."
        )
    user: Originals = {name: {} for name in domain[USER].forms}
    if domain[USER].forms and (folder / USER_DATABASE).is_file():
        path = folder / USER_DATABASE
        user = _store(_tables(read_json(path), domain[USER].forms, path), domain[USER].forms)
    return {AGENT: agent, USER: user}


def _tables(value: Any, forms: Forms, path: Path) -> dict[str, tuple[Path, Any]]:
    """The tables of one file."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path} must be an object of tables, got {show(value)}.")
    for name in value:
        if name not in forms:
            raise ConfigError(f"{path}: unknown table '{name}'. {nearest(str(name), forms)}")
    for name in forms:
        if name not in value:
            raise ConfigError(f"{path}: the table '{name}' is missing.")
    return {name: (path, value[name]) for name in forms}


def _store(tables: Mapping[str, tuple[Path, Any]], forms: Forms) -> Originals:
    """The tables' records in their forms."""
    store = {}
    for name, (path, records) in tables.items():
        if not isinstance(records, Mapping):
            raise ConfigError(f"{path}: '{name}' must be an object of records, got {show(records)}.")
        try:
            form = forms[name]
            store[name] = {key: shaped(_named(record, form, key), form, key) for key, record in records.items()}
        except RowError as error:
            raise ConfigError(f"{path}, {name}: {error}.") from None
    return store


def _named(record: Any, form: Any, key: str) -> Any:
    """tau-bench's users do not say their own id."""
    if isinstance(record, Mapping) and "user_id" in form and "email" in form and "user_id" not in record:
        return {"user_id": key, **record}
    return record


def read_json(path: Path) -> Any:
    """What a file holds, in which no key stands twice. Raises ConfigError."""
    try:
        return json.loads(path.read_bytes(), object_pairs_hook=unique)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no JSON: {error}.") from None
