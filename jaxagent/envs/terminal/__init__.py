"""Terminal tasks: what one is (`task`), the formats it is read from, and how it is started and judged (`verify`)."""
