"""MemAgent: a document that is far longer than the policy's window is read chunk by chunk, and a memory is kept."""
