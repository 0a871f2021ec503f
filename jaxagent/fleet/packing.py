"""Episodes as bytes are `jaxagent.data.packing`'s."""

from jaxagent.data.packing import LEVEL, MOST_BYTES, REST, Packed, check, digest_of, pack, unpack, whose

__all__ = ["LEVEL", "MOST_BYTES", "REST", "Packed", "check", "digest_of", "pack", "unpack", "whose"]
