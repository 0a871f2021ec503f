"""Tasks that are on no disk."""

from jaxagent.data import files, sources


class MemoryRows(files.Rows):
    name = "memory"

    def __init__(self, ids):
        self._ids = list(ids)

    def __len__(self):
        return len(self._ids)

    def __getitem__(self, index):
        return {"id": self._ids[index], "prompt": "p", "answers": ["a"]}


def source_of(count, prefix="t"):
    return sources.TaskSource(MemoryRows(f"{prefix}{i}" for i in range(count)), "memory", True)
