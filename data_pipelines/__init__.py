"""Offline pipelines: raw data in, TFDS/array_record datasets out. One file per dataset; `jaxagent/data` reads what they write."""
