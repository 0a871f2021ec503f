"""Search engines behind one interface, `base.Retriever`. `backends.open_retriever` opens the configured one."""
