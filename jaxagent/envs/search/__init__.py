"""Search-R1: an agent that searches, reads, searches again, and answers."""
