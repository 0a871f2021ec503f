"""ToolRL: one turn in which the policy thinks and calls tools, compared with the calls that were wanted."""
