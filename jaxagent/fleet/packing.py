"""Episodes as bytes are `jaxagent.data.codec`'s."""

from jaxagent.data.codec import LEVEL, MOST_BYTES, REST, Packed, digest_of, pack, unpack, whose
from jaxagent.data.codec import check_packed as check

__all__ = ["LEVEL", "MOST_BYTES", "REST", "Packed", "check", "digest_of", "pack", "unpack", "whose"]
