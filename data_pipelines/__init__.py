"""Offline pipelines: raw data in, TFDS/array_record datasets out, one file per dataset, read by `jaxagent/data`."""
