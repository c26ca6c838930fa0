"""How models write reasoning and tool calls: one reader for each family of formats."""
